"""Groups on simulated NPUs, among real processes. Patterns are made from a seed by numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.ascend.simulator import fake, npus
from tests.unit.members import Seat, introduce, results
from tests.unit.test_gloo_group import pattern
from twinkle_ray.types import Deadline

MIXED = (0, 1, 7, (1 << 16) - 1, 1 << 16, 0, 3 << 20, 2, 0)


def exchange(group: Any, sizes: tuple[int, ...], src: int = 0, seed: int = 0, seconds: float = 20.0) -> bool:
    expected = pattern(sizes, seed)
    views = [(t if group.rank == src else torch.full_like(t, 85)).to("npu") for t in expected]
    group.broadcast_many(views, src)
    group.synchronize(Deadline.after(seconds))
    return all(torch.equal(view.cpu(), t) for view, t in zip(views, expected, strict=True))


def many(seat: Seat) -> list[bool]:
    group = seat.group()
    right = [exchange(group, MIXED, src, src) for src in range(3)]
    group.destroy_group()
    right.append(fake().fake_live_comms() == 0)
    return right


def test_tensors_arrive(library: Path) -> None:
    with npus(library, many, 3) as people:
        introduce(people)
        assert results(people) == [[True] * 4] * 3
