"""The thin loops that execute a plan: one at the sender, one at each receiver.

Both know the manifest and the bucket size, so both walk the same chunks; each chunk is one launch of the group. Nothing
here decides where a tensor lives: the source yields tensors, the sink gives buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.digest import bytes_view
from twinkle_ray.endpoint import Operation
from twinkle_ray.manifest import Manifest
from twinkle_ray.plan import plan_chunks
from twinkle_ray.sinks import LoadReport, Sink


def wire_device(group: SyncGroup, device: torch.device) -> torch.device:
    """The parameters' device if the group moves its tensors, else the CPU (Gloo under a model on a GPU)."""
    return device if device.type == group.device_type else torch.device(group.device_type)


def send(
    group: SyncGroup, tensors: Iterator[torch.Tensor], manifest: Manifest, bucket_size: int, operation: Operation
) -> None:
    """Broadcast the manifest's tensors from this rank.

    Args:
        tensors: in manifest order, contiguous and of the manifest's dtypes. Consumed to its end on success; the caller
            closes it on an error, so that a sharded source can finish its gathers.
    """
    chunks = plan_chunks(manifest, bucket_size)
    operation.steps = len(chunks)
    tensor = torch.empty(0)
    at = -1
    for chunk in chunks:
        views = []
        with operation.timed("gather"):
            for segment in chunk.segments:
                while at < segment.tensor:
                    tensor = next(tensors)
                    at += 1
                    if tensor.device.type != group.device_type:
                        tensor = tensor.to(group.device_type)
                views.append(bytes_view(tensor)[segment.start : segment.stop])
        with operation.timed("wire"):
            group.broadcast_many(views, src=group.rank)
            # A gathered or cast tensor lives only in `views`; it must not be freed before the wire has read it.
            group.synchronize(operation.deadline)
        operation.step += 1
    while at + 1 < len(manifest):  # zero-size tensors at the end: consumed so that every rank makes the same gathers
        next(tensors)
        at += 1


def receive(
    group: SyncGroup, sink: Sink, manifest: Manifest, bucket_size: int, operation: Operation, source: int = 0
) -> LoadReport:
    """Receive the manifest's tensors from rank ``source`` into the sink."""
    chunks = plan_chunks(manifest, bucket_size)
    operation.steps = len(chunks)
    device = wire_device(group, sink.device)
    open_buffers: dict[int, torch.Tensor] = {}
    try:
        sink.begin(manifest)
        for chunk in chunks:
            views = []
            for segment in chunk.segments:
                buffer = open_buffers.get(segment.tensor)
                if buffer is None:
                    buffer = open_buffers[segment.tensor] = sink.buffer(manifest.tensors[segment.tensor], device)
                views.append(bytes_view(buffer)[segment.start : segment.stop])
            with operation.timed("wire"):
                if sink.in_place:
                    operation.touch()
                group.broadcast_many(views, src=source)
                group.synchronize(operation.deadline)
            with operation.timed("load"):
                if chunk.completes:
                    operation.touch()
                sink.ready(
                    [
                        (meta, open_buffers.pop(index) if meta.nbytes else sink.buffer(meta, device))
                        for index in chunk.completes
                        for meta in (manifest.tensors[index],)
                    ]
                )
            operation.step += 1
        with operation.timed("load"):
            report = sink.finish()
    except BaseException:
        sink.abandon()
        raise
    return replace(report, seconds={**report.seconds, **operation.seconds})
