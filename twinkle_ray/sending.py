"""What one sync has to send: decided from what the trainer has and what each rollout says that it holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_ray.errors import ConfigError
from twinkle_ray.types import MERGED, PLAIN, Contents, RolloutStatus, TrainerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the caller of a sync asks for.

    Attributes:
        merge: one base with the trainer's active adapters merged; else an adapter beside the plain base.
        adapter: its name; ``None``: the one that is active, which then serves all requests that name none.
    """

    merge: bool
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What crosses the wire.

    Attributes:
        base: kind of the base that is sent, ``plain`` or ``merged``; ``None``: all rollouts hold the plain one.
        base_id: of the trainer's plain base; ``""`` if it has no adapters.
        adapter: name of the adapter that follows it; ``None``: none does.
        default: whether that adapter serves all requests which name none.
    """

    base: str | None
    base_id: str = ""
    adapter: str | None = None
    default: bool = False


def decide(wanted: Wanted, trainer: TrainerStatus, rollouts: Mapping[str, RolloutStatus], in_flight: str) -> Sending:
    """What has to be sent so that afterwards every rollout holds what is wanted, whatever it holds now.

    Raises:
        ConfigError: the trainer has no such adapter, an engine has LoRA off or no room for one more, a merged base
            would pull the ground from under other adapters, or requests are to be kept frozen over an adapter that
            goes.
    """
    served = {name: status.default_adapter for name, status in rollouts.items() if status.default_adapter}
    if in_flight == "keep" and (served or not wanted.merge):
        raise ConfigError(
            "in_flight='keep' is not for adapters: a frozen request would go on with a version that is gone; use "
            "'wait' or 'abort'"
        )
    if wanted.merge:
        if not trainer.adapters:
            return Sending(base=PLAIN)
        for name, status in rollouts.items():
            others = [other for other in status.adapters if other != status.default_adapter]
            if others:
                raise ConfigError(
                    f"{name} holds {', '.join(map(repr, others))}, which belongs to the plain base, and "
                    "merge_and_sync=True would replace that; detach_adapter() first, or use merge_and_sync=False"
                )
        return Sending(base=MERGED)
    adapter = wanted.adapter
    if adapter is None:
        adapter = the_active(trainer.adapters, trainer.active)
    elif adapter not in trainer.adapters:
        known = f"it has {', '.join(map(repr, trainer.adapters))}" if trainer.adapters else "it has none"
        raise ConfigError(f"the trainer's model has no LoRA adapter {adapter!r}; {known}")
    default = wanted.adapter is None
    for name, status in rollouts.items():
        require_lora(name, status)
        _require_room(name, status, adapter, default=default)
    there = all(
        status.contents is Contents.WHOLE and status.base == PLAIN and status.base_id == trainer.base_id
        for status in rollouts.values()
    )
    return Sending(base=None if there else PLAIN, base_id=trainer.base_id, adapter=adapter, default=default)


def the_active(names: tuple[str, ...], active: tuple[str, ...]) -> str:
    """The one adapter that is meant where none was named.

    Args:
        names: of all adapters of the trainer.
        active: of those that its forward pass uses.

    Raises:
        ConfigError: there is no adapter, none of them is active, or several are.
    """
    if not names:
        raise ConfigError(
            "the trainer's model has no LoRA adapter that could be sent alone; use merge_and_sync=True, which sends "
            "the whole model"
        )
    if len(active) != 1:
        found = f"{', '.join(active)} are active at once" if active else "none is active"
        raise ConfigError(
            f"which of the trainer's adapters ({', '.join(names)}) is to be sent alone cannot be told: {found}; name "
            "it with sync_weights(adapter=...), or sync merged"
        )
    return active[0]


def disagreements(answers: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """One sentence for each tensor that a rollout cannot load or lacks.

    Args:
        answers: per rollout, of each of its workers the :class:`~twinkle_ray.sinks.Agreement` as a dict.
    """
    problems: dict[str, None] = {}
    for name, workers in answers.items():
        for worker in workers:
            found = [*worker["unknown"], *worker["mismatched"]]
            found += [f"{tensor}: the trainer does not send it" for tensor in worker["missing"]]
            problems |= dict.fromkeys(f"{name}: {problem}" for problem in found)
    return list(problems)


def require_lora(name: str, status: RolloutStatus) -> None:
    """Refuse a rollout whose vLLM cannot serve an adapter.

    Raises:
        ConfigError: so it is.
    """
    if not status.lora.get("enable_lora", True):
        raise ConfigError(
            f"{name}: its vLLM engine was made without enable_lora=True, which sending an adapter alone needs "
            "(RolloutActorMixin.lora_arguments() gives the arguments); make it so, or use merge_and_sync=True"
        )


def _require_room(name: str, status: RolloutStatus, adapter: str, *, default: bool) -> None:
    replaced = status.default_adapter if default else None
    others = [other for other in status.adapters if other not in (adapter, replaced)]
    most = status.lora.get("max_cpu_loras")
    if most is not None and len(others) >= most:
        raise ConfigError(
            f"{name}: adapter {adapter!r} finds no room beside {', '.join(map(repr, others))}: its vLLM engine holds "
            f"{most}; detach_adapter() one, or raise max_loras or max_cpu_loras"
        )


def idle_lora(rollouts: Mapping[str, RolloutStatus]) -> list[str]:
    """The rollouts whose vLLM has LoRA on and nothing to use it for, if only merged weights are sent."""
    return [name for name, status in rollouts.items() if status.lora.get("enable_lora") and not status.adapters]
