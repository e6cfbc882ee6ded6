"""What the driver knows of its actors: who they are and which methods they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_ray.errors import ConfigError, UnsupportedActor

BACKENDS = {"nccl": "TWINKLE_NCCL", "hccl": "TWINKLE_HCCL", "gloo": "TWINKLE_GLOO", "ipc": "TWINKLE_IPC"}
"""Backends by the modes of a sync that use them."""

TRAINER_METHODS = (
    "prepare_checkpoint_engine",
    "init_checkpoint_process_group",
    "send_checkpoint_weights",
    "finalize_checkpoint_engine",
)
ROLLOUT_METHODS = (
    "prepare_checkpoint_engine",
    "init_checkpoint_process_group",
    "receive_checkpoint_weights",
    "finalize_checkpoint_engine",
)
"""The seeds' surface: the least that an actor must have. Actors with our mixins have more and get more."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer actor: ``trainer[i]``."""

    name: str
    handle: Any

    @property
    def has_mixin(self) -> bool:
        return has_method(self.handle, "agree_checkpoint")


@dataclass(frozen=True, slots=True)
class Replica:
    """One rollout: ``rollout[i]``.

    Attributes:
        handle: the actor that holds (or fronts) the engine.
        owner: the user's replica object with ``sleep`` and ``wake_up``, or the handle itself.
    """

    name: str
    handle: Any
    owner: Any

    @property
    def has_mixin(self) -> bool:
        return has_method(self.handle, "start_checkpoint")


def has_method(handle: Any, method: str) -> bool:
    """Whether an actor handle (or a double of one) has this remote method."""
    return hasattr(getattr(handle, method, None), "remote")


def trainers_of(actors: Sequence[Any]) -> tuple[Trainer, ...]:
    """Check and name the trainers.

    Raises:
        ConfigError: none, or one twice.
        UnsupportedActor: one lacks the methods.
    """
    trainers = tuple(Trainer(f"trainer[{i}]", actor) for i, actor in enumerate(actors))
    if not trainers:
        raise ConfigError("train_actors is empty; a sync needs at least one trainer actor")
    _check([(t.name, t.handle) for t in trainers], TRAINER_METHODS, "TrainActorMixin")
    return trainers


def replicas_of(rollouts: Sequence[Any], known: Sequence[Replica] = (), first: int = 0) -> tuple[Replica, ...]:
    """Check and name the rollouts: actor handles, or objects whose ``primary`` is one.

    Args:
        known: others that are there already.
        first: number of the first one.

    Raises:
        ConfigError: none, or one twice.
        UnsupportedActor: one lacks the methods.
    """
    replicas = tuple(
        Replica(f"rollout[{i}]", rollout if has_method(rollout, ROLLOUT_METHODS[0]) else primary(rollout), rollout)
        for i, rollout in enumerate(rollouts, start=first)
    )
    if not replicas:
        raise ConfigError("rollout_replicas is empty; a sync needs at least one rollout actor")
    _check([(r.name, r.handle) for r in (*known, *replicas)], ROLLOUT_METHODS, "RolloutActorMixin")
    return replicas


def find(replicas: Sequence[Replica], wanted: Any) -> Replica:
    """One of these, by its name, its handle or the object that was given for it.

    Raises:
        ConfigError: it is none of them.
    """
    key = actor_key(primary(wanted)) if not isinstance(wanted, str) else None
    for replica in replicas:
        if replica.owner is wanted or (replica.name == wanted if key is None else actor_key(replica.handle) == key):
            return replica
    who = wanted if isinstance(wanted, str) else "this rollout"
    names = ", ".join(replica.name for replica in replicas)
    raise ConfigError(f"{who} is not, or not any more, one of this manager's; it has {names}")


def primary(rollout: Any) -> Any:
    """The actor behind a replica object; a bare handle stands for itself."""
    return getattr(rollout, "primary", rollout)


def actor_key(handle: Any) -> Any:
    """Equal for two handles of one actor."""
    return getattr(handle, "_actor_id", None) or id(handle)


def _check(members: list[tuple[str, Any]], methods: Sequence[str], mixin: str) -> None:
    seen: dict[Any, str] = {}
    for name, handle in members:
        missing = [method for method in methods if not has_method(handle, method)]
        if missing:
            raise UnsupportedActor(
                f"{name} has no {missing[0]}(); let its class inherit twinkle_ray.mixins.{mixin} (it must be a Ray "
                "actor handle or an object whose .primary is one)"
            )
        key = actor_key(handle)
        if key in seen:
            raise ConfigError(f"{name} is the same actor as {seen[key]}; give each actor once")
        seen[key] = name
