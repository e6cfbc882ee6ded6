"""Concurrent calls to actors, bounded: one phase of a sync, seen from the driver.

``ray.get`` on a list raises at the first error but leaves the others running, and says nothing of who is missing. A
round waits for all its members with one deadline; at the first failure it lets the others be released, collects for a
moment what they have to say, and raises the error that explains most, naming the phase and the actors.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from twinkle_ray.errors import (
    PeerLost,
    SyncAborted,
    SyncError,
    SyncTimeout,
    TwinkleRayError,
    first_cause,
    vagueness,
)
from twinkle_ray.naming import named
from twinkle_ray.types import Deadline, OpState, OpStatus

_SLICE_S = 0.2
_SETTLE_S = 1.5
"""Seconds after the first failure during which the others may still report a better explanation."""

_SETTLE_ALONE_S = 0.3
"""The same if everybody else has answered, and the one that did not is the failure."""

_MARGIN_S = 0.5
"""Actors end by their own deadline and can say why; the driver's own deadline lies this much later."""

_DRAIN_S = 60.0

_keys = itertools.count(1)
_session = uuid.uuid4().hex[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A method that blocks in the actor until it is done.

    Attributes:
        ref: of the call; or a function that makes it, when the round comes to this member.
    """

    ref: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation of a rollout that is started and then polled."""

    handle: Any
    op: str
    request: dict[str, Any]


@dataclass(slots=True)
class _Waiting:
    name: str
    kind: str  # call | poll
    handle: Any = None
    key: str = ""
    op: str = ""
    sent: float = 0.0


class Round:
    """One phase.

    Args:
        phase: as errors name it.
        deadline: of the whole sync.
        release: called once at the first failure with a reason; tells the other members to give up.
        owner: names the member that holds a rank of the group (``rank 2`` -> ``rollout[1]``).
        seen: called with each answer of a member that was polled.
    """

    def __init__(
        self,
        phase: str,
        deadline: Deadline,
        *,
        release: Callable[[str], None] | None = None,
        owner: Callable[[str], str] | None = None,
        seen: Callable[[str, OpStatus], None] | None = None,
    ) -> None:
        self.phase = phase
        self._seen = seen
        self._deadline = deadline
        self._release = release
        self._owner = owner or (lambda name: name)
        self._pending: dict[Any, _Waiting] = {}
        self._later: list[tuple[float, _Waiting]] = []
        self._dropped: list[Any] = []
        self._results: dict[str, Any] = {}
        self._errors: dict[str, BaseException] = {}

    def run(self, members: Mapping[str, Call | Op]) -> dict[str, Any]:
        """Results by member name.

        Raises:
            TwinkleRayError: the one that explains the failure best; of type :class:`SyncError` unless a member
                refused its input.
        """
        try:
            for name, member in members.items():
                self._send(name, member)
            self._collect()
        except BaseException as error:
            self._let_go(f"the driver was interrupted: {type(error).__name__}")
            raise
        finally:
            self._drain()
        if self._errors:
            self._let_go(self._reason())
            raise self._verdict()
        return self._results

    def _collect(self) -> None:
        settle: float | None = None
        while self._pending or self._later:
            now = time.monotonic()
            if self._errors and settle is None:
                settle = now + (_SETTLE_ALONE_S if self._only_late() else _SETTLE_S)
            if self._errors and not self._patient():
                self._let_go(self._reason())
            if settle is not None and (now > settle or self._explained()):
                break
            if settle is None and now > self._deadline.at + _MARGIN_S and not self._take_ready():
                self._expire()
                continue
            self._step(settle)

    def run_each(self, members: Mapping[str, Call | Op]) -> dict[str, Any]:
        """Like :meth:`run`, but every member runs to its own end; then the first failure is raised.

        The results of those that succeeded are on the error as ``done``.
        """
        done, failures = self.run_all(members)
        for failure in failures.values():
            failure.__dict__["done"] = done
            raise failure
        return done

    def run_all(self, members: Mapping[str, Call | Op]) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Like :meth:`run`, but every member runs to its own end: results and failures, by member name."""
        done: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        rounds = {name: Round(self.phase, self._deadline, owner=self._owner) for name in members}
        for name, member in members.items():
            rounds[name]._send(name, member)
        for name, single in rounds.items():
            try:
                done |= single.run({})
            except Exception as error:
                failures[name] = error
        return done, failures

    def _send(self, name: str, member: Call | Op) -> None:
        if isinstance(member, Call):
            self._pending[member.ref() if callable(member.ref) else member.ref] = _Waiting(name, "call")
            return
        key = f"{_session}-{next(_keys)}"
        start = named(member.handle.start_checkpoint, f"twinkle.{member.op}")
        ref = start.remote(key, member.op, member.request, _SLICE_S)
        self._pending[ref] = _Waiting(name, "poll", member.handle, key, member.op, time.monotonic())

    def _poll(self, waiting: _Waiting) -> None:
        waiting.sent = time.monotonic()
        poll = named(waiting.handle.poll_checkpoint, f"twinkle.{waiting.op}.poll")
        self._pending[poll.remote(waiting.key, _SLICE_S)] = waiting

    def _step(self, settle: float | None) -> None:
        now = time.monotonic()
        due = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, waiting in due:
            self._poll(waiting)
        limits = [0.25, *(at - now for at, _ in self._later)]
        if settle is not None:
            limits.append(settle - now)
        if not self._pending:
            time.sleep(max(0.0, min(limits)))
            return
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=max(0.001, min(limits)))
        for ref in ready:
            self._take(ref, self._pending.pop(ref))

    def _take_ready(self) -> bool:
        """Take what is there already. Whether there was any: who has answered is not late, whoever else kept us."""
        refs = list(self._pending)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in ready:
            if ref in self._pending:  # not of a member whose failure was among them
                self._take(ref, self._pending.pop(ref))
        return bool(ready)

    def _take(self, ref: Any, waiting: _Waiting) -> None:
        try:
            value = ray.get(ref, timeout=10.0)
        except RayError as error:
            cause = as_cause(error)
            if isinstance(cause, SyncError) and isinstance(error, RayActorError):
                cause.actors = (waiting.name,)
            self._fail(waiting.name, cause, str(getattr(error, "traceback_str", "") or error))
            return
        except Exception as error:
            self._fail(waiting.name, error, "")
            return
        if waiting.kind == "call":
            self._results[waiting.name] = value
        elif not isinstance(value, OpStatus):  # of an actor that overrides what the mixin gives it
            self._fail(waiting.name, SyncError(f"it answered {value!r}, which says nothing of its operation"), "")
        else:
            status = value
            if self._seen is not None:
                self._seen(waiting.name, status)
            if status.state is OpState.FAILED:
                cause = status.error or SyncError(f"{status.op} failed")
                self._fail(waiting.name, cause, str(getattr(cause, "twinkle_traceback", "")))
            elif status.state is OpState.DONE:
                self._results[waiting.name] = status.result
            elif time.monotonic() - waiting.sent < _SLICE_S / 2:  # an async actor: it answers at once
                self._later.append((time.monotonic() + 0.003, waiting))
            else:
                self._poll(waiting)

    def _fail(self, name: str, error: BaseException, trace: str) -> None:
        known = self._errors.get(name)
        if known is None or vagueness(error) < vagueness(known):
            if trace and not isinstance(error, SyncError):
                error.__dict__.setdefault("twinkle_traceback", trace)
            self._errors[name] = error
        for ref in [ref for ref, waiting in self._pending.items() if waiting.name == name]:
            del self._pending[ref]
            self._dropped.append(ref)
        self._later = [entry for entry in self._later if entry[1].name != name]

    def _drain(self) -> None:
        """Fetch what nobody waits for any more: Ray prints an error that nobody has fetched as an unhandled one."""
        refs = [*self._dropped, *self._pending]
        if refs:
            threading.Thread(target=_fetch, args=(refs,), name="twinkle-drain", daemon=True).start()

    def _missing(self) -> list[str]:
        waiting = [*self._pending.values(), *(entry[1] for entry in self._later)]
        return sorted({w.name for w in waiting if w.name not in self._errors})

    def _expire(self) -> None:
        names = self._missing()
        self._errors[names[0]] = SyncTimeout(
            f"{', '.join(names)} did not finish {self.phase} within {self._deadline.seconds:.1f} s",
            phase=self.phase,
            actors=tuple(names),
        )

    def _let_go(self, reason: str) -> None:
        release, self._release = self._release, None
        if release is not None:
            release(reason)

    def _reason(self) -> str:
        name, error = next(iter(self._errors.items()))
        return f"{name}: {type(error).__name__}: {error}"

    def _patient(self) -> bool:
        """Whether all that failed had only waited for others. Whoever kept them ends by its own deadline and says so,
        unless it is released before."""
        error = first_cause(self._errors.values())
        return isinstance(error, SyncAborted) or (isinstance(error, SyncTimeout) and not error.actors)

    def _only_late(self) -> bool:
        """Whether nobody has failed but one member that did not answer in time, and all others have ended well."""
        ((name, error), *more) = self._errors.items()
        return not more and isinstance(error, SyncTimeout) and error.actors == (name,) and self._missing() == []

    def _explained(self) -> bool:
        return any(vagueness(error) == 0 for error in self._errors.values())

    def _verdict(self) -> BaseException:
        name = min(self._errors, key=lambda n: vagueness(self._errors[n]))
        error = self._errors[name]
        # In the transfer even refused input has cost the group, and perhaps half of a model was written.
        if isinstance(error, TwinkleRayError) and not isinstance(error, SyncError) and self.phase != "transfer":
            named = copy.copy(error)
            named.args = (f"{name}: {error}",)
            return named
        if isinstance(error, SyncError):
            actors = tuple(dict.fromkeys(self._owner(actor) for actor in error.actors)) or (name,)
            if isinstance(error, (SyncAborted, SyncTimeout, PeerLost)) and not error.actors:
                # Nobody named a culprit: it is whoever has not answered, else all that say the same.
                late = (n for n, e in self._errors.items() if type(e) is type(error))
                actors = tuple(self._missing() or sorted(late))
            text = str(error)
            for rank in error.actors:
                text = re.sub(rf"\b{re.escape(rank)}\b", self._owner(rank), text)
            made = type(error)(
                f"{self.phase}: {', '.join(actors)}: {text}",
                phase=self.phase,
                actors=actors,
                cause_type=error.cause_type,
                cause_traceback=error.cause_traceback,
            )
        else:
            made = SyncError(
                f"{self.phase}: {name} raised {type(error).__name__}: {error}",
                phase=self.phase,
                actors=(name,),
                cause_type=type(error).__name__,
                cause_traceback=str(getattr(error, "twinkle_traceback", "")),
            )
        made.__cause__ = error
        return made


def _fetch(refs: list[Any]) -> None:
    for ref in refs:
        with contextlib.suppress(Exception):
            ray.get(ref, timeout=_DRAIN_S)


def as_cause(error: BaseException) -> BaseException:
    """What a Ray error stands for: the error raised in the actor, or the loss of the actor."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, BaseException) else error
    if isinstance(error, RayActorError):
        return PeerLost("its actor is dead or cannot be reached" + _reason(error))
    return error


def _reason(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    return f" ({text[:300]})" if text else ""
