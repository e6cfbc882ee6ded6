"""What the tests with Ray actors share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml


class Stage:
    """``stage(kind, *args, **kwargs)`` starts an actor.

    Attributes:
        mode: of a sync between such actors.
    """

    def __init__(self, mode: str, **options: Any) -> None:
        self.mode = mode
        self.made: list[Any] = []
        self._options = options

    def __call__(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        self.made.append(kind.options(**self._options).remote(*args, **kwargs))
        return self.made[-1]


@pytest.fixture
def actors(ray_cluster: str, device: str, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A :class:`Stage`, whose actors are killed afterwards."""
    if device == "npu":
        root, library = request.getfixturevalue("root"), request.getfixturevalue("library")
        stage = Stage("hccl", resources={"NPU": 1}, runtime_env=npu_runtime_env(root, library))
    else:
        stage = Stage("gloo")
    yield stage
    for actor in stage.made:
        ray.kill(actor)


def npu_runtime_env(root: Path, library: Path) -> dict[str, Any]:
    """What ``ray_configs`` recommends, and the simulator under it."""
    from tests.ascend import simulator

    recommended = yaml.safe_load((root / "ray_configs" / "runtime-env-ascend.yaml").read_text())
    simulated = {**simulator.environment(library), "FAKE_HCCL_EXEC_MS": "8000", "TWINKLE_TEST_DEVICE": "npu"}
    return {**recommended, "env_vars": {**recommended["env_vars"], **simulated}}
