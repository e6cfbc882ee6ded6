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


@pytest.fixture(scope="session")
def pool(ray_cluster: str) -> Iterator[dict[Any, list[Any]]]:
    """Idle actors by class: to start one that imports PEFT takes seconds."""
    idle: dict[Any, list[Any]] = {}
    yield idle
    for actor in (actor for same in idle.values() for actor in same):
        ray.kill(actor)


@pytest.fixture
def reused(pool: dict[Any, list[Any]]) -> Iterator[Any]:
    """``make(kind, *args, **kwargs)`` makes an actor of :mod:`tests.actors` anew, in a process that may have been one
    before. Tests that patch a process put it right again, or kill it."""
    made: list[tuple[Any, Any]] = []

    def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
        idle = pool.setdefault(kind, [])
        if idle:
            actor = idle.pop()
            ray.get(actor.call.remote(lambda one: one.__init__(*args, **kwargs)), timeout=60)
        else:
            actor = kind.remote(*args, **kwargs)
        made.append((kind, actor))
        return actor

    yield make
    for kind, actor in reversed(made):  # rollouts leave a group before its rank 0 does
        try:
            ray.get(actor.finalize_checkpoint_engine.remote(True), timeout=10)
        except ray.exceptions.RayError:
            continue
        pool[kind].append(actor)
