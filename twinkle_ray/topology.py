"""Who has which rank. Pure.

One group holds the senders and every process that owns a rollout's parameters: world size = senders + workers. The
first trainer is rank 0; the workers of a replica are neighbours, in the order of the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinkle_ray.errors import ConfigError
from twinkle_ray.routes import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks of one group.

    Attributes:
        world_size: members of the group.
        trainer_ranks: per trainer its rank, ``None`` for one that only takes part in gathers.
        rollout_ranks: per rollout the ranks of its workers.
        names: per rollout its name; by default ``rollout[i]``.
        seats: where a sync has several groups: per group its members by their ranks in the whole, the sender first.
    """

    world_size: int
    trainer_ranks: tuple[int | None, ...]
    rollout_ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()
    seats: tuple[tuple[int, ...], ...] = ()

    def owner(self, rank: int) -> str:
        """The member with this rank, as errors name it: ``trainer[0]``, ``rollout[2]``."""
        for index, ranks in enumerate(self.rollout_ranks):
            if rank in ranks:
                return self.names[index] if self.names else f"rollout[{index}]"
        return f"trainer[{self.trainer_ranks.index(rank)}]" if rank in self.trainer_ranks else f"rank {rank}"


def build(trainers: int, workers: Sequence[int], names: Sequence[str] = ()) -> Topology:
    """Topology of ``trainers`` trainers, the first of which sends, and replicas with ``workers[i]`` workers each.

    Args:
        names: of the replicas, if they are not numbered from 0 on.

    Raises:
        ConfigError: no trainer, no rollout, or a replica without workers.
    """
    if trainers < 1:
        raise ConfigError("there is no trainer actor; a sync needs at least one")
    if not workers:
        raise ConfigError("there is no rollout actor; a sync needs at least one")
    ranks: list[tuple[int, ...]] = []
    rank = 1
    for index, count in enumerate(workers):
        if count < 1:
            raise ConfigError(f"rollout[{index}] has {count} workers; it needs at least one")
        ranks.append(tuple(range(rank, rank + count)))
        rank += count
    return Topology(
        world_size=rank,
        trainer_ranks=(0, *[None] * (trainers - 1)),
        rollout_ranks=tuple(ranks),
        names=tuple(names),
    )


def arrange(trainers: int, workers: Sequence[int], names: Sequence[str], routes: Routes) -> Topology:
    """Topology of several groups: ranks as :func:`build` gives them, and after them those of the other senders.

    Args:
        routes: who is in which group.

    Raises:
        ConfigError: as :func:`build`.
    """
    made = build(trainers, workers, names)
    ranks: list[int | None] = [None] * trainers
    ranks[0] = 0
    number = made.world_size
    for trainer in routes.senders:
        if trainer:
            ranks[trainer] = number
            number += 1
    seats = []
    for party in routes.parties:
        sender = ranks[party.trainer]
        assert sender is not None
        seats.append((sender, *(made.rollout_ranks[replica][worker] for replica, worker in party.workers)))
    if 0 not in routes.senders:
        ranks[0] = None
    return replace(made, world_size=number, trainer_ranks=tuple(ranks), seats=tuple(seats))


def init_arguments(made: Topology, metadata: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Arguments of ``init_process_group`` for all trainers and all rollouts, in the seeds' form: dicts of lists.

    Every rollout is one rank; a trainer that is not in the group has rank -1.
    """

    def arguments(ranks: list[int]) -> dict[str, list[Any]]:
        count = len(ranks)
        return {"rank": ranks, "world_size": [made.world_size] * count, "master_metadata": [metadata] * count}

    trainers = [-1 if rank is None else rank for rank in made.trainer_ranks]
    return arguments(trainers), arguments([ranks[0] for ranks in made.rollout_ranks])
