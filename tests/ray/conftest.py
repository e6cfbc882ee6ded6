"""What the tests with Ray actors share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from tests.actors import Rollout, Trainer


class Stage:
    """``stage(kind, *args, **kwargs)`` starts an actor.

    Attributes:
        mode: of a sync between such actors.
        options: of such an actor, plain data.
    """

    def __init__(self, mode: str, **options: Any) -> None:
        self.mode = mode
        self.made: list[Any] = []
        self.options = options

    def __call__(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        self.made.append(kind.options(**self.options).remote(*args, **kwargs))
        return self.made[-1]


def stage_on(device: str, request: pytest.FixtureRequest) -> Stage:
    """A :class:`Stage` for actors whose models are on this device."""
    if device == "cpu":
        return Stage("gloo")
    root, library = request.getfixturevalue("root"), request.getfixturevalue("library")
    return Stage("hccl", resources={"NPU": 1}, runtime_env=npu_runtime_env(root, library))


IDLE_AT_MOST = 4
"""Idle actors that may hold a device each: the largest test wants 12 of the 16."""


@pytest.fixture
def stage(ray_cluster: str, device: str, request: pytest.FixtureRequest) -> Stage:
    """For actors whose models are on ``device``."""
    return stage_on(device, request)


@pytest.fixture
def actors(stage: Stage) -> Iterator[Stage]:
    """A :class:`Stage`, whose actors are killed afterwards."""
    yield stage
    for actor in stage.made:
        ray.kill(actor)


@pytest.fixture(scope="session")
def pool(ray_cluster: str) -> Iterator[dict[Any, list[Any]]]:
    """Idle actors by class and mode: to start one that imports PEFT takes seconds."""
    idle: dict[Any, list[Any]] = {}
    yield idle
    for actor in (actor for same in idle.values() for actor in same):
        ray.kill(actor)


@pytest.fixture
def reused(pool: dict[Any, list[Any]], stage: Stage) -> Iterator[Any]:
    """``make(kind, *args, **kwargs)`` makes an actor of :mod:`tests.actors` anew, in a process that may have been one
    before. Tests that patch a process put it right again, or kill it."""
    made: list[tuple[Any, Any]] = []

    def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
        idle = pool.setdefault((kind, stage.mode), [])
        if idle:
            actor = idle.pop()
            ray.get(actor.call.remote(lambda one: one.__init__(*args, **kwargs)), timeout=60)
        else:
            actor = stage(kind, *args, **kwargs)
        made.append((kind, actor))
        return actor

    make.mode = stage.mode  # type: ignore[attr-defined]
    yield make
    for kind, actor in reversed(made):  # rollouts leave a group before its rank 0 does
        try:
            ray.get(actor.finalize_checkpoint_engine.remote(True), timeout=10)
        except ray.exceptions.RayError:
            continue
        if stage.options.get("resources") and sum(map(len, pool.values())) >= IDLE_AT_MOST:
            ray.kill(actor)
        else:
            pool[kind, stage.mode].append(actor)


@pytest.fixture
def stocked(reused: Any, stage: Stage) -> Iterator[Any]:
    """``make(kind, *args, **kwargs)`` as ``reused`` for the two stock kinds; other actors are killed afterwards."""
    others: list[Any] = []

    def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind in (Trainer, Rollout):
            return reused(kind, *args, **kwargs)
        others.append(stage(kind, *args, **kwargs))
        return others[-1]

    make.mode = stage.mode  # type: ignore[attr-defined]
    yield make
    for actor in others:
        ray.kill(actor)


class Program:
    """A child process that prints JSON lines and reads commands.

    Attributes:
        said: what it printed first.
    """

    def __init__(self, root: Path, log: Path, *arguments: str, **env: str) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.said: dict[str, Any] = self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-4000:]
        heard: dict[str, Any] = json.loads(line)
        return heard

    def tell(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """Let it end by itself, or kill it."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=30)


def npu_runtime_env(root: Path, library: Path) -> dict[str, Any]:
    """What ``ray_configs`` recommends, and the simulator under it."""
    from tests.ascend import simulator

    recommended = yaml.safe_load((root / "ray_configs" / "runtime-env-ascend.yaml").read_text())
    simulated = {**simulator.environment(library), "FAKE_HCCL_EXEC_MS": "8000", "TWINKLE_TEST_DEVICE": "npu"}
    return {**recommended, "env_vars": {**recommended["env_vars"], **simulated}}
