"""``manager.check()``: everything that a sync compares, asked of everybody, with nothing sent and nothing changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_ray.checking import CheckReport, compare, failed
from twinkle_ray.errors import ConfigError, TwinkleRayError
from twinkle_ray.manifest import Manifest
from twinkle_ray.replica import BACKENDS, Replica, Trainer
from twinkle_ray.residency import no_sleep_mode
from twinkle_ray.rounds import Call, Op, Round
from twinkle_ray.sending import Wanted, decide, disagreements, idle_lora
from twinkle_ray.types import Deadline, RolloutStatus, TrainerStatus

logger = logging.getLogger("twinkle_ray")


def dry_run(
    trainers: Sequence[Trainer],
    replicas: Sequence[Replica],
    wanted: Wanted,
    mode_for: Callable[[Mapping[str, TrainerStatus], Mapping[str, RolloutStatus]], str],
    bucket_size: int,
    deadline: Deadline,
    *,
    sleeping: bool = False,
) -> CheckReport:
    """Ask everyone, and collect what is wrong instead of stopping at the first of it.

    Args:
        mode_for: the transport for these trainers and rollouts; raises ConfigError.
        sleeping: whether a sync puts rollouts to sleep and wakes their weights.

    Raises:
        CheckFailed: a sync would fail.
    """
    run = _DryRun(trainers, replicas, deadline)
    statuses: dict[str, TrainerStatus] = run.ask_trainers(
        "checkpoint_status", **({} if wanted.merge else {"merge": False})
    )
    held: dict[str, RolloutStatus] = run.ask_rollouts("prepare")
    first = statuses.get(trainers[0].name)
    run.problems += [
        f"{name} holds other names, shapes or dtypes than trainer[0]; all trainers must hold one model"
        for name, status in statuses.items()
        if first is not None and status.digest != first.digest
    ]
    run.problems += [
        f"{name} is asleep; wake at least its weights, with manager.wake_up_rollout(['weights'])"
        for name, status in held.items()
        if "weights" in status.asleep and not sleeping
    ]
    run.problems += [
        f"{name}: {no_sleep_mode(status.kind)}" for name, status in held.items() if sleeping and not status.sleep_mode
    ]
    own, mode = None, ""
    if first is not None:
        own = run.manifest(held, merge=wanted.merge)
        if held:
            try:
                mode = mode_for(statuses, held)
            except ConfigError as error:
                run.problems.append(str(error))
            run.adapters(wanted, first, held)
    warnings = []
    if wanted.merge:
        warnings = [f"{name}: vLLM has enable_lora=True, which merged weights do not need" for name in idle_lora(held)]
    facts = run.facts(BACKENDS.get(mode), held)
    staging = 0
    if own is not None:
        staging = min(2 * bucket_size + max(meta.nbytes for meta in own), own.nbytes)
    problems, more = compare(facts, staging)
    run.problems += problems
    warnings += more
    if run.problems or own is None:
        raise failed(run.problems, warnings)
    for warning in warnings:
        logger.warning(warning)
    return CheckReport(mode=mode, tensors=len(own), nbytes=own.nbytes, warnings=tuple(warnings), members=facts)


class _DryRun:
    """The questions, and the problems that came up in the answers."""

    def __init__(self, trainers: Sequence[Trainer], replicas: Sequence[Replica], deadline: Deadline) -> None:
        self.problems: list[str] = []
        self._trainers, self._replicas, self._deadline = trainers, replicas, deadline

    def ask(self, members: Mapping[str, Call | Op]) -> dict[str, Any]:
        """What those answer that can; the errors of the others are problems."""
        done, failures = Round("check", self._deadline).run_all(members)
        for name, error in failures.items():
            text = str(error).removeprefix(f"{name}: ")
            self.problems.append(f"{name}: {text.removeprefix(f'check: {name}: ')}")
        return done

    def ask_trainers(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.ask({t.name: Call(ref=getattr(t.handle, method).remote(*args, **kwargs)) for t in self._trainers})

    def ask_rollouts(self, op: str, among: Mapping[str, Any] | None = None, **request: Any) -> dict[str, Any]:
        """Ask those ``among`` them, or all."""
        asked = [r for r in self._replicas if among is None or r.name in among]
        return self.ask({r.name: Op(handle=r.handle, op=op, request=request) for r in asked})

    def manifest(self, held: Mapping[str, RolloutStatus], *, merge: bool) -> Manifest | None:
        """The trainer's, compared by every rollout."""
        sent = self.ask_trainers("checkpoint_manifest", merge)
        if self._trainers[0].name not in sent:
            return None
        own = Manifest.from_json(sent[self._trainers[0].name])
        self.problems += disagreements(self.ask_rollouts("agree", held, manifest=own.as_json()))
        return own

    def adapters(self, wanted: Wanted, trainer: TrainerStatus, held: Mapping[str, RolloutStatus]) -> None:
        """Whether the adapter that is wanted is there, and every rollout can serve it."""
        try:
            sending = decide(wanted, trainer, held, "wait")
        except TwinkleRayError as error:
            self.problems.append(str(error))
            return
        if sending.adapter is None:
            return
        first = self._trainers[0]
        found = self.ask({first.name: Call(ref=first.handle.checkpoint_adapter.remote(sending.adapter))})
        for one in found.values():
            self.ask_rollouts("check_adapter", held, name=one["name"], config=one["config"], manifest=one["manifest"])

    def facts(self, backend: str | None, held: Mapping[str, RolloutStatus]) -> dict[str, dict[str, Any]]:
        """Of every process; of a rollout those of its worker with the least memory."""
        facts = self.ask_trainers("checkpoint_facts", backend)
        workers: dict[str, list[dict[str, Any]]] = self.ask_rollouts("facts", held, backend=backend)
        return facts | {name: min(of, key=lambda fact: fact["free_nbytes"]) for name, of in workers.items()}
