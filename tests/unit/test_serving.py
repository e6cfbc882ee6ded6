"""What a rollout is left as when an operation fails: its contents, its door, its workers and the error told."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from twinkle_ray import serving
from twinkle_ray.errors import ConfigError, NotAgreed, PeerLost, ReplicaUnavailable, SyncAborted, SyncError
from twinkle_ray.serving import Serving
from twinkle_ray.types import Contents, OpState, OpStatus
from twinkle_ray.worker import pack_status

REPORT = {"path": "in place", "tensors": 1, "nbytes": 4, "direct_bytes": 4, "seconds": {}}


def running(touched: bool = False) -> OpStatus:
    return OpStatus(op="transfer", state=OpState.RUNNING, touched=touched)


def failed(error: BaseException, touched: bool = False) -> OpStatus:
    return OpStatus(op="transfer", state=OpState.FAILED, touched=touched, error=error)


def done() -> OpStatus:
    return OpStatus(op="transfer", state=OpState.DONE, touched=True, result=REPORT)


class FakeTarget:
    """An engine of two workers whose statuses are scripted; writes down what it is told."""

    kind = "fake"
    waits = False
    workers = 2
    sleep_mode = True
    healed = 0

    def __init__(self, before: list[OpStatus], after_abort: list[OpStatus], loop: Any = None) -> None:
        self.loop = loop
        self.before, self.after_abort = before, after_abort
        self.events: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self.draining = 0.0
        self.held: list[dict[str, int]] = [{}, {}]
        self.acts: dict[str, list[Any]] = {}
        self.while_pausing: Any = lambda: None
        self.tags: tuple[str, ...] = ()
        self.losses = 0

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        if method not in ("poll", "launched"):
            self.events.append(method)
        if method in self.fail:
            raise self.fail[method]
        if method == "poll":
            return [pack_status(s) for s in (self.after_abort if "abort" in self.events else self.before)]
        if method == "describe":
            return [{"device_type": "cpu", "device_id": "", "group": ""}] * 2
        if method == "adapters.entries":
            return [{"held": {name: [v, v] for name, v in one.items()}, "last": 9} for one in self.held]
        for index, act in enumerate(self.acts.pop(method, [])):
            act(self.held[index], *args)
        return [{"held": one} for one in self.held]

    async def pause(self, in_flight: str, deadline: Any) -> None:
        self.events.append("pause")
        self.while_pausing()
        if self.draining:
            await asyncio.sleep(self.draining)

    async def resume(self) -> None:
        self.events.append("resume")
        if "resume" in self.fail:
            raise self.fail["resume"]

    async def refuse(self, error: ReplicaUnavailable) -> None:
        self.events.append("refuse")

    async def drop_caches(self) -> None:
        self.events.append("drop_caches")

    async def asleep(self) -> tuple[str, ...]:
        return self.tags

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self, tags: list[str] | None) -> None: ...

    default_adapter: str | None = None

    def require_alive(self) -> None: ...

    def lora_facts(self) -> dict[str, Any]:
        return {}

    def next_adapter_number(self) -> int:
        return 1

    def set_default_adapter(self, name: str | None) -> None:
        self.default_adapter = name

    async def learn_adapters(self, *, timeout_s: float, answers: Any = None) -> dict[str, int]:
        if self.held[0] != self.held[1]:
            raise SyncError("the workers hold different adapters")
        return dict(self.held[0])


def receive(timeout_s: float = 5.0) -> dict[str, Any]:
    base = {"digest": "d", "kind": "plain", "base_id": "", "manifest": None}
    return {"base": base, "version": 3, "bucket_size": 8, "timeout_s": timeout_s}


def one_sync(rollout: Serving, op: str, request: dict[str, Any]) -> OpStatus:
    rollout.start(op, op, request)
    return end_of(rollout, op)


def alone(name: str = "one", *, default: bool = True, base: str | None = None) -> dict[str, Any]:
    """An adapter, perhaps with a base before it."""
    adapter = {"name": name, "digest": "a", "wire": "w", "base_id": "b", "default": default}
    adapter |= {"config": {}, "manifest": []}
    sent = None if base is None else {"digest": "d", "kind": base, "base_id": "b", "manifest": None}
    return {**receive(), "base": sent, "adapter": adapter}


def put(held: dict[str, int], base: bool, remove: list[str], register: Any) -> None:
    """What a worker does when it settles adapters."""
    for name in remove:
        held.pop(name, None)
    if register is not None:
        held[register["name"]] = register["version"]


def fail_to_put(held: dict[str, int], *args: Any) -> None:
    raise SyncError("no memory in this worker")


def end_of(rollout: Serving, key: str, seconds: float = 5.0) -> OpStatus:
    until = time.monotonic() + seconds
    while (status := rollout.poll(key, 0.05)).state is OpState.RUNNING:
        assert time.monotonic() < until
    return status


def test_bytes_that_a_worker_took_before_it_was_aborted_make_the_contents_mixed() -> None:
    lost = PeerLost("rank 0 is gone", actors=("rank 0",))
    target = FakeTarget([failed(lost), running()], [failed(lost), failed(SyncAborted("told"), touched=True)])
    rollout = Serving(target)
    rollout.start("k", "receive", receive())
    assert isinstance(end_of(rollout, "k").error, PeerLost)
    assert rollout.contents is Contents.MIXED
    assert target.events[-1] == "refuse"


def test_workers_that_were_told_in_time_keep_the_old_version() -> None:
    lost = PeerLost("rank 0 is gone", actors=("rank 0",))
    target = FakeTarget([failed(lost), running()], [failed(lost), failed(SyncAborted("told"))])
    rollout = Serving(target)
    rollout.start("k", "receive", receive())
    assert end_of(rollout, "k").state is OpState.FAILED
    assert rollout.contents is Contents.NONE
    assert target.events[-1] == "resume"


@pytest.mark.parametrize("method", ["poll", "receive"])
def test_workers_that_cannot_be_asked_are_aborted_and_feared_to_be_mixed(method: str) -> None:
    target = FakeTarget([running(), running()], [failed(SyncAborted("told"))] * 2)
    target.fail[method] = SyncError("a worker does not answer")
    rollout = Serving(target)
    rollout.start("k", "receive", receive())
    assert "does not answer" in str(end_of(rollout, "k").error)
    assert "abort" in target.events
    assert (rollout.contents is Contents.MIXED) == (method == "poll")


def test_a_failure_to_resume_does_not_hide_the_first_error() -> None:
    target = FakeTarget([failed(KeyError("first")), running()], [failed(KeyError("first")), running()])
    target.fail["resume"] = SyncError("second")
    rollout = Serving(target)
    rollout.start("k", "receive", receive())
    error = end_of(rollout, "k").error
    assert isinstance(error, KeyError)
    assert "second" in error.__notes__[0]


def test_an_abort_ends_an_operation_that_nobody_polls_any_more() -> None:
    target = FakeTarget([running(touched=True)] * 2, [failed(SyncAborted("told"), touched=True)] * 2)
    rollout = Serving(target)
    rollout.start("k", "receive", receive())
    rollout.poll("k", 0.0)
    rollout.abort("the driver said so")
    assert not rollout.status().updating
    assert rollout.contents is Contents.MIXED
    assert target.events[-1] == "refuse"


def test_an_abort_for_another_group_is_not_for_this_operation() -> None:
    target = FakeTarget([running()] * 2, [failed(SyncAborted("told"))] * 2)
    rollout = Serving(target)
    rollout._group = "mine"
    rollout.start("k", "receive", receive())
    rollout.abort("another driver's sync failed", "other")
    assert rollout.poll("k", 0.0).state is OpState.RUNNING
    rollout.abort("this driver's sync failed", "mine")
    assert end_of(rollout, "k").state is OpState.FAILED


def test_a_receive_of_another_group_is_refused_before_it_begins() -> None:
    target = FakeTarget([done()] * 2, [])
    rollout = Serving(target)
    rollout._group = "mine"
    rollout.start("k", "receive", {**receive(), "group": "other"})
    error = end_of(rollout, "k").error
    assert isinstance(error, SyncError)
    assert "pause" not in target.events


def test_an_operation_that_does_not_end_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_GRACE_S", 0.2)
    target = FakeTarget([running()] * 2, [failed(SyncAborted("told"))] * 2)
    rollout = Serving(target)
    rollout.start("old", "receive", receive())
    rollout._lock.acquire()  # another thread of the actor is inside a call that does not return
    with pytest.raises(SyncError, match="receive"):
        rollout.start("new", "connect", {"first_rank": 1, "world_size": 2, "rendezvous": {}, "timeout_s": 5})
    rollout._lock.release()
    assert isinstance(end_of(rollout, "old").error, SyncAborted)
    assert target.events[-1] == "resume"


def on_loop(body: Any) -> None:
    """Run ``body(loop)`` while the loop runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        body(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


def test_on_an_event_loop_an_operation_begins_when_the_one_before_has_ended() -> None:
    def body(loop: Any) -> None:
        target = FakeTarget([running()] * 2, [failed(SyncAborted("told"))] * 2, loop)
        rollout = Serving(target)
        rollout.start("old", "receive", receive())
        while "receive" not in target.events:
            time.sleep(0.01)
        rollout.start("new", "leave", {})
        assert end_of(rollout, "new").state is OpState.DONE
        assert target.events == ["pause", "receive", "drop_caches", "abort", "resume", "leave"]

    on_loop(body)


def test_an_abort_is_heard_while_requests_drain() -> None:
    def body(loop: Any) -> None:
        target = FakeTarget([running()] * 2, [], loop)
        target.draining = 30.0
        rollout = Serving(target)
        rollout.start("k", "receive", receive(60.0))
        while "pause" not in target.events:
            time.sleep(0.01)
        rollout.abort("the driver said so")
        assert isinstance(end_of(rollout, "k", 2).error, SyncAborted)
        assert target.events == ["pause", "resume"]

    on_loop(body)


def adapted(base: str = "plain") -> tuple[FakeTarget, Serving]:
    """A rollout of two workers that holds that base, and adapter ``one`` as the default."""
    target = FakeTarget([done()] * 2, [done()] * 2)
    rollout = Serving(target)
    target.acts["settle_adapters"] = [put, put]
    assert one_sync(rollout, "receive", alone(base=base)).state is OpState.DONE
    assert rollout.status().adapters == {"one": 3}
    return target, rollout


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("kind", ["merged", "plain"])
def test_workers_of_which_one_failed_are_brought_together_by_the_next_sync(name: str, kind: str) -> None:
    target, rollout = adapted()
    target.acts["settle_adapters"] = [put, fail_to_put]
    assert "no memory" in str(one_sync(rollout, "receive", {**alone(name), "version": 4}).error)
    assert rollout.contents is Contents.MIXED
    assert target.held[0] != target.held[1]
    found = one_sync(rollout, "prepare", {}).result
    assert (found.contents, found.adapters) == (Contents.MIXED, {})
    target.acts["settle_adapters"] = [put, put]
    request = (
        alone(name, base="plain") if kind == "plain" else {**receive(), "base": {**receive()["base"], "kind": kind}}
    )
    assert one_sync(rollout, "receive", {**request, "version": 5}).state is OpState.DONE
    want = {name: 5} if kind == "plain" else {}
    assert target.held == [want, want]
    assert rollout.status().adapters == want
    assert rollout.contents is Contents.WHOLE
    assert target.events[-1] == "resume"


def test_a_new_adapter_that_only_one_worker_could_attach_is_held_by_none() -> None:
    target, rollout = adapted()
    target.acts["adapters.attach"] = [lambda held, name, *rest: held.update({name: 0}), fail_to_put]
    target.acts["adapters.remove"] = [lambda held, name: held.pop(name, None)] * 2
    assert "no memory" in str(one_sync(rollout, "attach", {"name": "x", "path": "p"}).error)
    assert target.held == [{"one": 3}] * 2
    assert rollout.contents is Contents.WHOLE
    assert target.events[-1] == "resume"


def test_an_abort_while_requests_drain_for_an_adapter_leaves_no_engine_paused() -> None:
    target, rollout = adapted()
    target.while_pausing = lambda: setattr(rollout._running, "abort_reason", "the driver said so")
    assert isinstance(one_sync(rollout, "detach", {"name": "one"}).error, ConfigError)  # it is the default one
    target.default_adapter = None
    assert isinstance(one_sync(rollout, "detach", {"name": "one"}).error, SyncAborted)
    assert target.events[-1] == "resume"
    assert rollout.status().adapters == {"one": 3}


def test_adapters_of_an_engine_that_sleeps_are_left_alone() -> None:
    target, rollout = adapted()
    target.tags = ("weights",)
    error = one_sync(rollout, "attach", {"name": "x", "path": "p"}).error
    assert isinstance(error, ReplicaUnavailable)
    assert "wake at least its weights" in str(error)
    assert "adapters.attach" not in target.events


def test_an_engine_that_lost_its_weights_in_its_sleep_holds_no_base_for_an_adapter() -> None:
    target, rollout = adapted()
    target.losses += 1  # the user's own llm.sleep(level=2)
    error = one_sync(rollout, "receive", {**alone(), "version": 4}).error
    assert isinstance(error, NotAgreed)
    status = rollout.status()
    assert (status.contents, status.base, status.base_id) == (Contents.NONE, "", "")
    assert "settle_adapters" not in target.acts


def test_an_adapter_of_the_trainer_does_not_take_the_place_of_one_from_a_directory() -> None:
    target, rollout = adapted()
    target.acts["adapters.attach"] = [lambda held, name, *rest: held.update({name: 0})] * 2
    assert one_sync(rollout, "attach", {"name": "x", "path": "p"}).result == {"one": 3, "x": 0}
    request = {**alone("x", default=False), "version": 4}
    assert isinstance(one_sync(rollout, "receive", request).error, NotAgreed)  # agreed before it was attached
    target.acts["adapters.remove"] = [lambda held, name: held.pop(name)] * 2
    assert one_sync(rollout, "detach", {"name": "x"}).state is OpState.DONE
    target.acts["settle_adapters"] = [put, put]
    assert one_sync(rollout, "receive", request).state is OpState.DONE
    assert isinstance(one_sync(rollout, "attach", {"name": "x", "path": "p"}).error, ConfigError)


def test_what_an_engine_had_dropped_does_not_come_back_on_a_merged_base() -> None:
    target, rollout = adapted()
    target.held = [{}, {}]  # by vLLM's own reload_weights()
    assert one_sync(rollout, "prepare", {}).result.adapters == {}

    def put_back(held: dict[str, int], *args: Any) -> None:
        put(held, *args)
        held["tenant"] = 2
        target.acts["settle_adapters"] = [put, put]

    target.acts["settle_adapters"] = [put_back, put_back]
    base = {**receive()["base"], "kind": "merged"}
    assert one_sync(rollout, "receive", {**receive(), "base": base, "version": 4}).state is OpState.DONE
    assert target.held == [{}, {}]
    assert rollout.status().adapters == {}


def test_a_rollout_that_is_to_serve_nobody_does_not_for_an_adapter_that_is_attached() -> None:
    target = FakeTarget([done()] * 2, [done()] * 2)
    rollout = Serving(target)
    assert one_sync(rollout, "hold", {"reason": "its forerunner died"}).state is OpState.DONE
    assert one_sync(rollout, "attach", {"name": "x", "path": "p"}).state is OpState.DONE
    assert target.events[-1] == "refuse"
