"""What the tests with Ray actors share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray


@pytest.fixture
def actors(ray_cluster: str) -> Iterator[Any]:
    """``make(kind, *args, **kwargs)`` starts an actor; all are killed afterwards."""
    made: list[Any] = []

    def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(kind.remote(*args, **kwargs))
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)
