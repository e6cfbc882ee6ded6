"""Several drivers, and a driver that is not ours."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

from tests.actors import Rollout, Trainer
from twinkle_ray.checkpoint_engine import GlooCheckpointEngine


def test_two_drivers_on_one_cluster_do_not_cross(ray_cluster: str, root: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(root)}
    drivers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ray.second_driver", ray_cluster, str(seed)],
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


def test_the_seeds_own_driver_works_with_our_mixins(ray_cluster: str) -> None:
    trainers, rollouts = [Trainer.remote(1), Trainer.remote(1)], [Rollout.remote(2), Rollout.remote(3)]
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
    fresh = [rollouts[0], Rollout.remote(4)]
    seeds_sync(trainers, fresh)
    held = ray.get([a.digests.remote() for a in (trainers[0], *fresh)], timeout=30)
    assert held[1] == held[2] == held[0]
    for actor in (*trainers, *fresh):
        ray.kill(actor)
