"""Groups on CUDA devices: NCCL through cupy's communicator, one per process.

The group's stream does not synchronise with the default stream. :meth:`NcclGroup.synchronize` bounds the wait for all
launches and then makes the current stream wait too; until it returns the tensors of a launch stay referenced.

What is bounded, and how: nobody enters ``ncclCommInitRank`` before all ranks are at the door, since a peer that never
comes would hold it for ever. If one dies between the door and the init, the thread in the init is left behind (a new
communicator beside it runs at full speed). The first collective runs inside ``connect``, since NCCL builds its rings
there and a dead peer would block the launch itself. Later waits are polls of an event, and an abort of the
communicator from any thread ends the kernels (about 0.55 s on an H200; device and process stay usable).

cupy is imported on first use only.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from ray.util.collective import types as ray_types
from torch._C._distributed_c10d import Store

from twinkle_ray.backends.bounded import bounded
from twinkle_ray.backends.cuda_memory import cuda_exportable
from twinkle_ray.backends.nvml import linked, turned_off
from twinkle_ray.backends.streams import SLEEP_MAX_S, Kind, StreamGroup, published
from twinkle_ray.errors import ConfigError, SyncTimeout
from twinkle_ray.types import Deadline, Rendezvous

logger = logging.getLogger(__name__)

_OTHERS_FAULT = (2, 6)  # ncclSystemError (a network call failed), ncclRemoteError

_ABORT_S = 5.0
_LAUNCH_S = 0.2

_LEAVE_S = 0.25
"""Seconds to wait for ncclCommDestroy, which ends only when all ranks of the node have called it (0.5 s on two H200s).
Whoever makes a new group leaves the old one before the others do, and then it goes on by itself, beside the new one."""

_LAUNCH = 512
"""Calls in one group launch at most: on two H200s 512 a group were as fast as 2,000 (18,867 tensors), and the host's
work within one group grows faster than the number of calls."""

_DTYPES = {
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.uint32: "NCCL_UINT32",
    torch.int64: "NCCL_INT64",
    torch.uint64: "NCCL_UINT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
}
_REDUCE_OPS = {
    ray_types.ReduceOp.SUM: "NCCL_SUM",
    ray_types.ReduceOp.PRODUCT: "NCCL_PROD",
    ray_types.ReduceOp.MIN: "NCCL_MIN",
    ray_types.ReduceOp.MAX: "NCCL_MAX",
}


class NcclGroup(StreamGroup):
    """See :class:`~twinkle_ray.backends.streams.StreamGroup`."""

    name: ClassVar[str] = "TWINKLE_NCCL"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._nccl: Any = None
        self._marks: list[tuple[Any, int]] = []  # per launch: an event behind it, and how many are held

    @classmethod
    def missing(cls) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device; give the actor num_gpus=1, or use TWINKLE_GLOO on CPU"
        cuda = (torch.version.cuda or "12").split(".")[0]
        hint = f"pip install 'twinkle_ray[cuda{cuda}]'"
        if importlib.util.find_spec("cupy") is None:
            return f"the package cupy is missing; {hint}"
        try:
            nccl = _import_nccl()
        except Exception as error:
            return f"cupy.cuda.nccl does not import ({error}); {hint}"
        return None if nccl.available else f"cupy found no NCCL library; {hint}"

    @classmethod
    def linked(cls, device: torch.device) -> tuple[str, ...]:
        return () if turned_off() else linked(cls.identity(device))

    @classmethod
    def shareable(cls, device: torch.device, tensors: Iterable[torch.Tensor]) -> bool:
        return not turned_off() and cuda_exportable(device, tensors)

    def _build(self, store: Store, rendezvous: Rendezvous, deadline: Deadline) -> None:
        nccl = self._nccl = _import_nccl()
        with self._at_work():
            self._stream = self._runtime.Stream(self.device)
            if self._rank == 0:
                store.set("nccl/id", _id_bytes(nccl.get_unique_id()).hex())
            unique_id = bytes.fromhex(published(store, "nccl/id", deadline).decode())
            try:
                comm = _communicator(nccl, self._world_size, unique_id, self._rank)
            except (nccl.NcclError, KeyError) as error:
                raise self._blame(error) from error
            self._adopt(comm, deadline)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Device of the calling thread, for torch and for cupy, whose runtimes may be two libraries."""
        cupy = importlib.import_module("cupy")
        with self._here(), cupy.cuda.Device(self._index):
            yield

    @contextmanager
    def _wire(self, comm: Any) -> Iterator[_NcclWire]:
        self._nccl.groupStart()
        try:
            yield _NcclWire(comm, self._nccl.NCCL_UINT8, self._stream.cuda_stream)
        finally:
            self._nccl.groupEnd()

    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        self._check_views(views)
        for at in range(0, len(views), _LAUNCH):
            part = list(views[at : at + _LAUNCH])
            self._held.append(part)
            self._launch(lambda wire, part=part: wire.broadcast(part, src))  # type: ignore[misc]
        self._marks.append((self._mark(), len(self._held)))

    def synchronize(self, deadline: Deadline) -> None:
        self._check_failure()
        if self._stream is None:
            self._check()
        self._await(self._mark(), deadline)
        self._held.clear()
        self._marks.clear()

    def settle(self, deadline: Deadline, leave: int) -> None:
        count = len(self._marks) - leave
        if count <= 0:
            return
        self._check_failure()
        event, held = self._marks[count - 1]
        self._await(event, deadline)
        del self._held[:held]
        self._marks = [(later, number - held) for later, number in self._marks[count:]]

    def _check_transport(self) -> None:
        """Such as a network connection that broke."""
        comm = self._comm
        if comm is None:
            return
        try:
            comm.check_async_error()
        except (self._nccl.NcclError, KeyError) as error:
            raise self._blame(error) from error

    def _is_peers_fault(self, error: Exception) -> bool | None:
        """By NCCL's result code. cupy has no name for ncclRemoteError and stumbles over it with a KeyError."""
        if isinstance(error, self._nccl.NcclError):
            return getattr(error, "status", None) in _OTHERS_FAULT
        return True if isinstance(error, KeyError) else None

    def _kind(self, dtype: torch.dtype, op: ray_types.ReduceOp) -> Kind:
        if dtype not in _DTYPES:
            raise ConfigError(f"NCCL cannot reduce {dtype}")
        return int(getattr(self._nccl, _DTYPES[dtype])), int(getattr(self._nccl, _REDUCE_OPS[op]))

    def _busy(self) -> bool:
        return bool(self._held)

    def _sever(self) -> None:
        with self._state:
            comm, self._comm = self._comm, None
        if comm is None:
            return  # not made yet, or severed already
        # A launch in progress uses the communicator. A sound one ends at once; one that is stuck in NCCL must be
        # released from outside, and that is what the abort is for.
        idle = self._launching.acquire(timeout=_LAUNCH_S)
        try:
            self._within(_ABORT_S, comm.abort, "aborting the communicator")
        finally:
            if idle:
                self._launching.release()

    def _release(self) -> None:
        with self._state:
            comm, self._comm = self._comm, None
        if comm is not None:
            # NCCL's orderly end requires that nothing is in flight, and Ray's operations return once launched.
            idle_by = Deadline.after(_ABORT_S)
            while not (idle := self._stream.query()) and not idle_by.expired:
                time.sleep(SLEEP_MAX_S)
            if idle:
                self._within(_LEAVE_S, comm.destroy, "destroying the communicator", logging.DEBUG)
            else:
                self._within(_ABORT_S, comm.abort, "aborting the communicator")
        self._held.clear()
        self._marks.clear()
        self._stream = None

    def _within(self, seconds: float, call: Callable[[], None], what: str, level: int = logging.WARNING) -> None:
        """Bounded in time, on our device; a communicator that does not answer is left behind with its thread."""

        def on_device() -> None:
            with self._at_work():
                call()

        try:
            bounded(on_device, Deadline.after(seconds), f"{what} of group {self._group_name}", phase="finalize")
        except (SyncTimeout, RuntimeError) as error:
            logger.log(level, "%s", error)


class _NcclWire:
    def __init__(self, comm: Any, uint8: int, stream: int) -> None:
        self._comm, self._uint8, self._stream = comm, uint8, stream

    def broadcast(self, views: Sequence[torch.Tensor], src: int) -> None:
        comm, uint8, stream = self._comm, self._uint8, self._stream
        for view in views:
            if count := view.nbytes:
                comm.bcast(view.data_ptr(), count, uint8, src, stream)  # counts in 64 bits

    def all_reduce(self, at: int, count: int, kind: Kind) -> None:
        self._comm.allReduce(at, at, count, *kind, self._stream)

    def reduce(self, at: int, count: int, kind: Kind, root: int) -> None:
        self._comm.reduce(at, at, count, *kind, root, self._stream)

    def all_gather(self, at: int, into: int, nbytes: int) -> None:
        self._comm.allGather(at, into, nbytes, self._uint8, self._stream)

    def reduce_scatter(self, at: int, into: int, count: int, kind: Kind) -> None:
        self._comm.reduceScatter(at, into, count, *kind, self._stream)

    def send(self, at: int, nbytes: int, peer: int) -> None:
        self._comm.send(at, nbytes, self._uint8, peer, self._stream)

    def receive(self, at: int, nbytes: int, peer: int) -> None:
        self._comm.recv(at, nbytes, self._uint8, peer, self._stream)


def _import_nccl() -> Any:
    return importlib.import_module("cupy.cuda.nccl")


def _id_bytes(unique_id: Any) -> bytes:
    """cupy 14 gives bytes, earlier ones a tuple of signed chars."""
    return unique_id if isinstance(unique_id, bytes) else bytes(value & 0xFF for value in unique_id)


def _communicator(nccl: Any, world_size: int, unique_id: bytes, rank: int) -> Any:
    try:
        return nccl.NcclCommunicator(world_size, unique_id, rank)
    except TypeError:
        signed = tuple(value - 256 if value > 127 else value for value in unique_id)
        return nccl.NcclCommunicator(world_size, signed, rank)
