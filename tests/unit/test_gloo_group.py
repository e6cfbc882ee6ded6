"""Groups on CPU, among real processes. Patterns are made from a seed by numpy, so both ends know what must arrive."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from ray.util.collective.types import BroadcastOptions

from tests.unit.members import footprint, introduce, members, no_more, results, settled
from twinkle_ray.backends import backend_for, create_group, destroy_group, group_class, register, require
from twinkle_ray.backends.gloo import BATCH, SCRATCH, SMALL_VIEW, GlooGroup, _batches, _place, _runs
from twinkle_ray.backends.rendezvous import Meeting, unique_group_name
from twinkle_ray.errors import (
    BackendUnavailable,
    ConfigError,
    ManifestMismatch,
    PeerLost,
    SyncAborted,
    SyncError,
    SyncTimeout,
)
from twinkle_ray.types import Deadline

MIXED = (0, 1, 7, SMALL_VIEW - 1, SMALL_VIEW, 0, 3 << 20, 2, 0)


def pattern(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)) for size in sizes]


def exchange(group, sizes, src=0, seed=0, seconds=20.0):
    """Whether this rank holds rank ``src``'s pattern after one broadcast."""
    expected = pattern(sizes, seed)
    views = [t.clone() if group.rank == src else torch.full_like(t, 85) for t in expected]
    group.broadcast_many(views, src)
    group.synchronize(Deadline.after(seconds))
    return all(torch.equal(a, b) for a, b in zip(views, expected, strict=True))


def failure_of(call):
    """How long ``call`` took, and the error that ended it."""
    began = time.monotonic()
    try:
        call()
    except SyncError as error:
        return time.monotonic() - began, error
    raise AssertionError("it did not fail")


# Transfers


def fill_models(group):
    """Autograd refuses writes to leaves and to inference tensors, depending on the writing thread's mode."""
    with torch.inference_mode():
        tensors = [torch.full((6,), float(group.rank)), torch.full((200_000,), float(group.rank))]
    tensors += [torch.nn.Parameter(torch.full((n,), float(group.rank))) for n in (3, 5, 100_000)]
    with torch.no_grad():
        group.broadcast_many(tensors)
        group.synchronize(Deadline.after(20))
    return all(float(tensor.abs().max()) == 0.0 for tensor in tensors)


def send_all(seat):
    group = seat.group()
    right = {
        "mixed": exchange(group, MIXED),
        "from the last rank": exchange(group, MIXED, src=seat.world_size - 1, seed=1),
        "nothing": exchange(group, ()),
        "only empty": exchange(group, (0, 0)),
        "5,000 tiny": exchange(group, [17 + n % 40 for n in range(5000)], seed=2),
        "more than one scratch": exchange(group, [SMALL_VIEW - 1] * (SCRATCH // SMALL_VIEW + 3), seed=3),
        "24 MiB": exchange(group, (24 << 20,), seed=4),
        "several batches": exchange(group, [SMALL_VIEW + n for n in range(3 * BATCH + 5)], seed=5),
    }
    right["parameters, inference tensors"] = fill_models(group)
    for seed in range(20):  # launched together, one wait
        group.broadcast_many([t if seat.rank == 0 else torch.zeros_like(t) for t in pattern((100_000, 5), seed)])
    group.synchronize(Deadline.after(20))
    group.destroy_group()
    group.destroy_group()
    return right


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_all_sizes_arrive_right(world_size):
    with members(send_all, world_size) as people:
        introduce(people)
        for right in results(people):
            assert right == dict.fromkeys(right, True)


def send_huge(seat):
    group = seat.group()
    nbytes = (2 << 30) + 4097
    data = torch.zeros(nbytes, dtype=torch.uint8)
    marks = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, nbytes - 1])
    if seat.rank == 0:
        data[marks] = torch.arange(1, 6, dtype=torch.uint8)
    group.broadcast_many([data])
    group.synchronize(Deadline.after(60))
    right = data[marks].tolist() == [1, 2, 3, 4, 5] and int(data.count_nonzero()) == 5
    group.destroy_group()
    return right


@pytest.mark.soak
def test_more_than_2_gib_in_one_piece():
    with members(send_huge, 2) as people:
        introduce(people)
        assert results(people, 120) == [True, True]


def test_runs_take_every_view_once_and_keep_the_limits():
    sizes = [5, 0, SMALL_VIEW, 6, 7, *[SMALL_VIEW - 1] * 600, SMALL_VIEW + 1]
    views = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    runs = list(_runs(views))
    assert sorted(id(view) for run in runs for view in run) == sorted(id(view) for view in views if view.numel())
    assert [len(run) for run in runs if run[0].numel() >= SMALL_VIEW] == [1, 1]
    assert all(sum(view.numel() for view in run) <= SCRATCH for run in runs)
    assert len(runs) <= 6
    batches = list(_batches(runs, 1 << 40))
    assert [run for batch in batches for run in batch] == runs
    assert all(len(run) == 1 for batch in batches for run in batch[:-1])  # one scratch buffer at most
    assert [len(batch) for batch in _batches([[views[2]]] * 7, 2 * SMALL_VIEW)] == [2, 2, 2, 1]
    assert [len(batch) for batch in _batches([[views[2]]] * (2 * BATCH + 1), 1 << 40)] == [BATCH, BATCH, 1]


@pytest.mark.parametrize("world_size", range(1, 10))
def test_a_broadcast_reaches_every_rank_once(world_size):
    for src in range(world_size):
        places = [_place(rank, src, world_size) for rank in range(world_size)]
        assert [rank for rank, (parent, _) in enumerate(places) if parent is None] == [src]
        assert sorted(child for _, children in places for child in children) == sorted({*range(world_size)} - {src})
        assert all(places[child][0] == rank for rank, (_, children) in enumerate(places) for child in children)
        assert max(len(children) for _, children in places) <= (world_size - 1).bit_length()


def meet_late(seat):
    group = seat.group(seconds=2.0)
    options = type("Options", (), {"dst_rank": 1, "src_rank": 0, "n_elements": 0})
    tensor = torch.full((5,), float(seat.rank))
    if seat.rank == 0:
        time.sleep(2.5)
        group.send([tensor], options)
    else:
        group.recv([tensor], options)
    right = exchange(group, MIXED)
    group.destroy_group()
    return right and tensor.tolist() == [0.0] * 5


def test_an_operation_may_take_longer_than_the_connect_was_given():
    with members(meet_late, 2) as people:
        introduce(people)
        assert results(people) == [True, True]


def write_over(seat):
    group = seat.group()
    kept = []
    buffer = torch.zeros(100_000)
    for n in range(1, 6):
        if seat.rank == 0:
            buffer.fill_(n)
        elif seat.rank == 2:
            time.sleep(0.15)
        group.broadcast_many([buffer])
        group.synchronize(Deadline.after(20))
        if seat.rank == 0:
            buffer.fill_(777)  # at once, while another rank may not even have asked
        kept.append(buffer.unique().tolist())
    group.barrier()
    group.destroy_group()
    return kept


def test_a16_a_buffer_that_is_written_over_after_the_wait_was_read_by_all():
    with members(write_over, 3) as people:
        introduce(people)
        first, *others = results(people)
    assert first == [[777.0]] * 5
    assert others == [[[float(n)] for n in range(1, 6)]] * 2


# Peers that fail


def join_only(seat, seconds):
    took, error = failure_of(lambda: seat.group(seconds))
    return took, type(error), error.actors, str(error)


def test_a_peer_that_never_comes_is_named_within_the_deadline():
    with members(join_only, 3, 1.0, ranks=range(2)) as people:
        introduce(people)
        for took, kind, actors, text in results(people):
            assert kind is SyncTimeout
            assert actors == ("rank 2",)
            assert "rank 2 of 3 did not come within 1.0 s" in text
            assert took < 2.0


def die_behind_the_door(seat, victim):
    if seat.rank == victim:
        GlooGroup._build = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    took, error = failure_of(lambda: seat.group(10.0))
    return took, type(error), error.actors


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_while_connecting_is_not_waited_for(victim):
    with members(die_behind_the_door, 3, victim) as people:
        introduce(people)
        for took, kind, actors in results([member for rank, member in enumerate(people) if rank != victim]):
            assert took < 2.0
            assert kind is PeerLost
            assert actors == (f"rank {victim}",)


def over_ipv6(seat):
    meeting = Meeting.open(unique_group_name("v6"), "TWINKLE_GLOO", "::1") if seat.rank == 0 else None
    if meeting:
        seat.say(meeting.rendezvous)
    rendezvous = meeting.rendezvous if meeting else seat.hear()
    group = GlooGroup(seat.world_size, seat.rank, rendezvous.group)
    group.connect(rendezvous, Deadline.after(10), meeting)
    right = exchange(group, MIXED)
    if seat.rank == 1:  # the abort must find its sockets there too
        group.broadcast_many([torch.zeros(1 << 20, dtype=torch.uint8)])
        threading.Timer(0.2, group.abort, ("enough",)).start()
        took, _ = failure_of(lambda: group.synchronize(Deadline.after(20)))
        right = right and took < 1.2
    else:
        while group.failure is None:
            time.sleep(0.005)
    group.destroy_group()
    return right


def test_ipv6():
    with members(over_ipv6, 2) as people:
        introduce(people)
        assert results(people) == [True, True]


def survive(seat):
    """Transfer until something fails, tell, then transfer in a new group of the survivors."""
    group = seat.group()
    seat.say("connected")
    what = seat.hear()
    if what == "wait":
        while group.failure is None:
            time.sleep(0.005)
    took, error = failure_of(lambda: [exchange(group, (32 << 20, *[1 << 20] * 32), seed=n) for n in range(1000)])
    seat.say((took, type(error), error.actors, time.time()))
    if what == "wait":
        assert isinstance(group.failure, PeerLost)
    group.destroy_group()
    rank = seat.hear()
    new = seat.group(world_size=2, rank=rank)
    right = exchange(new, MIXED)
    new.destroy_group()
    return right


@pytest.mark.parametrize(
    ("when", "victim"), [("between transfers", 0), ("between transfers", 2), ("in a transfer", 0), ("in a transfer", 1)]
)
def test_a_killed_peer_is_named_and_the_others_go_on(when, victim):
    with members(survive, 3) as people:
        introduce(people)
        assert [member.hear() for member in people] == ["connected"] * 3
        for member in people:
            member.say("wait" if when == "between transfers" else "go")
        if when == "in a transfer":
            time.sleep(0.3)
            people[victim].stop()  # now the others are stuck in the middle
            time.sleep(0.2)
        killed = time.time()
        people[victim].kill()
        survivors = [member for rank, member in enumerate(people) if rank != victim]
        for member in survivors:
            _, kind, actors, at = member.hear()
            assert kind is PeerLost
            assert actors == (f"rank {victim}",)
            assert at - killed < 2.0
        for rank, member in enumerate(survivors):
            member.say(rank)
        introduce(survivors)
        assert results(survivors) == [True, True]


def stuck(seat, how):
    group = seat.group()
    seat.say("connected")
    if seat.rank == 0:  # never sends
        while group.failure is None:
            time.sleep(0.005)
        error = group.failure
    else:
        group.broadcast_many([torch.zeros(1 << 20, dtype=torch.uint8)])
        seconds = 0.5 if how == "deadline" else 60
        called = []
        if how == "abort":
            threading.Timer(0.5, lambda: (called.append(time.monotonic()), group.abort("enough"))).start()
        took, error = failure_of(lambda: group.synchronize(Deadline.after(seconds)))
        assert took < 1.5
        with pytest.raises(type(error)):
            group.broadcast_many([])
        with pytest.raises(type(error)):
            group.barrier()
    before = time.monotonic()
    group.abort("again")
    group.destroy_group()
    assert time.monotonic() - before < 1
    return type(error), error.actors, str(error)


def stopped_midway(seat, victim):
    """Rank ``victim`` is stopped when it has begun with two batches of operations."""
    group = seat.group()
    finish = group._finish

    def stop(parcels, src):
        if len(parcels) > 1:  # not the header
            os.kill(os.getpid(), signal.SIGSTOP)
        finish(parcels, src)

    views = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(256)]
    if seat.rank == victim:
        group._finish = stop
    else:
        threading.Timer(1.0, group.abort, ("enough",)).start()

    def transfer():
        while True:  # a rank that does not need the stopped one gets through once
            group.broadcast_many(views)
            group.synchronize(Deadline.after(20))

    took, error = failure_of(transfer)
    out = not group._busy()
    for view in views:
        view.fill_(7)
    time.sleep(0.2)
    kept = all(bool((view == 7).all()) for view in views)
    group.destroy_group()
    return took, str(error), out, kept


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_an_abort_ends_many_outstanding_operations_and_their_buffers_are_free(world_size, victim):
    with members(stopped_midway, world_size, victim) as people:
        introduce(people)
        others = [member for rank, member in enumerate(people) if rank != victim]
        for took, text, out, kept in results(others):
            assert took < 4.0  # of 20
            assert "enough" in text
            assert out
            assert kept


def test_a_failure_is_told_when_the_worker_is_out():
    meeting = Meeting.open("g", "TWINKLE_GLOO")
    group = GlooGroup(1, 0, "g")
    group.connect(meeting.rendezvous, Deadline.after(5), meeting)
    left = threading.Event()

    def slow():
        group.abort("now")
        time.sleep(1.4)  # such as a copy into a model, on a machine that is short of cores
        left.set()

    group._launch(slow)
    with pytest.raises(SyncAborted, match="now"):
        group.synchronize(Deadline.after(10))
    assert left.is_set()
    group.destroy_group()


def test_an_operation_that_gloo_never_ends_keeps_nobody_and_is_followed_by_nothing():
    meeting = Meeting.open("g", "TWINKLE_GLOO")
    group = GlooGroup(1, 0, "g")
    group.connect(meeting.rendezvous, Deadline.after(5), meeting)
    late, written = threading.Event(), []

    class Lost:
        def wait(self, timeout):
            assert late.wait(60)

    def work():
        group._end(Lost())
        written.append("late")

    group._launch(work)
    group.abort("now")
    took, error = failure_of(lambda: group.synchronize(Deadline.after(30)))
    assert took < 5  # of 30
    assert "now" in str(error)
    worker = group._worker._thread
    late.set()
    group.destroy_group()
    worker.join(10)
    assert not worker.is_alive()
    assert written == []


def test_an_abort_from_another_thread_releases_a_stuck_receiver_and_tells_the_others():
    with members(stuck, 3, "abort") as people:
        introduce(people)
        for member in people:
            member.hear()
        for kind, actors, text in results(people):
            assert kind is SyncAborted
            assert actors in {("rank 1",), ("rank 2",)}
            assert "enough" in text


def test_a_deadline_passes_for_the_receiver_and_aborts_the_others():
    with members(stuck, 2, "deadline") as people:
        introduce(people)
        for member in people:
            member.hear()
        (kind, actors, text), (own_kind, _, own_text) = results(people)
        assert own_kind is SyncTimeout
        assert "0.5 s" in own_text
        assert kind is SyncAborted
        assert actors == ("rank 1",)
        assert own_text in text


def disagree(seat, how):
    group = seat.group()
    if how == "recv":
        tensor = torch.zeros(10 + seat.rank, dtype=torch.uint8)
        options = type("Options", (), {"dst_rank": 1, "src_rank": 0, "n_elements": 0})
        call = (lambda: group.send([tensor], options)) if seat.rank == 0 else (lambda: group.recv([tensor], options))
    elif how == "operation":
        call = group.barrier if seat.rank else lambda: group.broadcast([torch.zeros(4)])
    else:
        sizes = {"longer": (100, 200), "shorter": (100, 50), "order": (150, 50)}[how] if seat.rank else (50, 150)
        call = lambda: exchange(group, sizes)  # noqa: E731
    try:
        call()
        call()  # the sender may be through with the first
    except Exception as error:
        group.destroy_group()
        return type(error), str(error)
    return None


@pytest.mark.parametrize("how", ["longer", "shorter", "order", "operation", "recv"])
def test_ranks_that_disagree_get_an_error_and_live(how):
    with members(disagree, 2, how) as people:
        introduce(people)
        (sender, text), (receiver, own_text) = results(people)
        assert receiver is ManifestMismatch
        assert sender is SyncAborted
        assert own_text in text


def leave(seat):
    group = seat.group()
    exchange(group, MIXED)
    if seat.rank == 1:
        group.destroy_group()
        return None
    until = time.monotonic() + 10
    while group.failure is None and time.monotonic() < until:
        time.sleep(0.005)
    heard = group.failure is not None
    known = isinstance(group.failure, PeerLost) and not group._failed.is_set()
    _, error = failure_of(lambda: exchange(group, MIXED))
    group.destroy_group()
    return heard, known, type(error), error.actors


def test_use_after_one_has_left_is_refused():
    with members(leave, 3) as people:
        introduce(people)
        (heard, known, kind, actors), _, (also_heard, also_known, other_kind, other_actors) = results(people)
        assert heard
        assert also_heard
        # The slower one may hear it from the faster.
        assert known or also_known
        assert PeerLost in (kind, other_kind)
        assert actors == other_actors == ("rank 1",)


# Beside others


def beside_default(seat):
    import torch.distributed as dist

    if seat.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        seat.say(port)
    else:
        port = seat.hear()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=seat.rank, world_size=2)
    group = seat.group()
    right = [exchange(group, MIXED)]
    ones = torch.ones(4)
    dist.all_reduce(ones)
    group.abort("ours only")
    dist.all_reduce(ones)
    right.append(ones.tolist() == [4.0] * 4)
    group.destroy_group()
    dist.all_reduce(ones)
    right.append(ones.tolist() == [8.0] * 4)
    dist.destroy_process_group()
    return right


def test_torchs_default_group_is_untouched():
    with members(beside_default, 2) as people:
        people[1].say(people[0].hear())
        introduce(people)
        assert results(people) == [[True] * 3] * 2


def two_at_once(seat):
    groups = [seat.group(), seat.group()]
    right = [[], []]

    def use(n):
        right[n] += [exchange(groups[n], (200_000 + n, 3, 1 << 20), src=n, seed=10 * i + n) for i in range(15)]

    threads = [threading.Thread(target=use, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    groups[1].barrier()  # the other rank is through as well
    groups[0].abort("one of two")
    alone = exchange(groups[1], MIXED)
    for group in groups:
        group.destroy_group()
    return right, alone


def test_two_groups_of_the_same_processes_do_not_cross():
    with members(two_at_once, 2) as people:
        introduce(people)
        introduce(people)
        assert results(people) == [([[True] * 15] * 2, True)] * 2


def given_up(seat, how):
    """What is left of a group that failed, before Python looks for objects that hold each other."""
    first = seat.group()
    assert exchange(first, (100,), seed=1)
    first.destroy_group()
    del first
    gc.collect()
    gc.disable()
    before = footprint()
    group = seat.group()
    assert exchange(group, (100,), seed=2)
    seat.say("in")
    assert seat.hear() == "on"
    views = [torch.ones(9)]
    ends = {"barrier": group.barrier, "rally": group.rally, "broadcast": partial(group.broadcast_many, views)}
    if seat.rank == 0:
        time.sleep(0.2)  # the other one waits by now
        group.abort("for once")
    with contextlib.suppress(SyncError):
        ends[how]()
        group.synchronize(Deadline.after(20))
    with contextlib.suppress(SyncError):
        group.rally()
    group.destroy_group()
    del group, ends
    return before, settled(before, 4.0)


@pytest.mark.parametrize("how", ["barrier", "rally", "broadcast"])
def test_a_group_that_was_given_up_leaves_no_thread_and_no_descriptor_to_a_garbage_collection(how):
    with members(given_up, 2, how) as people:
        for _ in range(2):
            introduce(people)
        assert [one.hear() for one in people] == ["in"] * 2
        for one in people:
            one.say("on")
        for before, after in results(people):
            assert no_more(after, before)


def hundred(seat):
    marks = []
    for n in range(105):
        group = seat.group()
        assert exchange(group, (100, 70_000), seed=n)
        if n % 7 == 3:
            with contextlib.suppress(SyncError):  # whoever is later may see the other's abort
                group.barrier()
                group.abort("now and then")
        group.destroy_group()
        if n in (4, 104):
            seat.say("settled")
            seat.hear()
            marks.append(settled(marks[0]) if marks else footprint())
    return marks


def test_a_hundred_groups_leave_no_thread_and_no_descriptor():
    with members(hundred, 2) as people:
        for n in range(105):
            introduce(people)
            if n in (4, 104):
                for member in people:
                    assert member.hear() == "settled"
                time.sleep(0.3)
                for member in people:
                    member.say("on")
        for early, late in results(people):
            assert no_more(late, early)


def under_fire(seat):
    group = seat.group()
    seat.say("connected")
    right = []
    while not seat.pipe.poll(0):
        right.append(exchange(group, (50_000, 500_000)))
        group.barrier()
        if len(right) == 40:
            seat.say("enough")
            seat.hear()
            break
    group.destroy_group()
    return all(right), len(right)


def test_garbage_on_both_ports_does_not_disturb_a_group():
    with members(under_fire, 2) as people:
        rendezvous = introduce(people)
        for member in people:
            member.hear()
        for _ in range(20):
            for port in (rendezvous.store_port, rendezvous.watch_port):
                with socket.create_connection((rendezvous.host, port), 2) as sock:
                    sock.sendall(os.urandom(5000))
        for member in people:
            assert member.hear() == "enough"
            member.say("stop")
        assert results(people) == [(True, 40)] * 2


# Arguments


def test_a_group_alone_checks_its_arguments():
    group = create_group("TWINKLE_GLOO", 1, 0, "g")
    with pytest.raises(ConfigError, match="not connected"):
        group.barrier()
    meeting = Meeting.open("g", "TWINKLE_GLOO")
    group.connect(meeting.rendezvous, Deadline.after(5), meeting)
    for view in (torch.zeros(4, 4, dtype=torch.uint8).t(), torch.zeros(4, 4, dtype=torch.uint8)[:, 0]):
        with pytest.raises(ConfigError, match="a contiguous tensor on cpu"):
            group.broadcast_many([view])
    with pytest.raises(ConfigError, match="cannot reduce"):
        group.allreduce([torch.zeros(2, dtype=torch.bool)])
    with pytest.raises(ConfigError, match="3 tensors"):
        group.broadcast([torch.zeros(1)] * 3, BroadcastOptions())
    with pytest.raises(ConfigError, match="str cannot be used"):
        group.broadcast(["x"])
    with pytest.raises(ConfigError, match="before"):
        group.connect(meeting.rendezvous, Deadline.after(1), meeting)
    group.barrier()
    assert group.failure is None
    destroy_group(group)
    destroy_group(group)
    with pytest.raises(ConfigError, match="destroyed"):
        group.barrier()


def test_a_rendezvous_of_another_group_is_refused():
    with Meeting.open("other", "TWINKLE_GLOO") as meeting:
        group = GlooGroup(1, 0, "g")
        with pytest.raises(ConfigError, match="other"):
            group.connect(meeting.rendezvous, Deadline.after(1), meeting)
    with Meeting.open("g", "TWINKLE_GLOO") as meeting:
        group = GlooGroup(2, 1, "g")
        with pytest.raises(ConfigError, match="rank 0"):
            group.connect(meeting.rendezvous, Deadline.after(1), meeting)


def test_backends_by_name_and_device():
    register()
    register()
    assert group_class("TWINKLE_GLOO") is GlooGroup
    assert backend_for("cpu") == "TWINKLE_GLOO"
    assert backend_for("cuda") == "TWINKLE_NCCL"
    assert group_class("TWINKLE_NCCL").check_backend_availability() is torch.cuda.is_available() is False
    with pytest.raises(BackendUnavailable, match=r"TWINKLE_NCCL .*CUDA"):
        require("TWINKLE_NCCL")
    with pytest.raises(ConfigError, match="NCCL2"):
        require("NCCL2")
    with pytest.raises(ConfigError, match="xpu"):
        backend_for("xpu")
    with pytest.raises(ConfigError, match="rank 2"):
        create_group("TWINKLE_GLOO", 2, 2, "g")


def test_nccl_without_cupy_says_what_to_install(monkeypatch):
    import importlib.util

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"cupy is missing; pip install 'twinkle_ray\[cuda13\]'"):
        require("TWINKLE_NCCL")
