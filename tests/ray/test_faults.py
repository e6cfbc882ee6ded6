"""Failures in one place, and what they leave in the others."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import ray

from tests.actors import Rollout, RolloutBase, Trainer, TrainerBase
from tests.ray.test_sync import SlowRollout, get
from twinkle_ray import CheckpointEngineManager, SyncError, SyncTimeout
from twinkle_ray.types import Contents

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def actors(stocked: Any) -> Any:
    return stocked


def test_rollouts_say_what_they_hold_after_an_error_that_needs_no_explanation(actors: Any) -> None:
    @ray.remote(num_cpus=0.1)
    class Breaks(TrainerBase):
        def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
            self.walks = 0
            return super().send_checkpoint_weights(*args, **kwargs)

        def named_weights(self) -> Any:
            for i, pair in enumerate(self.model.state_dict().items()):
                self.walks = getattr(self, "walks", -9) + (i == 0)
                if self.walks == 2 and i == 9:
                    raise KeyError("tensor 9 is not there")
                yield pair

    trainer, rollout = actors(Breaks), actors(Rollout, 1)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60, bucket_size=300) as manager:
        with pytest.raises(SyncError, match="tensor 9 is not there"):
            manager.sync_weights()
        status = get(rollout.checkpoint_status.remote())
        assert not status.updating
        assert status.contents is Contents.MIXED


def test_a_trainer_is_let_go_when_a_rollout_cannot_join(actors: Any) -> None:
    @ray.remote(num_cpus=0.1)
    class Refuses(RolloutBase):
        def start_checkpoint(self, key: str, op: str, request: Any, wait_s: float = 0.0) -> Any:
            if op == "connect":
                raise RuntimeError("no network here")
            return super().start_checkpoint(key, op, request, wait_s)

    trainer, rollouts = actors(Trainer), [actors(Refuses, 1), actors(Rollout, 2)]
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=20)
    get([a.ping.remote() for a in (trainer, *rollouts)])
    with pytest.raises(SyncError, match="no network here") as caught:
        manager.sync_weights()
    assert caught.value.phase == "init"
    assert caught.value.actors == ("rollout[0]",)
    get([a.ping.remote() for a in rollouts], 3)
    get(trainer.ping.remote(), 3)


def test_every_trainer_walks_its_weights_as_often_as_the_others(actors: Any) -> None:
    @ray.remote(num_cpus=0.1)
    class Counts(TrainerBase):
        walks = 0

        def named_weights(self) -> Any:
            for i, pair in enumerate(self.model.state_dict().items()):
                self.walks += i == 0
                yield pair

        def count(self) -> int:
            return self.walks

    trainers, rollout = [actors(Counts), actors(Counts)], actors(Rollout, 1)
    with CheckpointEngineManager(trainers, [rollout], timeout_s=60) as manager:
        for _ in range(2):
            manager.sync_weights()
            manager.verify()
            first, second = get([t.count.remote() for t in trainers])
            assert first == second


def test_a_rollout_that_hangs_in_loading_is_named_and_not_the_trainer(actors: Any) -> None:
    trainer, slow, other = actors(Trainer), actors(SlowRollout, 1, 6.0), actors(Rollout, 2)
    get([a.ping.remote() for a in (trainer, slow, other)])
    manager = CheckpointEngineManager([trainer], [slow, other], timeout_s=4, bucket_size=2000)
    with pytest.raises(SyncTimeout) as caught:
        manager.sync_weights()
    assert caught.value.phase == "transfer"
    assert caught.value.actors == ("rollout[0]",)
    # Its thread is still in the old load; the next sync must not be mixed with it.
    manager = CheckpointEngineManager([trainer], [other], timeout_s=30)
    manager.sync_weights()
    assert get(other.digests.remote()) == get(trainer.digests.remote())


def test_two_managers_that_share_a_trainer_and_take_turns(actors: Any) -> None:
    trainer, one, two = actors(Trainer), actors(Rollout, 1), actors(Rollout, 2)
    first = CheckpointEngineManager([trainer], [one], timeout_s=30)
    second = CheckpointEngineManager([trainer], [two], timeout_s=30)
    for seed in range(3):
        get(trainer.step.remote(seed))
        first.sync_weights()
        second.sync_weights()
        expected = get(trainer.digests.remote())
        assert get([one.digests.remote(), two.digests.remote()]) == [expected, expected]
    first.close()
    second.sync_weights()
    second.close()


def test_two_managers_that_share_a_trainer_at_once_end_soon_and_write_nothing_torn(actors: Any) -> None:
    trainer, one, two = actors(Trainer), actors(Rollout, 1), actors(Rollout, 2)
    managers = [CheckpointEngineManager([trainer], [r], timeout_s=20) for r in (one, two)]
    get([a.ping.remote() for a in (trainer, one, two)])
    errors: list[BaseException] = []

    def sync(manager: CheckpointEngineManager) -> None:
        try:
            manager.sync_weights()
        except SyncError as error:
            errors.append(error)

    threads = [threading.Thread(target=sync, args=(manager,)) for manager in managers]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 15, errors
    for manager, rollout in zip(managers, (one, two), strict=True):
        manager.sync_weights()
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())
