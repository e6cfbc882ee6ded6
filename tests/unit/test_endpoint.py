"""The endpoint's thread: what an operation that was given up can still do (nothing), and what is kept of one."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from twinkle_ray import backends
from twinkle_ray.endpoint import Endpoint, Operation
from twinkle_ray.errors import ConfigError, SyncAborted, SyncError, SyncTimeout
from twinkle_ray.types import Deadline, OpState, Rendezvous


class FakeGroup:
    """Stands for a SyncGroup: connecting is what the test says, aborting is noted."""

    def __init__(self, world_size: int, rank: int, name: str) -> None:
        self.name = "TWINKLE_GLOO"
        self.rank = self.number = rank
        self.group_name = name
        self.failure: SyncError | None = None
        self.destroyed = False
        self.connecting: Callable[[], None] = lambda: None

    def place(self, device: torch.device) -> None:
        pass

    def connect(self, rendezvous: Rendezvous, deadline: Deadline, meeting: Any) -> None:
        self.connecting()

    def abort(self, reason: str) -> None:
        self.failure = self.failure or SyncAborted(reason)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeGroup]:
    """The groups that were made, by name."""
    made: dict[str, FakeGroup] = {}

    def create(backend: str, world_size: int, rank: int, name: str) -> FakeGroup:
        if rank >= world_size:
            raise ConfigError("no such rank")
        made[name] = FakeGroup(world_size, rank, name)
        return made[name]

    monkeypatch.setattr(backends, "create_group", create)
    monkeypatch.setattr(backends, "destroy_group", lambda group: setattr(group, "destroyed", True))
    return made


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint(torch.device("cpu"))
    yield made
    made.abort("the test is over")


def place(name: str) -> Rendezvous:
    return Rendezvous(group=name, backend="TWINKLE_GLOO", host="127.0.0.1", store_port=1, watch_port=2)


def joined(endpoint: Endpoint, name: str) -> None:
    endpoint.connect(1, 2, place(name), Deadline.after(5)).outcome()


def hold(endpoint: Endpoint, release: threading.Event, after: Callable[[], None] = lambda: None) -> Operation:
    """An operation that is in its work until ``release``, and then does ``after``."""
    entered = threading.Event()

    def work(operation: Operation) -> None:
        entered.set()
        assert release.wait(10)
        after()

    operation = endpoint.start("transfer", work, Deadline.after(10))
    assert entered.wait(5)
    return operation


def test_an_error_of_an_abandoned_operation_does_not_give_up_the_next_group(
    endpoint: Endpoint, groups: dict[str, FakeGroup]
) -> None:
    release, late = threading.Event(), threading.Event()

    def fails() -> None:
        late.set()
        raise RuntimeError("the old group is severed")

    joined(endpoint, "one")
    hold(endpoint, release, fails)
    endpoint.abort("the driver said so")
    joined(endpoint, "two")
    release.set()
    assert late.wait(5)
    time.sleep(0.2)
    assert groups["one"].failure is not None
    assert groups["two"].failure is None


def test_an_abandoned_connect_installs_nothing(
    endpoint: Endpoint, groups: dict[str, FakeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    require = backends.require

    def slow(name: str) -> None:
        if threading.current_thread().name == "twinkle-endpoint" and not entered.is_set():
            entered.set()
            assert release.wait(10)
        require(name)

    monkeypatch.setattr(backends, "require", slow)
    endpoint.connect(1, 2, place("one"), Deadline.after(10))
    assert entered.wait(5)
    endpoint.abort("the driver said so")
    joined(endpoint, "two")
    release.set()
    time.sleep(0.3)
    assert endpoint.group is groups["two"]  # type: ignore[comparison-overlap]
    assert endpoint.rendezvous == place("two")
    assert "one" not in groups or groups["one"].destroyed


def test_an_abort_reaches_a_group_that_is_still_connecting(
    endpoint: Endpoint, groups: dict[str, FakeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = backends.create_group

    def create(*args: Any) -> Any:
        group = real(*args)
        group.connecting = lambda: release.wait(5)  # type: ignore[attr-defined]
        return group

    monkeypatch.setattr(backends, "create_group", create)
    operation = endpoint.connect(1, 2, place("one"), Deadline.after(10))
    while "one" not in groups or endpoint.group is None:
        time.sleep(0.01)
    endpoint.abort("the driver said so")
    release.set()
    assert groups["one"].failure is not None
    with pytest.raises(SyncAborted, match="the driver said so"):
        operation.outcome()
    assert not endpoint.is_sound()


def test_memory_is_not_used_again_until_the_abandoned_operation_is_out_of_it(
    endpoint: Endpoint, groups: dict[str, FakeGroup]
) -> None:
    release = threading.Event()
    events: list[str] = []
    joined(endpoint, "one")
    hold(endpoint, release, lambda: events.append("old"))
    endpoint.abort("the driver said so")
    joined(endpoint, "two")
    following = endpoint.start("transfer", lambda operation: events.append("new"), Deadline.after(10))
    assert not following.ended.wait(0.3)
    release.set()
    following.outcome()
    assert events == ["old", "new"]


def test_an_abandoned_operation_that_never_ends_is_named_at_the_deadline(
    endpoint: Endpoint, groups: dict[str, FakeGroup]
) -> None:
    release = threading.Event()
    joined(endpoint, "one")
    hold(endpoint, release)
    endpoint.abort("the driver said so")
    joined(endpoint, "two")
    start = time.monotonic()
    with pytest.raises(SyncTimeout, match="still in"):
        endpoint.start("transfer", lambda operation: None, Deadline.after(0.3)).outcome()
    assert time.monotonic() - start < 2
    release.set()
    joined(endpoint, "three")
    endpoint.start("transfer", lambda operation: None, Deadline.after(5)).outcome()


def test_an_operation_that_has_ended_may_not_touch_the_model_any_more() -> None:
    operation = Operation("transfer", Deadline.after(5))
    operation.touch()
    assert operation.status().touched
    ended = Operation("transfer", Deadline.after(5))
    ended.end(error=SyncAborted("given up"))
    with pytest.raises(SyncAborted):
        ended.touch()
    assert not ended.status().touched


def test_whoever_is_still_in_its_own_work_at_the_deadline_is_named(
    endpoint: Endpoint, groups: dict[str, FakeGroup]
) -> None:
    release = threading.Event()
    joined(endpoint, "one")
    operation = endpoint.start("transfer", lambda operation: release.wait(10), Deadline.after(0.1))
    with pytest.raises(SyncTimeout) as caught:
        operation.outcome()
    assert caught.value.actors == ("rank 1",)
    assert groups["one"].failure is not None
    release.set()


def test_whoever_only_waited_in_the_group_is_not_named(endpoint: Endpoint, groups: dict[str, FakeGroup]) -> None:
    release = threading.Event()
    joined(endpoint, "one")
    operation = endpoint.start("transfer", lambda operation: release.wait(10), Deadline.after(0.1))
    groups["one"].failure = SyncTimeout("rank 1 waited 0.1 s for a transfer")
    with pytest.raises(SyncTimeout) as caught:
        operation.outcome()
    assert caught.value.actors == ()
    release.set()


def test_nothing_of_a_failed_operations_frames_is_kept(endpoint: Endpoint) -> None:
    kept: list[Any] = []

    def inner() -> None:
        gathered = torch.ones(8)
        kept.append(weakref.ref(gathered))
        raise KeyError("tensor 9 is not there")

    def work(operation: Operation) -> None:
        try:
            inner()
        except KeyError as error:
            raise SyncError("the source failed", phase="transfer") from error

    operation = endpoint.start("transfer", work, Deadline.after(5))
    assert operation.ended.wait(5)
    time.sleep(0.1)
    gc.collect()
    assert kept[0]() is None
    with pytest.raises(SyncError) as caught:
        operation.outcome()
    assert caught.value.cause_type == "KeyError"
    assert "in inner" in caught.value.cause_traceback


def test_a_meeting_is_not_lost_when_the_group_cannot_be_made(endpoint: Endpoint, groups: dict[str, FakeGroup]) -> None:
    rendezvous = endpoint.open_meeting("TWINKLE_GLOO")
    meeting = endpoint.meeting
    assert meeting is not None
    with pytest.raises(ConfigError):
        endpoint.connect(2, 2, rendezvous, Deadline.after(5)).outcome()
    endpoint.leave()
    assert meeting._watch.fileno() == -1


def test_a_failed_operation_does_not_block_the_next_one(endpoint: Endpoint, groups: dict[str, FakeGroup]) -> None:
    release = threading.Event()
    joined(endpoint, "one")
    operation = hold(endpoint, release)
    with pytest.raises(SyncError, match="is running in this process"):
        endpoint.start("transfer", lambda operation: None, Deadline.after(5))
    endpoint.abort("the driver said so")
    endpoint.abort("twice")
    assert operation.status().state is OpState.FAILED
    release.set()
    joined(endpoint, "two")
    assert endpoint.is_sound()


def test_a_deadline_that_never_comes_does_not_keep_others_from_coming(endpoint: Endpoint) -> None:
    assert endpoint.start("transfer", lambda _: None, Deadline(float("inf"), float("inf"))).ended.wait(5)
    late = Endpoint(torch.device("cpu"))
    release = threading.Event()
    with pytest.raises(SyncTimeout):
        late.start("transfer", lambda _: release.wait(10), Deadline.after(0.2)).outcome()
    release.set()


FORKED = """
import os, threading, torch
from twinkle_ray.endpoint import Endpoint
from twinkle_ray.errors import SyncTimeout
from twinkle_ray.types import Deadline
Endpoint(torch.device("cpu")).start("transfer", lambda _: None, Deadline.after(60.0)).outcome()
child = os.fork()
if child == 0:
    stuck = threading.Event().wait
    operation = Endpoint(torch.device("cpu")).start("transfer", lambda _: stuck(30), Deadline.after(0.2))
    operation.ended.wait(4.0)
    os._exit(0 if isinstance(operation.status().error, SyncTimeout) else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_deadlines_come_in_a_forked_process_too() -> None:
    """A child engine may be forked from an actor that has synced before."""
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=60, check=False).returncode == 0
