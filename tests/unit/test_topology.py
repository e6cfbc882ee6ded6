"""Who has which rank."""

from __future__ import annotations

import pytest

from twinkle_ray.errors import ConfigError
from twinkle_ray.topology import build, init_arguments


@pytest.mark.parametrize(("trainers", "replicas", "workers"), [(1, 1, 1), (1, 3, 1), (2, 2, 2), (1, 4, 1), (2, 1, 2)])
def test_a33_each_rank_is_one_member_and_all_are_there(trainers: int, replicas: int, workers: int) -> None:
    made = build(trainers, [workers] * replicas)
    ranks = [rank for rank in made.trainer_ranks if rank is not None]
    ranks += [rank for replica in made.rollout_ranks for rank in replica]
    assert sorted(ranks) == list(range(made.world_size))
    assert made.world_size == 1 + replicas * workers
    assert made.trainer_ranks == (0, *[None] * (trainers - 1))
    owners = [made.owner(rank) for rank in range(made.world_size)]
    assert owners == ["trainer[0]", *[f"rollout[{i}]" for i in range(replicas) for _ in range(workers)]]
    ours, theirs = init_arguments(made, "where")
    assert ours["rank"] == [0, *[-1] * (trainers - 1)]
    assert theirs["rank"] == [1 + workers * i for i in range(replicas)]
    assert set(ours["world_size"] + theirs["world_size"]) == {made.world_size}


def test_a33_replicas_may_have_different_numbers_of_workers() -> None:
    made = build(1, [2, 1, 4], ["rollout[5]", "rollout[0]", "rollout[9]"])
    assert made.rollout_ranks == ((1, 2), (3,), (4, 5, 6, 7))
    assert [made.owner(rank) for rank in (2, 3, 4)] == ["rollout[5]", "rollout[0]", "rollout[9]"]
    for workers in ([], [1, 0]):
        with pytest.raises(ConfigError, match="at least one"):
            build(1, workers)
