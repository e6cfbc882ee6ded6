"""A group of one receiver for tests: what is broadcast to it are the bytes of given tensors, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.endpoint import Operation
from twinkle_ray.errors import SyncError
from twinkle_ray.manifest import Manifest
from twinkle_ray.sinks import LoadReport, Sink
from twinkle_ray.transfer import receive
from twinkle_ray.types import Deadline


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in row-major order, by way of numpy."""
    return (
        bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""
    )


class Feed:
    """The group.

    Args:
        tensors: in the order and dtypes of the manifest.
        fail_at: raise instead of the launch of this number, from 0.

    Attributes:
        launched: sizes of the views of each launch.
        under_way: views that were launched and not waited for, with what they will hold.
    """

    device_type = "cpu"
    rank = 1

    def __init__(self, tensors: Iterable[torch.Tensor], fail_at: int | None = None) -> None:
        self.content = b"".join(map(raw, tensors))
        self.at = 0
        self.fail_at = fail_at
        self.launched: list[list[int]] = []
        self.under_way: deque[list[tuple[torch.Tensor, bytes]]] = deque()

    def rally(self) -> None:
        pass

    def assemble(self, deadline: Deadline) -> None:
        self.rally()

    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        if len(self.launched) == self.fail_at:
            raise SyncError("the wire broke", phase="transfer")
        self.launched.append([view.numel() for view in views])
        flying = []
        for view in views:
            assert view.dtype == torch.uint8
            assert view.is_contiguous()
            assert view.numel() > 0
            flying.append((view, self.content[self.at : self.at + view.numel()]))
            self.at += view.numel()
        places = sorted((view.data_ptr(), view.data_ptr() + view.numel()) for view in views)
        assert all(end <= later for (_, end), (later, _) in pairwise(places)), "a rank would pass on mixed bytes"
        self.under_way.append(flying)

    def flush(self) -> None:
        pass

    def settle(self, deadline: Deadline, leave: int) -> None:
        while len(self.under_way) > leave:
            for view, content in self.under_way.popleft():
                view.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def synchronize(self, deadline: Deadline) -> None:
        self.settle(deadline, 0)


def deliver(
    sink: Sink,
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
    bucket_size: int,
    *,
    fail_at: int | None = None,
    operation: Operation | None = None,
) -> LoadReport:
    """One sync into a sink, which has agreed: the bytes of ``tensors`` by way of the real receive loop."""
    feed: Any = Feed([tensors[meta.name] for meta in manifest], fail_at)
    operation = operation or Operation("transfer", Deadline.after(60.0))
    report = receive(cast(SyncGroup, feed), sink, manifest, bucket_size, operation)
    assert feed.at == len(feed.content), "not all bytes were asked for"
    return report
