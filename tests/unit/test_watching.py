"""What a manager lets others see: it costs a sync nothing that could fail, and nothing is forgotten."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
import weakref
from typing import Any

import pytest

from twinkle_ray import metrics, watching
from twinkle_ray.errors import ConfigError, PeerLost, SyncTimeout
from twinkle_ray.metrics import State
from twinkle_ray.status import ManagerStatus
from twinkle_ray.types import Contents, OpState, OpStatus, ReplicaReport, RolloutStatus, SyncReport
from twinkle_ray.watching import Watch

NAMES = ("rollout[0]", "rollout[1]")


def report(version: int, *names: str, **changes: Any) -> SyncReport:
    replicas = tuple(
        ReplicaReport(
            name=name,
            version=version,
            path="in place",
            tensors=2,
            nbytes=100,
            direct_bytes=60,
            seconds={"wire": 0.25, "load": 0.0},
        )
        for name in names
    )
    given: dict[str, Any] = {"mode": "gloo", "tensors": 2, "nbytes": 100, "seconds": 0.5, "base": "plain"}
    given |= {"phases": {"transfer": 0.4}, "sender": {"wire": 0.25}, "replicas": replicas}
    return SyncReport(version=version, **{**given, **changes})


def succeed(watch: Watch, version: int, *names: str, **changes: Any) -> None:
    with watch.sync(names) as sync:
        sync.phases["transfer"] = 0.0
        watch.sending(version)
        sync.report = report(version, *names, **changes)


def fail(watch: Watch, error: Exception, *phases: str, sent: int | None = None) -> None:
    with watch.sync(NAMES) as sync:
        sync.phases |= dict.fromkeys(phases, 0.0)
        if sent is not None:
            watch.sending(sent)
        watch.asked({"rollout[0]": status(Contents.WHOLE, 1), "rollout[1]": None})
        raise error


class Sink:
    """Stands for Ray: counters add up, gauges are those that were set last."""

    def __init__(self) -> None:
        self.counters: dict[tuple[str, ...], float] = {}
        self.gauges: dict[tuple[str, ...], float] = {}

    def record(self, values: metrics.Values) -> None:
        for (metric, tags), value in values.added.items():
            key = (metric.name, *tags[1:])
            self.counters[key] = self.counters.get(key, 0) + value
        self.gauges |= {(metric.name, *tags[1:]): value for (metric, tags), value in values.held.items()}

    def of(self, metric: metrics.Metric) -> dict[str, float]:
        """A gauge by member."""
        return {key[-1]: value for key, value in self.gauges.items() if key[0] == metric.name}


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Sink:
    made = Sink()
    monkeypatch.setattr(metrics, "record", made.record)
    monkeypatch.setattr(watching, "_connected", lambda: True)
    monkeypatch.setattr(watching, "_job_id", lambda: "")  # Ray would start itself
    monkeypatch.setattr(watching, "_register", lambda watch: None)  # the tests tick
    return made


@pytest.fixture
def watch(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(made, "_write", lambda: None)
    return made


def test_numbers_of_several_syncs_add_up(watch: Watch, sink: Sink) -> None:
    for version in (1, 2, 3):
        succeed(watch, version, *NAMES)
    watch.tick()
    assert sink.counters["twinkle_syncs", "gloo", "base"] == 3
    assert sink.counters["twinkle_bytes", "trainer", "trainer[0]"] == 300
    assert sink.counters["twinkle_direct_bytes", "rollout[1]"] == 180
    assert sink.counters["twinkle_staged_bytes", "rollout[1]"] == 120
    assert sink.counters["twinkle_phase_seconds", "rollout", "rollout[0]", "wire"] == 0.75
    assert not [key for key in sink.counters if "load" in key]  # Ray refuses to add nothing
    assert sink.of(metrics.VERSION) == {"trainer[0]": 3, "rollout[0]": 3, "rollout[1]": 3}


@pytest.mark.parametrize(
    ("content", "sent"),
    [({"adapter": "a"}, "base and adapter"), ({"base": "", "adapter": "a"}, "adapter"), ({"base": "merged"}, "base")],
)
def test_a_sync_is_counted_by_what_it_sent(watch: Watch, sink: Sink, content: dict[str, Any], sent: str) -> None:
    succeed(watch, 1, *NAMES, **content)
    watch.tick()
    assert sink.counters["twinkle_syncs", "gloo", sent] == 1


def test_who_is_gone_is_set_to_gone_once(watch: Watch, sink: Sink) -> None:
    succeed(watch, 1, *NAMES)
    watch.tick()
    watch.members(NAMES[:1])
    watch.tick()
    assert sink.of(metrics.STATE) == {"rollout[0]": State.WHOLE, "rollout[1]": State.GONE}
    sink.gauges.clear()
    watch._set_at = 0.0
    watch.tick()
    assert sink.of(metrics.STATE) == {"rollout[0]": State.WHOLE}


@pytest.mark.parametrize(("lost", "after"), [(False, State.WHOLE), (True, State.EMPTY)])
def test_who_sleeps_is_shown(watch: Watch, sink: Sink, lost: bool, after: State) -> None:
    def states() -> list[float]:
        watch.tick()
        return [sink.of(metrics.STATE)[name] for name in NAMES]

    succeed(watch, 1, *NAMES)
    watch.slept(dict.fromkeys(NAMES, ("kv_cache",)), lost=lost)
    assert states() == [State.WHOLE, State.WHOLE]
    watch.slept({"rollout[0]": ("kv_cache", "weights"), "rollout[1]": None}, lost=False)
    assert states() == [State.ASLEEP, State.WHOLE]
    watch.slept({"rollout[0]": (), "rollout[1]": ()}, lost=lost)
    assert states() == [after, State.WHOLE]
    succeed(watch, 2, *NAMES)
    assert states() == [State.WHOLE, State.WHOLE]


def test_a_dead_rollout_that_was_dropped_is_a_failure(watch: Watch, sink: Sink) -> None:
    with watch.sync(NAMES) as sync:
        watch.members(NAMES[:1])
        sync.report = report(1, NAMES[0], dropped=(NAMES[1],))
    watch.tick()
    assert sink.counters["twinkle_failures", "dropped", "PeerLost", "rollout[1]"] == 1
    assert sink.of(metrics.STATE) == {"rollout[0]": State.WHOLE}


@pytest.mark.parametrize("sent", [None, 2])
def test_after_a_failure_the_trainer_is_ahead(watch: Watch, sink: Sink, sent: int | None) -> None:
    succeed(watch, 1, *NAMES)
    for _ in range(2):
        with pytest.raises(SyncTimeout):
            fail(watch, SyncTimeout("late", phase="prepare", actors=("rollout[1]",)), sent=sent)
    watch.tick()
    assert sink.counters["twinkle_failures", "prepare", "SyncTimeout", "rollout[1]"] == 2
    assert sink.of(metrics.VERSION) == {"trainer[0]": 2, "rollout[0]": 1, "rollout[1]": 1}
    assert sink.of(metrics.STATE) == {"rollout[0]": State.WHOLE, "rollout[1]": State.SILENT}


def test_an_error_that_names_no_phase_is_of_the_one_that_ran(watch: Watch, sink: Sink) -> None:
    with pytest.raises(ConfigError):
        fail(watch, ConfigError("no such adapter"), "sleep", "prepare")
    watch.tick()
    assert sink.counters == {("twinkle_failures", "prepare", "ConfigError", ""): 1}


def status(contents: Contents, version: int, **changes: Any) -> RolloutStatus:
    plain: dict[str, Any] = {"kind": "module", "updating": False, "asleep": (), "group": "", "workers": 1}
    return RolloutStatus(version=version, contents=contents, **{**plain, **changes})


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (None, State.SILENT),
        (status(Contents.NONE, 0), State.EMPTY),
        (status(Contents.WHOLE, 1), State.WHOLE),
        (status(Contents.MIXED, 1), State.MIXED),
        (status(Contents.WHOLE, 1, asleep=("weights",)), State.ASLEEP),
        (status(Contents.WHOLE, 1, asleep=("kv_cache",)), State.WHOLE),
        (status(Contents.MIXED, 1, updating=True), State.UPDATING),
    ],
)
def test_states(said: RolloutStatus | None, state: State) -> None:
    assert metrics.state_of(said) is state


def test_the_numbers_of_states_are_those_that_the_description_and_the_dashboard_give() -> None:
    text = metrics.STATE.description
    assert all(f"{state.value} {state.name.lower()}" in text for state in State)


def test_a_sync_that_runs_is_shown_with_its_phase_and_chunks(watch: Watch) -> None:
    succeed(watch, 1, *NAMES)
    with watch.sync(NAMES) as sync:
        sync.phases["transfer"] = 0.0
        watch.sending(2)
        watch.polled("rollout[1]", OpStatus(op="receive", state=OpState.RUNNING, step=3, steps=9))
        shown = watch._status(sync)
        assert watch.fields() == {"manager": watch.manager, "version": 2, "phase": "transfer", "generation": 0}
        sync.report = report(2, *NAMES)
    assert (shown.version, shown.phase) == (2, "transfer")
    assert [(m.state, m.version, m.step, m.steps) for m in shown.members] == [
        ("updating", 1, 0, 0),
        ("updating", 1, 3, 9),
    ]
    assert shown.last is not None
    assert shown.last.version == 1
    assert ManagerStatus.from_json(json.loads(json.dumps(shown.as_json()))) == shown
    later = {**shown.as_json(), "new": 1, "members": [{"name": "a", "state": "b", "new": 2}]}
    assert ManagerStatus.from_json(later).members[0].name == "a"


def test_what_cannot_be_recorded_fails_nothing(
    watch: Watch, sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(metrics, "record", broken)
    monkeypatch.setattr(watch, "_write", broken)
    succeed(watch, 1, *NAMES)
    with caplog.at_level(logging.DEBUG, "twinkle_ray"):
        watch.tick()
        watch.close()
    assert "could not be written" in caplog.text


def test_a_manager_that_nobody_closed_is_let_go_and_its_record_is_to_be_removed(sink: Sink) -> None:
    watch = Watch()
    succeed(watch, 1, *NAMES)
    name = watch.manager
    del watch
    gc.collect()
    assert name in {manager for _, manager in watching._left}


def test_the_thread_keeps_no_manager_alive_and_ends_with_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_TICK_S", 0.01)
    monkeypatch.setattr(watching, "_connected", lambda: False)
    seen = threading.Event()
    watch = Watch()
    monkeypatch.setattr(Watch, "tick", lambda one: seen.set())
    gone = weakref.ref(watch)
    assert seen.wait(10)
    del watch
    deadline = time.monotonic() + 10
    while gone() is not None:
        assert time.monotonic() < deadline
        gc.collect()


def test_a_closed_manager_writes_no_more(watch: Watch, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed(watch, 1, *NAMES)
    watch.close()
    assert sink.counters["twinkle_syncs", "gloo", "base"] == 1
    written: list[str] = []
    monkeypatch.setattr(watch, "_write", lambda: written.append("again"))
    watch.tick()  # of the thread, which had it in hand
    assert written == []


def test_a_failed_sync_is_one_warning_with_fields(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "twinkle_ray"), pytest.raises(PeerLost):
        fail(watch, PeerLost("gone", phase="init", actors=("rollout[0]",)), "init", sent=2)
    (line,) = caplog.records
    assert (line.levelname, line.getMessage()) == ("WARNING", "sync v2 failed: PeerLost: gone")
    fields = {key: vars(line)[key] for key in ("manager", "version", "phase", "generation")}
    assert fields == {"manager": watch.manager, "version": 2, "phase": "init", "generation": 0}
