"""What a manager lets others see of it: metrics, the live status record, and fields for its log lines.

A sync must not pay for being watched, and must never fail because of it. The driver's thread only stores what it knows
(a :class:`Watch`'s plain attributes); one daemon thread per process looks at all watches twice a second, gives metrics
to Ray and writes status records, and whatever goes wrong there ends there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from twinkle_ray import metrics
from twinkle_ray.metrics import State, Values
from twinkle_ray.status import HEARTBEAT_S, LastFailure, LastSync, ManagerStatus, MemberStatus, Store
from twinkle_ray.types import OpStatus, RolloutStatus, SyncReport

logger = logging.getLogger("twinkle_ray")

_TICK_S = 0.5
_WRITE_S = 1.0
"""A status record is written at most this often."""
_SLOW_S = 0.5
"""A sync that takes longer is shown while it runs."""
_GAUGES_S = 1.0
"""Gauges are set this often, since Ray exports only those that were set in its last interval: of 10 s, unless it was
configured otherwise, and of 1 s at least."""
_LOCK_S = 2.0
_MESSAGE_CHARS = 2000


@dataclass(slots=True)
class Sync:
    """One sync that runs.

    Attributes:
        phases: seconds by phase; the last one is the one that runs.
        report: to be set when it has succeeded.
        version: that is being sent; ``None``: nothing is yet.
    """

    phases: dict[str, float] = field(default_factory=dict)
    report: SyncReport | None = None
    version: int | None = None
    began: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.time)

    @property
    def phase(self) -> str:
        while True:
            try:
                return next(reversed(self.phases), "")
            except RuntimeError:  # the other thread has begun a phase just now
                continue

    @property
    def slow(self) -> bool:
        return time.monotonic() - self.began > _SLOW_S


class Watch:
    """One manager, as others see it.

    Attributes:
        manager: its id.
        log: the package's logger; its lines have the fields of :meth:`fields`.
    """

    def __init__(self) -> None:
        self._job = _job_id()
        self.manager = f"{self._job or 'local'}-{uuid.uuid4().hex[:6]}"
        self.log = _Log(self)
        # Written by the manager's thread. Records are replaced, not changed, so that the other one sees whole ones.
        self._generation = 0
        self._version = 0
        self._held: dict[str, tuple[State, int | None]] = {}
        self._steps: dict[str, tuple[int, int]] = {}
        self._sync: Sync | None = None
        self._phase = ""
        self._last: LastSync | None = None
        self._failure: LastFailure | None = None
        self._changes = 0
        self._events: deque[Callable[[], Values]] = deque()
        self._closed = False
        # The background thread's.
        self._lock = threading.Lock()
        self._kept: dict[metrics.Key, float] = {}
        self._set: dict[metrics.Key, float] = {}
        self._set_at = self._written_at = -math.inf
        self._written_changes = -1
        self._store: Store | None = None
        self._left = weakref.finalize(self, _left.append, (self._job, self.manager))
        self._left.atexit = False
        _register(self)

    # --- told by the manager's thread: stores, and does nothing that could fail or wait --------------------------

    @contextlib.contextmanager
    def sync(self, rollouts: Sequence[str]) -> Iterator[Sync]:
        """One ``sync_weights``: its end, good or bad, is recorded.

        Args:
            rollouts: names of those that take part.
        """
        self.members(rollouts)
        self._steps = {}
        self._sync = sync = Sync()
        try:
            yield sync
        except BaseException as error:
            self._failed(error, sync)
            raise
        else:
            if sync.report is not None:
                self._synced(sync.report)
        finally:
            self._phase, self._sync = sync.phase, None
            self._changes += 1

    def sending(self, version: int) -> None:
        """This version is on its way now."""
        self._version = version
        if self._sync is not None:
            self._sync.version = version

    def grouped(self) -> None:
        """A group was made."""
        self._generation += 1
        self._events.append(functools.partial(metrics.of_group, self.manager))

    def polled(self, name: str, status: OpStatus) -> None:
        """What a rollout says of the operation that runs in it."""
        if status.steps:
            self._steps[name] = status.step, status.steps

    def asked(self, statuses: Mapping[str, RolloutStatus | None]) -> None:
        """What rollouts say of themselves; ``None`` for one that does not answer."""
        held = dict(self._held)
        for name, status in statuses.items():
            version = held.get(name, (State.EMPTY, None))[1] if status is None else status.version
            held[name] = metrics.state_of(status), version
        self._held = held

    def slept(self, asleep: Mapping[str, Sequence[str] | None], *, lost: bool) -> None:
        """Which memory tags of rollouts sleep now; ``None`` for one that does not answer.

        Args:
            lost: the weights of those that wake are gone.
        """
        held = dict(self._held)
        for name, tags in asleep.items():
            state, version = held.get(name, (State.EMPTY, None))
            if tags is not None and "weights" in tags and state is State.WHOLE:
                held[name] = State.ASLEEP, version
            elif tags is not None and "weights" not in tags and state is State.ASLEEP:
                held[name] = State.EMPTY if lost else State.WHOLE, version
        if held != self._held:
            self._held = held
            self._changes += 1

    def members(self, rollouts: Sequence[str]) -> None:
        """These are the rollouts now."""
        if list(self._held) != list(rollouts):
            self._held = {name: self._held.get(name, (State.EMPTY, None)) for name in rollouts}
            self._changes += 1

    def fields(self) -> dict[str, Any]:
        """For structured logs: ``manager``, ``version``, ``phase`` and ``generation``."""
        sync = self._sync
        return {
            "manager": self.manager,
            "version": self._version,
            "phase": self._phase if sync is None else sync.phase,
            "generation": self._generation,
        }

    def close(self) -> None:
        """The manager is closed: its last numbers are recorded and its record is removed. Takes milliseconds, and a few
        seconds at most where Ray's GCS does not answer."""
        self._closed = True
        _watches.discard(self)
        self._left.detach()
        if self._lock.acquire(timeout=_LOCK_S):
            try:
                self._held, self._version, self._kept = {}, 0, {}
                with _quietly():
                    self._record()
                with _quietly():
                    if self._store is not None and _connected():
                        self._store.remove(self._job, self.manager)
            finally:
                self._lock.release()

    def _synced(self, report: SyncReport) -> None:
        self._version = report.version
        # Who cannot be asked is in no record of the report.
        versions = dict.fromkeys(self._held, report.version) | {r.name: r.version for r in report.replicas}
        self._held = {name: (State.WHOLE, held) for name, held in versions.items() if name not in report.dropped}
        self._last = LastSync(
            version=report.version,
            mode=report.mode,
            seconds=report.seconds,
            nbytes=report.nbytes,
            phases=dict(report.phases),
            ended=time.time(),
        )
        self._failure = None
        self._events.append(functools.partial(metrics.of_sync, self.manager, report))

    def _failed(self, error: BaseException, sync: Sync) -> None:
        phase = str(getattr(error, "phase", "")) or sync.phase
        members = tuple(getattr(error, "actors", ()))
        if sync.version is None:  # it failed before it had one
            self._version = 1 + max((held or 0 for _, held in self._held.values()), default=0)
        self._failure = LastFailure(
            phase=phase,
            error=type(error).__name__,
            members=members,
            message=str(error)[:_MESSAGE_CHARS],
            ended=time.time(),
        )
        self._events.append(functools.partial(metrics.of_failure, self.manager, phase, type(error).__name__, members))
        self.log.warning("sync v%d failed: %s: %s", self._version, type(error).__name__, error)

    # --- the background thread ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Record and write what is due."""
        with self._lock:
            if self._closed:  # just now; its record is not to come back
                return
            with _quietly():
                self._record()
            with _quietly():
                self._write()

    def _record(self) -> None:
        news = Values()
        while self._events:
            values = self._events.popleft()()
            if values.held:
                self._kept, values.held = values.held, {}  # what only the sync before had is over
            news.join(values)
        sync, held = self._sync, self._held
        gauges = dict(self._kept)
        for name, (state, version) in held.items():
            if sync is not None and sync.slow:
                state = State.UPDATING
            gauges[metrics.STATE, (self.manager, name)] = float(state)
            if version is not None:
                gauges[metrics.VERSION, (self.manager, "rollout", name)] = version
        if self._version:
            gauges[metrics.VERSION, (self.manager, "trainer", "trainer[0]")] = self._version
        now = time.monotonic()
        if gauges != self._set or now - self._set_at >= _GAUGES_S:
            gone = [key for key in self._set if key[0] is metrics.STATE and key not in gauges]
            news.held = {**gauges, **dict.fromkeys(gone, float(State.GONE))}
            self._set, self._set_at = gauges, now
        if _connected():
            metrics.record(news)

    def _write(self) -> None:
        sync, changes = self._sync, self._changes
        busy = changes != self._written_changes or (sync is not None and sync.slow)
        now = time.monotonic()
        if not _connected() or now - self._written_at < (_WRITE_S if busy else HEARTBEAT_S):
            return
        self._written_at, self._written_changes = now, changes
        if self._store is None:
            self._store = Store()
        self._store.write(self._status(sync))

    def _status(self, sync: Sync | None) -> ManagerStatus:
        steps = dict(self._steps) if sync is not None else {}
        members = []
        for name, (state, version) in self._held.items():
            step, of = steps.get(name, (0, 0))
            shown = state if sync is None else State.UPDATING
            members.append(MemberStatus(name=name, state=shown.name.lower(), version=version, step=step, steps=of))
        return ManagerStatus(
            manager=self.manager,
            job=self._job,
            host=socket.gethostname(),
            pid=os.getpid(),
            written=time.time(),
            version=self._version,
            generation=self._generation,
            phase=sync.phase if sync is not None else "",
            started=sync.started if sync is not None else None,
            members=tuple(members),
            last=self._last,
            failure=self._failure,
        )


class _Log(logging.LoggerAdapter[logging.Logger]):
    """The package's logger with a manager's fields as ``extra``, which JSON formatters write out."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(logger)
        self._watch = weakref.ref(watch)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        watch = self._watch()
        kwargs["extra"] = {**(watch.fields() if watch is not None else {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_left: deque[tuple[str, str]] = deque()
"""Records of managers that nobody closed before the last reference to them was gone."""
_threads: list[threading.Thread] = []
_starting = threading.Lock()


def _register(watch: Watch) -> None:
    with _starting:
        _watches.add(watch)
        if not _threads:
            _threads.append(threading.Thread(target=_run, name="twinkle-watch", daemon=True))
            _threads[0].start()


def _run() -> None:
    while True:
        time.sleep(_TICK_S)
        _tick_all()
        with _quietly():
            while _left:
                job, manager = _left.popleft()
                if _connected():
                    Store().remove(job, manager)
        with _starting:
            if not _watches and not _left:
                _threads.clear()
                return


def _tick_all() -> None:
    """On its own, so that no local variable keeps a manager alive between two ticks."""
    for watch in list(_watches):
        watch.tick()


@atexit.register
def _flush() -> None:
    """Ray's own exit comes after this, and the last sync's numbers would be lost with it."""
    for watch in list(_watches):
        if watch._lock.acquire(timeout=_LOCK_S):
            try:
                with _quietly():
                    watch._record()
            finally:
                watch._lock.release()


def _job_id() -> str:
    with _quietly():
        if _connected():
            return str(ray.get_runtime_context().get_job_id())
    return ""


def _connected() -> bool:
    return bool(ray.is_initialized())


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What cannot be recorded must not fail a sync, nor end the thread."""
    try:
        yield
    except Exception:
        logger.debug("metrics or the status record could not be written", exc_info=True)
