"""Rollouts that come, go and die, trainers that are replaced, and what is told of them."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import ray
import torch

from tests.actors import Probed, Rollout, RolloutBase, TinyLM, Trainer, at_launch, die, placed
from tests.ray.test_lora import Adapted, get
from twinkle_ray import CheckpointEngineManager, ConfigError, ManifestMismatch, PeerLost, SyncError
from twinkle_ray.types import Contents


@pytest.fixture
def actors(reused: Any) -> Any:
    return reused


def kill(actor: Any) -> None:
    """As an OOM kill does: with no word to anybody."""
    os.kill(get(actor.pid.remote()), signal.SIGKILL)


def equal(trainer: Any, *rollouts: Any) -> bool:
    want = get(trainer.digests.remote())
    return all(get(rollout.digests.remote()) == want for rollout in rollouts)


def test_a_rollout_that_joins_takes_part_from_the_next_sync_on(actors: Any) -> None:
    trainer, first, second = actors(Trainer, 1), actors(Rollout, 5), actors(Rollout, 6)
    manager = CheckpointEngineManager([trainer], [first], timeout_s=30)
    manager.sync_weights()
    assert manager.add_rollout(second) == "rollout[1]"
    assert get(second.checkpoint_status.remote()).contents is Contents.NONE
    assert not manager.base_sync_done
    report = manager.sync_weights()
    assert [replica.name for replica in report.replicas] == ["rollout[0]", "rollout[1]"]
    assert report.version == 2
    assert equal(trainer, first, second)
    assert manager.base_sync_done
    for sync in range(2):
        get(trainer.step.remote(sync))
        assert list(manager.sync_weights().phases) == ["transfer"]
    assert equal(trainer, first, second)


def test_a_newcomer_gets_the_base_and_the_adapter(actors: Any) -> None:
    trainer, first, second = actors(Adapted), actors(Rollout, 5), actors(Rollout, 6)
    manager = CheckpointEngineManager([trainer], [first], timeout_s=30)
    manager.sync_weights(False)
    manager.add_rollout(second)
    assert manager.sync_weights(False).base == "plain"
    assert manager.sync_weights(False).base == ""
    want = get(trainer.logits.remote())
    assert all(torch.equal(get(rollout.logits.remote()), want) for rollout in (first, second))


def test_a_rollout_that_is_removed_keeps_what_it_has(actors: Any) -> None:
    trainer, rollouts = actors(Trainer, 1), [actors(Rollout, seed) for seed in (5, 6, 7)]
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=30)
    manager.sync_weights()
    held = get(rollouts[1].digests.remote())
    manager.remove_rollout(rollouts[1])
    assert manager.rollout_actors == [rollouts[0], rollouts[2]]
    get(trainer.step.remote(1))
    report = manager.sync_weights()
    assert [replica.name for replica in report.replicas] == ["rollout[0]", "rollout[2]"]
    assert equal(trainer, rollouts[0], rollouts[2])
    assert get(rollouts[1].digests.remote()) == held
    status = get(rollouts[1].checkpoint_status.remote())
    assert (status.group, status.version, status.contents) == ("", 1, Contents.WHOLE)
    # An error names the one that it is about, though it is no more the one of that number in the list.
    get(rollouts[2].call.remote(lambda one: setattr(one, "model", placed(TinyLM(3, width=8)))))
    with pytest.raises(ManifestMismatch, match=r"rollout\[2\]") as caught:
        manager.sync_weights()
    assert "rollout[1]" not in str(caught.value)
    # A number is never given again.
    manager.remove_rollout("rollout[2]")
    assert manager.add_rollout(rollouts[2]) == "rollout[3]"


def test_members_that_cannot_be_are_refused_in_one_sentence(actors: Any) -> None:
    trainer, one, other = actors(Trainer, 1), actors(Rollout, 5), actors(Rollout, 6)
    manager = CheckpointEngineManager([trainer], [one, other], timeout_s=30)
    with pytest.raises(ConfigError, match=r"rollout\[2\] is the same actor as rollout\[1\]; give each actor once"):
        manager.add_rollout(other)
    manager.remove_rollout(other)
    for wanted in (other, "rollout[1]"):
        with pytest.raises(ConfigError, match=r"is not, or not any more, one of this manager's; it has rollout\[0\]"):
            manager.remove_rollout(wanted)
    with pytest.raises(ConfigError, match=r"rollout\[0\] is the last rollout"):
        manager.remove_rollout(one)
    with pytest.raises(ConfigError, match="train_actors is empty"):
        manager.replace_trainers([])
    with pytest.raises(ConfigError, match="on_dead_rollout is 'ignore'; it must be one of error, drop"):
        CheckpointEngineManager([trainer], [one], on_dead_rollout="ignore")
    for seconds in (0, -1.0):
        with pytest.raises(ConfigError, match="timeout_s is"):
            CheckpointEngineManager([trainer], [one], timeout_s=seconds)
    manager.sync_weights()
    assert equal(trainer, one)


def test_other_trainers_send_from_then_on(actors: Any) -> None:
    rollout = actors(Rollout, 5)
    old, new = actors(Trainer, 1), actors(Trainer, 2)
    manager = CheckpointEngineManager([old], [rollout], timeout_s=30)
    manager.sync_weights()
    manager.replace_trainers([new])
    assert manager.train_actors == [new]
    assert get(old.checkpoint_status.remote()).group == ""
    assert manager.sync_weights().version == 2
    assert equal(new, rollout)
    manager.replace_trainers([actors(Trainer, 3, width=8)])
    with pytest.raises(ManifestMismatch, match=r"rollout\[0\]: .*shape"):
        manager.sync_weights()
    assert equal(new, rollout)


def test_a_trainer_that_died_is_replaced(actors: Any) -> None:
    rollout, old, new = actors(Rollout, 5), actors(Trainer, 1), actors(Trainer, 2)
    manager = CheckpointEngineManager([old], [rollout], timeout_s=30)
    manager.sync_weights()
    kill(old)
    with pytest.raises(PeerLost, match=r"trainer\[0\]"):
        manager.sync_weights()
    manager.replace_trainers([new])
    manager.sync_weights()
    assert equal(new, rollout)


@pytest.mark.parametrize("when", ["between two syncs", "in the middle of one"])
@pytest.mark.parametrize("policy", ["error", "drop"])
def test_a_rollout_that_dies(actors: Any, policy: str, when: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer, rollouts = actors(Trainer, 1), [actors(Rollout, seed) for seed in (5, 6, 7)]
    manager = CheckpointEngineManager(
        [trainer], rollouts, timeout_s=30, on_dead_rollout=policy, bucket_size=1024 if "middle" in when else 1 << 20
    )
    manager.sync_weights()
    get(trainer.step.remote(1))
    if when == "between two syncs":
        kill(rollouts[1])
    else:
        get(rollouts[1].call.remote(die_while_loading))
    start = time.monotonic()
    if policy == "error":
        with pytest.raises(PeerLost, match=r"rollout\[1\]") as caught:
            manager.sync_weights()
        assert caught.value.actors == ("rollout[1]",)
        assert caught.value.versions["rollout[1]"] is None
        manager.remove_rollout("rollout[1]")
        report = manager.sync_weights()
    else:
        with caplog.at_level(logging.WARNING, "twinkle_ray"):
            report = manager.sync_weights()
        assert report.dropped == ("rollout[1]",)
        assert any("rollout[1]: dropped, because its actor is dead" in r.getMessage() for r in caplog.records)
    assert time.monotonic() - start < 15
    assert [replica.name for replica in report.replicas] == ["rollout[0]", "rollout[2]"]
    assert equal(trainer, rollouts[0], rollouts[2])


def die_while_loading(rollout: Probed) -> None:
    at_launch(2, die)


def test_the_last_rollout_is_not_dropped(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30, on_dead_rollout="drop")
    manager.sync_weights()
    kill(rollout)
    with pytest.raises(SyncError, match=r"rollout\[0\]"):
        manager.sync_weights()
    manager.add_rollout(other := actors(Rollout, 6))
    assert manager.sync_weights().dropped == ("rollout[0]",)
    assert equal(trainer, other)


def test_a_rollout_that_is_dead_cannot_join(actors: Any) -> None:
    trainer, rollout, dead = actors(Trainer, 1), actors(Rollout, 5), actors(Rollout, 6)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30)
    kill(dead)
    with pytest.raises(PeerLost, match=r"rollout\[1\]"):
        manager.add_rollout(dead)
    assert manager.rollout_actors == [rollout]
    manager.sync_weights()


def test_a_rollout_that_ray_starts_again_is_empty_until_a_sync_fills_it(actors: Any, stage: Any) -> None:
    """``max_restarts``: the process is another one, with the weights that its engine is made with."""
    trainer = actors(Trainer, 1)
    rollout = stage(ray.remote(num_cpus=0.1, max_restarts=1, max_task_retries=-1)(RolloutBase), 5)
    try:
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30)
        manager.sync_weights()
        manager.sync_weights()
        before = get(rollout.pid.remote())
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while get(rollout.pid.remote()) == before:
            assert time.monotonic() < deadline
        status = get(rollout.checkpoint_status.remote())
        assert (status.version, status.contents) == (0, Contents.NONE)
        assert not manager.base_sync_done
        manager.sync_weights()
        assert equal(trainer, rollout)
        assert get(rollout.checkpoint_status.remote()).contents is Contents.WHOLE
    finally:
        ray.kill(rollout)
