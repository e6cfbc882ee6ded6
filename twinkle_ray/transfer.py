"""The thin loops that execute a plan: one at the sender, one at each receiver.

Both know the manifest and the bucket size, so both walk the same chunks; each chunk is one launch of the group. Nothing
here decides where a tensor lives: the source yields tensors, the sink says where their bytes go.

Chunks are launched one after the other without a wait in between as long as nothing is staged, that is, as long as
every view is memory that stays anyway: a parameter on either side, or the scratch buffer for bytes that a receiver has
no use for. Staged tensors (gathered, cast, or to be copied or loaded) hold memory until their chunk has arrived: two
buckets of it at most, the scratch buffer counted, and besides the one tensor that may be larger. So the next chunk is
gathered, or the last one loaded, while the wire works on the other.

Ahead of the first chunk stands a barrier. The sender comes to it with that chunk in hand, a receiver with a manifest
that fits its model, and up to then nothing was written anywhere: whoever fails or refuses before leaves all as it was.

A sync may have tens of thousands of tensors, and the wire moves a small one in microseconds. So all that is the same
at each sync is worked out once and kept: the plan, what the sender takes of each tensor, and (by the sink, which knows
how long it holds) where each segment goes at a receiver.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import torch

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.digest import bytes_view
from twinkle_ray.endpoint import Operation
from twinkle_ray.errors import ManifestMismatch, NotAgreed, PeerLost, SyncTimeout
from twinkle_ray.landing import Step
from twinkle_ray.manifest import Manifest
from twinkle_ray.plan import Chunk, plan_chunks
from twinkle_ray.sinks import LoadReport, Receiver
from twinkle_ray.sources import TensorStream

_STAGED = 2
"""Buckets of memory that staged tensors may hold while they are on their way."""
_PLANS = 4
_plans: dict[tuple[str, int], _Plan] = {}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is the same at each sync.

    Attributes:
        takes: per chunk what the sender takes of which tensor, ``(tensor, start, stop, sizes)``: the bytes of
            consecutive segments, or ``None`` where one segment is the whole tensor.
        wholes: per chunk whether it is whole tensors, one after the other.
        pulls: per chunk the bytes of the tensors that begin in it.
        largest: bytes of the largest tensor if it exceeds the bucket, else 0.
    """

    chunks: tuple[Chunk, ...]
    takes: tuple[tuple[tuple[int, int, int, tuple[int, ...] | None], ...], ...]
    wholes: tuple[bool, ...]
    pulls: tuple[int, ...]
    largest: int


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
    plan = _plan(manifest, bucket_size)
    chunks = plan.chunks
    operation.step, operation.steps = 0, len(chunks)
    flight = _Flight(group, operation)
    room = _STAGED * bucket_size + plan.largest
    device = getattr(tensors, "device", None)
    at_once = (
        tensors.take if isinstance(tensors, TensorStream) and device and device.type == group.device_type else None
    )
    tensor = flat = nothing = torch.empty(0)
    staged = False
    at = -1
    for index, takes in enumerate(plan.takes):
        with operation.timed("wire"):
            while flight.staged and flight.staged + plan.pulls[index] > room:
                flight.land()
        views: list[torch.Tensor] = []
        done = 0
        with operation.timed("gather"):
            if at_once is not None and plan.wholes[index] and takes and takes[0][0] == at + 1:
                views = list(at_once(len(takes)) or ())
                at += len(views)
            for wanted, start, stop, sizes in () if views else takes:
                while at < wanted:
                    tensor = flat = nothing  # what is gathered now must not stand beside the one before it
                    tensor = next(tensors)
                    at += 1
                    staged = getattr(tensors, "staged", True)
                    if tensor.device.type != group.device_type:
                        tensor, staged = tensor.to(group.device_type), True
                    if staged:
                        flight.staged += tensor.nbytes
                flat = tensor.view(-1).view(torch.uint8)  # contiguous, and of size zero none is asked for
                if sizes is None:
                    views.append(flat)
                else:
                    views += flat[start:stop].split_with_sizes(sizes)
                if staged and stop == tensor.nbytes:
                    done += stop
        with operation.timed("wire"):
            if index == 0:
                group.assemble(operation.deadline)
            flight.launch(views, src=group.rank, frees=done)
    while at + 1 < len(manifest):  # zero-size tensors at the end: consumed so that every rank makes the same gathers
        next(tensors)
        at += 1
    if isinstance(tensors, TensorStream):
        with operation.timed("gather"):
            tensors.recheck()
    with operation.timed("wire"):
        if not chunks:
            group.assemble(operation.deadline)
        while flight.chunks:
            flight.land()
        group.synchronize(operation.deadline)


def receive(
    group: SyncGroup,
    sink: Receiver,
    manifest: Manifest,
    bucket_size: int,
    operation: Operation,
    source: int = 0,
    *,
    last: bool = True,
) -> LoadReport:
    """Receive the manifest's tensors from rank ``source`` into the sink.

    Args:
        last: nothing follows in this operation.
    """
    chunks = _plan(manifest, bucket_size).chunks
    operation.step, operation.steps = 0, len(chunks)
    device = wire_device(group, sink.device)
    flight = _Flight(group, operation)
    metas = manifest.tensors
    buffers: dict[int, torch.Tensor] = {}
    slots: deque[torch.Tensor] = deque()

    def fill(step: Step) -> Sequence[torch.Tensor]:
        if not (step.scratch.nbytes or step.slot.nbytes or step.staged):
            return step.views
        views = step.views.copy()
        if step.scratch.nbytes:
            step.scratch.cut(scratch, views)
        if step.slot.nbytes:
            slot = torch.empty(step.slot.nbytes, dtype=torch.uint8, device=device)
            step.slot.cut(slot, views)
            slots.append(slot)
        for at, index, start, stop in step.staged:
            if index not in buffers:
                buffers[index] = sink.buffer(metas[index], device)
            views[at] = bytes_view(buffers[index])[start:stop]
        flight.staged += step.begins_nbytes
        return views

    def land() -> None:
        with operation.timed("wire"):
            flight.land(counted=False)
        step = landing.steps[operation.step]
        if step.completes or step.slot.nbytes:
            with operation.timed("load"):
                if sink.live:
                    operation.touch()
                if step.slot.nbytes:
                    step.scatter(slots.popleft())
                # one of size zero has had no segment to make a buffer for
                filled = [buffers.pop(i) if i in buffers else sink.buffer(metas[i], device) for i in step.completes]
                sink.ready([(metas[i], tensor) for i, tensor in zip(step.completes, filled, strict=True)])
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
            landing = sink.landing(chunks, device)
        scratch = torch.empty(landing.scratch_nbytes, dtype=torch.uint8, device=device)
        room = _STAGED * bucket_size + landing.largest - landing.scratch_nbytes
        for step in landing.steps:
            while flight.chunks and flight.staged and flight.staged + step.begins_nbytes > room:
                land()
            with operation.timed("wire"):
                if step.live or (step.staged and sink.in_place):
                    operation.touch()
                flight.launch(fill(step), src=source, frees=step.ends_nbytes)
        group.flush()
        if last:
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
    views: Sequence[torch.Tensor]  # those of staged tensors nobody else may hold
    frees: int


class _Flight:
    """Chunks that were launched and are not known to have arrived, oldest first.

    Attributes:
        staged: bytes of staged tensors that are held, which whoever makes one adds to. Those that end in a chunk are
            free when it has arrived.
    """

    def __init__(self, group: SyncGroup, operation: Operation) -> None:
        self.chunks: deque[_Launched] = deque()
        self.staged = 0
        self._group, self._operation = group, operation

    def launch(self, views: Sequence[torch.Tensor], *, src: int, frees: int) -> None:
        with self._located():
            self._group.broadcast_many(views, src=src)
        self.chunks.append(_Launched(views, frees))

    def land(self, *, counted: bool = True) -> None:
        """Wait for the oldest one and let it go."""
        operation = self._operation
        with self._located():
            self._group.settle(operation.deadline, len(self.chunks) - 1)
        self.staged -= self.chunks.popleft().frees
        operation.step += counted

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        """An error of the wire says which chunk was due."""
        try:
            yield
        except (ManifestMismatch, PeerLost, SyncTimeout) as error:
            error.args = (f"{error.message} (chunk {self._operation.step + 1} of {self._operation.steps})",)
            raise


def _plan(manifest: Manifest, bucket_size: int) -> _Plan:
    key = manifest.digest, bucket_size
    if key not in _plans:
        while len(_plans) >= _PLANS:
            _plans.pop(next(iter(_plans)))
        chunks = plan_chunks(manifest, bucket_size)
        takes = tuple(_takes(manifest, chunk) for chunk in chunks)
        largest = max((meta.nbytes for meta in manifest), default=0)
        _plans[key] = _Plan(
            chunks=chunks,
            takes=takes,
            wholes=tuple(
                all(sizes is None and index == parts[0][0] + i for i, (index, _, _, sizes) in enumerate(parts))
                for parts in takes
            ),
            pulls=tuple(sum(manifest.tensors[s.tensor].nbytes for s in c.segments if s.start == 0) for c in chunks),
            largest=largest if largest > bucket_size else 0,
        )
    return _plans[key]


def _takes(manifest: Manifest, chunk: Chunk) -> tuple[tuple[int, int, int, tuple[int, ...] | None], ...]:
    result = []
    for index, segments in groupby(chunk.segments, key=attrgetter("tensor")):
        parts = list(segments)
        sizes = tuple(segment.nbytes for segment in parts)
        start, stop = parts[0].start, parts[-1].stop
        whole = len(parts) == 1 and stop - start == manifest.tensors[index].nbytes
        result.append((index, start, stop, None if whole else sizes))
    return tuple(result)
