"""Trainer and rollout in one bundle."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import ray

from tests.actors import Rollout, Trainer
from twinkle_ray import CheckpointEngineManager, ConfigError, Placement, SyncTimeout

pytestmark = pytest.mark.usefixtures("ray_cluster")


def where(actor: Any) -> tuple[str, str]:
    """The placement group, and the devices that Ray gave."""
    group = ray.get_runtime_context().get_placement_group_id()
    return group, os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=60)


def ping_for(seconds: float, actor: Any) -> None:
    """Ray takes a moment to end actors."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        get(actor.ping.remote())


def test_trainer_and_rollout_of_a_bundle_get_the_same_device_and_sync() -> None:
    with Placement(2, resource="NPU", trainer_share=0.4, cpus=0.4) as place:
        trainers = [Trainer.options(**place.trainer(i)).remote(1) for i in range(2)]
        rollouts = [Rollout.options(**place.rollout(i)).remote(2) for i in range(2)]
        found = get([actor.call.remote(where) for actor in (*trainers, *rollouts)])
        assert {group for group, _ in found} == {place.group.id.hex()}
        devices = [device for _, device in found]
        assert devices[:2] == devices[2:]
        assert len(set(devices)) == 2
        with CheckpointEngineManager(trainers, rollouts, is_colocated=True, sleep_level=0) as manager:
            manager.sync_and_wake()
        assert get(rollouts[1].digests.remote()) == get(trainers[0].digests.remote())
    with pytest.raises(ray.exceptions.RayActorError):  # they end with their bundles
        ping_for(30.0, trainers[0])


def test_without_a_device_and_over_several() -> None:
    with Placement(2, resource=None, cpus=1.0) as place:
        assert place.trainer(1)["num_cpus"] == 0.5
        assert "resources" not in place.rollout(1)
        over = place.rollout(0, 1)
        assert (over["num_gpus"], over["scheduling_strategy"].placement_group_capture_child_tasks) == (0, True)
        assert over["runtime_env"]["env_vars"] == {"VLLM_RAY_PER_WORKER_GPUS": "0.5", "VLLM_RAY_BUNDLE_INDICES": "0,1"}
        for wrong in ((), (0, 0), (2,), (0, 2)):
            with pytest.raises(ConfigError, match=r"no device 2; this placement has 2|one or more devices, each once"):
                place.rollout(*wrong)
        with pytest.raises(ConfigError, match="no device -1"):
            place.trainer(-1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"devices": 1, "trainer_share": 1.0}, r"trainer_share is 1\.0"),
        ({"devices": 1, "cpus": 0}, "cpus is 0"),
    ],
)
def test_numbers_that_make_no_sense(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(**how)


def test_a_cluster_without_such_devices_is_described() -> None:
    with pytest.raises(
        SyncTimeout, match=r"no place for 1 bundles of .*'GPU': 1\.0.* within 1 s; the cluster has .*'NPU'"
    ):
        Placement(1, timeout_s=1)
