"""Groups on CUDA devices: NCCL through cupy's communicator, one per process.

A group works on one device and on a stream of its own, which does not synchronise with the default stream. Each launch
first makes that stream wait for the calling thread's current stream; work on other streams is the caller's to order,
or to wait for with :meth:`NcclGroup.fence`. :meth:`NcclGroup.synchronize` bounds the wait for all launches and then
makes the current stream wait too; until it returns the tensors of a launch stay referenced.

What is bounded, and how: nobody enters ``ncclCommInitRank`` before all ranks are at the door, since a peer that never
comes would hold it for ever. If one dies between the door and the init, the thread in the init is left behind (a new
communicator beside it runs at full speed). The first collective runs inside ``connect``, since NCCL builds its rings
there and a dead peer would block the launch itself. Later waits are polls of an event, and an abort of the
communicator from any thread ends the kernels (about 0.55 s on an H200; device and process stay usable).

Bytes travel as uint8, which every dtype can be viewed as. cupy is imported on first use only.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from ray.util.collective import types as ray_types
from torch._C._distributed_c10d import Store

from twinkle_ray.backends.base import VERDICT_S, SyncGroup
from twinkle_ray.backends.bounded import bounded
from twinkle_ray.backends.operands import Operand, per_rank, single
from twinkle_ray.errors import ConfigError, SyncError, SyncTimeout, TwinkleRayError
from twinkle_ray.types import Deadline, Rendezvous

logger = logging.getLogger(__name__)

_OTHERS_FAULT = (2, 6)  # ncclSystemError (a network call failed), ncclRemoteError

_SPIN_S = 0.001
_SLEEP_MIN_S = 50e-6
_SLEEP_MAX_S = 1e-4
_ASK_TRANSPORT_S = 5e-3
_ABORT_S = 5.0
_LAUNCH_S = 0.2

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


class NcclGroup(SyncGroup):
    """See :class:`~twinkle_ray.backends.base.SyncGroup`.

    Attributes:
        device: set it before ``connect`` to use another device than torch's current one of the thread that connects.
    """

    name: ClassVar[str] = "TWINKLE_NCCL"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.device: torch.device | None = None
        self._comm: Any = None
        self._nccl: Any = None
        self._stream: Any = None
        self._launching = threading.Lock()
        self._held: list[Any] = []  # operands of launches that may not have ended
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

    def connect(self, rendezvous: Rendezvous, deadline: Deadline, meeting: Any = None) -> None:
        if self.device is None:  # here, since a thread's current device is its own
            self.device = torch.device("cuda", torch.cuda.current_device())
        super().connect(rendezvous, deadline, meeting)

    def _build(self, store: Store, rendezvous: Rendezvous, deadline: Deadline) -> None:
        nccl = _import_nccl()
        with self._on_device():
            stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            if self._rank == 0:
                store.set("nccl/id", _id_bytes(nccl.get_unique_id()).hex())
            unique_id = bytes.fromhex(_wait_for(store, "nccl/id", deadline).decode())
            try:
                comm = _communicator(nccl, self._world_size, unique_id, self._rank)
            except (nccl.NcclError, KeyError) as error:
                raise self._transport_failed(error) from error
            with self._state:
                self._nccl, self._stream, self._comm = nccl, stream, comm
                late = self._failure is not None or self._destroyed
            if late:
                self._sever()
                return
            first = torch.zeros(16, dtype=torch.uint8, device=self.device)
            self.broadcast_many([first])
            self.synchronize(deadline)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Device of the calling thread, for torch and for cupy, whose runtimes may be two libraries."""
        cupy = importlib.import_module("cupy")
        with torch.cuda.device(self.device), cupy.cuda.Device(self._index):
            yield

    @property
    def _index(self) -> int:
        assert self.device is not None
        return self.device.index if self.device.index is not None else 0

    def fence(self) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()

    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        self._check_views(views)
        for at in range(0, len(views), _LAUNCH):
            part = list(views[at : at + _LAUNCH])
            self._launch(lambda comm, stream, part=part: self._bcast(comm, part, src, stream), part)  # type: ignore[misc]
        self._mark()

    def rally(self) -> None:
        if self._byte is None:
            with torch.cuda.device(self.device):
                self._byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        at = self._byte.data_ptr()
        self._launch(
            lambda comm, stream: comm.allReduce(at, at, 1, self._nccl.NCCL_UINT8, self._nccl.NCCL_SUM, stream),
            [self._byte],
        )
        self._mark()

    def _mark(self) -> None:
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._marks.append((event, len(self._held)))

    def _bcast(self, comm: Any, views: Sequence[torch.Tensor], src: int, stream: int) -> None:
        uint8 = self._nccl.NCCL_UINT8
        for view in views:
            if count := view.nbytes:
                comm.bcast(view.data_ptr(), count, uint8, src, stream)  # counts in 64 bits

    def _launch(self, calls: Callable[[Any, int], None], held: list[Any]) -> None:
        """Put NCCL calls into one group launch on our stream, behind the current stream's work."""
        self._check()
        self._held.append(held)
        with self._launching, self._on_device():
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            comm = self._comm
            if comm is None:
                raise self._raised() or SyncError(f"group {self._group_name} has no communicator")
            try:
                self._nccl.groupStart()
                try:
                    calls(comm, self._stream.cuda_stream)
                finally:
                    self._nccl.groupEnd()
            except (self._nccl.NcclError, KeyError) as error:
                raise self._transport_failed(error) from error
            except Exception as error:
                raise self._fail_locally(error) from error

    def synchronize(self, deadline: Deadline) -> None:
        self._check_failure()
        if self._stream is None:
            self._check()
        try:
            with torch.cuda.device(self.device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
                self._poll(event, deadline)
                # Kernels that an abort has ended look done; the failure is set before they end.
                self._check_failure()
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
        except TwinkleRayError:
            raise
        except Exception as error:
            raise self._fail_locally(error) from error
        self._held.clear()
        self._marks.clear()

    def settle(self, deadline: Deadline, leave: int) -> None:
        count = len(self._marks) - leave
        if count <= 0:
            return
        self._check_failure()
        event, held = self._marks[count - 1]
        try:
            with torch.cuda.device(self.device):
                self._poll(event, deadline)
                self._check_failure()
                torch.cuda.current_stream(self.device).wait_event(event)
        except TwinkleRayError:
            raise
        except Exception as error:
            raise self._fail_locally(error) from error
        del self._held[:held]
        self._marks = [(later, number - held) for later, number in self._marks[count:]]

    def _poll(self, event: Any, deadline: Deadline) -> None:
        ask_at = time.monotonic() + _ASK_TRANSPORT_S
        spin_until = time.monotonic() + _SPIN_S
        pause = _SLEEP_MIN_S
        while not event.query():
            self._check_failure()
            if deadline.expired:
                raise self._fail(
                    SyncTimeout(
                        f"rank {self._rank} of group {self._group_name} waited {deadline.seconds:.1f} s for a transfer",
                        phase="transfer",
                    ),
                    tell=True,
                )
            now = time.monotonic()
            if now < spin_until:
                continue
            time.sleep(pause)
            pause = min(2 * pause, _SLEEP_MAX_S)
            if now > ask_at:
                self._check_transport()
                ask_at = now + _ASK_TRANSPORT_S

    def _check_transport(self) -> None:
        """Raise if NCCL has met an error by itself, such as a network connection that broke."""
        comm = self._comm
        if comm is None:
            return
        try:
            comm.check_async_error()
        except (self._nccl.NcclError, KeyError) as error:
            raise self._transport_failed(error) from error

    def _transport_failed(self, error: Exception) -> TwinkleRayError:
        """A peer's fault or our own, by NCCL's result code. cupy has no name for ncclRemoteError and stumbles over it
        with a KeyError."""
        if isinstance(error, KeyError) or getattr(error, "status", None) in _OTHERS_FAULT:
            return self._broken(error)
        if self._failed.wait(VERDICT_S):  # the communicator was aborted under this call
            failure = self._raised()
            assert failure is not None
            return failure
        return self._fail_locally(error)

    def _check_failure(self) -> None:
        if (error := self._raised()) is not None:
            raise error

    # Ray's operations. Like Ray's own NCCL group they return once launched, but in stream order: the caller's current
    # stream waits for the result. They may be followed by anything on that stream, without synchronize().

    def broadcast(self, tensor: Any, broadcast_options: Any = ray_types.BroadcastOptions()) -> None:  # noqa: B008
        operand = single(tensor, self.device_type)
        src = broadcast_options.root_rank
        self._in_order(lambda comm, stream: self._bcast(comm, [operand.bytes], src, stream), operand.tensor)
        if self._rank != src:
            self._put_back(operand)

    def allreduce(self, tensor: Any, allreduce_options: Any = ray_types.AllReduceOptions()) -> None:  # noqa: B008
        operand = single(tensor, self.device_type)
        dtype, op = self._code(operand, allreduce_options)
        pointer, count = operand.tensor.data_ptr(), operand.tensor.numel()
        self._in_order(lambda comm, stream: comm.allReduce(pointer, pointer, count, dtype, op, stream), operand.tensor)
        self._put_back(operand)

    def reduce(self, tensor: Any, reduce_options: Any = ray_types.ReduceOptions()) -> None:  # noqa: B008
        operand = single(tensor, self.device_type)
        dtype, op = self._code(operand, reduce_options)
        root = reduce_options.root_rank
        pointer, count = operand.tensor.data_ptr(), operand.tensor.numel()
        self._in_order(
            lambda comm, stream: comm.reduce(pointer, pointer, count, dtype, op, root, stream), operand.tensor
        )
        if self._rank == root:
            self._put_back(operand)

    def allgather(
        self,
        tensor_list: Any,
        tensor: Any,
        allgather_options: Any = ray_types.AllGatherOptions(),  # noqa: B008
    ) -> None:
        operand = single(tensor, self.device_type)
        outputs = per_rank(tensor_list, operand, self._world_size)
        source = operand.bytes
        with torch.cuda.device(self.device):
            gathered = torch.empty(self._world_size * source.numel(), dtype=torch.uint8, device=self.device)
        self._in_order(
            lambda comm, stream: comm.allGather(
                source.data_ptr(), gathered.data_ptr(), source.numel(), self._nccl.NCCL_UINT8, stream
            ),
            [source, gathered],
        )
        for output, part in zip(outputs, gathered.view(self._world_size, -1), strict=True):
            output.bytes.copy_(part)
            self._put_back(output)

    def reducescatter(
        self,
        tensor: Any,
        tensor_list: Any,
        reducescatter_options: Any = ray_types.ReduceScatterOptions(),  # noqa: B008
    ) -> None:
        operand = single(tensor, self.device_type)
        inputs = per_rank(tensor_list, operand, self._world_size)
        dtype, op = self._code(operand, reducescatter_options)
        with torch.cuda.device(self.device):
            joined = torch.cat([item.tensor.view(-1) for item in inputs])
        pointer, count = operand.tensor.data_ptr(), operand.tensor.numel()
        self._in_order(
            lambda comm, stream: comm.reduceScatter(joined.data_ptr(), pointer, count, dtype, op, stream),
            [operand.tensor, joined],
        )
        self._put_back(operand)

    def barrier(self, barrier_options: Any = ray_types.BarrierOptions()) -> None:  # noqa: B008
        """Unlike the others this one blocks, within the options' time-out or ``op_timeout_s``."""
        with torch.cuda.device(self.device):
            self.allreduce([torch.ones(1, dtype=torch.int32, device=self.device)])
        self.synchronize(self._op_deadline(barrier_options))

    def send(self, tensor: Any, send_options: Any) -> None:
        """May block in the launch until the receiver has joined, the first time that two ranks talk."""
        data = single(tensor, self.device_type).first(send_options.n_elements)
        peer = send_options.dst_rank
        self._in_order(
            lambda comm, stream: comm.send(data.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, peer, stream), data
        )

    def recv(self, tensor: Any, recv_options: Any) -> None:
        operand = single(tensor, self.device_type)
        data = operand.first(recv_options.n_elements)
        peer = recv_options.src_rank
        self._in_order(
            lambda comm, stream: comm.recv(data.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, peer, stream), data
        )
        self._put_back(operand)

    def _in_order(self, calls: Callable[[Any, int], None], held: Any) -> None:
        self._check()
        self._launch(calls, [held])
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        # From here on stream order protects the operands: their memory, once freed, is reused behind this wait only.
        self._held.pop()

    def _put_back(self, operand: Operand) -> None:
        with torch.cuda.device(self.device):
            operand.put_back()

    def _code(self, operand: Operand, options: Any) -> tuple[int, int]:
        """NCCL's numbers for the dtype and the operation."""
        self._check()
        if operand.tensor.dtype not in _DTYPES:
            raise ConfigError(f"NCCL cannot reduce {operand.tensor.dtype}")
        return (
            int(getattr(self._nccl, _DTYPES[operand.tensor.dtype])),
            int(getattr(self._nccl, _REDUCE_OPS[options.reduceOp])),
        )

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
                time.sleep(_SLEEP_MAX_S)
            self._within(_ABORT_S, comm.destroy if idle else comm.abort, "destroying the communicator")
        self._held.clear()
        self._marks.clear()
        self._stream = None

    def _within(self, seconds: float, call: Callable[[], None], what: str) -> None:
        """Bounded in time, on our device; a communicator that does not answer is left behind with its thread."""

        def on_device() -> None:
            with self._on_device():
                call()

        try:
            bounded(on_device, Deadline.after(seconds), f"{what} of group {self._group_name}", phase="finalize")
        except (SyncTimeout, RuntimeError) as error:
            logger.warning("%s", error)


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


def _wait_for(store: Store, key: str, deadline: Deadline) -> bytes:
    while not store.check([key]):
        if deadline.expired:
            raise SyncTimeout(f"rank 0 did not publish {key} within {deadline.seconds:.1f} s", phase="connect")
        time.sleep(0.005)
    return store.get(key)
