"""Several groups as one, for a sender that is rank 0 of each: those on its device, and the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import Store

from twinkle_ray.backends.base import BroadcastGroup, SyncGroup
from twinkle_ray.errors import ConfigError, TwinkleRayError
from twinkle_ray.types import Deadline, Rendezvous


class FanOut(BroadcastGroup):
    """What is broadcast goes to every group. If one fails all do.

    Args:
        group_name: of the sync for which they were made.
        groups: connected or not; the one for whose device the tensors are comes first. All but the first make progress
            by themselves once something is launched, so that waiting for the first one holds none of them up.
    """

    name: ClassVar[str] = "TWINKLE_FANOUT"

    def __init__(self, group_name: str, groups: Sequence[SyncGroup]) -> None:
        super().__init__(1 + sum(group.world_size - 1 for group in groups), 0, group_name)
        self.groups = tuple(groups)
        self.device_type = groups[0].device_type  # type: ignore[misc]
        self.hosts = any(group.hosts for group in groups)
        self.numbers = groups[0].numbers
        for group in groups:
            group.followers = tuple(other for other in groups if other is not group)

    @classmethod
    def missing(cls) -> str | None:
        return "it is made of other groups"

    @property
    def failure(self) -> TwinkleRayError | None:
        return next((error for group in self.groups if (error := group.failure) is not None), None)

    def host(self, tensors: Iterable[torch.Tensor]) -> None:
        held = list(tensors)
        for group in self.groups:
            group.host(held)

    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        for group in reversed(self.groups):
            if group.device_type == self.device_type:
                group.broadcast_many(views, src)
                continue
            # Through this device's memory, of two chunks at most; the endpoint's deadline bounds the wait.
            group.settle(Deadline.after(group.op_timeout_s), 1)
            group.broadcast_many([view.to(group.device_type) for view in views], src)

    def rally(self) -> None:
        for group in reversed(self.groups):
            group.rally()

    def assemble(self, deadline: Deadline) -> None:
        """No group may begin before the others have come together, so this waits."""
        for group in self.groups:
            group.muster(deadline)
        for group in reversed(self.groups):
            group.rally()
            group.synchronize(deadline)

    def synchronize(self, deadline: Deadline) -> None:
        for group in self.groups:
            group.synchronize(deadline)

    def settle(self, deadline: Deadline, leave: int) -> None:
        for group in self.groups:
            group.settle(deadline, leave)

    def fence(self) -> None:
        for group in self.groups:
            group.fence()

    def abort(self, reason: str) -> None:
        for group in self.groups:
            group.abort(reason)

    def destroy_group(self) -> None:
        from twinkle_ray.backends import destroy_group

        for group in self.groups:
            destroy_group(group)

    def connect(self, rendezvous: Rendezvous, deadline: Deadline, meeting: Any = None) -> None:
        raise ConfigError("each group of a fan-out is connected for itself")

    def _build(self, store: Store, rendezvous: Rendezvous, deadline: Deadline) -> None:
        raise NotImplementedError

    def _busy(self) -> bool:
        return any(group._busy() for group in self.groups)

    def _sever(self) -> None:
        for group in self.groups:
            group._sever()

    def _release(self) -> None:
        pass
