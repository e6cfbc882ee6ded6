"""What a driver's metrics are called, and how a sync becomes numbers. The only place where a metric's name stands.

They go through ``ray.util.metrics``, so that Ray's agent on the driver's node exports them with its own, at the port
that Prometheus scrapes already. Ray puts ``ray_`` before each name and ``_total`` after a counter's:
``twinkle_bytes`` is ``ray_twinkle_bytes_total`` there. Seconds are seconds and bytes are bytes.

Tags:

- ``manager``: Ray's id of the job and a random part, such as ``01000000-5f3a9c``.
- ``role``: ``driver``, ``trainer`` or ``rollout``.
- ``member``: ``driver``, ``trainer[i]`` or ``rollout[i]``, as reports and errors name them.
- ``phase``: of the driver ``sleep``, ``prepare``, ``init``, ``agree``, ``transfer``, ``refused``, ``outdated``; of the
  trainer that sends ``fence``, ``gather``, ``wire``; of a rollout what its report has, such as ``pause``, ``wire``,
  ``load``, ``reset``.

Counters count what succeeded, so that they are sums over reports; only ``twinkle_failures`` counts what did not. A
gauge is exported as long as it is set again and again: Ray drops one that was not set for two of its report intervals,
so that a manager that is closed, a rollout that was removed and a driver that is dead vanish by themselves.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_ray.types import Contents, RolloutStatus, SyncReport


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without what Ray adds.
        kind: ``counter``, ``gauge`` or ``histogram``.
        tags: that every value has, beside those that Ray adds.
        bounds: of a histogram's buckets, in the metric's unit.
    """

    name: str
    kind: str
    tags: tuple[str, ...]
    description: str
    bounds: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """The name in Prometheus; a histogram's without ``_bucket``, ``_count`` and ``_sum``."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


SYNCS = Metric(
    "twinkle_syncs", "counter", ("manager", "mode", "sent"), "Syncs that succeeded, by transport and content"
)
FAILURES = Metric(
    "twinkle_failures",
    "counter",
    ("manager", "phase", "error", "member"),
    "Syncs that failed, by phase, class of the error and the first member it names; and, as phase 'dropped', rollouts "
    "that were dead and without which a sync went on",
)
SYNC_SECONDS = Metric(
    "twinkle_sync_seconds",
    "histogram",
    ("manager",),
    "Seconds of a sync that succeeded, from call to return",
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
SYNCED_SECONDS = Metric(
    "twinkle_synced_seconds", "counter", ("manager",), "The same, summed; the sum that Ray gives a histogram is rounded"
)
PHASE_SECONDS = Metric(
    "twinkle_phase_seconds", "counter", ("manager", "role", "member", "phase"), "Seconds of each member in each phase"
)
BYTES = Metric(
    "twinkle_bytes",
    "counter",
    ("manager", "role", "member"),
    "Bytes of weights: sent once by the trainer, and received by each worker of a rollout",
)
DIRECT_BYTES = Metric(
    "twinkle_direct_bytes", "counter", ("manager", "member"), "Of a rollout's bytes, written straight into parameters"
)
STAGED_BYTES = Metric(
    "twinkle_staged_bytes", "counter", ("manager", "member"), "Of a rollout's bytes, those that took one copy more"
)
GROUPS = Metric("twinkle_groups", "counter", ("manager",), "Collective groups made: generations")
VERSION = Metric(
    "twinkle_weights_version",
    "gauge",
    ("manager", "role", "member"),
    "Version of the weights that a rollout holds; of trainer[0], the version that the last sync brought or, if it "
    "failed, was to bring",
)
STATE = Metric(
    "twinkle_replica_state",
    "gauge",
    ("manager", "member"),
    "State of a rollout: 0 gone, 1 whole, 2 asleep, 3 updating, 4 empty, 5 mixed, 6 silent",
)
LAST_SECONDS = Metric("twinkle_last_sync_seconds", "gauge", ("manager",), "Seconds of the last sync that succeeded")
LAST_BYTES = Metric("twinkle_last_sync_bytes", "gauge", ("manager",), "Bytes that the last sync that succeeded sent")
LAST_PHASE_SECONDS = Metric(
    "twinkle_last_phase_seconds",
    "gauge",
    ("manager", "role", "member", "phase"),
    "Seconds of each member in each phase of the last sync that succeeded",
)

ALL = (
    SYNCS,
    FAILURES,
    SYNC_SECONDS,
    SYNCED_SECONDS,
    PHASE_SECONDS,
    BYTES,
    DIRECT_BYTES,
    STAGED_BYTES,
    GROUPS,
    VERSION,
    STATE,
    LAST_SECONDS,
    LAST_BYTES,
    LAST_PHASE_SECONDS,
)


class State(enum.IntEnum):
    """Of a rollout, as the driver knows it. The numbers are those of ``twinkle_replica_state``."""

    GONE = 0  # the manager's no more
    WHOLE = 1  # one whole version, and awake
    ASLEEP = 2  # its weights sleep
    UPDATING = 3  # a sync that takes longer than a moment is writing into it
    EMPTY = 4  # no sync has reached it, or it has lost what one brought
    MIXED = 5  # a sync failed midway; it serves nobody before the next one
    SILENT = 6  # it did not answer when a sync had failed


def state_of(status: RolloutStatus | None) -> State:
    """State of a rollout that was asked; ``None``: it did not answer."""
    if status is None:
        return State.SILENT
    if "weights" in status.asleep:
        return State.ASLEEP
    if status.updating:
        return State.UPDATING
    return {Contents.NONE: State.EMPTY, Contents.WHOLE: State.WHOLE, Contents.MIXED: State.MIXED}[status.contents]


Key = tuple[Metric, tuple[str, ...]]
"""A metric and the values of its tags, in order."""


@dataclass(slots=True)
class Values:
    """What was measured, before anybody asks Ray to take it.

    Attributes:
        added: to counters.
        observed: in histograms.
        held: by gauges.
    """

    added: dict[Key, float] = field(default_factory=dict)
    observed: list[tuple[Key, float]] = field(default_factory=list)
    held: dict[Key, float] = field(default_factory=dict)

    def add(self, metric: Metric, value: float, *tags: str) -> None:
        if value > 0:  # Ray refuses 0
            self.added[metric, tags] = self.added.get((metric, tags), 0.0) + value

    def join(self, other: Values) -> None:
        """Take the other's in."""
        for (metric, tags), value in other.added.items():
            self.add(metric, value, *tags)
        self.observed += other.observed
        self.held |= other.held


def of_sync(manager: str, report: SyncReport) -> Values:
    """Counters, histogram and gauges of one sync that succeeded."""
    values = Values()
    sent = " and ".join([part for part in (report.base and "base", report.adapter and "adapter") if part])
    values.add(SYNCS, 1, manager, report.mode, sent)
    values.observed.append(((SYNC_SECONDS, (manager,)), report.seconds))
    values.add(SYNCED_SECONDS, report.seconds, manager)
    values.held[LAST_SECONDS, (manager,)] = report.seconds
    values.held[LAST_BYTES, (manager,)] = report.nbytes

    def phases(role: str, member: str, seconds: Mapping[str, float]) -> None:
        for phase, took in seconds.items():
            values.add(PHASE_SECONDS, took, manager, role, member, phase)
            values.held[LAST_PHASE_SECONDS, (manager, role, member, phase)] = took

    phases("driver", "driver", report.phases)
    phases("trainer", "trainer[0]", report.sender)
    values.add(BYTES, report.nbytes, manager, "trainer", "trainer[0]")
    for replica in report.replicas:
        phases("rollout", replica.name, replica.seconds)
        values.add(BYTES, replica.nbytes, manager, "rollout", replica.name)
        values.add(DIRECT_BYTES, replica.direct_bytes, manager, replica.name)
        values.add(STAGED_BYTES, replica.nbytes - replica.direct_bytes, manager, replica.name)
    for name in report.dropped:
        values.add(FAILURES, 1, manager, "dropped", "PeerLost", name)
    return values


def of_failure(manager: str, phase: str, error: str, members: Sequence[str]) -> Values:
    """The counter of one sync that failed.

    Args:
        error: class of the error.
        members: that it names.
    """
    values = Values()
    values.add(FAILURES, 1, manager, phase, error, members[0] if members else "")
    return values


def of_group(manager: str) -> Values:
    """The counter of one group that was made."""
    values = Values()
    values.add(GROUPS, 1, manager)
    return values


_made: dict[str, Any] = {}
_making = threading.Lock()


def record(values: Values) -> None:
    """Give values to Ray, some 2 us each. Without effect where Ray exports nothing.

    A process must have called ``ray.init`` before.
    """
    for (metric, tags), value in values.added.items():
        _instrument(metric).inc(value, dict(zip(metric.tags, tags, strict=True)))
    for (metric, tags), value in values.observed:
        _instrument(metric).observe(value, dict(zip(metric.tags, tags, strict=True)))
    for (metric, tags), value in values.held.items():
        _instrument(metric).set(value, dict(zip(metric.tags, tags, strict=True)))


def _instrument(metric: Metric) -> Any:
    from ray.util import metrics

    with _making:
        if metric.name not in _made:
            _made[metric.name] = (
                metrics.Histogram(metric.name, metric.description, list(metric.bounds), metric.tags)
                if metric.kind == "histogram"
                else {"counter": metrics.Counter, "gauge": metrics.Gauge}[metric.kind](
                    metric.name, metric.description, metric.tags
                )
            )
        return _made[metric.name]
