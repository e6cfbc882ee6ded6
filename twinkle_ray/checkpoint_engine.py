"""The engines of the seeds: one object per process, driven by hand.

    engine = NCCLCheckpointEngine(bucket_size=512 << 20)      # on the trainer, rank 0
    engine.is_master = True
    metadata = engine.prepare()                               # hand this to the others
    engine.init_process_group(rank=0, world_size=5)
    await engine.send_weights(model.named_parameters())
    engine.finalize()

    engine = NCCLCheckpointEngine(bucket_size=512 << 20)      # on a rollout, rank 1 to 4
    engine.prepare()
    engine.init_process_group(rank=1, world_size=5, master_metadata=metadata)
    async for name, tensor in engine.receive_weights():
        ...
    engine.finalize()

``init_process_group`` blocks until all ranks have come, so the ranks call it concurrently. They are thin: an
:class:`~twinkle_ray.endpoint.Endpoint` does the work, in its own thread, so that neither ``send_weights`` nor
``receive_weights`` blocks the event loop. Actors that inherit the mixins do not need these engines.
"""

from __future__ import annotations

import asyncio
import os
import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from twinkle_ray import backends, topology
from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.endpoint import Endpoint, Operation
from twinkle_ray.errors import ConfigError, SyncError, SyncTimeout
from twinkle_ray.plan import DEFAULT_BUCKET_SIZE
from twinkle_ray.stream import receive_stream, send_stream
from twinkle_ray.transfer import wire_device
from twinkle_ray.types import Deadline, Rendezvous

DEFAULT_TIMEOUT_S = 300.0
"""Seconds for one connect or one transfer: the metadata time-out of the seeds."""

Weights = Iterable[tuple[str, torch.Tensor]]


class CheckpointEngine(ABC):
    """Moves weights from one trainer process to rollout processes.

    Attributes:
        is_master: set it on rank 0 before :meth:`prepare`.
    """

    is_master: bool = False

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Get ready. On the master the result is the metadata that all other ranks need; elsewhere it is empty."""

    @abstractmethod
    def init_process_group(self, rank: int, world_size: int, **kwargs: Any) -> None:
        """Join the group; blocks until every rank has come or the time-out has passed."""

    @abstractmethod
    async def send_weights(self, weight_generator: Weights) -> None:
        """Send ``(name, tensor)`` pairs from rank 0."""

    @abstractmethod
    def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the pairs in the order in which they were sent; each tensor owns its storage."""

    @abstractmethod
    def finalize(self) -> None:
        """Leave the group and free everything. Idempotent."""

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of ``init_process_group`` for all trainers and all rollouts, as dicts of lists.

        The first trainer is rank 0, other trainers are -1 (not in the group), rollouts are 1 to n.

        Args:
            metadata: what the trainers' ``prepare`` returned; the first entry is the master's.
        """
        made = topology.build(trainer_world_size, [1] * rollout_world_size)
        return topology.init_arguments(made, metadata[0])


class GroupCheckpointEngine(CheckpointEngine):
    """An engine over one of our Ray collective groups.

    Args:
        bucket_size: bytes sent in one piece at most. The ends may differ in it: the sender's counts.
        timeout: seconds for :meth:`init_process_group`, and for one whole send or receive.
        device: where received tensors are made; default: the current device of the backend's type.

    Raises:
        ConfigError: ``bucket_size`` or ``timeout`` is not positive.
    """

    backend: ClassVar[str]

    def __init__(
        self,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        timeout: float = DEFAULT_TIMEOUT_S,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if bucket_size <= 0:
            raise ConfigError(f"bucket_size is {bucket_size}, but it must be a positive number of bytes")
        if timeout <= 0:
            raise ConfigError(f"timeout is {timeout}, but it must be a positive number of seconds")
        self.bucket_size = bucket_size
        self.timeout = timeout
        self._handshake_s = self._handshake_seconds()
        self.is_master = False
        self._rank: int | None = None
        self._device = torch.device(device) if device is not None else None
        self._endpoint: Endpoint | None = None

    def prepare(self) -> dict[str, Any]:
        """On the master open the place where the group meets; see the base class.

        Raises:
            BackendUnavailable: the backend's package or device is missing.
        """
        backends.require(self.backend)
        endpoint = self._made_endpoint()
        return metadata_of(endpoint.open_meeting(self.backend)) if self.is_master else {}

    def init_process_group(
        self, rank: int, world_size: int, master_metadata: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Join as ``rank`` of ``world_size``. The master needs no metadata; rank -1 joins nothing.

        Raises:
            ConfigError: rank and world size do not go together, or metadata is missing.
            SyncTimeout: not all ranks came within ``timeout``; names those that did not.
        """
        if kwargs:
            raise ConfigError(f"init_process_group does not know {', '.join(sorted(kwargs))}")
        self._rank = None
        if rank < 0:
            return
        if rank >= world_size:
            raise ConfigError(f"rank {rank} does not exist in a group of {world_size}")
        endpoint = self._made_endpoint()
        rendezvous = rendezvous_of(master_metadata, endpoint)
        if rendezvous is None:
            raise ConfigError(
                f"rank {rank} needs master_metadata, the dict that prepare() returned on rank 0 (where is_master is "
                "set before prepare())"
            )
        endpoint.connect(rank, world_size, rendezvous, Deadline.after(self._handshake_s)).outcome()
        self._rank = rank

    async def send_weights(self, weight_generator: Weights) -> None:
        """Send ``(name, tensor)`` pairs; a rank outside the group only walks the generator (it may gather shards).

        Raises:
            ConfigError: two tensors of one name, or a tensor that cannot be sent; the receivers are released.
            SyncError: the group failed.
        """
        if self._rank is None:
            for _ in weight_generator:
                pass
            return
        endpoint = self._made_endpoint()

        def work(operation: Operation) -> None:
            group = _group_of(endpoint)
            self._handshake(group, operation.deadline)
            send_stream(group, weight_generator, self.bucket_size, operation.deadline)
            _meet(group, operation.deadline)  # else the sender could leave before the last bucket is asked for

        await _outcome(endpoint.start("send_weights", work, Deadline.after(self.timeout)))

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield ``(name, tensor)`` in the order sent. The tensor's storage is the caller's.

        At most two tensors wait for a slow consumer; the sender waits with it.

        Raises:
            SyncError: the group failed; what was yielded before is a part of the model.
        """
        if self._rank is None:
            return
        endpoint = self._made_endpoint()
        handed: queue.Queue[tuple[str, torch.Tensor]] = queue.Queue(maxsize=2)

        def work(operation: Operation) -> None:
            group = _group_of(endpoint)
            self._handshake(group, operation.deadline)
            for item in receive_stream(group, wire_device(group, endpoint.device), operation.deadline):
                while not operation.ended.is_set():
                    try:
                        handed.put(item, timeout=0.05)
                        break
                    except queue.Full:
                        continue
            _meet(group, operation.deadline)

        operation = endpoint.start("receive_weights", work, Deadline.after(self.timeout))
        try:
            naps = 0
            while True:
                finished = operation.ended.is_set()
                try:
                    name, tensor = handed.get_nowait()
                except queue.Empty:
                    if finished:
                        break
                    await asyncio.sleep(min(0.01, 0.0005 * naps))
                    naps += 1
                    continue
                naps = 0
                yield name, tensor if tensor.device.type == endpoint.device.type else tensor.to(endpoint.device)
            operation.outcome()
        finally:
            if not operation.ended.is_set():
                endpoint.abort("the receiver stopped before the last tensor")

    def finalize(self) -> None:
        """Leave the group and free everything. Idempotent."""
        endpoint, self._endpoint, self._rank = self._endpoint, None, None
        if endpoint is not None:
            endpoint.leave()

    def abort(self, reason: str) -> None:
        """Release this rank and all others from whatever they wait in."""
        if self._endpoint is not None:
            self._endpoint.abort(reason)

    def _handshake_seconds(self) -> float:
        return self.timeout

    def _handshake(self, group: SyncGroup, deadline: Deadline) -> None:
        """Before any metadata is sent all ranks must have come to the transfer."""
        _meet(group, Deadline.after(min(self._handshake_s, deadline.remaining())))

    def _made_endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = Endpoint(self._device or _current_device(self.backend))
        return self._endpoint


class NCCLCheckpointEngine(GroupCheckpointEngine):
    """Between NVIDIA GPUs, over NCCL through cupy."""

    backend = "TWINKLE_NCCL"


class HCCLCheckpointEngine(GroupCheckpointEngine):
    """Between Ascend NPUs, over HCCL.

    The environment variable ``TWINKLE_CKPT_HCCL_META_TIMEOUT_S``, an integer number of seconds and 300 without it,
    bounds the handshakes: that all ranks come to :meth:`init_process_group`, and that all come to a transfer before its
    first metadata is sent. Read at construction.

    Raises:
        ConfigError: as the base class, or the variable is not an integer above 0.
    """

    backend = "TWINKLE_HCCL"

    def _handshake_seconds(self) -> float:
        return _positive_seconds("TWINKLE_CKPT_HCCL_META_TIMEOUT_S", 300)

    def _handshake(self, group: SyncGroup, deadline: Deadline) -> None:
        try:
            super()._handshake(group, deadline)
        except SyncTimeout:
            raise SyncTimeout(
                f"not all ranks came to the transfer within {self._handshake_s:.0f} s "
                "(TWINKLE_CKPT_HCCL_META_TIMEOUT_S); nothing was sent",
                phase="transfer",
            ) from None


class GlooCheckpointEngine(GroupCheckpointEngine):
    """Between CPUs, over Gloo."""

    backend = "TWINKLE_GLOO"


def metadata_of(rendezvous: Rendezvous) -> dict[str, Any]:
    """Plain dict of a rendezvous, the ``master_metadata`` of the seeds."""
    return asdict(rendezvous)


def rendezvous_of(metadata: Any, endpoint: Endpoint | None) -> Rendezvous | None:
    """The rendezvous in ``metadata``; without metadata the endpoint's own, if it is the master's.

    Raises:
        ConfigError: the metadata is not what ``prepare`` of a twinkle_ray master returned.
    """
    if metadata is None:
        if endpoint is None:
            return None
        return endpoint.meeting.rendezvous if endpoint.meeting is not None else endpoint.rendezvous
    if isinstance(metadata, Rendezvous):
        return metadata
    try:
        return Rendezvous(**metadata)
    except TypeError:
        raise ConfigError(
            "master_metadata is not what prepare() returned on rank 0 (a dict with group, backend, host, store_port "
            "and watch_port)"
        ) from None


def _meet(group: SyncGroup, deadline: Deadline) -> None:
    group.rally()
    group.synchronize(deadline)


def _positive_seconds(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ConfigError(f"the environment variable {name} is {text!r}, but it must be an integer of seconds above 0")
    return int(text)


async def _outcome(operation: Operation) -> Any:
    naps = 0
    while not operation.ended.is_set():  # the endpoint ends it at its deadline
        await asyncio.sleep(min(0.01, 0.0005 * naps))
        naps += 1
    return operation.outcome()


def _group_of(endpoint: Endpoint) -> SyncGroup:
    if endpoint.group is None:
        raise SyncError("init_process_group was not called, or failed", phase="transfer")
    return endpoint.group


def _current_device(backend: str) -> torch.device:
    kind = backends.group_class(backend).device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())
