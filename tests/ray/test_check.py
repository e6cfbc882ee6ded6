"""``manager.check()``: all that is wrong at once, before a byte has moved."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch

from tests.actors import Rollout, TinyLM, Trainer, placed
from tests.ray.test_lora import Adapted, get
from twinkle_ray import CheckpointEngineManager
from twinkle_ray.checking import CheckFailed, compare
from twinkle_ray.types import Contents


@pytest.fixture
def actors(reused: Any) -> Any:
    return reused


def test_what_fits_is_said_and_nothing_is_changed(actors: Any) -> None:
    trainer, rollouts = actors(Adapted), [actors(Rollout, seed) for seed in (5, 6)]
    held = [get(rollout.digests.remote()) for rollout in rollouts]
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=30)
    for how in ({}, {"merge_and_sync": False}, {"adapter": "default"}):
        report = manager.check(**how)
        assert report.mode == actors.mode
        assert report.nbytes == sum(t.nbytes for t in TinyLM(0).state_dict().values())
        assert report.warnings == ()
        assert report.members.keys() == {"trainer[0]", "rollout[0]", "rollout[1]"}
        for facts in report.members.values():
            assert facts["versions"]["torch"] == importlib.metadata.version("torch")
            assert facts["free_nbytes"] > 1 << 20
    assert [get(rollout.digests.remote()) for rollout in rollouts] == held
    assert [get(rollout.checkpoint_status.remote()).contents for rollout in rollouts] == [Contents.NONE] * 2
    manager.sync_weights()


def test_all_that_is_wrong_is_said_at_once(actors: Any) -> None:
    trainers = [actors(Trainer, 1), actors(Trainer, 1, width=8)]
    rollouts = [actors(Rollout, 5, dtype=torch.bfloat16, width=8), actors(Rollout, 6), actors(Rollout, 7)]
    get(rollouts[1].call.remote(lambda one: setattr(one.model, "more", placed(torch.nn.Linear(2, 2)))))
    get(rollouts[2].call.remote(lambda one: delattr(one, "model")))
    manager = CheckpointEngineManager(trainers, rollouts, timeout_s=30)
    with pytest.raises(CheckFailed) as caught:
        manager.check(adapter="tenant")
    text = "\n".join(caught.value.problems)
    for part in (
        "trainer[1] holds other names, shapes or dtypes than trainer[0]",
        "rollout[0]: embed.weight: shape (32, 16) from the trainer, (32, 8) held",
        "rollout[1]: more.weight: the trainer does not send it",
        "rollout[1]: more.bias: the trainer does not send it",
        "has neither self.llm nor self.model",
        "the trainer's model has no LoRA adapter 'tenant'; it has none",
    ):
        assert part in text
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    assert "rollout[2]: " in text
    assert get(rollouts[1].checkpoint_status.remote()).version == 0


def facts(**more: Any) -> dict[str, Any]:
    usual = {"versions": {"twinkle_ray": "1", "ray": "2", "torch": "3"}, "free_nbytes": 100, "device": "cpu"}
    return {**usual, "backend": "", **more}


def test_processes_are_compared() -> None:
    same = {"trainer[0]": facts(), "rollout[0]": facts()}
    assert compare(same, 100) == ([], [])
    other = facts(versions={"twinkle_ray": "0", "ray": "2", "torch": "4"}, free_nbytes=3 << 20, backend="no cupy here")
    problems, warnings = compare({**same, "rollout[1]": other}, 5 << 20)
    assert problems == [
        "rollout[1]: no cupy here",
        "not all have the same twinkle_ray: 1 in trainer[0], rollout[0]; 0 in rollout[1]",
    ]
    assert warnings[0] == "not all have the same torch: 3 in trainer[0], rollout[0]; 4 in rollout[1]"
    assert warnings[-1] == (
        "rollout[1]: 3 MiB are free on cpu, and a sync may stage up to 5 MiB there; lower bucket_size or leave more "
        "memory free"
    )
