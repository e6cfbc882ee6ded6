"""Groups on one device, on a CPU: one copy through shared memory, and every way in which that ends."""

from __future__ import annotations

import gc
import mmap
import os
import re
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.members import Member, Seat, footprint, introduce, members, no_more, results, settled
from twinkle_ray.backends import ipc
from twinkle_ray.backends import link as links
from twinkle_ray.backends import memory as memories
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

IPC = "TWINKLE_IPC"


def joined(seat: Seat, **kwargs: Any) -> Any:
    return Seat(seat.rank, seat.world_size, seat.pipe, IPC).group(**kwargs)


def left_behind(people: list[Member]) -> list[str]:
    """Files of shared memory that one of these could have forgotten; torch puts the process's number into a name."""
    numbers = [f"_{member.process.pid}_" for member in people]
    return [name for name in os.listdir("/dev/shm") if any(number in name for number in numbers)]


def raw(some: list[torch.Tensor]) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in some]


def objects(module: list[torch.Tensor]) -> set[int]:
    """Inodes of the mapped memory in which tensors lie, as the kernel lists them."""
    found = set()
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        start, stop = (int(part, 16) for part in fields[0].split("-"))
        spans.append((start, stop, int(fields[4])))
    for tensor in module:
        found |= {inode for start, stop, inode in spans if start <= tensor.data_ptr() < stop}
    return found


def mapped() -> set[int]:
    return {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()}


def tensors(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    whole = torch.randn(50, 30)
    return [torch.randn(1000), whole[10:20], torch.randint(0, 9, (7,)), torch.randn(3, dtype=torch.bfloat16), whole[:3]]


def leave(seat: Seat, group: Any) -> None:
    """The sender last, since what is open of its memory is closed when it has left."""
    until = time.monotonic() + 10
    while seat.rank == 0 and group.failure is None and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.0 if seat.rank else 0.3)
    group.destroy_group()


# --- bytes -------------------------------------------------------------------------------------------------------


def one_copy(seat: Seat, rounds: int) -> Any:
    group = joined(seat)
    mine = tensors(1 if seat.rank == 0 else 2)
    seen = []
    if seat.rank == 0:
        before = [(id(t), t.clone()) for t in mine]
        group.host(mine)
        assert all(id(t) == i and torch.equal(t, v) for t, (i, v) in zip(mine, before, strict=True))
        mine[1][0, 0] = 17.0  # a view still is one of the same memory
        assert mine[1]._base[10, 0] == 17.0
    for number in range(rounds):
        group.rally()
        if seat.rank == 0:
            for tensor in mine:
                tensor.add_(1)
        group.broadcast_many(mine[:2])
        group.broadcast_many(mine[2:])
        group.synchronize(Deadline.after(10))
        seen.append(raw(mine))
        if seat.rank and number == 0:
            shared = mapped()
    counts = vars_of(group.counts)
    inodes = objects(mine) if seat.rank == 0 else shared
    group.destroy_group()
    if seat.rank:
        inodes = inodes, mapped()
    return seen, counts, inodes


def vars_of(counts: Any) -> dict[str, int]:
    return {name: getattr(counts, name) for name in type(counts).__slots__}


def test_each_byte_is_copied_once_from_where_it_lies_to_where_it_belongs() -> None:
    with members(one_copy, 3, 3) as people:
        introduce(people)
        (sent, counts, ours), *others = results(people)
        assert left_behind(people) == []
    nbytes = sum(map(len, sent[0]))
    assert counts["hosted"] == 4000 + 6000 + 56 + 6
    assert (counts["staged"], counts["shared"], counts["repeated"]) == (0, 3 * nbytes, 4)
    for got, theirs, (during, after) in others:
        assert got == sent
        assert sent[0] != sent[1]
        assert (theirs["copied"], theirs["opened"], theirs["repeated"]) == (3 * nbytes, 4, 4)
        assert ours <= during  # the very memory of the sender's tensors was mapped, says the kernel
        assert not ours & after


def one_after_the_other(seat: Seat) -> Any:
    group = joined(seat)
    mine = torch.ones(10) if seat.rank == 0 else torch.zeros(10)
    seat.say("in")
    assert seat.hear() == "go on"
    group.rally()
    group.broadcast_many([mine])
    if seat.rank == 0:
        seat.say("sent")
        assert seat.hear() == "end"  # meanwhile it does not even look at what the others say
    elif seat.world_size == 3:
        with pytest.raises(SyncTimeout):
            group.synchronize(Deadline.after(0.5))
        return mine.tolist()
    group.synchronize(Deadline.after(10))
    group.destroy_group()
    return mine.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_single_receiver_is_not_waited_for_and_of_two_none_goes_first(world_size: int) -> None:
    with members(one_after_the_other, world_size) as people:
        introduce(people)
        assert all(member.hear() == "in" for member in people)
        people[0].say("go on")
        assert people[0].hear() == "sent"
        people[1].say("go on")
        (got,) = results(people[1:2])
        if world_size == 2:
            people[0].say("end")
            results(people[:1])
    assert got == [float(world_size == 2)] * 10


def slow_to_hear(seat: Seat) -> Any:
    """A receiver that reads its welcome when the sender has said more already."""
    if seat.rank:
        hear = links._await_welcome

        def late(*args: Any) -> None:
            assert seat.hear() == "all is said"
            hear(*args)

        links._await_welcome = late  # type: ignore[assignment]
    group = joined(seat)
    mine = torch.full((10,), 1.0 - seat.rank)
    group.rally()
    group.broadcast_many([mine])
    if seat.rank == 0:
        seat.say("all is said")
    group.synchronize(Deadline.after(10))
    group.destroy_group()
    return mine.sum().item()


def test_what_the_sender_says_at_once_reaches_a_receiver_that_has_just_come() -> None:
    with members(slow_to_hear, 2) as people:
        introduce(people)
        assert people[0].hear() == "all is said"
        people[1].say("all is said")
        assert results(people) == [10, 10]


def many_chunks(seat: Seat) -> Any:
    group = joined(seat)
    mine = list(torch.full((400,), float(seat.rank == 0)).split(10))
    if seat.rank == 0:
        group.host(mine)
        people = group._peers.values()
    else:
        people = [group._peers[0]]
        assert seat.hear() == "sent"
    calls = []
    for peer in people:
        for name in ("take", "post"):
            real = getattr(peer.link, name)
            setattr(peer.link, name, lambda *args, real=real, name=name: [calls.append(name), real(*args)][1])
    group.rally()
    for tensor in mine:
        group.broadcast_many([tensor])
    counted = calls.count("take"), calls.count("post")
    if seat.rank == 0:
        seat.say("sent")
    group.synchronize(Deadline.after(10))
    done = calls.count("post") - counted[1]
    leave(seat, group)
    return counted, done, {float(tensor.sum()) for tensor in mine}


def test_a_chunk_of_a_steady_stream_costs_one_call_at_the_sender_and_none_at_the_receiver() -> None:
    with members(many_chunks, 2) as people:
        introduce(people)
        assert people[0].hear() == "sent"
        people[1].say("sent")
        (sender, _, _), (receiver, done, values) = results(people)
    assert sender == (1, 2 + 40)  # at the barrier; block and barrier, and each chunk
    assert receiver == (1, 0)  # a receiver that finds all there has nothing to ask
    assert done == 1
    assert values == {10.0}


def new_storages(seat: Seat) -> Any:
    group = joined(seat)
    mine = torch.nn.Parameter(torch.zeros(1 << 16))
    seen = []
    for number in range(6):
        if seat.rank == 0:
            if number in (2, 4, 5):
                mine.data = torch.zeros(1 << 16)  # the old memory goes, and perhaps its address comes again
            with torch.no_grad():
                mine.fill_(number + 1)
            group.host([mine])
        group.rally()
        group.broadcast_many([mine.detach()])
        group.synchronize(Deadline.after(10))
        seen.append(mine.unique().tolist())
    counts, held = group.counts, len(group._opened)
    leave(seat, group)
    return seen, counts.opened, counts.repeated, held


def test_memory_that_was_exchanged_is_noticed_and_the_old_one_is_let_go() -> None:
    with members(new_storages, 2) as people:
        introduce(people)
        (sent, _, repeated, _), (got, opened, again, held) = results(people)
    assert sent == got == [[n + 1.0] for n in range(6)]
    assert (opened, held, repeated, again) == (4, 1, 2, 2)


def one_lets_go(seat: Seat) -> Any:
    group = joined(seat)
    mine = torch.zeros(1 << 16)
    group.host([mine])
    seen, open_after = [], []
    for number in range(5):
        assert seat.hear() == "next"  # a sync begins when all have let go who do
        if seat.rank == 0:
            mine.fill_(number + 1)
        group.rally()
        group.broadcast_many([mine])
        group.synchronize(Deadline.after(10))
        seen.append(mine.unique().tolist())
        if number % 2 and seat.rank != 2:
            group.let_go()
            group.let_go()
        open_after.append(len(group._opened))
        seat.say("over")
    maps = len(mapped())
    group.let_go()
    closed = maps - len(mapped())
    leave(seat, group)
    return seen, open_after, closed, group.counts.repeated


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_member_that_closes_what_it_had_open_opens_it_again(world_size: int) -> None:
    with members(one_lets_go, world_size) as people:
        introduce(people)
        for _ in range(5):
            for member in people:
                member.say("next")
            assert [member.hear() for member in people] == ["over"] * world_size
        (sent, _, _, said_again), *received = results(people)
    opened = ([1, 0, 1, 0, 1], [1] * 5)[: world_size - 1]
    for (got, mine, closed, _), theirs in zip(received, opened, strict=True):
        assert got == sent == [[n + 1.0] for n in range(5)]
        assert (mine, closed) == (theirs, 1)
    assert said_again == 2  # and anew in the rounds 1, 3 and 5


def lets_go_late(seat: Seat) -> Any:
    group = joined(seat)
    mine = torch.full((1000,), 1.0 if seat.rank == 0 else 0.0)
    group.host([mine])
    for number in range(2):
        if seat.rank == 0:
            mine.fill_(number + 1)
        elif number:
            assert seat.hear() == "sent"
            group.let_go()
        try:
            group.rally()
            group.broadcast_many([mine])
            if number and seat.rank == 0:
                seat.say("sent")
            group.synchronize(Deadline.after(10))
        except SyncError as error:
            return type(error).__name__, str(error), mine.unique().tolist()
    return None


def test_a_receiver_that_lets_go_when_a_sync_has_begun_refuses_it() -> None:
    with members(lets_go_late, 2) as people:
        introduce(people)
        assert people[0].hear() == "sent"
        people[1].say("sent")
        (theirs, said, _), (mine, _, held) = results(people)
    assert (mine, held) == ("NotAgreed", [1.0])  # which a manager answers by agreeing anew
    assert theirs == "SyncAborted"
    assert "rank 1 closed the sender's memory" in said


def through_slots(seat: Seat, kind: str) -> Any:
    group = joined(seat)
    torch.manual_seed(seat.rank)
    if kind == "loaded" and seat.rank == 0:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(os.urandom(416))
            file.flush()
            mapping = mmap.mmap(file.fileno(), 416, flags=mmap.MAP_PRIVATE)
        mine = torch.frombuffer(mapping, dtype=torch.int32, count=100, offset=16)
        before = mine.clone()
    elif kind == "mapped" and seat.rank == 0:
        with tempfile.NamedTemporaryFile() as file:
            file.write(os.urandom(400))
            file.flush()
            mine = torch.from_file(file.name, shared=False, size=100)
    elif kind == "numpy" and seat.rank == 0:
        array = np.random.default_rng(1).random(100, dtype=np.float32)
        mine = torch.from_numpy(array)
    else:
        mine = torch.rand(100)
    if kind == "full" and seat.rank == 0:
        memories._SPARE = 1 << 60
    if seat.rank == 0:
        group.host([mine, torch.zeros(1)])
        if kind == "numpy":
            array[0] = 5.0
            assert mine[0] == 5.0  # still one memory
        if kind == "loaded":
            assert torch.equal(mine, before)
            mine = mine.view(torch.float32)
    got = []
    for _ in range(2):
        group.rally()
        for _ in range(7):  # more than there are slots
            if seat.rank:
                mine = torch.zeros(100)
            else:
                mine = mine if kind in ("loaded", "mapped", "numpy", "full") else torch.rand(100)
            group.broadcast_many([mine])
            got.append(mine)
            if kind == "waits":
                group.settle(Deadline.after(10), 1)
        group.synchronize(Deadline.after(10))
    counts = group.counts
    slots = sum(slot.memory.nbytes for slot in group._slots if slot.memory is not None)
    group.destroy_group()
    return [t.view(torch.uint8).tolist() for t in got], counts.staged, counts.copied, slots


@pytest.mark.parametrize("kind", ["made", "waits", "mapped", "numpy", "full"])
def test_what_cannot_be_shared_goes_through_two_slots(kind: str) -> None:
    with members(through_slots, 3, kind) as people:
        introduce(people)
        (sent, staged, _, slots), *others = results(people)
    assert staged == 14 * 400
    assert slots == 2 * 448
    for got, _, copied, _ in others:
        assert got == sent
        assert copied == staged


def growing(seat: Seat) -> Any:
    group = joined(seat)
    group.rally()
    mine = [torch.rand(1 << n) if seat.rank == 0 else torch.zeros(1 << n) for n in range(4, 14)]
    for one in mine:
        group.broadcast_many([one])
    group.synchronize(Deadline.after(10))
    held = len(group._opened)
    leave(seat, group)
    return raw(mine), held


def test_a_slot_that_grows_leaves_nothing_open() -> None:
    with members(growing, 2) as people:
        introduce(people)
        (sent, _), (got, held) = results(people)
    assert got == sent
    assert held == 2


def test_what_was_loaded_from_a_checkpoint_is_moved_once() -> None:
    with members(through_slots, 2, "loaded") as people:
        introduce(people)
        (sent, staged, _, slots), (got, _, copied, _) = results(people)
    assert got == sent
    assert (staged, slots, copied) == (0, 0, 14 * 400)


def many(seat: Seat, count: int) -> Any:
    """More blocks than descriptors fit into a message, more messages than a socket holds, in both directions."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    group = joined(seat)
    mine = [torch.full((3,), n + 1.0) if seat.rank == 0 else torch.zeros(3) for n in range(count)]
    if seat.rank == 0:
        group.host(mine)
    for _ in range(2):
        group.rally()
        group.broadcast_many(mine)
        for tensor in mine:
            group.broadcast_many([tensor])
        group.synchronize(Deadline.after(30))
    assert all(t.tolist() == [n + 1.0] * 3 for n, t in enumerate(mine))
    shared = group.counts.shared
    group.destroy_group()
    return len(os.listdir("/proc/self/fd")), shared


def test_thousands_of_chunks_and_storages() -> None:
    with members(many, 2, 1500) as people:
        introduce(people)
        (sender, shared), (receiver, _) = results(people, 60)
    assert 200 < sender < 300  # a quarter of what it may have open; the rest goes through slots
    assert 2 * 2 * 12 * 200 < shared < 2 * 2 * 12 * 300
    assert receiver < 40  # mapped without keeping descriptors


def remembered(seat: Seat, count: int) -> Any:
    """How often a sender asks of a storage whether it is gone, per storage."""
    asked = 0
    dead = memories._Weak.dead

    def counted(self: Any) -> bool:
        nonlocal asked
        asked += 1
        return bool(dead.fget(self))  # type: ignore[attr-defined]

    memories._Weak.dead = property(counted)  # type: ignore[assignment, method-assign]
    group = joined(seat)
    mine = [torch.full((3,), n + 1.0) if seat.rank == 0 else torch.zeros(3) for n in range(count)]
    if seat.rank == 0:
        group.host(mine)
    group.rally()
    group.broadcast_many(mine)
    group.synchronize(Deadline.after(30))
    assert mine[-1].tolist() == [count] * 3
    group.destroy_group()
    return asked / count


def test_what_is_remembered_of_thousands_of_storages_is_not_looked_through_for_each_of_them() -> None:
    with members(remembered, 2, 4000) as people:
        introduce(people)
        sender, _ = results(people, 60)
    assert 0 < sender < 20


def impatient(seat: Seat, what: str) -> Any:
    """How often a sender goes round while it waits for one receiver, and another one that is done has said more."""
    group = joined(seat)
    mine = torch.full((10,), 1.0 - seat.rank)
    rounds = 0
    if seat.rank == 0:
        advance = group._advance

        def counted(**kwargs: Any) -> bool:
            nonlocal rounds
            rounds += 1
            return bool(advance(**kwargs))

        group._advance = counted
    group.rally()
    group.synchronize(Deadline.after(10))
    group.broadcast_many([mine])
    if seat.rank == 2:
        assert seat.hear() == "go on"
    group.synchronize(Deadline.after(10))
    if seat.rank == 1:
        group.rally() if what == "next operation" else group.let_go()
    seat.say("done")
    assert seat.hear() == "leave"
    group.abort("the test has ended")
    return rounds


@pytest.mark.parametrize("what", ["next operation", "let go"])
def test_a_sender_sleeps_while_it_waits_whatever_the_others_say(what: str) -> None:
    with members(impatient, 3, what) as people:
        introduce(people)
        assert people[1].hear() == "done"
        time.sleep(0.3)
        people[2].say("go on")
        assert [people[rank].hear() for rank in (0, 2)] == ["done"] * 2
        for one in people:
            one.say("leave")
        assert results(people)[0] < 200


# --- order and mistakes ------------------------------------------------------------------------------------------


def late_receiver(seat: Seat) -> Any:
    group = joined(seat)
    mine = torch.full((10,), 1.0 - seat.rank)
    if seat.rank == 2:
        assert seat.hear() == "come"
    with pytest.raises(SyncTimeout if seat.rank == 1 else SyncAborted):  # noqa: PT012
        group.rally()
        group.broadcast_many([mine])
        group.synchronize(Deadline.after(0.5 if seat.rank == 1 else 5.0))
    return mine.sum().item()


def test_nothing_moves_before_all_have_come_and_a_deadline_ends_it_for_all() -> None:
    with members(late_receiver, 3) as people:
        introduce(people)
        assert results(people[:2]) == [10.0, 0.0]
        people[2].say("come")
        assert results(people[2:]) == [-10.0]


def disagree(seat: Seat, how: str) -> str:
    group = joined(seat)
    group.rally()
    if how == "arguments":
        with pytest.raises(ConfigError, match="only rank 0 can"):
            group.broadcast_many([torch.zeros(4)], src=1)
        with pytest.raises(ConfigError, match="contiguous"):
            group.broadcast_many([torch.zeros(4, 4).t()])
        with pytest.raises(ConfigError, match="has no allreduce"):
            group.allreduce([torch.zeros(4)])
        one = torch.full((2,), float(1 - seat.rank))
        group.broadcast([one])
        group.barrier()
        return str(one.tolist())
    try:
        if how == "order" and seat.rank:
            group.rally()
        else:
            group.broadcast_many([torch.zeros(4 + (how == "size" and seat.rank))])
        group.synchronize(Deadline.after(10))
    except (ManifestMismatch, SyncAborted, PeerLost) as error:
        return type(error).__name__
    return "nothing"


def test_ranks_that_disagree_say_so() -> None:
    for how, word in (("size", "ManifestMismatch"), ("order", "ManifestMismatch")):
        with members(disagree, 2, how) as people:
            introduce(people)
            assert word in results(people)
    with members(disagree, 2, "arguments") as people:
        introduce(people)
        assert results(people) == ["[1.0, 1.0]"] * 2


# --- failures ----------------------------------------------------------------------------------------------------


def victim(seat: Seat, part: str) -> Any:
    """Half of a sync is done, then somebody goes."""
    group = joined(seat)
    mine = torch.full((1000,), 1.0 - seat.rank)
    group.rally()
    group.broadcast_many([mine])
    group.synchronize(Deadline.after(10))
    seat.say("half")
    order = seat.hear()
    if order == "abort":
        group.abort("enough")
    if order == "stay":
        time.sleep(60)
    start = time.monotonic()
    try:
        group.rally()
        group.broadcast_many([mine])
        group.synchronize(Deadline.after(20))
    except (SyncAborted, PeerLost, SyncTimeout) as error:
        took = time.monotonic() - start
        group.destroy_group()
        group.destroy_group()
        return type(error).__name__, list(error.actors), took < 3
    return "nothing", [], True


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_member_releases_the_others_and_leaves_nothing_behind(killed: int) -> None:
    with members(victim, 3, "") as people:
        introduce(people)
        for member in people:
            assert member.hear() == "half"
        for rank, member in enumerate(people):
            member.say("stay" if rank == killed else "go on")
        time.sleep(0.3)
        people[killed].kill()
        rest = results([member for rank, member in enumerate(people) if rank != killed])
    assert [(kind, soon) for kind, _, soon in rest] == [("PeerLost", True)] * 2
    assert all(actors == [f"rank {killed}"] for _, actors, _ in rest)
    assert left_behind(people) == []


def outliving(seat: Seat) -> Any:
    """What is held of the sender's memory when the group has failed, and nobody has called anything since."""
    group = joined(seat)
    mine = [torch.full((1 << 18,), 1.0 - seat.rank) for _ in range(3)]
    if seat.rank == 0:
        group.host(mine)
    for _ in range(2):
        group.rally()
        group.broadcast_many(mine)
        group.synchronize(Deadline.after(10))
    theirs = objects(list(group._opened.values()))
    seat.say("there")
    if seat.rank == 0:
        match seat.hear():
            case "fail":
                group.abort("it has had enough")
            case "leave":
                group.destroy_group()
        time.sleep(60)
    assert len(theirs) == 3
    until = time.monotonic() + 10
    while theirs & mapped() and time.monotonic() < until:
        time.sleep(0.02)
    return len(theirs & mapped()), len(group._opened), mine[0].sum().item(), type(group.failure).__name__


@pytest.mark.parametrize(("end", "failure"), [("killed", "PeerLost"), ("fail", "SyncAborted"), ("leave", "PeerLost")])
def test_the_memory_of_a_sender_that_is_no_more_is_closed_at_once(end: str, failure: str) -> None:
    with members(outliving, 2) as people:
        introduce(people)
        assert [member.hear() for member in people] == ["there"] * 2
        people[0].say(end)
        if end == "killed":
            people[0].kill()
        assert results(people[1:]) == [(0, 0, float(1 << 18), failure)]


class Sealed(memories.SharedMemory):
    """Memory that another process cannot open, as CUDA's in a container of its own."""

    def export(self, name: str) -> Any:
        return memories.Export(64, handle="abc")

    def open(self, export: Any) -> Any:
        raise BackendUnavailable(f"handle {export.handle} cannot be opened here; use weight_sync_mode='nccl'")


def left_alone(seat: Seat, what: str) -> Any:
    """A sender that leaves in good order, and a receiver that had asked for something before."""
    group = joined(seat)
    mine = torch.full((10,), 1.0 - seat.rank)
    if seat.rank == 0:
        seat.say("here")
        assert seat.hear() == "leave"
        group.destroy_group()
        return None
    group.rally() if what == "rally" else group.broadcast_many([mine])
    seat.say("asked")
    assert seat.hear() == "go on"
    until = time.monotonic() + 5
    while group._memory is not None and time.monotonic() < until:
        time.sleep(0.01)
    try:
        group.synchronize(Deadline.after(10))
    except SyncError as error:
        return type(error).__name__, error.actors
    return "nothing was raised"


@pytest.mark.parametrize("what", ["rally", "broadcast"])
def test_what_never_happened_since_the_sender_has_left_is_an_error(what: str) -> None:
    with members(left_alone, 2, what) as people:
        introduce(people)
        assert [one.hear() for one in people] == ["here", "asked"]
        people[0].say("leave")
        assert results(people[:1]) == [None]
        people[1].say("go on")
        assert results(people[1:]) == [("PeerLost", ("rank 0",))]


def sync(group: Any, mine: list[torch.Tensor]) -> None:
    group.rally()
    group.broadcast_many(mine)
    group.synchronize(Deadline.after(10))


def out_of_files(seat: Seat, who: int) -> Any:
    group = joined(seat)
    mine = [torch.full((3,), 1.0 - seat.rank) for _ in range(300)]
    if seat.rank == 0:
        group.host(mine)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if seat.rank == who:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 50, hard))
    with pytest.raises(SyncError) as raised:
        sync(group, mine)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    actors, text = raised.value.actors, str(raised.value)
    group.destroy_group()
    del group, mine, raised
    gc.collect()
    return actors, text, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("who", [0, 1])
def test_whoever_may_open_no_more_files_is_the_one_that_is_named(who: int) -> None:
    with members(out_of_files, 2, who) as people:
        introduce(people)
        found = results(people)
    for actors, _, left in found:
        assert actors == (f"rank {who}",)
        assert left < 60
    assert re.search("[Tt]oo many open files|no more files", found[who][1])


def refused(seat: Seat) -> Any:
    ipc.memory_of = lambda device: Sealed()  # type: ignore[assignment]
    try:
        joined(seat)
    except (BackendUnavailable, SyncAborted) as error:
        return type(error).__name__, str(error)
    return "it was made"


def test_memory_that_cannot_be_opened_shows_when_the_group_is_made() -> None:
    with members(refused, 2) as people:
        introduce(people)
        (first, why), second = results(people)
    assert second == ("BackendUnavailable", "handle abc cannot be opened here; use weight_sync_mode='nccl'")
    assert first == "SyncAborted"
    assert "handle abc cannot be opened here" in why


def test_an_abort_releases_a_member_that_waits() -> None:
    with members(victim, 2, "") as people:
        introduce(people)
        for member in people:
            assert member.hear() == "half"
        people[0].say("go on")
        time.sleep(0.2)
        people[1].say("abort")
        rest = results(people)
    assert rest == [("SyncAborted", ["rank 1"], True)] * 2


def stopped(seat: Seat) -> Any:
    group = joined(seat)
    group.rally()
    seat.say("there")
    if seat.rank:
        time.sleep(60)
    group.broadcast_many([torch.zeros(10)])
    start = time.monotonic()
    with pytest.raises(SyncTimeout, match=r"waited 1\.0 s"):
        group.synchronize(Deadline.after(1.0))
    return time.monotonic() - start


def test_a_deadline_ends_the_wait_for_a_member_that_does_nothing() -> None:
    with members(stopped, 2) as people:
        introduce(people)
        assert people[0].hear() == people[1].hear() == "there"
        assert 0.9 < results(people[:1])[0] < 2.0


def over_and_over(seat: Seat) -> Any:
    """Groups come and go, in order, aborted, with blocks of their own."""
    sizes = []
    for number in range(4):
        group = joined(seat)
        mine = [torch.full((100,), float(number)) if seat.rank == 0 else torch.zeros(100) for _ in range(20)]
        if seat.rank == 0:
            group.host(mine[:10])
        group.rally()
        group.broadcast_many(mine)
        group.synchronize(Deadline.after(10))
        assert mine[3].tolist() == mine[15].tolist() == [float(number)] * 100
        if number % 2:
            time.sleep(0.3)  # until both have got here
            group.abort("for once")
        group.destroy_group()
        with pytest.raises((ConfigError, SyncAborted)):
            group.rally()
        del mine, group
        time.sleep(0.1)
        sizes.append((*(settled(sizes[0][:2]) if sizes else footprint()), len(mapped())))
    return sizes


def test_groups_leave_no_threads_descriptors_or_mappings_behind() -> None:
    with members(over_and_over, 2) as people:
        for _ in range(4):
            introduce(people)
        for sizes in results(people):
            assert no_more(sizes[-1][:2], sizes[0][:2])
            assert sizes[-1][2] <= sizes[0][2] + 1


def stuck(seat: Seat) -> Any:
    """A thread that is in the middle of a copy is left behind, and what it copies from must stay mapped."""
    group = joined(seat)
    mine = torch.full((1 << 20,), 1.0 - seat.rank)
    if seat.rank == 0:
        group.host([mine])
        group.rally()
        group.broadcast_many([mine])
        with pytest.raises((SyncAborted, PeerLost)):
            group.synchronize(Deadline.after(10))
        return True
    inside, go_on = threading.Event(), threading.Event()
    copy = memories.SharedMemory.copy

    def slow(memory: Any, into: Any, of: Any) -> None:
        inside.set()
        assert go_on.wait(20)
        copy(memory, into, of)

    memories.SharedMemory.copy = slow  # type: ignore[method-assign]
    errors = []

    def receive() -> None:
        group.rally()
        group.broadcast_many([mine])
        try:
            group.synchronize(Deadline.after(10))
        except SyncAborted as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    assert inside.wait(10)
    group.abort("the driver has left")
    with pytest.raises(SyncError, match=r"rank 1 of group .* is still reading the sender's memory"):
        group.let_go()
    group.destroy_group()
    held = len(group._opened)
    go_on.set()
    thread.join(10)
    return held, len(group._opened), len(errors), mine.sum().item()


def test_a_copy_that_was_given_up_keeps_its_memory_until_it_ends() -> None:
    with members(stuck, 2) as people:
        introduce(people)
        assert results(people) == [True, (1, 0, 1, float(1 << 20))]


def stranger(seat: Seat) -> Any:
    import socket

    from twinkle_ray.backends import link

    if seat.rank == 0:
        host = link.Host()
        seat.say(host.address)
        with pytest.raises(SyncTimeout, match="rank 1 did not call"):
            host.accept([1], Deadline.after(1.0), lambda: None)
        links = host.accept([1], Deadline.after(10.0), lambda: None)
        return sorted(links)
    address = seat.hear()
    name, key = address.split()
    held = []
    for sent in (
        b"",
        b"\xff" * 50,
        b'\x19\x00\x00\x00{"rank": 1, "key": "none"}',
        b'\x14\x00\x00\x00{"rank":1,"key":"%s' % b"x",
    ):
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].connect(f"\0{name}")
        held[-1].sendall(sent)
    with pytest.raises(PeerLost, match="does not listen"):
        link.call(f"{name}x {key}", 1, Deadline.after(5.0), lambda: None)
    assert seat.hear() == "now"
    mine = link.call(address, 1, Deadline.after(10.0), lambda: None)
    return [mine.fileno() > 0]


def test_nobody_gets_in_without_the_key() -> None:
    with members(stranger, 2) as people:
        people[1].say(people[0].hear())
        time.sleep(1.2)
        people[1].say("now")
        assert results(people) == [[1], [True]]
