"""What a trainer actor owes to the other ranks of its own job, and to the sync that it was asked for."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.actors import TrainerBase
from twinkle_ray.errors import ConfigError, SyncError, SyncTimeout
from twinkle_ray.training import Training


class Walked(Training):
    """Sends two tensors and counts how many were walked, as a sharded model's gathers would be."""

    def __init__(self) -> None:
        self.walked = 0
        super().__init__(lambda: self.pairs)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            self.walked += 1
            yield name, torch.ones(4)


def agreed(training: Training) -> str:
    own = training.source().manifest()
    return training.agree(own.digest, ("float32", "float32"))


def test_a_sender_without_a_group_still_makes_the_gathers_that_the_other_ranks_are_in() -> None:
    training = Walked()
    training.rank = 0
    digest = agreed(training)
    training.walked = 0
    with pytest.raises(SyncError, match="not in the group"):
        training.send(digest, 8, 5.0)
    assert training.walked == 4  # once to compare the manifest, once for the gathers


def test_a_trainer_that_another_sync_has_taken_does_not_send_into_that_ones_group() -> None:
    class Other:
        group_name = "other"
        rank = 0
        failure = None

        def abort(self, reason: str) -> None:
            raise AssertionError("it is not ours to abort")

    training = Walked()
    training.rank = 0
    training.endpoint.group = Other()  # type: ignore[assignment]
    digest = agreed(training)
    with pytest.raises(SyncError, match="another sync has taken it"):
        training.send(digest, 8, 5.0, group="mine")
    training.rank = None  # taken as a rank that only gathers
    with pytest.raises(SyncError, match="another sync has taken it"):
        training.send(digest, 8, 5.0, group="mine")
    assert training.send(digest, 8, 5.0) == {}


def test_no_time_left_is_not_the_default_time() -> None:
    actor = TrainerBase()
    metadata = actor.prepare_checkpoint_engine(True)
    start = time.monotonic()
    with pytest.raises(SyncTimeout):
        actor.init_checkpoint_process_group(0, 2, metadata, timeout_s=0.0)
    assert time.monotonic() - start < 3
    actor.finalize_checkpoint_engine(leave=True)


def test_a_rank_without_metadata_is_told_so() -> None:
    actor = TrainerBase()
    with pytest.raises(ConfigError, match="master_metadata"):
        actor.init_checkpoint_process_group(0, 2)
    actor.init_checkpoint_process_group(-1, 2)


def test_the_master_needs_no_metadata_as_in_the_seeds() -> None:
    actor: Any = TrainerBase()
    actor.prepare_checkpoint_engine(True)
    actor.init_checkpoint_process_group(rank=0, world_size=1)
    assert actor.checkpoint_status().group
    actor.abort_checkpoint("of another driver", "another group")
    assert actor.checkpoint_status().group
    actor.abort_checkpoint("of this one", actor.checkpoint_status().group)
    assert not actor.checkpoint_status().group
    actor.finalize_checkpoint_engine(leave=True)


def test_whether_its_memory_can_be_shared_is_asked_once_for_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def shareable(device: Any, tensors: Any) -> bool:
        asked.append(len(list(tensors)))
        return len(asked) == 1

    monkeypatch.setattr("twinkle_ray.training.shareable", shareable)
    held: list[torch.nn.Module] = [torch.nn.Linear(2, 2)]
    one = Training(lambda: held[0])
    assert [one.status().shareable for _ in range(3)] == [True] * 3
    held[0] = torch.nn.Linear(2, 2, bias=False)
    assert [one.status().shareable for _ in range(2)] == [False] * 2
    assert asked == [2, 1]


def test_a_module_that_was_replaced_is_not_kept() -> None:
    held: list[torch.nn.Module] = [torch.nn.Linear(2, 2)]
    one = Training(lambda: held[0])
    one.status()
    before = weakref.ref(held[0])
    held[0] = torch.nn.Linear(2, 2)
    one.source()
    gc.collect()
    assert before() is None
