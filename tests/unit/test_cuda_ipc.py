"""The CUDA side of groups on one device, against a double of CUDA's driver: no GPU is needed, and none was tried."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from twinkle_ray.backends import cuda_memory, ipc
from twinkle_ray.backends.cuda_memory import CudaMemory
from twinkle_ray.backends.ipc import IpcGroup, _Peer
from twinkle_ray.backends.link import Link
from twinkle_ray.backends.memory import memory_of
from twinkle_ray.errors import BackendUnavailable, SyncError
from twinkle_ray.types import Deadline

CPU = torch.device("cpu")


class Driver:
    """Two processes' view of one device. Addresses are those of host memory."""

    def __init__(self) -> None:
        self.allocations: dict[int, tuple[Any, int, int, bool]] = {}  # base: memory, size, id, legacy
        self.ids = 0
        self.handles: list[int] = []
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.asked = 0

    def put(self, memory: Any, base: int, size: int, legacy: bool = True) -> None:
        """What an allocator does."""
        self.ids += 1
        self.allocations[base] = memory, size, self.ids, legacy

    def _at(self, address: int) -> tuple[int, tuple[Any, int, int, bool]] | None:
        return next((pair for pair in self.allocations.items() if pair[0] <= address < pair[0] + pair[1][1]), None)

    def address_range(self, address: int) -> tuple[int, int]:
        found = self._at(address)
        assert found is not None
        return found[0], found[1][1]

    def buffer_id(self, address: int) -> int | None:
        self.asked += 1
        found = self._at(address)
        return None if found is None else found[1][2]

    def exportable(self, address: int) -> bool:
        found = self._at(address)
        return found is not None and found[1][3]

    def handle(self, base: int) -> bytes:
        assert self.allocations[base][3]
        self.handles.append(base)
        return base.to_bytes(64, "big")

    def open(self, handle: bytes) -> int:
        base = int.from_bytes(handle, "big")
        assert base in self.allocations
        if self.opened.count(base) > self.closed.count(base):
            raise SyncError("cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_ALREADY_MAPPED", phase="transfer")
        self.opened.append(base)
        return base

    def close(self, address: int) -> None:
        self.closed.append(address)

    def allocate(self, nbytes: int) -> int:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.put(memory, memory.data_ptr(), nbytes)
        return memory.data_ptr()

    def free(self, address: int) -> None:
        del self.allocations[address]


class Runtime:
    """torch's side: what is copied is there only when a mark behind it has passed, as on a stream."""

    def __init__(self, polls: int = 3) -> None:
        self.polls = polls
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.launches: list[int] = []
        self.joins = self.drains = 0
        self.ends, self.broken = True, False

    def tensor(self, address: int, nbytes: int, free: Callable[[], None] | None) -> torch.Tensor:
        made = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        if free is not None:
            import weakref

            weakref.finalize(made.untyped_storage(), free)
        return made

    def copy(self, into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        self.launches.append(len(into))
        self.waiting += zip(into, of, strict=True)

    def mark(self) -> list[Any]:
        return [self.polls, len(self.waiting)]

    def passed(self, mark: list[Any]) -> bool:
        mark[0] -= 1
        if mark[0] > 0:
            return False
        for target, source in self.waiting:
            target.copy_(source)
        self.waiting.clear()
        return True

    def join(self) -> None:
        self.joins += 1

    def drain(self, seconds: float) -> bool:
        self.drains += 1
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.ends


class Pair:
    """A sender and a receiver, in one process."""

    def __init__(self) -> None:
        self.driver = Driver()
        ends = socket.socketpair()
        self.groups = [IpcGroup(2, rank, "pair") for rank in range(2)]
        self.runtimes = [Runtime(), Runtime()]
        for rank, group in enumerate(self.groups):
            group._connected = True
            group._memory = CudaMemory(CPU, self.driver, self.runtimes[rank])
            group._adopt({1 - rank: _Peer(Link(ends[rank]))})

    def sync(self, *chunks: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What the receiver gets."""
        got = [[torch.zeros_like(t) for t in chunk] for chunk in chunks]

        def run(group: Any, mine: Sequence[list[torch.Tensor]]) -> None:
            group.rally()
            for chunk in mine:
                group.broadcast_many(chunk)
            group.synchronize(Deadline.after(10))

        thread = threading.Thread(target=run, args=(self.groups[1], got))
        thread.start()
        run(self.groups[0], chunks)
        thread.join(10)
        return got

    def segment(self, nbytes: int, legacy: bool = True) -> torch.Tensor:
        made = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self.driver.put(made, made.data_ptr(), nbytes, legacy)
        return made


@pytest.fixture
def pair() -> Any:
    made = Pair()
    yield made
    for group in made.groups:
        group.destroy_group()
    assert sorted(made.driver.opened) == sorted(made.driver.closed)


def equal(got: list[list[torch.Tensor]], *chunks: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(got, chunks, strict=True) for a, b in zip(x, y, strict=True))


def test_each_allocation_is_opened_once_whatever_lies_in_it(pair: Pair) -> None:
    one, two = pair.segment(4096), pair.segment(1024)
    chunks = [one[:100], two[512:], one[1000:2000].view(torch.int32)], [one[4000:], two[:1]]
    for _ in range(3):
        one.add_(1)
        assert equal(pair.sync(*chunks), *chunks)
    assert sorted(pair.driver.handles) == sorted(pair.driver.opened) == sorted([one.data_ptr(), two.data_ptr()])
    assert pair.groups[1].counts.repeated == 4
    assert pair.groups[0].counts.staged == 0
    assert pair.runtimes[1].joins == 3  # what follows on the receiver's stream waits for the copies


@pytest.mark.parametrize("polls", [1, 3])
def test_an_address_that_comes_again_is_another_allocation(pair: Pair, polls: int) -> None:
    for runtime in pair.runtimes:  # once the sender's device idles, so that the first chunk is named at once
        runtime.polls = polls
    segment = pair.segment(4096)
    chunk = [segment[64:128]]
    pair.sync(chunk)
    address = segment.data_ptr()
    del pair.driver.allocations[address]  # emptied cache, sleep, offload ...
    pair.driver.put(segment, address, 4096)  # ... and the same address again
    assert equal(pair.sync(chunk), chunk)
    assert pair.driver.opened == [address] * 2
    assert pair.driver.closed == [address]
    assert pair.runtimes[1].drains == 1  # nothing may still read from what is closed
    assert pair.groups[0].counts.repeated == 0
    assert equal(pair.sync(chunk), chunk)
    assert pair.groups[0].counts.repeated == 1


def thousands(pair: Pair) -> list[list[torch.Tensor]]:
    """Chunks of a model whose tensors lie in more blocks than are looked at ahead of one sync."""
    return [[pair.segment(16) for _ in range(60)] for _ in range(10)]


def test_few_blocks_are_looked_at_before_anything_is_on_its_way(pair: Pair) -> None:
    chunks = thousands(pair)
    pair.sync(*chunks)
    sender, driver = pair.groups[0], pair.driver
    before = driver.asked
    assert equal(pair.sync(*chunks), *chunks)
    assert 600 <= driver.asked - before <= 600 + ipc._LOOKED_AT  # each one as it is sent
    before = driver.asked
    sender.rally()
    assert not sender._queue  # the receiver may begin
    assert driver.asked - before <= ipc._LOOKED_AT
    pair.groups[1].rally()
    for group in pair.groups[1], sender:
        group.synchronize(Deadline.after(10))


@pytest.mark.parametrize("at", [0, 5, 9])
def test_a_block_that_came_again_amid_a_stream_is_closed_when_the_copies_before_it_have_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    chunks = thousands(pair)
    pair.sync(*chunks)
    pair.sync(*chunks)  # now others than the first ones would be looked at first
    driver, again = pair.driver, chunks[at][30]
    address = again.data_ptr()
    del driver.allocations[address]
    driver.put(again, address, 16)

    def close(base: int) -> None:
        assert not pair.runtimes[1].waiting
        driver.closed.append(base)

    monkeypatch.setattr(driver, "close", close)
    for _ in range(2):
        again.add_(1)
        assert equal(pair.sync(*chunks), *chunks)
    assert driver.closed == [address]
    assert driver.opened.count(address) == 2


@pytest.mark.parametrize("known", [False, True])
def test_an_address_that_comes_again_and_again_within_one_sync(pair: Pair, known: bool) -> None:
    """A tensor is made for each chunk, and the allocator gives its memory back and gets it again in between."""
    fixed, made = pair.segment(64), pair.segment(64)
    address = made.data_ptr()
    before = [[fixed], [made]] if known else [[fixed]]
    assert equal(pair.sync(*before), *before)
    sender, receiver = pair.groups
    got = [torch.zeros(64, dtype=torch.uint8) for _ in range(3)]
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            receiver.rally()
            for part in got:
                receiver.broadcast_many([part])
            receiver.synchronize(Deadline.after(10))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    sender.rally()
    for number in range(3):
        if number:
            del pair.driver.allocations[address]
            pair.driver.put(made, address, 64)
        made.fill_(number + 1)
        sender.broadcast_many([made])
        sender.settle(Deadline.after(10), 0)
    sender.synchronize(Deadline.after(10))
    thread.join(10)
    assert not errors
    assert [part.unique().tolist() for part in got] == [[1], [2], [3]]


def test_a_sender_that_waits_for_a_slot_lets_the_driver_be(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = pair.segment(64 * 50, legacy=False)
    chunks = [list(segment.split(64)) for _ in range(3)]
    asked = 0
    exportable = pair.driver.exportable

    def counted(address: int) -> bool:
        nonlocal asked
        asked += 1
        return exportable(address)

    monkeypatch.setattr(pair.driver, "exportable", counted)
    sender, receiver = pair.groups
    sender.rally()
    for chunk in chunks:  # two slots, and nobody has come yet
        sender.broadcast_many(chunk)
    thread = threading.Thread(target=lambda: sender.synchronize(Deadline.after(10)))
    thread.start()
    time.sleep(0.3)
    assert asked < 20 * sum(map(len, chunks))
    got = [[torch.zeros_like(part) for part in chunk] for chunk in chunks]
    receiver.rally()
    for mine in got:
        receiver.broadcast_many(mine)
    receiver.synchronize(Deadline.after(10))
    thread.join(10)
    assert equal(got, *chunks)


def test_a_block_that_is_used_no_more_is_let_go_within_a_few_syncs(pair: Pair) -> None:
    chunks = thousands(pair)
    pair.sync(*chunks)
    gone = chunks[9][59].data_ptr()
    del pair.driver.allocations[gone]
    for _ in range(-(-600 // ipc._LOOKED_AT)):
        assert equal(pair.sync(chunks[0]), chunks[0])
    assert pair.driver.closed == [gone]


def test_expandable_segments_go_through_two_slots_of_our_own(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    segment = pair.segment(4096, legacy=False)
    chunks = [[segment[n : n + 512]] for n in range(0, 4096, 512)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert equal(pair.sync(*chunks), *chunks)
    assert caplog.text.count("expandable_segments:False avoids that") == 1
    assert len(pair.driver.opened) == 2
    assert pair.groups[0].counts.staged == 2 * 4096
    assert len(pair.driver.allocations) == 3
    pair.groups[1].destroy_group()
    pair.groups[0].destroy_group()
    assert len(pair.driver.allocations) == 1


def test_nothing_is_told_before_the_device_has_done_it(pair: Pair) -> None:
    segment = pair.segment(256)
    sender, receiver = pair.groups
    sender.rally()
    receiver.rally()
    pair.runtimes[0].polls = pair.runtimes[1].polls = 1 << 30
    sender.broadcast_many([segment])
    mine = torch.zeros(256, dtype=torch.uint8)
    receiver.broadcast_many([mine])
    for _ in range(5):
        sender._advance(waiting=True)
        receiver._advance(waiting=True)
    assert receiver.counts.opened == 0  # the sender's stream has not made the bytes yet
    sender._queue[0].mark[0] = 1
    for _ in range(5):
        sender._advance(waiting=True)
        receiver._advance(waiting=True)
    assert receiver.counts.opened == 1
    assert [op.number for op in sender._flying] == [2]  # launched at the receiver, but not copied
    receiver._flying[-1].mark[0] = 1
    for _ in range(5):
        receiver._advance(waiting=True)
        sender._advance(waiting=True)
    assert not sender._flying
    assert torch.equal(mine, segment)


def ahead(pair: Pair, *chunks: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What a receiver gets that comes when all is published."""
    sender, receiver = pair.groups
    got = [[torch.zeros_like(t) for t in chunk] for chunk in chunks]
    pair.runtimes[1].launches.clear()
    sender.rally()
    for chunk in chunks:
        sender.broadcast_many(chunk)
    while sender._queue:  # until its device has made them
        sender._advance(waiting=False)
    receiver.rally()
    for mine in got:
        receiver.broadcast_many(mine)
    receiver.synchronize(Deadline.after(10))
    sender.synchronize(Deadline.after(10))
    return got


def test_chunks_that_are_there_already_are_launched_together_but_the_first_ones(pair: Pair) -> None:
    segment = pair.segment(13 * 20 * 8)
    chunks = [list(part.split(8)) for part in segment.split(20 * 8)]
    for _ in range(2):
        segment.add_(1)
        assert equal(ahead(pair, *chunks), *chunks)
        # An idle device begins with 16 copies of the first chunk; then one chunk, two, four at most, and the rest.
        assert pair.runtimes[1].launches == [16, 4, 20, 40, 80, 80, 20]
    assert pair.groups[1].counts.copied == 2 * segment.nbytes
    base, adapter = chunks[:5], chunks[5:8]
    sender, receiver = pair.groups
    got = [[torch.zeros_like(t) for t in chunk] for chunk in base + adapter]

    def run(group: Any, mine: Sequence[list[torch.Tensor]]) -> None:
        for part in mine[:5], mine[5:]:  # two parts of one operation, the second of which finds the first one waiting
            group.rally()
            for chunk in part:
                group.broadcast_many(chunk)
        group.synchronize(Deadline.after(10))

    thread = threading.Thread(target=run, args=(sender, base + adapter))
    thread.start()
    run(receiver, got)
    thread.join(10)
    assert equal(got, *base, *adapter)


def test_a_slot_that_grows_amid_a_stream_loses_nothing(pair: Pair) -> None:
    segment = pair.segment(4096, legacy=False)
    chunks = [[segment[:nbytes]] for nbytes in (64, 128, 256, 512, 1024, 2048, 4096, 64)]
    for _ in range(2):
        segment.add_(1)
        assert equal(pair.sync(*chunks), *chunks)
    assert len(pair.driver.opened) > 2  # larger ones were made
    assert len(pair.groups[1]._opened) == 2


def test_a_copy_that_was_only_gathered_is_not_made_when_the_sync_has_failed(pair: Pair) -> None:
    segment = pair.segment(4096)
    chunks = [[part] for part in segment.split(512)]
    assert equal(pair.sync(*chunks), *chunks)
    sender, receiver = pair.groups
    sender.rally()
    for chunk in chunks:
        sender.broadcast_many(chunk)
    while sender._queue:
        sender._advance(waiting=False)
    mine = [torch.zeros(512, dtype=torch.uint8) for _ in chunks]
    receiver.rally()
    for part in mine[:3]:
        receiver.broadcast_many([part])
    assert len(receiver._gathered) == 1
    launched = len(pair.runtimes[1].launches)
    with pytest.raises(SyncError, match="in an operation that has not ended"):
        receiver.let_go()
    assert pair.driver.closed == []
    sender.abort("for once")
    receiver.abort("for once")
    with pytest.raises(SyncError):
        receiver.synchronize(Deadline.after(10))
    assert len(pair.runtimes[1].launches) == launched
    assert not mine[2].any()


def test_whoever_is_told_of_a_failure_amid_a_launch_finds_no_copy_under_way(pair: Pair) -> None:
    segment = pair.segment(4096)
    runtime = pair.runtimes[1]
    real = runtime.copy

    def copy(into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        if runtime.launches:
            raise RuntimeError("CUDA error: out of memory")
        real(into, of)

    runtime.copy = copy  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="out of memory"):
        ahead(pair, list(segment.split(64)))  # more than are launched first
    assert runtime.launches == [16]
    assert runtime.waiting == []


class SlowDevice(Runtime):
    """A mark passes when marks were asked for so often since it was made."""

    lag = 200
    asked = 0

    def mark(self) -> list[Any]:
        return [self.asked]

    def passed(self, mark: list[Any]) -> bool:
        self.asked += 1
        return self.asked >= mark[0] + self.lag


def test_chunks_do_not_wait_for_the_device_one_after_the_other(pair: Pair) -> None:
    segment = pair.segment(1024)
    chunks = [[segment[n : n + 64]] for n in range(0, 1024, 64)]
    device = pair.runtimes[0] = pair.groups[0]._memory._runtime = SlowDevice()
    assert equal(pair.sync(*chunks), *chunks)
    assert device.asked <= device.lag + 4 * len(chunks)


class Library:
    """CUDA's, as ctypes gives it, with the call that copies many pieces at once in one of its two forms, or without."""

    def __init__(self, form: str) -> None:
        self.calls: list[int] = []
        self.code = 0
        setattr(self, form, self._copy)

    @staticmethod
    def cuPointerGetAttribute(*args: Any) -> int:
        return 0

    @staticmethod
    def cuCtxGetCurrent(context: Any) -> int:
        return 0

    @staticmethod
    def cuGetErrorName(code: Any, text: Any) -> int:
        return 0

    def _copy(self, into: Any, of: Any, sizes: Any, count: Any, how: Any, first: Any, hows: Any, *rest: Any) -> int:
        assert (first._obj.value, hows.value, how._obj.order) == (0, 1, 1)
        self.calls.append(rest[-1].value)
        assert len(rest) == (1 if hasattr(self, "cuMemcpyBatchAsync_v2") else 2)
        for n in range(count.value):
            ctypes.memmove(into[n], of[n], sizes[n])
        return self.code


def _driver(monkeypatch: pytest.MonkeyPatch, form: str) -> tuple[Any, Library]:
    library = Library(form)
    monkeypatch.setattr(cuda_memory.ctypes, "CDLL", lambda name: library)
    return cuda_memory.CudaDriver(), library


@pytest.mark.parametrize("form", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"])
def test_many_pieces_are_copied_by_one_call(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    driver, library = _driver(monkeypatch, form)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    spans = [(0, 10), (17, 1), (40, 60)]
    into, of = [[t.data_ptr() + at for at, _ in spans] for t in (target, source)]
    assert driver.copy_many(into, of, [n for _, n in spans], 77)
    assert library.calls == [77]
    for at, n in spans:
        assert torch.equal(target[at : at + n], source[at : at + n])
    assert target.count_nonzero() == sum(n for _, n in spans) - 1
    assert driver.copy_many([], [], [], 77)
    assert library.calls == [77]
    library.code = 700
    with pytest.raises(SyncError, match=f"{form} failed with 700"):
        driver.copy_many(into, of, [n for _, n in spans], 77)


def test_an_older_driver_says_that_it_has_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = _driver(monkeypatch, "cuSomethingElse")
    assert not driver.copy_many([1], [2], [3], 4)
    assert library.calls == []


def test_more_pieces_than_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = _driver(monkeypatch, "cuMemcpyBatchAsync_v2")
    source, target = torch.arange(600, dtype=torch.int16), torch.zeros(600, dtype=torch.int16)
    into, of = [[t.data_ptr() + 2 * n for n in range(600)] for t in (target, source)]
    assert driver.copy_many(into, of, [2] * 600, 5)
    assert torch.equal(source, target)
    assert library.calls == [5] * 3


class Stream:
    """Of a device that does nothing before it is told to."""

    def __init__(self, *_: Any) -> None:
        self.cuda_stream = id(self)
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        upto = len(other.work)
        self.work.append(lambda: other.run(upto))

    def run(self, upto: int | None = None) -> None:
        while self.done < (len(self.work) if upto is None else upto):
            self.done += 1
            self.work[self.done - 1]()


class Event:
    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, len(stream.work)

    def query(self) -> bool:
        return self.stream.done >= self.at


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime over such streams, the current one of which is ``runtime.current``."""
    current, made = Stream(), []

    class Cuda:
        def __getattr__(self, name: str) -> Any:
            return {"Stream": stream, "Event": Event, "current_stream": lambda device: current}[name]

    def stream(device: Any) -> Stream:
        made.append(Stream())
        return made[-1]

    class Launching:
        """A driver whose copies are done when their stream comes to them."""

        def copy_many(self, into: Any, of: Any, sizes: Any, number: int) -> bool:
            mine = next(one for one in made if one.cuda_stream == number)

            def copy() -> None:
                for target, source, nbytes in zip(into, of, sizes, strict=True):
                    ctypes.memmove(target, source, nbytes)

            mine.work.append(copy)
            return True

    monkeypatch.setattr(cuda_memory.torch, "cuda", Cuda())
    found: Any = cuda_memory._Runtime(CPU, Launching())
    found.current = current
    return found


def test_a_mark_stands_for_its_own_copies_on_whichever_stream(runtime: Any) -> None:
    sources = [torch.full((8,), n, dtype=torch.uint8) for n in range(1, 5)]
    targets = [torch.zeros(8, dtype=torch.uint8) for _ in sources]
    marks = []
    for target, source in zip(targets, sources, strict=True):
        runtime.copy([target], [source])
        marks.append(runtime.mark())
    assert [len(stream.work) for stream in runtime._streams] == [4, 4]
    assert not any(map(runtime.passed, marks))
    runtime._streams[1].run()
    assert [runtime.passed(mark) for mark in marks] == [False, True, False, True]
    assert [bool(target[0]) for target in targets] == [False, True, False, True]
    assert not runtime.drain(0.01)
    runtime._streams[0].run()
    assert all(map(runtime.passed, marks))
    assert all(map(torch.equal, targets, sources))
    assert runtime.drain(0.01)


def test_copies_wait_for_what_made_their_bytes_and_what_follows_waits_for_them(runtime: Any) -> None:
    source, target, read = (torch.zeros(4, dtype=torch.uint8) for _ in range(3))
    runtime.current.work.append(lambda: source.fill_(7))
    runtime.copy([target], [source])
    runtime.mark()
    runtime.join()
    runtime.current.work.append(lambda: read.copy_(target))
    for stream in runtime._streams:
        stream.run()
    assert target.tolist() == [7] * 4
    runtime.current.run()
    assert read.tolist() == [7] * 4
    runtime.current.work.append(lambda: source.fill_(9))
    mark = runtime.mark()  # with no copy: of what is on the caller's own stream
    assert not runtime.passed(mark)
    runtime.current.run()
    assert runtime.passed(mark)


def test_an_operation_joins_every_stream_at_its_end(runtime: Any) -> None:
    source, target, read, first = torch.ones(4), torch.zeros(4), torch.zeros(4), torch.zeros(4)
    runtime.copy([first], [source])
    runtime.copy([target], [source])  # on the second one
    runtime.join()
    runtime.current.work.append(lambda: read.copy_(target))
    runtime.current.run()
    assert torch.equal(read, source)


def test_what_cannot_be_closed_stays_open_and_nothing_is_raised(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    segment, other = pair.segment(256), pair.segment(256)
    pair.sync([segment[:64], other[:64]])
    close, closed = pair.driver.close, []

    def failing(address: int) -> None:
        closed.append(address)
        if len(closed) == 1:
            raise SyncError("cuIpcCloseMemHandle failed with CUDA_ERROR_X", phase="transfer")
        close(address)

    pair.driver.close = failing  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        pair.groups[1].let_go()
    assert sorted(closed) == sorted([segment.data_ptr(), other.data_ptr()])
    assert caplog.text.count("cannot be closed: cuIpcCloseMemHandle failed with CUDA_ERROR_X") == 1
    pair.driver.closed.append(closed[0])  # for the fixture


@pytest.mark.parametrize(("ends", "why"), [(False, "copies out of it do not end"), (True, "CUDA error: an illegal")])
def test_memory_that_is_being_copied_is_not_closed(
    pair: Pair, caplog: pytest.LogCaptureFixture, ends: bool, why: str
) -> None:
    segment = pair.segment(256)
    pair.sync([segment[:64]])
    pair.runtimes[1].ends, pair.runtimes[1].broken = ends, ends  # a device that is stuck, or has failed
    with caplog.at_level(logging.WARNING):
        pair.groups[1].let_go()
    assert pair.driver.closed == []
    assert f"stays open here: {why}" in caplog.text
    pair.driver.closed.append(segment.data_ptr())  # for the fixture


def test_a_tensor_over_foreign_memory_that_torch_has_copied_is_refused(runtime: Any) -> None:
    memory = (ctypes.c_uint8 * 64)()
    monkey = cuda_memory.torch.as_tensor
    try:
        cuda_memory.torch.as_tensor = lambda thing, device: torch.zeros(64, dtype=torch.uint8)
        with pytest.raises(BackendUnavailable, match="copies another GPU's memory instead of reading it; use "):
            runtime.tensor(ctypes.addressof(memory), 64, None)
    finally:
        cuda_memory.torch.as_tensor = monkey


def test_devices_without_a_way_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match="NPU IPC exists in torch_npu, but was never run"):
        memory_of(torch.device("meta"))

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_memory.ctypes, "CDLL", missing)
    with pytest.raises(BackendUnavailable, match=r"libcuda\.so\.1 does not load"):
        cuda_memory.CudaDriver()
