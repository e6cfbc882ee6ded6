"""Groups on one device, or on linked ones: one sender and its neighbours, who read its memory themselves.

NCCL refuses two ranks on one device, and through host memory the bytes would be copied three times more; between two
devices it moves them by kernels, a little slower than the copy engines do. So nothing is sent here but where the bytes
are: the sender names the block of memory in which each view lies (see
:mod:`twinkle_ray.backends.memory`), and a receiver, which has opened that block once, copies from there straight to
where its own view is. That is one copy of each byte. At the next sync of the same a message says "as last time".

What cannot be shared as it lies (gathered, merged or cast tensors on a CPU, memory of expandable segments) goes through
one of two *slots*, memory that can be shared, of the size of a chunk each, which stay as long as the group: one copy
more, and a chunk waits until all have read what was in its slot before.

The messages go over a Unix socket from the sender to each receiver (:mod:`twinkle_ray.backends.link`), numbered by the
operations that every rank makes in the same order:

    sender -> receiver   {"open": [[number, bytes, handle], ...]}   blocks, with a descriptor each on a CPU
                         {"drop": [number, ...]}                   blocks that are gone;
                         {"drop": [number, ...], "anew": true}     all of them, since somebody has closed its own
                         {"go": n}                                 the barrier that is operation n is open
                         {"at": n, "sizes": ..., "pieces": [number, offset, ...]}  where operation n's views are,
                         {"at": n, "as": k}                        or: as those of the k-th one behind the last barrier
    receiver -> sender   {"here": n}                               it has come to a barrier that is not open yet
                         {"done": n}                               it has ended operation n and all before
                         {"anew": true}                            it has closed all blocks

A barrier opens when all have come to it. A single receiver need not be waited for: the bytes lie still until it reads
them, which it does when it has come there itself. So it finds all that it has to know, and not a question that has to
go there and back.

Nobody waits in :meth:`IpcGroup.broadcast_many` and :meth:`IpcGroup.rally`: what has to wait is done in
:meth:`IpcGroup.settle` and :meth:`IpcGroup.synchronize`, by the calling thread. A receiver says that it is done when
its copies have ended and it waits for that, so when the sender's ``synchronize`` returns nobody reads its memory any
more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, TypeVar

import torch
from torch._C._distributed_c10d import Store

from twinkle_ray.backends.base import BroadcastGroup, on_device
from twinkle_ray.backends.link import FDS, Host, Link, call, wait
from twinkle_ray.backends.memory import Export, Memory, memory_of
from twinkle_ray.backends.streams import published
from twinkle_ray.digest import bytes_view
from twinkle_ray.errors import ConfigError, ManifestMismatch, NotAgreed, SyncError, SyncTimeout, TwinkleRayError
from twinkle_ray.types import Deadline, Rendezvous

T = TypeVar("T")

_POSITIONS = 4096
"""Operations behind a barrier of which both ends remember where their views were."""
_SLICE_S = 1.0
_SPIN_S = 50e-6
_LOOKED_AT = 256
"""Blocks that are looked at ahead of each sync, in turn: a model of many small tensors has thousands, and while they
are looked at nothing is on its way."""
_FEW = 16
"""Copies that a receiver launches first: an idle device begins with them while the driver takes in the others, some
5 us for each."""

_ALIGNED = 64
_TRIAL = 2 << 20  # bytes
_EXIT_S = 1.0


@dataclass(slots=True)
class Counts:
    """Bytes, since the group was made.

    Attributes:
        hosted: of the sender's own storages that were moved into memory that can be shared.
        staged: that the sender copied into a slot.
        shared: that the sender named where they lie.
        copied: that a receiver copied to where they belong.
        opened: blocks that a receiver has opened.
        repeated: operations that were as those of the last time.
    """

    hosted: int = 0
    staged: int = 0
    shared: int = 0
    copied: int = 0
    opened: int = 0
    repeated: int = 0


@dataclass(slots=True)
class _Op:
    number: int
    views: list[torch.Tensor] | None  # None: a barrier
    mark: Any = None
    slot: int | None = None
    place: _Place | None = None


@dataclass(slots=True)
class _Place:
    """Where the views of one operation behind a barrier were."""

    sizes: list[int]
    addresses: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    sources: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    memory: torch.Tensor | None = None
    until: int = 0  # the operation that used it last


@dataclass(slots=True)
class _Peer:
    """A receiver, as the sender knows it: the last barrier it has come to, the last operation that it has ended."""

    link: Link
    here: int = 0
    done: int = 0


class IpcGroup(BroadcastGroup):
    """See :class:`~twinkle_ray.backends.base.SyncGroup`. Rank 0 is the only one that sends.

    Attributes:
        counts: what was moved and how.
    """

    name: ClassVar[str] = "TWINKLE_IPC"
    device_type = "cpu"  # until it has a place

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.counts = Counts()
        self._memory: Memory | None = None
        self._device = torch.device("cpu")
        self._peers: dict[int, _Peer] = {}
        self._last = 0  # number of the last operation that was asked for
        self._queue: deque[_Op] = deque()  # not begun: not published, or (at a receiver) not heard of
        self._gathered: list[_Op] = []  # at a receiver: to be launched together
        self._flying: deque[_Op] = deque()  # begun, not known to have ended
        self._inbox: deque[dict[str, Any]] = deque()
        self._position = 0
        self._places: dict[int, _Place] = {}
        self._blocks: dict[str, int] = {}  # at the sender: numbers by name
        self._at: set[Any] = set()  # their addresses
        self._numbers = 0
        self._swept = False  # behind the last barrier
        self._opened: dict[int, torch.Tensor] = {}  # at a receiver, by number
        self._slots = (_Slot(), _Slot())
        self._turn = 0
        self._launches = 0  # behind the last barrier
        self._mustering = False
        self._anew = False  # a receiver has closed its blocks, and the sender has not said yet that it knows
        self._using = threading.Lock()  # held by the thread that uses links and memory

    @classmethod
    def missing(cls) -> str | None:
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            return "memory is shared between processes on Linux only"
        return None

    def place(self, device: torch.device) -> None:
        self._device = device
        self.device_type = device.type  # type: ignore[misc]
        self.hosts = device.type == "cpu"

    def _build(self, store: Store, rendezvous: Rendezvous, deadline: Deadline) -> None:
        with on_device(self._device):
            self._meet(store, deadline)

    def _meet(self, store: Store, deadline: Deadline) -> None:
        self._memory = memory = memory_of(self._device)
        if self._rank:
            # Where this process cannot open the sender's memory, that shows here and not amid a transfer.
            trial = published(store, "ipc/trial", deadline).decode()
            if trial:
                memory.close([memory.open(Export(_TRIAL, trial))])
            address = published(store, "ipc/address", deadline).decode()
            link = call(address, self._rank, deadline, self._raised)
            self._adopt({0: _Peer(link)})
            return
        host = Host()
        try:
            slot = memory.slot(_TRIAL)
            where = memory.locate(slot)
            store.set("ipc/trial", memory.export(where[0]).handle if where is not None else "")
            store.set("ipc/address", host.address)
            links = host.accept(range(1, self._world_size), deadline, self._raised)
        finally:
            host.close()
        del slot  # all that have come have opened it
        self._adopt({rank: _Peer(link) for rank, link in links.items()})

    def _adopt(self, peers: dict[int, _Peer]) -> None:
        with self._state:
            self._peers = peers
            late = self._destroyed
        if late:
            self._clean(0.0)

    # --- what a sync uses --------------------------------------------------------------------------------------

    def host(self, tensors: Iterable[torch.Tensor]) -> None:
        memory = self._memory
        if memory is not None and self._rank == 0:
            self.counts.hosted += memory.host(tensors)

    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        if src:
            raise ConfigError(f"rank {src} cannot send in group {self._group_name}, only rank 0 can: it is the memory")
        self._check()
        self._check_views(views)
        some = [view for view in views if view.nbytes]
        self._guarded(lambda: self._ask(some))

    def rally(self) -> None:
        self._check()
        self._guarded(lambda: self._ask(None))

    def _ask(self, views: list[torch.Tensor] | None) -> None:
        self._last += 1
        op = _Op(self._last, views)
        if self._rank == 0 and self._memory is not None:
            if views is not None:
                op.mark = self._memory.mark()  # now: when its turn comes it may have passed
            else:
                self._look_for_dead(self._memory)
        self._queue.append(op)
        self._advance(waiting=False)
        if views is None and self._rank and self._queue:
            self._peers[0].link.post({"here": self._last})

    def synchronize(self, deadline: Deadline) -> None:
        self._until(lambda: not self._queue and not self._flying, deadline)

    def settle(self, deadline: Deadline, leave: int) -> None:
        self._until(lambda: len(self._queue) + len(self._flying) <= leave, deadline)

    def muster(self, deadline: Deadline) -> None:
        if self._rank == 0:
            self._mustering = True
            self._until(lambda: all(peer.here > self._last for peer in self._peers.values()), deadline)
            self._mustering = False

    def flush(self) -> None:
        self._check()
        self._guarded(lambda: self._launch(self._memory) if self._memory is not None else None)

    def let_go(self) -> None:
        reading = f"rank {self._rank} of group {self._group_name} is still reading the sender's memory"
        if not self._using.acquire(timeout=_EXIT_S):
            raise SyncError(f"{reading}, in an operation that was given up", phase="offload")
        try:
            if self._rank and self._busy() and self.failure is None:
                raise SyncError(f"{reading}, in an operation that has not ended", phase="offload")
            if self._rank and self._memory is not None and self._opened:
                self._drop(self._memory, set(self._opened))
                self._anew = True
                # Now, since a single receiver is not waited for: its sender would name blocks that are closed.
                with contextlib.suppress(OSError):  # the next sync finds out that it is gone
                    self._peers[0].link.post({"anew": True})
        finally:
            self._using.release()

    def fence(self) -> None:
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize(self._device)

    def _until(self, ended: Callable[[], bool], deadline: Deadline) -> None:
        def work() -> None:
            while True:
                self._require_sound()
                moved = self._advance(waiting=True)
                if ended() and not any(peer.link.unsent for peer in self._peers.values()):
                    break
                if moved:
                    continue
                if deadline.expired:
                    raise SyncTimeout(
                        f"rank {self._rank} of group {self._group_name} waited {deadline.seconds:.1f} s for a transfer",
                        phase="transfer",
                    )
                # Of what is queued only the first is waited for, and if that is a barrier a message will tell.
                busy = any(op.mark is not None for op in (*self._flying, *islice(self._queue, 1)))
                # Nor for those who owe nothing: what they say of the next operation is not read now.
                links = [peer.link for peer in self._peers.values() if self._owes(peer) or peer.link.unsent]
                wait(links, 0.0 if busy else min(_SLICE_S, deadline.remaining()))
                if busy:
                    time.sleep(_SPIN_S)
            if self._memory is not None:
                self._memory.join()

        self._guarded(work)

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            with self._using, torch.inference_mode():  # the only mode that may write to every kind of tensor
                try:
                    if self._memory is None:  # given back since it was asked: the sender has left
                        self._check()
                    return work()
                except TwinkleRayError as error:
                    failure = self._fail(error, tell=True)
                except ConnectionError as error:
                    failure = self._broken(error)
                except Exception as error:
                    failure = self._fail_locally(error)
                self._exit()
        finally:
            if self._destroyed or self._failed.is_set() or self._sender_left:
                self._clean(0.0)  # another thread that wanted to did not wait for this one
        raise failure

    def _exit(self) -> None:
        """Whoever is told of a failure may use the memory again, so no copy may be on its way."""
        until = time.monotonic() + _EXIT_S
        try:
            while time.monotonic() < until and not all(self._passed(op) for op in self._flying):
                time.sleep(_SPIN_S)
        except Exception:  # the device itself failed
            return

    def _passed(self, op: _Op) -> bool:
        assert self._memory is not None
        return op.mark is None or self._memory.passed(op.mark)

    def _advance(self, *, waiting: bool) -> bool:
        """Do what can be done without waiting. Whether there was anything.

        Args:
            waiting: there is nothing else to do. Otherwise the next chunk comes at once, and is not to be kept by calls
                of the system, some of which take longer than a chunk that is copied within a device.
        """
        if self._memory is None or not self._peers:
            return False
        for peer in self._peers.values():
            peer.link.flush()
        return self._send(self._memory, waiting) if self._rank == 0 else self._receive(self._memory, waiting)

    # --- the sender --------------------------------------------------------------------------------------------

    def _send(self, memory: Memory, waiting: bool) -> bool:
        moved = False
        barrier = bool(self._queue) and self._queue[0].views is None
        if not (waiting or barrier):
            moved = self._publish_all(memory)
            if not self._queue:
                return moved
        moved = self._listen() or moved
        moved = self._publish_all(memory) or moved
        while self._flying and all(peer.done >= self._flying[0].number for peer in self._peers.values()):
            self._flying.popleft()
            moved = True
        return moved

    def _owes(self, peer: _Peer) -> bool:
        """Whether anything has to come from there."""
        return bool(self._rank) or peer.done < self._last or (self._mustering and peer.here <= self._last)

    def _listen(self) -> bool:
        """Whether anybody has said anything."""
        moved = False
        for rank, peer in self._peers.items():
            if not self._owes(peer):
                continue  # it may leave before the others are through
            for message in peer.link.take():
                moved = True
                match message:
                    case {"here": int(number)}:
                        peer.here = number
                    case {"anew": True}:
                        self._anew = True
                    case {"done": int(number)}:
                        peer.done = number
                    case _:
                        raise ManifestMismatch(f"rank {rank} answered with what is none of the group's messages")
        return moved

    def _publish_all(self, memory: Memory) -> bool:
        """What can be published now. Whether there was anything."""
        moved = False
        while self._queue and self._publish(memory, self._queue[0]):
            self._flying.append(self._queue.popleft())
            moved = True
        return moved

    def _publish(self, memory: Memory, op: _Op) -> bool:
        """Whether it could be done now."""
        if op.views is None:
            if len(self._peers) > 1 and not all(peer.here >= op.number for peer in self._peers.values()):
                return False
            if self._anew:
                self._tell({"drop": list(self._blocks.values()), "anew": True})
                self._blocks.clear()
                self._at.clear()
                self._places.clear()
                self._anew = False
            self._tell({"go": op.number})
            self._position = 0
            return True
        if not self._passed(op):  # what made these bytes has not ended, and no stream orders two processes
            return False
        op.mark = None
        position = self._position
        addresses = [view.data_ptr() for view in op.views]
        sizes = [view.nbytes for view in op.views]
        place = self._places.get(position)
        if (
            place is not None
            and place.addresses == addresses
            and place.sizes == sizes
            and all(map(memory.alive, place.names))
        ):
            self._tell({"at": op.number, "as": position})
            self.counts.repeated += 1
            self.counts.shared += sum(sizes)
        else:
            if not self._describe(memory, op, addresses, sizes):
                return False
        self._position += 1
        return True

    def _describe(self, memory: Memory, op: _Op, addresses: list[int], sizes: list[int]) -> bool:
        assert op.views is not None
        found = [memory.locate(view) for view in op.views]
        staged = [at for at, one in enumerate(found) if one is None]
        if staged and not self._stage(memory, op, staged, found):
            return False
        names = {one[0] for one in found if one is not None}
        if new := [name for name in names if name not in self._blocks]:
            # First, since no two blocks of one address can be open.
            if not (self._swept and self._at.isdisjoint(map(memory.address, new))):
                self._drop_dead(memory)
            self._open(new, memory)
        pieces: list[int] = []
        for one in found:
            assert one is not None
            pieces += (self._blocks[one[0]], one[1])
        self._tell({"at": op.number, "sizes": _digest(sizes), "pieces": pieces})
        total, copied = sum(sizes), sum(sizes[at] for at in staged)
        self.counts.shared += total - copied
        self.counts.staged += copied
        self._places.pop(self._position, None)
        if not staged and self._position < _POSITIONS:
            self._places[self._position] = _Place(sizes, addresses, names)
        return True

    def _stage(self, memory: Memory, op: _Op, staged: Sequence[int], found: list[tuple[str, int] | None]) -> bool:
        """Bring views into a slot. ``False``: it is still being read."""
        assert op.views is not None
        slot = self._slots[self._turn]
        if op.slot is None:
            if any(peer.done < slot.until for peer in self._peers.values()):
                return False
            offsets, used = [], 0
            for at in staged:
                offsets.append(used)
                used += -(-op.views[at].nbytes // _ALIGNED) * _ALIGNED
            if slot.memory is None or slot.memory.nbytes < used:
                slot.memory = None  # its memory goes before the new one comes, at the receivers too
                self._drop_dead(memory)
                slot.memory = memory.slot(used)
            into = [slot.memory[o : o + op.views[at].nbytes] for at, o in zip(staged, offsets, strict=True)]
            memory.copy(into, [bytes_view(op.views[at]) for at in staged])
            op.slot = self._turn
            op.mark = memory.mark()
            if not memory.passed(op.mark):
                return False
        assert slot.memory is not None
        where = memory.locate(slot.memory)
        if where is None:
            raise ConfigError(f"group {self._group_name} cannot share memory that it has made itself for that")
        used = 0
        for at in staged:
            found[at] = where[0], where[1] + used
            used += -(-op.views[at].nbytes // _ALIGNED) * _ALIGNED
        slot.until = op.number
        self._turn = 1 - self._turn
        return True

    def _open(self, names: Sequence[str], memory: Memory) -> None:
        for first in range(0, len(names), FDS):
            opened, fds = [], []
            for name in names[first : first + FDS]:
                self._numbers += 1
                self._blocks[name] = self._numbers
                self._at.add(memory.address(name))
                export = memory.export(name)
                opened.append([self._numbers, export.nbytes, export.handle])
                if export.fd >= 0:
                    fds.append(export.fd)
            self._tell({"open": opened}, fds)

    def _look_for_dead(self, memory: Memory) -> None:
        """Ahead of a sync, when nothing is on its way. All blocks that are used in it are looked at again."""
        self._swept = False
        some = list(islice(self._blocks, _LOOKED_AT))
        if not all(map(memory.alive, some)):
            self._drop_dead(memory)
        elif len(some) < len(self._blocks):
            for name in some:
                self._blocks[name] = self._blocks.pop(name)  # now the last one

    def _drop_dead(self, memory: Memory) -> None:
        self._swept = True
        dead = [name for name in self._blocks if not memory.alive(name)]
        if dead:
            self._tell({"drop": [self._blocks.pop(name) for name in dead]})
            self._at = set(map(memory.address, self._blocks))
            self._places = {at: place for at, place in self._places.items() if place.names.isdisjoint(dead)}

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        for peer in self._peers.values():
            peer.link.post(message, fds)

    # --- a receiver --------------------------------------------------------------------------------------------

    def _receive(self, memory: Memory, waiting: bool) -> bool:
        link = self._peers[0].link
        if not self._busy():
            return False  # so that the sender may leave
        moved = self._handle_all(memory, link)
        if waiting or self._queue:
            self._inbox += link.take()
            moved = self._handle_all(memory, link) or moved
        if waiting:
            self._launch(memory)
            ended = 0
            while self._flying and self._passed(self._flying[0]):
                ended = self._flying.popleft().number
            if ended:
                link.post({"done": ended})
                moved = True
        return moved

    def _handle_all(self, memory: Memory, link: Link) -> bool:
        """What is about an operation that this rank has come to. Whether there was anything."""
        moved = False
        while self._inbox and self._handle(memory, link, self._inbox[0]):
            self._inbox.popleft()
            moved = True
        return moved

    def _handle(self, memory: Memory, link: Link, message: dict[str, Any]) -> bool:
        """``False``: not now; it is about an operation that this rank has not come to, or one has to end first."""
        match message:
            case {"open": list(blocks)}:
                for number, nbytes, handle in blocks:
                    fd = link.take_fd() if not handle else -1
                    self._opened[number] = memory.open(Export(nbytes, handle, fd))
                    self.counts.opened += 1
                return True
            case {"drop": list(numbers)}:
                self._launch(memory)
                if not all(map(self._passed, self._flying)):
                    return False  # a copy may read from them
                self._drop(memory, set(numbers))
                self._anew = self._anew and "anew" not in message
                return True
            case {"go": int(number)}:
                if not self._queue:
                    return False
                self._require(number, self._queue[0].views is None)
                if self._anew:
                    raise NotAgreed(
                        f"rank {self._rank} closed the sender's memory after this sync had begun", phase="transfer"
                    )
                self._launch(memory)
                self._position = self._launches = 0
                self._flying.append(self._queue.popleft())
            case {"at": int(number)}:
                if not self._queue:
                    return False
                self._require(number, self._queue[0].views is not None)
                op = self._queue.popleft()
                self._find(op, message)
                self._position += 1
                self._gathered.append(op)
                # Fewer calls for a device that has enough to do, but for one that idles, the first chunks as they come.
                if len(self._gathered) >= min(memory.at_once, 1 << max(0, self._launches - 1)):
                    self._launch(memory)
            case _:
                raise ManifestMismatch("rank 0 sent what is none of the group's messages")
        return True

    def _require(self, number: int, same_kind: bool) -> None:
        if not same_kind or number != self._queue[0].number:
            raise ManifestMismatch(
                f"rank {self._rank} is at another operation ({self._queue[0].number}) than rank 0 ({number})"
            )

    def _find(self, op: _Op, message: dict[str, Any]) -> None:
        """Where the bytes of an operation are."""
        assert op.views is not None
        sizes = [view.nbytes for view in op.views]
        match message:
            case {"as": int(at)} if at == self._position and at in self._places:
                place = self._places[at]
                if place.sizes != sizes:
                    raise self._other_sizes(sizes)
                self.counts.repeated += 1
            case {"sizes": str(digest), "pieces": list(pieces)}:
                if digest != _digest(sizes) or len(pieces) != 2 * len(sizes):
                    raise self._other_sizes(sizes)
                place = _Place(sizes, numbers=set(pieces[::2]))
                for number, offset, nbytes in zip(pieces[::2], pieces[1::2], sizes, strict=True):
                    block = self._opened.get(number)
                    if block is None or not 0 <= offset <= block.nbytes - nbytes:
                        raise ManifestMismatch("rank 0 names memory that is in none of its blocks")
                    place.sources.append(block[offset : offset + nbytes])
                if self._position < _POSITIONS:
                    self._places[self._position] = place
            case _:
                raise ManifestMismatch(f"rank 0 speaks of an earlier operation that rank {self._rank} does not know")
        op.place = place

    def _launch(self, memory: Memory) -> None:
        """Copy for all operations that are gathered."""
        if not self._gathered:
            return
        into: list[torch.Tensor] = []
        of: list[torch.Tensor] = []
        sizes: list[int] = []
        for op in self._gathered:
            assert op.views is not None
            assert op.place is not None
            into += (v if v.dtype is torch.uint8 and v.dim() == 1 else bytes_view(v) for v in op.views)
            of += op.place.sources
            sizes += op.place.sizes
        try:
            for first, last in _parts(sizes, memory.batch_nbytes, _FEW if self._launches == 0 else len(sizes)):
                self._require_sound()
                memory.copy(into[first:last], of[first:last])
                self.counts.copied += sum(sizes[first:last])
        finally:  # also what was launched before a failure is on its way
            mark = memory.mark()
            for op in self._gathered:
                op.mark, op.place = mark, None
            self._launches += 1
            self._flying += self._gathered
            self._gathered.clear()

    def _other_sizes(self, sizes: Sequence[int]) -> ManifestMismatch:
        return ManifestMismatch(
            f"rank {self._rank} is at a broadcast of {len(sizes)} tensors with {sum(sizes)} bytes in all, but rank 0 "
            "at one of others; another operation, order or size"
        )

    def _drop(self, memory: Memory, numbers: set[int]) -> None:
        self._places = {at: place for at, place in self._places.items() if place.numbers.isdisjoint(numbers)}
        memory.close([self._opened.pop(number) for number in numbers & self._opened.keys()])

    # --- end ---------------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return bool(self._queue or self._gathered or self._flying)

    def _sever(self) -> None:
        with self._state:
            peers = list(self._peers.values())
        for peer in peers:
            peer.link.sever()
        if self._failed.is_set():
            self._close_soon()

    @property
    def _sender_left(self) -> bool:
        return self._lifeline is not None and self._lifeline.departed == 0

    def _left(self, rank: int) -> None:
        if rank == 0:  # which does not leave before all have read what it has sent
            self._close_soon()

    def _close_soon(self) -> None:
        """The sender's memory, also a dead one's, is free only when all have closed it. Whoever calls does not wait,
        since the device may be stuck."""
        if self._peers or self._opened:
            threading.Thread(target=self._clean, args=(0.0,), name=f"twinkle-close-{self._rank}", daemon=True).start()

    def _release(self) -> None:
        self._sever()
        self._clean(_EXIT_S)

    def _clean(self, wait_s: float) -> None:
        """Give back what is held, unless a thread that was left behind is using it; then that one will."""
        if not self._using.acquire(timeout=wait_s):
            return
        try:
            with self._state:
                peers, self._peers = list(self._peers.values()), {}
            for peer in peers:
                peer.link.close()
            if self._memory is not None and self._opened:
                self._drop(self._memory, set(self._opened))
            self._places.clear()
            self._blocks.clear()
            self._at.clear()
            self._queue.clear()
            self._gathered.clear()
            self._flying.clear()
            self._inbox.clear()
            self._slots = (_Slot(), _Slot())
            self._memory = None
        finally:
            self._using.release()


def _parts(sizes: Sequence[int], limit: int, few: int) -> Iterator[tuple[int, int]]:
    """Ranges of at least one and otherwise at most ``limit`` bytes, the first of them of at most ``few`` pieces."""
    first = used = 0
    for at, nbytes in enumerate(sizes):
        if used and (used + nbytes > limit or at == few):
            yield first, at
            first, used = at, 0
        used += nbytes
    if used:
        yield first, len(sizes)


def _digest(sizes: Sequence[int]) -> str:
    return hashlib.blake2b(array("Q", sizes).tobytes(), digest_size=8).hexdigest()
