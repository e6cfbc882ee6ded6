"""Groups on CPU: torch's gloo, on a store of our own, never torch.distributed's default group.

All collectives of a group run one after another in a thread of its own, so that any wait for them can be bounded; a
caller that gives up leaves the thread behind. The buffers of an operation belong to that thread until the operation
has ended, because an abandoned gloo receive may still write into them.

Gloo has no abort of its own that works (``ProcessGroup.abort`` does nothing). What works is to shut down the connected
sockets between this group's ranks: operations that wait for their turn raise within milliseconds. They are found among
the process's descriptors by gloo's listening port, which each rank publishes in the store. The listener itself is never
touched: gloo ends the process if it fails. Needs Linux (``/proc/self/fd``).

One operation is not released by that: the send that gloo is just writing or the receive that it is just reading. A wait
for it would last for ever (torch 2.13). So of a batch of tensors none is waited for, but a byte that follows them, and
at the sender a byte by which the receiver answers. Gloo's own collectives, which only Ray's API uses here, have no such
remedy; a failure in the middle of one is told after a second, and its thread is lost.

A gloo broadcast or receive of unequal sizes terminates the receiver's process, without an exception. Therefore each
operation is preceded by 24 bytes that say what comes, and ranks that disagree raise ManifestMismatch.

Broadcasts are sends and receives along a tree, not gloo's broadcasts: those make several threads wake up one after the
other for each tensor, 0.2-0.3 ms, while gloo's own thread goes through sends and receives that were posted ahead
without waking any. Measured on 2 cores, 539 MB in 339 tensors in proportion to one tensor of as many bytes: to one
receiver 1.02-1.16 (with gloo's broadcasts 1.5-1.7), to three 0.96 (1.59); several of gloo's broadcasts at a time,
with 2 to 8 threads, were no better than one. Views are not cut into pieces.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from traceback import clear_frames
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from ray.util.collective import types as ray_types
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.backends.operands import Operand, per_rank, single
from twinkle_ray.backends.rendezvous import address_towards
from twinkle_ray.digest import bytes_view
from twinkle_ray.errors import ConfigError, ManifestMismatch, SyncError, SyncTimeout, TwinkleRayError
from twinkle_ray.types import Deadline, Rendezvous

logger = logging.getLogger(__name__)

SMALL_VIEW = 64 << 10
"""Bytes under which a view is sent together with other small ones. Limits of 16 to 256 KiB were equally fast."""
SCRATCH = 16 << 20
"""Bytes of one scratch buffer at most."""
BATCH = 256
"""Operations of a broadcast that are started together. Two such batches at most are on their way at a time."""
BATCH_BYTES = 256 << 20
"""Bytes from which a batch is complete. The end of a batch costs a few wake-ups: of 64 MiB each, 540 MB took 1.11-1.18
times as long as in one buffer, of 256 MiB 1.02-1.07."""
FORWARDED_BYTES = 64 << 20
"""The same if ranks hand on what they receive, for which they wait until they have the batch."""

_EXIT_S = 1.0
"""How long a failure is kept from the caller while the worker is not out of its operation; for broadcasts, which write
to what the caller may use again, as long as the deadline, unless gloo has lost the operation (:data:`_LOST_S`)."""
_LOST_S = 1.5
"""Seconds after which a worker is left behind in the wait for one of gloo's operations, once all connections are shut.
Gloo may never end a send that it finds broken in the very call that starts it: it fails all that is pending on that
connection, and only then counts this one in. Nothing can be read or written any more by then."""
_LAST_TAG = (1 << 31) - 4
_NEVER = timedelta(days=1)  # gloo's own time-out; ours is synchronize()'s deadline
_HEADER = struct.Struct("<QQ8s")
_REDUCIBLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)
_REDUCE_OPS: dict[ray_types.ReduceOp, Any] = {
    ray_types.ReduceOp.SUM: dist.ReduceOp.SUM,
    ray_types.ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ray_types.ReduceOp.MIN: dist.ReduceOp.MIN,
    ray_types.ReduceOp.MAX: dist.ReduceOp.MAX,
}

Address = tuple[str, int]


class GlooGroup(SyncGroup):
    """See :class:`~twinkle_ray.backends.base.SyncGroup`."""

    name: ClassVar[str] = "TWINKLE_GLOO"
    device_type: ClassVar[str] = "cpu"

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._pg: Any = None
        self._worker: _Worker | None = None
        self._pending: list[Future[None]] = []
        # Gloo's operations of a broadcast that are not known to have ended; the worker's own.
        self._receives: deque[Any] = deque()
        self._sends: deque[Any] = deque()
        self._acks: deque[Any] = deque()  # receives of what answers the sends
        self._byte_out = torch.zeros(1, dtype=torch.uint8)
        self._tag = 0  # of a broadcast's last part; its answer has the next. 0 and 1 belong to send and recv.
        self._in_gloo = False  # whether the worker waits for an operation of gloo's
        self._own_port = 0
        self._peers: frozenset[Address] = frozenset()

    @classmethod
    def missing(cls) -> str | None:
        if not (dist.is_available() and dist.is_gloo_available()):
            return "torch was built without gloo; install a torch wheel for Linux"
        if not os.path.isdir("/proc/self/fd"):
            return "an abort needs /proc/self/fd, which only Linux has"
        return None

    def _build(self, store: Store, rendezvous: Rendezvous, deadline: Deadline) -> None:
        host = address_towards(rendezvous.host)
        device, self._own_port = _open_device(host)
        store.set(f"gloo/{self._rank}", f"{host} {self._own_port}")
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=max(deadline.remaining(), 0.001))
        try:
            pg = ProcessGroupGloo(store, self._rank, self._world_size, options)
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            self._peers = frozenset(_address(store.get(f"gloo/{rank}").decode()) for rank in others)
        except RuntimeError as error:
            if deadline.expired:
                raise SyncTimeout(
                    f"not all ranks' gloo connected to rank {self._rank} within {deadline.seconds:.1f} s: "
                    f"{str(error).splitlines()[0]}",
                    phase="connect",
                ) from None
            raise self._broken(error) from error
        pg._set_default_timeout(_NEVER)
        self._pg = pg
        self._worker = _Worker(f"twinkle-gloo-{self._rank}-{self._group_name}")

    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        self._check_views(views)
        flat = [bytes_view(view) for view in views]
        self._launch(lambda: self._broadcast(flat, src))

    def rally(self) -> None:
        self._launch(self._barrier)

    def synchronize(self, deadline: Deadline) -> None:
        self.settle(deadline, 0)

    def settle(self, deadline: Deadline, leave: int) -> None:
        self._settle(deadline, leave, max(deadline.remaining(), _EXIT_S))

    def _settle(self, deadline: Deadline, leave: int, exit_s: float) -> None:
        count = max(0, len(self._pending) - leave)
        pending, self._pending = self._pending[:count], self._pending[count:]
        while wait(pending, timeout=min(0.05, deadline.remaining())).not_done:
            if not self._failed.is_set():
                if not deadline.expired:
                    continue
                who = f"rank {self._rank} of group {self._group_name}"
                message = f"{who} waited {deadline.seconds:.1f} s for a transfer"
                self._fail(SyncTimeout(message, phase="transfer"), tell=True)
            # Whoever is told of the failure may use these buffers again. The sockets are shut, so the worker is out
            # within milliseconds if it gets a core.
            left_at = time.monotonic() + exit_s
            lost_at = time.monotonic() + _LOST_S
            while wait(pending, timeout=0.05).not_done and time.monotonic() < left_at:
                if self._in_gloo and time.monotonic() > lost_at:
                    logger.warning("%s: gloo did not end an operation whose connections are shut", self._group_name)
                    break
            break
        while pending:  # and no name for one: the error would hold itself by the frame that it was raised in
            if pending[0].done():
                pending.pop(0).result()
            else:
                pending.pop(0)
        self._require_sound()

    # Ray's operations. They block until done, within the options' time-out or `op_timeout_s`.

    def broadcast(self, tensor: Any, broadcast_options: Any = ray_types.BroadcastOptions()) -> None:  # noqa: B008
        operand = single(tensor, self.device_type)
        src = broadcast_options.root_rank
        self._now(lambda: self._broadcast([operand.bytes], src), broadcast_options)
        if self._rank != src:
            operand.put_back()

    def allreduce(self, tensor: Any, allreduce_options: Any = ray_types.AllReduceOptions()) -> None:  # noqa: B008
        operand = _reducible(single(tensor, self.device_type))
        op = allreduce_options.reduceOp

        def work() -> None:
            self._agree(f"allreduce {op} {operand.tensor.dtype}", [operand.tensor.numel()])
            self._allreduce(operand.tensor, op)

        self._now(work, allreduce_options)
        operand.put_back()

    def reduce(self, tensor: Any, reduce_options: Any = ray_types.ReduceOptions()) -> None:  # noqa: B008
        operand = _reducible(single(tensor, self.device_type))
        root, op = reduce_options.root_rank, reduce_options.reduceOp
        # Gloo leaves partial sums in the tensors of the other ranks.
        tensor_in = operand.tensor if self._rank == root else operand.tensor.clone()

        def work() -> None:
            self._agree(f"reduce {root} {op} {operand.tensor.dtype}", [operand.tensor.numel()])
            options = dist.ReduceOptions()
            options.rootRank, options.reduceOp = root, _REDUCE_OPS[op]
            if tensor_in.numel():
                self._wait(self._pg.reduce, [tensor_in], options)

        self._now(work, reduce_options)
        if self._rank == root:
            operand.put_back()

    def allgather(
        self,
        tensor_list: Any,
        tensor: Any,
        allgather_options: Any = ray_types.AllGatherOptions(),  # noqa: B008
    ) -> None:
        operand = single(tensor, self.device_type)
        outputs = per_rank(tensor_list, operand, self._world_size)

        def work() -> None:
            self._agree("allgather", [operand.bytes.numel()])
            if operand.tensor.numel():
                self._wait(self._pg.allgather, [[output.bytes for output in outputs]], [operand.bytes])

        self._now(work, allgather_options)
        for output in outputs:
            output.put_back()

    def reducescatter(
        self,
        tensor: Any,
        tensor_list: Any,
        reducescatter_options: Any = ray_types.ReduceScatterOptions(),  # noqa: B008
    ) -> None:
        operand = _reducible(single(tensor, self.device_type))
        inputs = per_rank(tensor_list, operand, self._world_size)
        op = reducescatter_options.reduceOp
        summed = torch.cat([item.tensor.view(-1) for item in inputs])

        def work() -> None:
            self._agree(f"reducescatter {op} {operand.tensor.dtype}", [operand.tensor.numel()])
            self._allreduce(summed, op)

        self._now(work, reducescatter_options)
        operand.tensor.view(-1).copy_(summed.view(self._world_size, -1)[self._rank])
        operand.put_back()

    def barrier(self, barrier_options: Any = ray_types.BarrierOptions()) -> None:  # noqa: B008
        self._now(self._barrier, barrier_options)

    def send(self, tensor: Any, send_options: Any) -> None:
        data = single(tensor, self.device_type).first(send_options.n_elements)
        header = torch.tensor([data.numel()], dtype=torch.int64).view(torch.uint8)
        parcels = [_Parcel(part) for part in (header, data, self._byte_out) if part.numel()]

        def work() -> None:
            self._ask([send_options.dst_rank], 1)
            self._send_on(parcels, [send_options.dst_rank])
            self._land(self._acks, 1)
            self._sends.clear()

        self._now(work, send_options)

    def recv(self, tensor: Any, recv_options: Any) -> None:
        operand = single(tensor, self.device_type)
        data = operand.first(recv_options.n_elements)
        header = torch.zeros(1, dtype=torch.int64)

        def work() -> None:
            src = recv_options.src_rank
            self._wait(self._pg.recv, [header], src, 0)
            if int(header) != data.numel():
                raise ManifestMismatch(
                    f"rank {src} sends {int(header)} bytes, but rank {self._rank} expects {data.numel()}"
                )
            parts = [part for part in (data, torch.empty(1, dtype=torch.uint8)) if part.numel()]
            self._receives += [self._start(self._pg.recv, [part], src, 0) for part in parts]
            self._land(self._receives, len(parts))
            self._wait(self._pg.send, [self._byte_out], src, 1)

        self._now(work, recv_options)
        operand.put_back()

    def _now(self, work: Callable[[], None], options: Any) -> None:
        self._launch(work)
        self._settle(self._op_deadline(options), 0, _EXIT_S)

    def _launch(self, work: Callable[[], None]) -> None:
        self._check()

        def guarded() -> None:
            try:
                self._require_sound()
                with torch.inference_mode():  # thread-local; the only mode that may write to every kind of tensor
                    work()
            except TwinkleRayError as error:
                clear_frames(error.__traceback__)  # which have gloo's own objects, and so its threads and sockets
                raise self._fail(error, tell=True) from None
            except Exception as error:
                clear_frames(error.__traceback__)
                raise self._fail_locally(error) from error
            finally:
                self._abandon()  # after a failure the sockets are shut by now

        assert self._worker is not None
        self._pending.append(self._worker.submit(guarded))

    def _wait(self, launch: Callable[..., Any], *args: Any) -> None:
        """Run one gloo operation in the worker to its end."""
        self._end(self._start(launch, *args))

    def _start(self, launch: Callable[..., Any], *args: Any) -> Any:
        self._require_sound()
        try:
            return launch(*args)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _end(self, work: Any) -> None:
        self._in_gloo = True
        try:
            work.wait(_NEVER)
        except RuntimeError as error:
            raise self._broken(error) from error
        finally:
            self._in_gloo = False
        self._require_sound()  # or what follows might write to what is used by others now

    def _land(self, receives: deque[Any], count: int) -> None:
        """Wait for the last of the oldest ``count``; the others have come before it."""
        self._end(receives[count - 1])  # once only: gloo counts it off, and a second wait would never end
        for _ in range(count):
            receives.popleft()

    def _abandon(self) -> None:
        """Drop what has not ended. Gloo knows an operation's buffer through the operation only, whose end waits for a
        read or write that is just being made; so nothing uses the buffers afterwards."""
        for works in (self._receives, self._sends, self._acks):
            works.clear()

    def _agree(self, what: str, sizes: Sequence[int], src: int = 0, later: deque[list[_Parcel]] | None = None) -> None:
        """Raise ManifestMismatch on each rank that is about to do something else than rank ``src``, which waits for
        the others unless it may do that ``later``."""
        digest = hashlib.blake2b(f"{what} {src} ".encode() + array("Q", sizes).tobytes(), digest_size=8).digest()
        mine = _HEADER.pack(len(sizes), sum(sizes), digest)
        header = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        parcels = [_Parcel(header)]
        self._post(parcels, src)
        if self._rank == src and later is not None:
            later.append(parcels)
            return
        self._finish(parcels, src)
        theirs = header.numpy().tobytes()
        if theirs != mine:
            count, total, _ = _HEADER.unpack(theirs)
            raise ManifestMismatch(
                f"rank {self._rank} is at {what!r} of {len(sizes)} tensors with {sum(sizes)} in all, "
                f"but rank {src} is at one of {count} with {total}; another operation, order or size"
            )

    def _broadcast(self, views: Sequence[torch.Tensor], src: int) -> None:
        ahead: deque[list[_Parcel]] = deque()
        self._agree("broadcast", [view.numel() for view in views], src, ahead)
        limit = BATCH_BYTES if self._world_size <= 3 else FORWARDED_BYTES
        for runs in _batches(_runs(views), limit):
            batch = [_parcel(run, filled=self._rank == src) for run in runs]
            ahead.append([*batch, _Parcel(torch.zeros(1, dtype=torch.uint8))])
            self._post(ahead[-1], src)
            if len(ahead) > 1:
                self._finish(ahead.popleft(), src)
        while ahead:
            self._finish(ahead.popleft(), src)

    def _post(self, parcels: Sequence[_Parcel], src: int) -> None:
        """Start a batch as far as it can be started at once: the sends of rank ``src``, the receives of others."""
        parent, children = _place(self._rank, src, self._world_size)
        for parcel in parcels:
            parcel.tag = self._tag = self._tag % _LAST_TAG + 2
        if parent is None:
            self._ask(children, self._tag + 1)
            self._send_on(parcels, children)
        for parcel in parcels if parent is not None else ():
            self._receives.append(self._start(self._pg.recv, [parcel.tensor], parent, parcel.tag))

    def _finish(self, parcels: Sequence[_Parcel], src: int) -> None:
        """Wait for a batch, hand it on, and put it where it belongs."""
        parent, children = _place(self._rank, src, self._world_size)
        answer = parcels[-1].tag + 1
        if parent is not None:
            self._land(self._receives, len(parcels))
            self._ask(children, answer)
            self._send_on(parcels, children)
            self._wait(self._pg.send, [self._byte_out], parent, answer)
            for parcel in parcels:
                parcel.spread()
        for _ in children:
            self._land(self._acks, 1)
        for _ in range(len(parcels) * len(children)):
            self._sends.popleft()

    def _ask(self, ranks: Sequence[int], tag: int) -> None:
        """Begin to receive the byte by which each of these says that it has what it will be sent."""
        for rank in ranks:
            answer = torch.empty(1, dtype=torch.uint8)
            self._acks.append(self._start(self._pg.recv, [answer], rank, tag))

    def _send_on(self, parcels: Sequence[_Parcel], ranks: Sequence[int]) -> None:
        for rank in ranks:
            for parcel in parcels:
                self._sends.append(self._start(self._pg.send, [parcel.tensor], rank, parcel.tag))

    def _barrier(self) -> None:
        self._agree("barrier", [])
        self._wait(self._pg.barrier)

    def _allreduce(self, tensor: torch.Tensor, op: ray_types.ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        if tensor.numel():
            self._wait(self._pg.allreduce, [tensor], options)

    def _busy(self) -> bool:
        return any(not future.done() for future in self._pending)

    def _sever(self) -> None:
        if self._own_port:
            _shut_connections(self._own_port, self._peers)

    def _release(self) -> None:
        worker, self._worker = self._worker, None
        pg, self._pg = [self._pg], None
        self._pending = []
        if worker is None:
            return
        # Destroying a process group joins gloo's threads, so the one that may be stuck in it must be the one to do it.
        worker.submit(pg.clear)
        worker.close()


class _Worker:
    """A daemon thread that runs jobs in order. A job's closure is dropped when it has ended."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """End after the jobs submitted so far; waits a second at most for that."""
        self._jobs.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, job, future


def _runs(views: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Sort views into broadcasts: a large one alone, small ones together wherever they stand, empty ones not at all."""
    run: list[torch.Tensor] = []
    used = 0
    for view in views:
        nbytes = view.numel()
        if nbytes >= SMALL_VIEW:
            yield [view]
        elif nbytes:
            if used + nbytes > SCRATCH:
                yield run
                run, used = [], 0
            run.append(view)
            used += nbytes
    if run:
        yield run


def _batches(runs: Iterable[list[torch.Tensor]], limit: int) -> Iterator[list[list[torch.Tensor]]]:
    """Runs to be started together. One that needs a scratch buffer ends its batch: that bounds their memory."""
    batch: list[list[torch.Tensor]] = []
    used = 0
    for run in runs:
        batch.append(run)
        used += sum(view.numel() for view in run)
        if len(batch) == BATCH or used >= limit or len(run) > 1:
            yield batch
            batch, used = [], 0
    if batch:
        yield batch


@dataclass(slots=True)
class _Parcel:
    """One operation's tensor, and the views that it stands for if it is a scratch buffer."""

    tensor: torch.Tensor
    views: Sequence[torch.Tensor] = ()
    tag: int = 0

    def spread(self) -> None:
        if self.views:
            torch._foreach_copy_(
                list(self.views), list(torch.split(self.tensor, [view.numel() for view in self.views]))
            )


def _parcel(run: list[torch.Tensor], *, filled: bool) -> _Parcel:
    if len(run) == 1:
        return _Parcel(run[0])
    scratch = torch.cat(run) if filled else torch.empty(sum(view.numel() for view in run), dtype=torch.uint8)
    return _Parcel(scratch, run)


def _place(rank: int, src: int, world_size: int) -> tuple[int | None, list[int]]:
    """Of whom a rank receives a broadcast from ``src`` and to whom it sends it: a binomial tree, as gloo's own is."""
    at = (rank - src) % world_size
    parent = None if at == 0 else (at - (1 << at.bit_length() - 1) + src) % world_size
    steps = range(at.bit_length(), world_size.bit_length())
    return parent, [(at + (1 << step) + src) % world_size for step in steps if at + (1 << step) < world_size]


def _reducible(operand: Operand) -> Operand:
    if operand.tensor.dtype not in _REDUCIBLE:
        raise ConfigError(f"gloo cannot reduce {operand.tensor.dtype}")
    return operand


_device_lock = threading.Lock()


def _open_device(host: str) -> tuple[Any, int]:
    """A gloo device bound to ``host``, and the port it listens on, which gloo does not tell.

    Raises:
        SyncError: its listener cannot be told from others that this process opened at the same moment.
    """
    for _ in range(10):
        with _device_lock:
            before = set(_listeners(host))
            device: Any = ProcessGroupGloo.create_device(hostname=host)
            new = set(_listeners(host)) - before
        if len(new) == 1:
            return device, new.pop()
        del device
        time.sleep(0.05)
    raise SyncError(f"gloo's listener on {host} was not found in /proc/self/fd", phase="connect")


def _listeners(host: str) -> Iterator[int]:
    """Ports on which this process listens at ``host``."""
    for sock in _tcp_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            address = _normal(sock.getsockname())
            if address[0] == _normal((host, 0))[0]:
                yield address[1]


def _shut_connections(own_port: int, peers: frozenset[Address]) -> None:
    """Shut down every connected socket of this process that starts at ``own_port`` or ends at one of ``peers``."""
    for sock in _tcp_sockets():
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if sock.getsockname()[1] == own_port or _normal(sock.getpeername()) in peers:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected, or not any more


def _tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of the process's TCP sockets, each closed when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed since
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _address(text: str) -> Address:
    host, port = text.split()
    return _normal((host, int(port)))


def _normal(address: Sequence[Any]) -> Address:
    """Host and port, with an IPv4 address inside an IPv6 one taken out."""
    ip = ip_address(str(address[0]).split("%")[0])
    return str(getattr(ip, "ipv4_mapped", None) or ip), int(address[1])
