"""Several drivers, and a driver that is not ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.actors import Rollout, RolloutBase, Trainer
from twinkle_ray import CheckpointEngineManager
from twinkle_ray.checkpoint_engine import GlooCheckpointEngine


def test_two_drivers_on_one_cluster_do_not_cross(ray_cluster: str, root: Path, stage: Any) -> None:
    env = {**os.environ, "PYTHONPATH": str(root)}
    drivers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ray.second_driver", ray_cluster, str(seed), json.dumps(stage.options)],
            cwd=root,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    answers = []
    for driver in drivers:
        out, _ = driver.communicate(timeout=120)
        assert driver.returncode == 0
        answers.append(json.loads(out.splitlines()[-1]))
    assert [a["equal"] for a in answers] == [True, True]
    assert answers[0]["digest"] != answers[1]["digest"]


@pytest.mark.parametrize("when", ["idle", "in the middle of a sync"])
def test_a_driver_that_is_killed_leaves_rollouts_that_the_next_one_can_use(
    ray_cluster: str, root: Path, stage: Any, when: str
) -> None:
    names = [f"{kind}-{uuid.uuid4().hex[:8]}" for kind in ("trainer", "rollout")]
    trainer = Trainer.options(name=names[0], **stage.options).remote(1)
    rollout = ray.remote(num_cpus=0.1)(SlowRolloutBase).options(name=names[1], **stage.options).remote(5)
    pid = ray.get(rollout.pid.remote(), timeout=60)
    namespace = ray.get_runtime_context().namespace
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.ray.dying_driver", ray_cluster, namespace, *names],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert [driver.stdout.readline().strip() for _ in range(2)] == ["syncing", "synced"]
        if when != "idle":
            ray.get(rollout.call.remote(slow_down), timeout=30)
            driver.stdin.write("go on\n")
            driver.stdin.flush()
            assert driver.stdout.readline().strip() == "syncing"
            deadline = time.monotonic() + 20
            while not ray.get(rollout.checkpoint_status.remote(), timeout=20).updating:
                assert time.monotonic() < deadline
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(timeout=30)
        ray.get(rollout.call.remote(speed_up), timeout=30)
        ray.get(trainer.step.remote(3), timeout=30)
        start = time.monotonic()
        with CheckpointEngineManager([trainer], [rollout], timeout_s=30) as manager:
            manager.sync_weights()
        assert time.monotonic() - start < 30
        held, want = ray.get([rollout.digests.remote(), trainer.digests.remote()], timeout=30)
        assert held == want
        assert ray.get(rollout.pid.remote(), timeout=30) == pid
    finally:
        driver.kill()
        for actor in (trainer, rollout):
            ray.kill(actor)


class SlowRolloutBase(RolloutBase):
    """Everything is loaded, chunk by chunk, and none too fast."""

    seconds = 0.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        from twinkle_ray.sinks import ModuleSink

        ready = ModuleSink.ready

        def slow(sink: ModuleSink, tensors: Any) -> None:
            time.sleep(self.seconds)
            ready(sink, tensors)

        ModuleSink.ready = slow  # type: ignore[method-assign]
        ModuleSink._ranges = lambda *_: None  # type: ignore[method-assign]


def slow_down(rollout: SlowRolloutBase) -> None:
    rollout.seconds = 0.3


def speed_up(rollout: SlowRolloutBase) -> None:
    rollout.seconds = 0.0


def seeds_sync(trainers: list[Any], rollouts: list[Any], merge: bool = True) -> None:
    """The calls of the seeds' manager in its order, with its arguments (it has no time-outs; a test needs them)."""

    def get(refs: Any) -> Any:
        return ray.get(refs, timeout=60)

    flags = [True] + [False] * (len(trainers) - 1)
    metadata = get([t.prepare_checkpoint_engine.remote(flag) for t, flag in zip(trainers, flags, strict=True)])[0]
    get([r.prepare_checkpoint_engine.remote(False) for r in rollouts])
    sides = GlooCheckpointEngine.build_topology(len(trainers), len(rollouts), [metadata])
    init = []
    for actors, kwargs in zip((trainers, rollouts), sides, strict=True):
        init += [
            a.init_checkpoint_process_group.remote(**{key: values[i] for key, values in kwargs.items()})
            for i, a in enumerate(actors)
        ]
    get(init)
    if merge:
        get([t.merge_lora.remote() for t in trainers])
    get(
        [t.send_checkpoint_weights.remote(adapter_only=False) for t in trainers]
        + [r.receive_checkpoint_weights.remote(base_sync_done=False, peft_config=None) for r in rollouts]
    )
    if merge:
        get([t.unmerge_lora.remote() for t in trainers])
    get([a.finalize_checkpoint_engine.remote() for a in (*trainers, *rollouts)])


def test_the_seeds_own_driver_works_with_our_mixins(stage: Any) -> None:
    trainers, rollouts = [stage(Trainer, 1) for _ in range(2)], [stage(Rollout, seed) for seed in (2, 3)]
    groups = set()
    for step in range(3):
        seeds_sync(trainers, rollouts)
        held = ray.get([a.digests.remote() for a in (trainers[0], *rollouts)], timeout=30)
        assert held[1] == held[0]
        assert held[2] == held[0]
        assert ray.get([r.weights_version.remote() for r in rollouts], timeout=30) == [step + 1] * 2
        groups |= {s.group for s in ray.get([r.checkpoint_status.remote() for r in rollouts], timeout=30)}
        ray.get([t.step.remote(step) for t in trainers], timeout=30)
    assert len(groups) == 1  # a sound group is kept from sync to sync
    lost = rollouts[1].checkpoint_status.remote()
    ray.kill(rollouts[1])
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(lost, timeout=10)
    while ray.get(trainers[0].checkpoint_status.remote(), timeout=10).group:
        time.sleep(0.05)  # until the lifeline has told the others
    fresh = [rollouts[0], stage(Rollout, 4)]
    seeds_sync(trainers, fresh)
    held = ray.get([a.digests.remote() for a in (trainers[0], *fresh)], timeout=30)
    assert held[1] == held[2] == held[0]
    for actor in (*trainers, *fresh):
        ray.kill(actor)
