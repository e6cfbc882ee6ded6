"""The door of a synchronous engine, with an engine that is a list of requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_ray.errors import ReplicaUnavailable, SyncTimeout
from twinkle_ray.types import Deadline
from twinkle_ray.vllm.door import Door, DoorState


class FakeEngine:
    """Each request needs some steps; the step that ends it returns its name."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0

    def add_request(self, name: str, steps: int) -> None:
        self.left[name] = steps

    def step(self) -> list[str]:
        time.sleep(0.001)
        self.steps += 1
        self.left = {name: n - 1 for name, n in self.left.items()}
        done = [name for name, n in self.left.items() if n <= 0]
        for name in done:
            del self.left[name]
        return done

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


def generate(engine: FakeEngine, requests: dict[str, int]) -> list[str]:
    """What ``LLM.generate`` does with its engine."""
    for name, steps in requests.items():
        engine.add_request(name, steps)
    outputs: list[str] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return sorted(outputs)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def door(engine: FakeEngine) -> Door:
    def abort() -> list[str]:
        ended, engine.left = [f"{name} aborted" for name in engine.left], {}
        return ended

    made = Door(engine, abort=abort, own_core=True, wait_s=5.0)
    made.install()
    return made


class Caller(threading.Thread):
    """Another thread of the actor."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work, self.result, self.error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def outcome(self) -> Any:
        self.join(10)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def busy(engine: FakeEngine, requests: dict[str, int]) -> Caller:
    """A caller in the midst of generating."""
    caller = Caller(lambda: generate(engine, requests))
    until(lambda: engine.steps > 3)
    return caller


def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline.after(10)
    while not condition():
        assert not deadline.expired
        time.sleep(0.001)


def test_an_open_door_is_not_noticed(engine: FakeEngine, door: Door) -> None:
    assert generate(engine, {"a": 3, "b": 5}) == ["a", "b"]


def test_while_frozen_nothing_is_computed_and_afterwards_nothing_is_lost(engine: FakeEngine, door: Door) -> None:
    caller = busy(engine, {"a": 50, "b": 60})
    door.freeze(abort=False)
    steps = engine.steps
    time.sleep(0.05)
    assert engine.steps == steps
    door.open()
    assert caller.outcome() == ["a", "b"]


def test_draining_lets_running_requests_end_and_their_caller_gets_them(engine: FakeEngine, door: Door) -> None:
    caller = busy(engine, {"a": 30, "b": 60})
    door.close()
    door.drain(Deadline.after(10))
    assert door.state is DoorState.FROZEN
    assert caller.outcome() == ["a", "b"]


def test_draining_needs_no_caller_that_steps(engine: FakeEngine, door: Door) -> None:
    engine.add_request("a", 5)
    door.close()
    door.drain(Deadline.after(10))
    assert engine.has_unfinished_requests()
    assert engine.step() == ["a"]
    assert not engine.has_unfinished_requests()


def test_draining_is_bounded_by_its_deadline(engine: FakeEngine, door: Door) -> None:
    caller = busy(engine, {"a": 1000})
    door.close()
    with pytest.raises(SyncTimeout, match="still running"):
        door.drain(Deadline.after(0.02))
    door.open()
    assert caller.outcome() == ["a"]


def test_aborted_requests_reach_their_caller_while_the_door_is_frozen(engine: FakeEngine, door: Door) -> None:
    caller = busy(engine, {"a": 10_000})
    door.freeze(abort=True)
    assert caller.outcome() == ["a aborted"]


def test_a_new_request_waits_until_the_door_opens(engine: FakeEngine, door: Door) -> None:
    door.close()
    caller = Caller(lambda: generate(engine, {"a": 2}))
    time.sleep(0.03)
    assert not engine.left
    door.open()
    assert caller.outcome() == ["a"]


def test_a_new_request_gives_up_after_its_wait(engine: FakeEngine, door: Door) -> None:
    door.wait_s = 0.02
    door.close()
    with pytest.raises(ReplicaUnavailable, match="updating"):
        engine.add_request("a", 1)


def test_a_refusal_ends_running_waiting_and_new_requests(engine: FakeEngine, door: Door) -> None:
    running = busy(engine, {"a": 10_000})
    door.freeze(abort=False)
    waiting = Caller(lambda: engine.add_request("b", 1))
    door.refuse(ReplicaUnavailable("poisoned"))
    for caller in (running, waiting, Caller(lambda: generate(engine, {"c": 1}))):
        with pytest.raises(ReplicaUnavailable, match="poisoned"):
            caller.outcome()
    door.close()
    door.drain(Deadline.after(1))
    door.open()
    assert generate(engine, {"d": 1}) == ["d"]


def test_a_caller_whose_requests_a_refusal_dropped_never_ends_quietly(engine: FakeEngine, door: Door) -> None:
    engine.add_request("a", 5)
    door.refuse(ReplicaUnavailable("poisoned"))
    assert engine.has_unfinished_requests()
    with pytest.raises(ReplicaUnavailable):
        engine.step()
    assert not engine.has_unfinished_requests()


def test_the_only_thread_of_an_actor_drives_the_update_for_which_it_waits(engine: FakeEngine, door: Door) -> None:
    slices: list[float] = []

    def advance(seconds: float) -> None:
        slices.append(seconds)
        if len(slices) == 4:
            door.open()

    door.advance = advance
    door.close()
    assert generate(engine, {"a": 1}) == ["a"]
    assert len(slices) == 4
    assert all(0 < seconds <= 0.05 for seconds in slices)


def test_removing_the_door_leaves_the_engine_as_it_was(engine: FakeEngine, door: Door) -> None:
    door.close()
    door.remove()
    assert set(vars(engine)) == {"left", "steps"}
    assert generate(engine, {"a": 1}) == ["a"]


def test_a_request_that_is_let_in_is_use_and_one_that_waits_is_not(engine: FakeEngine, door: Door) -> None:
    assert door.used  # whatever ran before the door was there
    door.used = False
    generate(engine, {"a": 1})
    assert door.used
    assert door.idle

    door.used = False
    door.close()
    waiting = threading.Thread(target=generate, args=(engine, {"b": 2}))
    waiting.start()
    time.sleep(0.1)
    assert not door.used
    door.open()
    waiting.join(5)
    assert door.used
