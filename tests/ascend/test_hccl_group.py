"""Groups on simulated NPUs, among real processes. Patterns are made from a seed by numpy."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.util.collective.types import ReduceOp

from tests.ascend.simulator import IMPATIENT, fake, knob, npus, patient, turned
from tests.unit.members import Seat, footprint, introduce, no_more, results, settled
from tests.unit.test_gloo_group import failure_of, pattern
from twinkle_ray.backends import base, hccl
from twinkle_ray.backends.rendezvous import Meeting, join_store
from twinkle_ray.errors import ConfigError, PeerLost, SyncAborted, SyncError, SyncTimeout
from twinkle_ray.types import Deadline

MIXED = (0, 1, 7, (1 << 16) - 1, 1 << 16, 0, 3 << 20, 2, 0)


def exchange(group: Any, sizes: tuple[int, ...], src: int = 0, seed: int = 0, seconds: float = 20.0) -> bool:
    """Whether this rank holds rank ``src``'s pattern after one broadcast."""
    expected = pattern(sizes, seed)
    views = [(t if group.rank == src else torch.full_like(t, 85)).to("npu") for t in expected]
    group.broadcast_many(views, src)
    group.synchronize(Deadline.after(seconds))
    return all(torch.equal(view.cpu(), t) for view, t in zip(views, expected, strict=True))


def leave(group: Any) -> None:
    """When all have what they came for: the stand-in's links hold some bytes that nobody has asked for yet."""
    group.barrier()
    group.destroy_group()


def buried(seconds: float = 5.0) -> bool:
    """Whether no communicator is left, at the latest when the stand-in has given up its collectives."""
    until = time.monotonic() + seconds
    while (fake().fake_live_comms() or hccl.burials()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(fake().fake_live_comms() == 0 and hccl.burials() == 0)


# Transfers


def transfers(seat: Seat) -> dict[str, bool]:
    group: Any = seat.group()
    right = {f"from {src}": exchange(group, MIXED, src, src) for src in range(3)}
    hccl.PIECE = 1000
    right["many pieces"] = exchange(group, (999, 1, 1000, 1001, 2500, 3, 5), 1)
    hccl.PIECE = 128 << 20
    before = fake().fake_calls(b"HcclBroadcast")
    right["many small"] = exchange(group, tuple(16 + i % 300 for i in range(3000)), 2)
    right["in one broadcast"] = fake().fake_calls(b"HcclBroadcast") == before + 1
    right["nothing"] = exchange(group, ())
    launched = [torch.full((5,), float(group.rank + n), device="npu") for n in range(4)]
    group.rally()
    for tensor in launched:
        group.broadcast_many([tensor.view(torch.uint8)], 2)
    group.settle(Deadline.after(5), 2)
    right["settled"] = [tensor.tolist() for tensor in launched[:2]] == [[2.0] * 5, [3.0] * 5]
    group.synchronize(Deadline.after(5))
    right["all"] = [tensor.tolist()[0] for tensor in launched] == [2.0, 3.0, 4.0, 5.0]
    parameter = torch.nn.Parameter(torch.full((6,), float(group.rank), device="npu"))
    with torch.inference_mode():
        frozen = torch.full((6,), float(group.rank), device="npu")
    group.broadcast_many([parameter.detach().view(torch.uint8), frozen.view(torch.uint8)])
    group.synchronize(Deadline.after(5))
    right["leaf and inference tensor"] = parameter.tolist() == frozen.tolist() == [0.0] * 6
    leave(group)
    right["no communicator is left"] = fake().fake_live_comms() == 0
    return right


def test_tensors_arrive_bit_for_bit(library: Path) -> None:
    with npus(library, transfers, 3) as people:
        introduce(people)
        for right in results(people):
            assert [what for what, holds in right.items() if not holds] == []


# The order of streams. Work that takes long stands before what must wait for it, so that without the order it loses.


def ordered(seat: Seat, removed: str) -> tuple[float, float]:
    """What a receiver has of a tensor that is filled by the sender, broadcast, and read, with one order removed."""
    group: Any = seat.group()
    stream = type(group._stream)
    wait_stream, npu_stream = stream.wait_stream, stream.npu_stream
    if removed == "launch behind the current stream":
        stream.wait_stream = lambda self, other: None if self == group._stream else wait_stream(self, other)
    elif removed == "current stream behind the launch":
        stream.wait_stream = lambda self, other: None if other == group._stream else wait_stream(self, other)
    elif removed == "pointer read anew":
        stream.npu_stream = property(lambda self: self.stream_id)
    full, tensor = torch.full((1000,), 7.0, device="npu"), torch.zeros(1000, device="npu")
    if group.rank == 0:
        torch.npu._sleep(600)  # type: ignore[attr-defined]
        tensor.copy_(full)
    with turned("FAKE_HCCL_DELAY_MS", 300):
        group.broadcast([tensor], SimpleNamespace(root_rank=0))
        read = float(tensor[0])
        torch.npu.synchronize()  # type: ignore[attr-defined]
    stream.wait_stream, stream.npu_stream = wait_stream, npu_stream
    later = float(tensor[0])
    group.destroy_group()
    return read, later


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        ("", (7.0, 7.0)),
        ("launch behind the current stream", (0.0, 0.0)),
        ("current stream behind the launch", (0.0, 7.0)),
        ("pointer read anew", (0.0, 0.0)),
    ],
)
def test_each_order_of_streams_is_needed(library: Path, removed: str, seen: tuple[float, float]) -> None:
    with npus(library, ordered, 2, removed) as people:
        introduce(people)
        assert results(people)[1] == seen


def read_elsewhere(seat: Seat) -> tuple[bool, bool]:
    """Whether the tensors are filled when a wait returns, for a reader whom no stream keeps waiting."""
    import torch_npu

    group: Any = seat.group()
    right = []
    for wait in (lambda: group.settle(Deadline.after(20), 0), lambda: group.synchronize(Deadline.after(20))):
        views = [torch.full((size,), seat.rank, dtype=torch.uint8, device="npu") for size in (100, 70_000)]
        group.broadcast_many(views, src=1)
        torch.npu._sleep(300)  # type: ignore[attr-defined]
        wait()
        right.append(all(bool((torch_npu.on_cpu(view) == 1).all()) for view in views))
    leave(group)
    return right[0], right[1]


def test_a_wait_ends_when_the_tensors_are_filled(library: Path) -> None:
    with npus(library, read_elsewhere, 2) as people:
        introduce(people)
        assert results(people) == [(True, True)] * 2


# Failures


def exchange_for_ever(group: Any) -> None:
    for n in range(10_000):
        exchange(group, (8 << 20, 100), seed=n)


def survive(seat: Seat, when: str) -> Any:
    """Transfer until something fails, tell, then transfer in a new group of the survivors."""
    group: Any = seat.group()
    seat.say("connected")
    seat.hear()
    if when == "between transfers":
        while group.failure is None:
            time.sleep(0.005)
    _, error = failure_of(lambda: exchange_for_ever(group))
    at = time.time()
    began = time.monotonic()
    group.destroy_group()
    seat.say((type(error), error.actors, at, time.monotonic() - began))
    rank = seat.hear()
    patient()
    began = time.monotonic()
    new = seat.group(world_size=2, rank=rank)
    right = exchange(new, MIXED)
    took = time.monotonic() - began
    leave(new)
    return right, took, buried()


@pytest.mark.parametrize(
    ("when", "victim"), [("between transfers", 0), ("between transfers", 2), ("in a transfer", 0), ("in a transfer", 1)]
)
def test_a_killed_rank_is_named_and_the_next_generation_works(library: Path, when: str, victim: int) -> None:
    with npus(library, survive, 3, when, FAKE_HCCL_EXEC_MS="2500") as people:
        introduce(people)
        assert [member.hear() for member in people] == ["connected"] * 3
        for member in people:
            member.say("go")
        if when == "in a transfer":
            time.sleep(0.3)
            people[victim].stop()  # now the others are stuck in a broadcast
            time.sleep(0.2)
        killed = time.time()
        people[victim].kill()
        survivors = [member for rank, member in enumerate(people) if rank != victim]
        for member in survivors:
            kind, actors, at, left_s = member.hear()
            assert kind is PeerLost
            assert actors == (f"rank {victim}",)
            assert at - killed < 1.5
            assert left_s < 1.0
        for rank, member in enumerate(survivors):
            member.say(rank)
        introduce(survivors)
        for right, took, nothing_left in results(survivors):
            assert right
            assert took < 2.0  # that is, before the stand-in gives up the old collective
            assert nothing_left


def late(seat: Seat) -> Any:
    """Rank 0's broadcast comes when rank 1 has given up, and before the stand-in has."""
    group: Any = seat.group()
    tensor = torch.full((1 << 20,), seat.rank == 0, dtype=torch.uint8, device="npu")
    if seat.rank == 0:
        knob("FAKE_HCCL_DELAY_MS", 700)
    group.broadcast_many([tensor])
    failure_of(lambda: group.synchronize(Deadline.after(0.3 if seat.rank else 60)))
    piece = group._flight[0]
    group.destroy_group()
    nothing_left = buried()
    return int(piece.memory.min()), int(tensor.max()), nothing_left


def test_what_comes_late_does_not_touch_the_tensors(library: Path) -> None:
    with npus(library, late, 2, **IMPATIENT) as people:
        introduce(people)
        arrived, tensor, nothing_left = results(people)[1]
        assert arrived == 1
        assert tensor == 0
        assert nothing_left


def give_up(seat: Seat, how: str) -> Any:
    """Rank 0 never sends."""
    group: Any = seat.group()
    seat.say("connected")
    if seat.rank == 0:
        while group.failure is None:
            time.sleep(0.005)
        error = group.failure
    else:
        group.broadcast_many([torch.zeros(1 << 20, dtype=torch.uint8, device="npu")])
        if how == "abort":
            threading.Timer(0.3, group.abort, ("enough",)).start()
        took, error = failure_of(lambda: group.synchronize(Deadline.after(0.3 if how == "deadline" else 60)))
        assert took < 1.0
        with pytest.raises(type(error)):
            group.barrier()
    began = time.monotonic()
    group.abort("again")
    group.destroy_group()
    assert time.monotonic() - began < 1.0
    patient()
    new = seat.group()
    right = exchange(new, MIXED)
    leave(new)
    return type(error), error.actors, str(error), right, buried()


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_whoever_gives_up_is_released_at_once_and_tells_the_others(library: Path, how: str) -> None:
    with npus(library, give_up, 2, how, **IMPATIENT) as people:
        introduce(people)
        assert [member.hear() for member in people] == ["connected"] * 2
        introduce(people)
        (other, actors, text, *well), (own, _, own_text, *own_well) = results(people)
        assert other is SyncAborted
        assert own is (SyncAborted if how == "abort" else SyncTimeout)
        assert actors == ("rank 1",)
        assert ("enough" if how == "abort" else own_text) in text
        assert well == own_well == [True, True]


def absent(seat: Seat) -> Any:
    _, error = failure_of(lambda: seat.group(1.0, world_size=3))
    made = fake().fake_calls(b"HcclCommInitRootInfo")
    new = seat.group()
    right = exchange(new, MIXED)
    leave(new)
    return type(error), error.actors, made, right, buried()


def test_a_missing_rank_is_named_before_anybody_enters_hccl(library: Path) -> None:
    with npus(library, absent, 2) as people:
        introduce(people)
        introduce(people)
        assert results(people) == [(SyncTimeout, ("rank 2",), 0, True, True)] * 2


def killed_in_the_init(seat: Seat) -> Any:
    if seat.rank == 2:
        hccl.Library.__call__ = lambda self, name, *args: os.kill(os.getpid(), signal.SIGKILL)
    _, error = failure_of(seat.group)
    began = time.monotonic()
    rank = seat.hear()
    new = seat.group(world_size=2, rank=rank)
    right = exchange(new, MIXED)
    leave(new)
    return type(error), error.actors, right, time.monotonic() - began < 4.0, buried()


def test_a_rank_that_dies_in_hccls_init_is_named_at_once(library: Path) -> None:
    # What it leaves behind is a thread in the init, until HCCL_CONNECT_TIMEOUT: no communicator can be made meanwhile.
    with npus(library, killed_in_the_init, 3, FAKE_HCCL_CONNECT_MS="1000") as people:
        introduce(people)
        survivors = people[:2]
        for rank, member in enumerate(survivors):
            member.say(rank)
        introduce(survivors)
        assert results(survivors) == [(PeerLost, ("rank 2",), True, True, True)] * 2


def outcome(seat: Seat) -> Any:
    """The error of one generation, if any, then how the next one fares."""
    group: Any = None
    error: SyncError | None = None
    began = time.monotonic()
    try:
        group = seat.group()
        exchange(group, MIXED)
        group.barrier()
    except SyncError as caught:
        error = caught
    took = time.monotonic() - began
    if group is not None:
        group.destroy_group()
    knob("FAKE_HCCL_FAIL")
    os.environ["HCCL_HOST_SOCKET_PORT_RANGE"] = "auto"
    nothing_left = buried()
    patient()
    new = seat.group()
    right = exchange(new, MIXED)
    leave(new)
    return type(error), str(error), took < 4.0, nothing_left, right, buried()


def with_code(seat: Seat, rank: int, call: str, code: int) -> Any:
    if seat.rank == rank:
        knob("FAKE_HCCL_FAIL", f"{call}:{code}")
    return outcome(seat)


@pytest.mark.parametrize(
    ("call", "code", "kind", "hint"),
    [
        ("HcclBroadcast", 5, SyncError, "does not support"),
        ("HcclAllReduce", 5, SyncError, "does not support"),
        ("HcclCommInitRootInfo", 6, SyncError, "communicators were never destroyed"),
        ("HcclCommInitRootInfo", 9, PeerLost, "HCCL_CONNECT_TIMEOUT"),
        ("HcclGetRootInfo", 11, SyncError, "HCCL_HOST_SOCKET_PORT_RANGE=auto"),
        ("HcclBroadcast", 20, SyncError, "busy"),
    ],
)
def test_each_result_code_is_one_error_and_the_next_generation_works(
    library: Path, call: str, code: int, kind: type[SyncError], hint: str
) -> None:
    rank = 0 if call == "HcclGetRootInfo" else 1
    with npus(library, with_code, 2, rank, call, code, FAKE_HCCL_CONNECT_MS="1000", **IMPATIENT) as people:
        introduce(people)
        introduce(people)
        ends = results(people)
    own, own_text, *own_well = ends[rank]
    other, text, *well = ends[1 - rank]
    assert own is kind
    assert f"{call} returned {code} (" in own_text
    assert hint in own_text
    assert other is SyncAborted
    assert own_text in text
    assert well == own_well == [True] * 4


def test_a_taken_port_is_told_with_its_mend(library: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"HCCL_HOST_SOCKET_PORT_RANGE": str(taken.getsockname()[1]), "FAKE_HCCL_CONNECT_MS": "1000"}
        with npus(library, outcome, 2, **ports) as people:
            introduce(people)
            introduce(people)
            (own, own_text, *own_well), (other, text, *well) = results(people)
    assert own is SyncError
    assert "HcclGetRootInfo returned 11" in own_text
    assert "HCCL_HOST_SOCKET_PORT_RANGE=auto" in own_text
    assert other is SyncAborted
    assert own_text in text
    assert well == own_well == [True] * 4


def busy_for_a_while(seat: Seat) -> Any:
    group = seat.group()
    knob("FAKE_HCCL_FAIL", "HcclCommDestroy:20")
    threading.Timer(0.5, knob, ("FAKE_HCCL_FAIL",)).start()
    began = time.monotonic()
    group.destroy_group()
    return fake().fake_live_comms(), hccl.burials(), 0.4 < time.monotonic() - began < 1.5


def test_a_communicator_that_is_busy_is_destroyed_when_it_is_not(library: Path) -> None:
    with npus(library, busy_for_a_while, 2) as people:
        introduce(people)
        assert results(people) == [(0, 0, True)] * 2


def given_up_by_the_device(seat: Seat) -> Any:
    """Rank 0 does not launch, and rank 1's own deadline is far."""
    group: Any = seat.group()
    broken = group._stream
    if seat.rank:
        knob("FAKE_HCCL_EXEC_MS", 300)
        group.broadcast_many([torch.zeros(100, device="npu").view(torch.uint8)])
        _, error = failure_of(lambda: group.synchronize(Deadline.after(30)))
        with pytest.raises(RuntimeError):
            broken.query()
    else:
        while group.failure is None:
            time.sleep(0.005)
        error = group.failure
    group.destroy_group()
    patient()
    sound = 0
    for n in range(33):  # as many as there are streams in the pool
        new: Any = seat.group()
        new.fence()  # which the broken stream must not make fail for ever
        sound += exchange(new, MIXED[:4], seed=n) and not (seat.rank and new._stream == broken)
        leave(new)
    return type(error), str(error), sound, buried()


def test_a_stream_that_hccl_has_broken_is_told_and_not_used_again(library: Path) -> None:
    with npus(library, given_up_by_the_device, 2) as people:
        for _ in range(34):
            introduce(people)
        (other, _, *well), (own, text, *own_well) = results(people)
        assert own is PeerLost
        assert "HCCL_EXEC_TIMEOUT" in text
        assert other is SyncAborted
        assert well == own_well == [33, True]


def rebuild(seat: Seat) -> Any:
    """In one store for all groups: to join another one each time takes longer than all the rest."""
    if seat.rank == 0:
        meeting = Meeting.open("all", seat.backend)
        seat.say(meeting.rendezvous)
        store = meeting.store
        Meeting.store = property(lambda self: store)  # type: ignore[assignment, method-assign]
    else:
        store = join_store(seat.hear(), Deadline.after(20))
        base.join_store = lambda rendezvous, deadline: store
    marks = []
    for n in range(205):
        group = seat.group()
        assert exchange(group, (100, 70_000), seed=n)
        leave(group)
        if n in (40, 204):  # after the pool's streams were made
            seat.say("settled")
            seat.hear()
            marks.append(settled(marks[0]) if marks else footprint())
    return fake().fake_live_comms(), fake().fake_calls(b"HcclCommInitRootInfo"), *marks


def test_two_hundred_groups_leave_no_communicator_no_thread_and_no_descriptor(library: Path) -> None:
    with npus(library, rebuild, 2) as people:
        introduce(people)
        for n in range(205):
            introduce(people)
            if n in (40, 204):
                for member in people:
                    assert member.hear() == "settled"
                time.sleep(0.3)
                for member in people:
                    member.say("on")
        for living, made, early, late_ in results(people):
            assert living == 0
            assert made == 205
            assert no_more(late_, early)


# Beside others


def beside_a_trainers_own(seat: Seat) -> Any:
    """Ranks 0 and 1 are trainers with a default hccl group of their own, of another size."""
    import torch.distributed as dist

    trains = seat.rank < 2
    if seat.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        seat.say(port)
    if trains:
        address = f"tcp://127.0.0.1:{seat.hear()}"
        dist.init_process_group("hccl", address, rank=seat.rank, world_size=2)
    ones = torch.ones(4, device="npu")
    totals = []

    def train() -> None:
        if trains:
            dist.all_reduce(ones)
            totals.append(ones.tolist()[0])

    train()
    right = []
    for n in range(3):
        group = seat.group()
        right.append(exchange(group, MIXED, seed=n))
        train()
        right.append(exchange(group, MIXED, src=2, seed=n))
        if n == 1:
            with contextlib.suppress(SyncError):  # whoever is later may see the other's abort
                group.barrier()
                group.abort("ours only")
            group.destroy_group()
        else:
            leave(group)
        train()
    if trains:
        assert dist.get_backend() == "hccl"
        dist.destroy_process_group()
    return right, totals


def test_a_trainers_own_default_group_is_untouched(library: Path) -> None:
    with npus(library, beside_a_trainers_own, 3) as people:
        port = people[0].hear()
        for member in people[:2]:
            member.say(port)
        for _ in range(3):
            introduce(people)
        totals = [2.0**n for n in range(1, 8)]
        assert results(people) == [([True] * 6, totals)] * 2 + [([True] * 6, [])]


def on_one_npu(seat: Seat) -> Any:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "5"
    error: Exception | None = None
    try:
        seat.group()
    except (SyncError, ConfigError) as caught:
        error = caught
    return type(error), str(error)


def test_two_ranks_on_one_npu_are_refused(library: Path) -> None:
    with npus(library, on_one_npu, 2) as people:
        introduce(people)
        (kind, text), (other, other_text) = results(people)
        assert kind is ConfigError
        assert "ranks 0 and 1 are on one NPU" in text
        assert "/npu/5" in text
        assert other is SyncAborted
        assert text in other_text


# One rank alone


def alone(seat: Seat) -> Any:
    group: Any = seat.group()
    said = []

    def refused(call: Any) -> None:
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append("")

    refused(lambda: group.broadcast([torch.zeros(3)]))
    refused(lambda: group.broadcast([torch.zeros(3, device="npu:1")]))
    refused(lambda: group.broadcast_many([torch.zeros(3, device="npu:1").view(torch.uint8)]))
    refused(lambda: group.broadcast_many([torch.zeros(4, 4, dtype=torch.uint8, device="npu").t()]))
    import torch_npu

    nz = torch_npu.npu_format_cast(torch.zeros(64, 64, device="npu"), 29)
    refused(lambda: group.broadcast_many([nz.view(-1).view(torch.uint8)]))
    for dtype in (torch.uint8, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn):
        refused(lambda dtype=dtype: group.allreduce([torch.zeros(8, dtype=torch.uint8, device="npu").view(dtype)]))
    group.barrier()
    sound = group.failure is None
    group.destroy_group()
    return said, sound


def test_arguments_that_cannot_be_used_are_refused_in_one_sentence(library: Path) -> None:
    with npus(library, alone, 1, ASCEND_RT_VISIBLE_DEVICES="3,5") as people:
        introduce(people)
        ((said, sound),) = results(people)
        expected = ("on cpu", "npu:1", "npu:1", "contiguous", "format 29.*weight_nz_mode=0")
        for text, part in zip(said, expected + ("HCCL cannot reduce",) * 5, strict=True):
            assert re.search(part, text), (text, part)
        assert sound


def huge(seat: Seat) -> Any:
    """Memory that is never touched takes none."""
    group: Any = seat.group()
    knob("FAKE_HCCL_DRY", 1)
    counts = {}
    nbytes = (3 << 30) + 1
    tensor = torch.empty(nbytes, dtype=torch.int8, device="npu")
    options = SimpleNamespace(root_rank=0, reduceOp=ReduceOp.SUM, dst_rank=0, src_rank=0, n_elements=0)
    for name, call in {
        "HcclBroadcast": group.broadcast,
        "HcclAllReduce": group.allreduce,
        "HcclReduce": group.reduce,
        "HcclSend": group.send,
        "HcclRecv": group.recv,
    }.items():
        call([tensor], options)
        counts[name] = fake().fake_last_count(name.encode())
    wire = hccl._HcclWire(hccl.library(), group._comm, group._stream.npu_stream)
    wire.all_gather(tensor.data_ptr(), tensor.data_ptr(), nbytes)
    wire.reduce_scatter(tensor.data_ptr(), tensor.data_ptr(), nbytes, (0, 0))
    group.synchronize(Deadline.after(5))
    for name in ("HcclAllGather", "HcclReduceScatter"):
        counts[name] = fake().fake_last_count(name.encode())
    group.destroy_group()
    return counts, nbytes


def test_counts_beyond_32_bits_reach_the_library_whole(library: Path) -> None:
    with npus(library, huge, 1) as people:
        introduce(people)
        ((counts, nbytes),) = results(people)
        assert len(counts) == 7
        assert set(counts.values()) == {nbytes}


def test_pieces_hold_every_byte_once_in_order() -> None:
    views = [torch.arange(start, start + size, dtype=torch.int32) for start, size in ((0, 5), (5, 1), (6, 23), (29, 2))]
    for limit in (1, 2, 3, 7, 31, 100):
        cut = list(hccl.pieces(views, limit))
        assert torch.cat([part for piece in cut for part in piece]).tolist() == list(range(31))
        sizes = [sum(map(len, piece)) for piece in cut]
        assert set(sizes[:-1]) <= {limit}
        assert 0 < sizes[-1] <= limit
    assert list(hccl.pieces([], 7)) == []


def test_ids_of_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4, 6,7")
    assert [hccl.physical_id(index) for index in range(3)] == ["4", "6", "7"]
    assert [hccl.logical_index(id_) for id_ in (4, "6", 7)] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"NPU 5 is not among .*ASCEND_RT_VISIBLE_DEVICES=4,6,7"):
        hccl.logical_index(5)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
    assert (hccl.physical_id(3), hccl.logical_index("3")) == ("3", 3)
