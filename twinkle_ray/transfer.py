"""The thin loops that execute a plan: one at the sender, one at each receiver.

Both know the manifest and the bucket size, so both walk the same chunks; each chunk is one launch of the group. Nothing
here decides where a tensor lives: the source yields tensors, the sink gives buffers.

Chunks are launched one after the other without a wait in between as long as nothing is staged, that is, as long as
every view is memory that stays anyway: a parameter on either side. A chunk with a staged tensor (gathered, cast, or to
be copied or loaded) holds a bucket of memory, so two of them at most are on their way: the next is gathered, or the
last one loaded, while the wire works on the other.

Ahead of the first chunk stands a barrier. The sender comes to it with that chunk in hand, a receiver with a manifest
that fits its model, and up to then nothing was written anywhere: whoever fails or refuses before leaves all as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.digest import bytes_view
from twinkle_ray.endpoint import Operation
from twinkle_ray.errors import ManifestMismatch, NotAgreed
from twinkle_ray.manifest import Manifest
from twinkle_ray.plan import Chunk, plan_chunks
from twinkle_ray.sinks import LoadReport, Sink

_STAGED = 2
"""Chunks with staged tensors that may be on their way at one time."""
_PLANS = 4
_plans: dict[tuple[str, int], tuple[Chunk, ...]] = {}


def wire_device(group: SyncGroup, device: torch.device) -> torch.device:
    """The parameters' device if the group moves its tensors, else the CPU (Gloo under a model on a GPU)."""
    return device if device.type == group.device_type else torch.device(group.device_type)


def send(
    group: SyncGroup, tensors: Iterator[torch.Tensor], manifest: Manifest, bucket_size: int, operation: Operation
) -> None:
    """Broadcast the manifest's tensors from this rank.

    Args:
        tensors: in manifest order, contiguous and of the manifest's dtypes. Consumed to its end on success; the caller
            closes it on an error, so that a sharded source can finish its gathers. Its attribute ``staged`` says
            whether the last tensor is memory that nobody else holds; without it all are taken for such.
    """
    chunks = _plan(manifest, bucket_size)
    operation.steps = len(chunks)
    flight = _Flight(group, operation)
    tensor = torch.empty(0)
    staged = False
    at = -1
    for index, chunk in enumerate(chunks):
        views = []
        holds = False
        with operation.timed("gather"):
            for segment in chunk.segments:
                while at < segment.tensor:
                    tensor = next(tensors)
                    at += 1
                    staged = getattr(tensors, "staged", True)
                    if tensor.device.type != group.device_type:
                        tensor, staged = tensor.to(group.device_type), True
                holds |= staged
                views.append(bytes_view(tensor)[segment.start : segment.stop])
        with operation.timed("wire"):
            if index == 0:
                group.rally()
            flight.launch(views, src=group.rank, staged=holds)
            while flight.staged >= _STAGED:
                flight.land()
    while at + 1 < len(manifest):  # zero-size tensors at the end: consumed so that every rank makes the same gathers
        next(tensors)
        at += 1
    with operation.timed("wire"):
        if not chunks:
            group.rally()
        while flight.chunks:
            flight.land()
        group.synchronize(operation.deadline)


def receive(
    group: SyncGroup, sink: Sink, manifest: Manifest, bucket_size: int, operation: Operation, source: int = 0
) -> LoadReport:
    """Receive the manifest's tensors from rank ``source`` into the sink."""
    chunks = _plan(manifest, bucket_size)
    operation.steps = len(chunks)
    device = wire_device(group, sink.device)
    flight = _Flight(group, operation)
    buffers: dict[int, torch.Tensor] = {}

    def land() -> None:
        with operation.timed("wire"):
            chunk = chunks[operation.step]
            flight.land(counted=False)
        with operation.timed("load"):
            if chunk.completes:
                operation.touch()
            sink.ready(
                [
                    (meta, buffers.pop(index) if meta.nbytes else sink.buffer(meta, device))
                    for index in chunk.completes
                    for meta in (manifest.tensors[index],)
                ]
            )
        operation.step += 1

    try:
        try:
            sink.begin(manifest)
        except ManifestMismatch as error:
            raise NotAgreed(str(error), phase="transfer") from error
        with operation.timed("wait"):
            group.rally()
            group.synchronize(operation.deadline)
        with operation.timed("load"):
            sink.arm(operation.touch)
        for chunk in chunks:
            views = []
            staged = False
            for segment in chunk.segments:
                meta = manifest.tensors[segment.tensor]
                buffer = buffers.get(segment.tensor)
                if buffer is None:
                    buffer = buffers[segment.tensor] = sink.buffer(meta, device)
                staged |= not sink.lends(meta)
                views.append(bytes_view(buffer)[segment.start : segment.stop])
            with operation.timed("wire"):
                if sink.in_place:
                    operation.touch()
                flight.launch(views, src=source, staged=staged)
            while flight.staged >= _STAGED:
                land()
        operation.launched.set()
        while flight.chunks:
            land()
        with operation.timed("wire"):
            group.synchronize(operation.deadline)
        with operation.timed("load"):
            report = sink.finish()
    except BaseException:
        sink.abandon()
        raise
    return replace(report, seconds={**report.seconds, **operation.seconds})


@dataclass(frozen=True, slots=True)
class _Launched:
    views: Sequence[torch.Tensor]  # which nobody else may hold
    staged: bool


class _Flight:
    """Chunks that were launched and are not known to have arrived, oldest first."""

    def __init__(self, group: SyncGroup, operation: Operation) -> None:
        self.chunks: deque[_Launched] = deque()
        self.staged = 0
        self._group, self._operation = group, operation

    def launch(self, views: Sequence[torch.Tensor], *, src: int, staged: bool) -> None:
        self._group.broadcast_many(views, src=src)
        self.chunks.append(_Launched(views, staged))
        self.staged += staged

    def land(self, *, counted: bool = True) -> None:
        """Wait for the oldest one and let it go."""
        self._group.settle(self._operation.deadline, len(self.chunks) - 1)
        self.staged -= self.chunks.popleft().staged
        self._operation.step += counted


def _plan(manifest: Manifest, bucket_size: int) -> tuple[Chunk, ...]:
    key = manifest.digest, bucket_size
    if key not in _plans:
        while len(_plans) >= _PLANS:
            _plans.pop(next(iter(_plans)))
        _plans[key] = plan_chunks(manifest, bucket_size)
    return _plans[key]
