"""The driver's side of sleep: rollouts are put to sleep and woken all at once, each from the state that it is in.

Whoever has our mixin is asked what sleeps. A user's replica object whose actor cannot be asked is remembered for, as
the seeds' driver does for all.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from twinkle_ray.errors import ConfigError, SyncError, SyncTimeout, first_cause
from twinkle_ray.replica import Replica
from twinkle_ray.residency import TAGS, described, require_tags
from twinkle_ray.rounds import Call, Op, Round, as_cause
from twinkle_ray.types import Deadline

_ASK_S = 5.0

Asleep = dict[str, tuple[str, ...]]
"""Memory tags that sleep, by rollout."""


class Sleepers:
    """The rollouts of one manager as sleepers."""

    def __init__(self) -> None:
        self._remembered: dict[str, set[str]] = {}
        self._able: set[str] = set()

    def forget(self, name: str) -> None:
        """This rollout takes part no more."""
        self._remembered.pop(name, None)
        self._able.discard(name)

    def asleep(self, replicas: Iterable[Replica], deadline: Deadline) -> dict[str, tuple[str, ...] | None]:
        """What sleeps now; ``None`` of one that does not answer."""
        replicas = list(replicas)
        found, _ = self._ask([r for r in replicas if r.has_mixin], deadline)
        said = {name: tags for name, (tags, _) in found.items()}
        return {r.name: said.get(r.name) if r.has_mixin else self._recalled(r.name) for r in replicas}

    def sleep(
        self, replicas: Sequence[Replica], level: int, *, in_flight: str, parts: bool, deadline: Deadline
    ) -> Asleep:
        """Put those to sleep that are awake.

        Args:
            in_flight: what becomes of their requests: ``wait`` for them, or ``abort`` them.
            parts: whether it is enough that something sleeps already.

        Returns:
            What sleeps then.

        Raises:
            ConfigError: one of them cannot sleep; then nobody was put to sleep.
            SyncError: some failed; the others sleep. ``asleep`` on it and its message say who is in which state.
        """
        self._require_able([r for r in replicas if r.has_mixin and r.name not in self._able], deadline)
        asleep = self._before(replicas, deadline)

        def awake(replica: Replica) -> bool:
            tags = asleep[replica.name]
            return not (tags if parts else "weights" in tags)

        request = {"level": level, "in_flight": in_flight, "parts": parts, "timeout_s": deadline.remaining()}
        return asleep | self._act("sleep", replicas, awake, request, {"level": level}, deadline)

    def wake_up(self, replicas: Sequence[Replica], tags: Sequence[str] | None, deadline: Deadline) -> Asleep:
        """Wake what sleeps.

        Args:
            tags: only these; ``None``: all.

        Returns:
            What sleeps then.

        Raises:
            ConfigError: there is no such tag; then nobody was woken.
            SyncError: as :meth:`sleep`'s.
        """
        require_tags(tags)
        asleep = self._before(replicas, deadline)

        def sleeps(replica: Replica) -> bool:
            return any(tags is None or tag in tags for tag in asleep[replica.name])

        request = {"tags": None if tags is None else list(tags)}
        return asleep | self._act("wake_up", replicas, sleeps, request, request, deadline)

    # --- asking ------------------------------------------------------------------------------------------------

    def _ask(
        self, replicas: Sequence[Replica], deadline: Deadline
    ) -> tuple[dict[str, tuple[tuple[str, ...], str]], dict[str, Exception]]:
        ops = {r.name: Op(handle=r.handle, op="residency", request={}) for r in replicas}
        return Round("sleep", deadline).run_all(ops)

    def _recalled(self, name: str) -> tuple[str, ...]:
        return tuple(sorted(self._remembered.get(name, ())))

    def _require_able(self, replicas: Sequence[Replica], deadline: Deadline) -> None:
        """Before anybody is put to sleep. Each is asked once; an engine made anew refuses for itself."""
        if not replicas:
            return
        found, failures = self._ask(replicas, deadline)
        if failures:
            raise self._told("sleep", failures, replicas)
        unable = {r.name: found[r.name][1] for r in replicas if found[r.name][1] and not _by_owner(r)}
        if unable:
            raise ConfigError("; ".join(f"{name}: {why}" for name, why in unable.items()))
        self._able |= found.keys()

    def _before(self, replicas: Sequence[Replica], deadline: Deadline) -> Asleep:
        """What sleeps of those whose own object does it. The others look for themselves, and are taken for such as
        have something to do."""
        asked = [r for r in replicas if _by_owner(r) and r.has_mixin]
        found, failures = self._ask(asked, deadline) if asked else ({}, {})
        if failures:
            raise self._told("sleep", failures, replicas)
        said = {name: tuple(tags) for name, (tags, _) in found.items()}
        return {r.name: said[r.name] if r in asked else self._recalled(r.name) for r in replicas}

    # --- acting ------------------------------------------------------------------------------------------------

    def _act(
        self,
        action: str,
        replicas: Sequence[Replica],
        wanted: Callable[[Replica], bool],
        request: dict[str, Any],
        arguments: dict[str, Any],
        deadline: Deadline,
    ) -> Asleep:
        own = {r.name: r for r in replicas if _by_owner(r) and wanted(r)}
        threads = _Threads({name: _call(r.owner, action, arguments, deadline) for name, r in own.items()})
        ops: dict[str, Call | Op] = {
            r.name: Op(handle=r.handle, op=action, request=request) for r in replicas if not _by_owner(r)
        }
        done, failures = Round(action, deadline).run_all(ops)
        after: Asleep = {name: tuple(tags) for name, tags in done.items()}
        succeeded, failed = threads.join(action, deadline)
        failures |= failed
        for name in succeeded:
            self._note(name, action, arguments)
        if failures:
            raise self._told(action, failures, replicas)
        mixed = [replica for replica in own.values() if replica.has_mixin]
        after |= {name: self._recalled(name) for name in own}
        after |= {name: tags for name, tags in self.asleep(mixed, deadline).items() if tags is not None}
        return after

    def _note(self, name: str, action: str, arguments: Mapping[str, Any]) -> None:
        if action == "sleep":
            self._remembered[name] = set(TAGS)
        else:
            tags = arguments["tags"]
            self._remembered[name] = set() if tags is None else self._remembered.get(name, set()) - set(tags)

    def _told(self, action: str, failures: Mapping[str, Exception], replicas: Sequence[Replica]) -> Exception:
        """The failure that explains most, with who is in which state now."""
        asleep = self.asleep(replicas, Deadline.after(_ASK_S))
        error = first_cause(failures.values())
        told: Any = copy.copy(error)
        told.args = (f"{error} (now {described(asleep)})", *error.args[1:])
        told.__dict__ |= {**vars(error), "asleep": asleep}
        if isinstance(told, SyncError):
            told.phase, told.actors = action, tuple(failures)
        told.__cause__ = error.__cause__
        assert isinstance(told, Exception)
        return told


def _by_owner(replica: Replica) -> bool:
    """Whether the user's replica object, or a method of the actor's own, does it."""
    return all(callable(getattr(replica.owner, m, None)) or _remote(replica.owner, m) for m in ("sleep", "wake_up"))


def _remote(owner: Any, method: str) -> bool:
    return hasattr(getattr(owner, method, None), "remote")


def _call(owner: Any, action: str, arguments: dict[str, Any], deadline: Deadline) -> Callable[[], None]:
    def call() -> None:
        method = getattr(owner, action)
        answer = method.remote(**arguments) if hasattr(method, "remote") else method(**arguments)
        if isinstance(answer, ray.ObjectRef):
            try:
                ray.get(answer, timeout=max(deadline.remaining(), 0.001))
            except ray.exceptions.GetTimeoutError as error:
                raise SyncTimeout(f"it did not answer within {deadline.seconds:.1f} s") from error

    return call


class _Threads:
    """Functions that block, each in a thread of its own."""

    def __init__(self, functions: Mapping[str, Callable[[], None]]) -> None:
        self._waiting = set(functions)
        self._answers: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
        for name, function in functions.items():
            thread = threading.Thread(target=self._run, args=(name, function), name="twinkle-sleep", daemon=True)
            thread.start()

    def _run(self, name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._answers.put((name, error))
        else:
            self._answers.put((name, None))

    def join(self, action: str, deadline: Deadline) -> tuple[list[str], dict[str, Exception]]:
        """Who succeeded, and errors of the others."""
        done: list[str] = []
        failures: dict[str, Exception] = {}
        while self._waiting:
            try:
                name, error = self._answers.get(timeout=max(deadline.remaining(), 0.001))
            except queue.Empty:
                for late in sorted(self._waiting):
                    text = f"{action}: {late} did not answer within {deadline.seconds:.1f} s"
                    failures[late] = SyncTimeout(text, phase=action, actors=(late,))
                break
            self._waiting.discard(name)
            if error is None:
                done.append(name)
            else:
                failures[name] = _typed(action, name, as_cause(error))
        return done, failures


def _typed(action: str, name: str, error: BaseException) -> Exception:
    if isinstance(error, SyncError):
        made = type(error)(f"{action}: {name}: {error}", phase=action, actors=(name,))
    else:
        kind = type(error).__name__
        made = SyncError(f"{action}: {name} raised {kind}: {error}", phase=action, actors=(name,), cause_type=kind)
    made.__cause__ = error
    return made
