"""What the groups on devices with streams have in common, NCCL's and HCCL's.

A group works on one device and on a stream of its own. Each launch first makes that stream wait for the calling
thread's current stream, which is looked up anew each time; work on other streams is the caller's to order, or to wait
for with :meth:`StreamGroup.fence`. Waits are polls of an event, so that a deadline or a failure ends them.

Bytes travel as uint8, which every dtype can be viewed as. Only reductions need to know the dtype.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from ray.util.collective import types as ray_types
from torch._C._distributed_c10d import Store

from twinkle_ray.backends.base import VERDICT_S, SyncGroup
from twinkle_ray.backends.operands import Operand, per_rank, single
from twinkle_ray.backends.rendezvous import Meeting
from twinkle_ray.errors import ConfigError, SyncError, SyncTimeout, TwinkleRayError
from twinkle_ray.types import Deadline, Rendezvous

_SPIN_S = 0.001
_SLEEP_MIN_S = 50e-6
SLEEP_MAX_S = 1e-4
_ASK_TRANSPORT_S = 5e-3

Kind = tuple[int, int]
"""A communication library's numbers for a dtype and a reduction."""


class Wire(Protocol):
    """A communicator with the stream on which its calls are put. An address is a ``data_ptr()``, a count is in
    elements."""

    def broadcast(self, views: Sequence[torch.Tensor], src: int) -> None: ...

    def all_reduce(self, at: int, count: int, kind: Kind) -> None: ...

    def reduce(self, at: int, count: int, kind: Kind, root: int) -> None: ...

    def all_gather(self, at: int, into: int, nbytes: int) -> None: ...

    def reduce_scatter(self, at: int, into: int, count: int, kind: Kind) -> None: ...

    def send(self, at: int, nbytes: int, peer: int) -> None: ...

    def receive(self, at: int, nbytes: int, peer: int) -> None: ...


class StreamGroup(SyncGroup):
    """See :class:`~twinkle_ray.backends.base.SyncGroup`.

    Attributes:
        device: set it before ``connect`` to use another device than torch's current one of the thread that connects.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.device: torch.device | None = None
        self._comm: Any = None
        self._stream: Any = None
        self._launching = threading.Lock()
        self._held: list[Any] = []  # operands of launches that may not have ended

    @property
    def _runtime(self) -> Any:
        """``torch.cuda`` or ``torch.npu``."""
        return getattr(torch, self.device_type)

    @abstractmethod
    def _wire(self, comm: Any) -> AbstractContextManager[Wire]:
        """For the calls of one launch, which may take effect at its end only."""

    @abstractmethod
    def _kind(self, dtype: torch.dtype, op: ray_types.ReduceOp) -> Kind:
        """Raises ConfigError if the library cannot reduce this dtype."""

    @abstractmethod
    def _is_peers_fault(self, error: Exception) -> bool | None:
        """What the communication library says by this error; ``None``: it is not the library's."""

    def _blame(self, error: Exception) -> TwinkleRayError:
        """What to raise for an error of a call into the communication library."""
        if isinstance(error, TwinkleRayError):
            return error
        peers = self._is_peers_fault(error)
        if peers:
            return self._broken(error)
        if peers is False and self._failed.wait(VERDICT_S):  # the group was given up under this call
            failure = self._raised()
            assert failure is not None
            return failure
        return self._fail_locally(error)

    def _check_transport(self) -> None:
        """Raise if the communicator has met an error by itself; asked every few milliseconds of a wait."""

    def _check_stream(self) -> None:
        """Raise any error if our stream is broken though an event on it has passed."""

    def _stream_broke(self, error: Exception) -> TwinkleRayError:
        """What to raise for an error of the device."""
        return self._fail_locally(error)

    def _here(self) -> AbstractContextManager[Any]:
        """The group's device as torch's current one in the calling thread."""
        device: AbstractContextManager[Any] = self._runtime.device(self.device)
        return device

    def _at_work(self) -> AbstractContextManager[Any]:
        """The same for calls into the communication library."""
        return self._here()

    @property
    def _index(self) -> int:
        assert self.device is not None
        return self.device.index if self.device.index is not None else 0

    def connect(self, rendezvous: Rendezvous, deadline: Deadline, meeting: Meeting | None = None) -> None:
        if self.device is None:  # here, since a thread's current device is its own
            self.device = torch.device(self.device_type, self._runtime.current_device())
        super().connect(rendezvous, deadline, meeting)

    def _adopt(self, comm: Any, deadline: Deadline) -> None:
        """Take a new communicator, unless the group has failed meanwhile. The first collective runs here, within
        ``connect``: the libraries build their links in it, and a dead peer would block a launch."""
        with self._state:
            self._comm = comm
            late = self._failure is not None or self._destroyed
        if late:
            self._sever()
            return
        self.broadcast_many([torch.zeros(16, dtype=torch.uint8, device=self.device)])
        self.synchronize(deadline)

    def fence(self) -> None:
        assert self.device is not None
        self.wait_for(self.device)

    def rally(self) -> None:
        if self._byte is None:
            with self._here():
                self._byte = torch.zeros(1, dtype=torch.int8, device=self.device)
        at, kind = self._byte.data_ptr(), self._kind(torch.int8, ray_types.ReduceOp.SUM)
        self._launch(lambda wire: wire.all_reduce(at, 1, kind))

    def _launch(self, calls: Callable[[Wire], None]) -> None:
        """Put calls on our stream, behind the current stream's work."""
        self._check()
        with self._launching, self._at_work():
            self._stream.wait_stream(self._runtime.current_stream(self.device))
            comm = self._comm
            if comm is None:
                raise self._raised() or SyncError(f"group {self._group_name} has no communicator")
            try:
                with self._wire(comm) as wire:
                    calls(wire)
            except Exception as error:
                raise self._blame(error) from error

    def _mark(self) -> Any:
        """An event behind all that was launched."""
        with self._here():
            event = self._runtime.Event()
            event.record(self._stream)
        return event

    def _await(self, event: Any, deadline: Deadline) -> None:
        """Wait for an event of our stream; the current stream's work goes on behind it."""
        try:
            with self._here():
                self._poll(event, deadline)
                # Work that an abort has ended looks done; the failure is set before it ends.
                self._check_failure()
                self._check_stream()
                self._runtime.current_stream(self.device).wait_event(event)
        except TwinkleRayError:
            raise
        except Exception as error:
            raise self._stream_broke(error) from error

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
            pause = min(2 * pause, SLEEP_MAX_S)
            if now > ask_at:
                self._check_transport()
                ask_at = now + _ASK_TRANSPORT_S

    def _check_failure(self) -> None:
        self._require_sound()

    # Ray's operations. Like Ray's own NCCL group they return once launched, but in stream order: the caller's current
    # stream waits for the result. They may be followed by anything on that stream, without synchronize().

    def broadcast(self, tensor: Any, broadcast_options: Any = ray_types.BroadcastOptions()) -> None:  # noqa: B008
        operand = self._operand(tensor)
        src = broadcast_options.root_rank
        self._in_order(lambda wire: wire.broadcast([operand.bytes], src), operand.tensor)
        if self._rank != src:
            self._put_back(operand)

    def allreduce(self, tensor: Any, allreduce_options: Any = ray_types.AllReduceOptions()) -> None:  # noqa: B008
        operand = self._operand(tensor)
        self._reduce_all(operand, allreduce_options.reduceOp)
        self._put_back(operand)

    def _reduce_all(self, operand: Operand, op: ray_types.ReduceOp) -> None:
        kind = self._kind(operand.tensor.dtype, op)
        pointer, count = operand.tensor.data_ptr(), operand.tensor.numel()
        self._in_order(lambda wire: wire.all_reduce(pointer, count, kind), operand.tensor)

    def reduce(self, tensor: Any, reduce_options: Any = ray_types.ReduceOptions()) -> None:  # noqa: B008
        operand = self._operand(tensor)
        kind = self._kind(operand.tensor.dtype, reduce_options.reduceOp)
        root = reduce_options.root_rank
        pointer, count = operand.tensor.data_ptr(), operand.tensor.numel()
        self._in_order(lambda wire: wire.reduce(pointer, count, kind, root), operand.tensor)
        if self._rank == root:
            self._put_back(operand)

    def allgather(
        self,
        tensor_list: Any,
        tensor: Any,
        allgather_options: Any = ray_types.AllGatherOptions(),  # noqa: B008
    ) -> None:
        operand = self._operand(tensor)
        outputs = per_rank(tensor_list, operand, self._world_size)
        source = operand.bytes
        with self._here():
            gathered = torch.empty(self._world_size * source.numel(), dtype=torch.uint8, device=self.device)
        self._in_order(
            lambda wire: wire.all_gather(source.data_ptr(), gathered.data_ptr(), source.numel()), [source, gathered]
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
        operand = self._operand(tensor)
        inputs = per_rank(tensor_list, operand, self._world_size)
        kind = self._kind(operand.tensor.dtype, reducescatter_options.reduceOp)
        with self._here():
            joined = torch.cat([item.tensor.view(-1) for item in inputs])
        pointer, count = operand.tensor.data_ptr(), operand.tensor.numel()
        self._in_order(
            lambda wire: wire.reduce_scatter(joined.data_ptr(), pointer, count, kind), [operand.tensor, joined]
        )
        self._put_back(operand)

    def barrier(self, barrier_options: Any = ray_types.BarrierOptions()) -> None:  # noqa: B008
        """Unlike the others this one blocks, within the options' time-out or ``op_timeout_s``."""
        with self._here():
            operand = self._operand([torch.ones(1, dtype=torch.int32, device=self.device)])
        # Not allreduce() with its default: Ray's collective.allreduce(op=...) rewrites that for the whole process.
        self._reduce_all(operand, ray_types.ReduceOp.SUM)
        self.synchronize(self._op_deadline(barrier_options))

    def send(self, tensor: Any, send_options: Any) -> None:
        """May block in the launch until the receiver has joined, the first time that two ranks talk."""
        data = self._operand(tensor).first(send_options.n_elements)
        peer = send_options.dst_rank
        self._in_order(lambda wire: wire.send(data.data_ptr(), data.numel(), peer), data)

    def recv(self, tensor: Any, recv_options: Any) -> None:
        operand = self._operand(tensor)
        data = operand.first(recv_options.n_elements)
        peer = recv_options.src_rank
        self._in_order(lambda wire: wire.receive(data.data_ptr(), data.numel(), peer), data)
        self._put_back(operand)

    def _operand(self, tensor: Any) -> Operand:
        self._check()
        operand = single(tensor, self.device_type)
        if operand.tensor.device.index != self._index:
            raise ConfigError(
                f"a tensor is on {operand.tensor.device}, but group {self._group_name} works on "
                f"{self.device_type}:{self._index}"
            )
        return operand

    def _in_order(self, calls: Callable[[Wire], None], held: Any) -> None:
        self._held.append(held)
        self._launch(calls)
        self._runtime.current_stream(self.device).wait_stream(self._stream)
        # From here on stream order protects the operands: their memory, once freed, is reused behind this wait only.
        self._held.pop()

    def _put_back(self, operand: Operand) -> None:
        with self._here():
            operand.put_back()


def published(store: Store, key: str, deadline: Deadline, by: int = 0) -> bytes:
    """What rank ``by`` has put into the store, or will by the deadline.

    Raises:
        SyncTimeout: it has not.
    """
    while not store.check([key]):
        if deadline.expired:
            raise SyncTimeout(
                f"rank {by} did not publish {key} within {deadline.seconds:.1f} s",
                phase="connect",
                actors=(f"rank {by}",),
            )
        time.sleep(0.005)
    return store.get(key)
