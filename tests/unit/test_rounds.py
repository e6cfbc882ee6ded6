"""Whom a round blames, whom it waits for and whom it lets go, with answers instead of actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from twinkle_ray import rounds, topology
from twinkle_ray.errors import ManifestMismatch, PeerLost, SyncAborted, SyncError, SyncTimeout
from twinkle_ray.rounds import Call, Op, Round
from twinkle_ray.types import Deadline, OpState, OpStatus

MADE = topology.build(1, [1] * 12)


class FakeRay:
    """``ray.wait`` and ``ray.get`` over futures."""

    @staticmethod
    def wait(refs: list[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        until = time.monotonic() + timeout
        while True:
            ready = [ref for ref in refs if ref.done()][:num_returns]
            if ready or time.monotonic() >= until:
                return ready, [ref for ref in refs if ref not in ready]
            wait(refs, timeout=min(0.01, timeout), return_when="FIRST_COMPLETED")

    @staticmethod
    def get(ref: Future[Any], timeout: float) -> Any:
        return ref.result(timeout)


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ray", FakeRay)


def answer(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    elif value is not ...:
        future.set_result(value)
    return future


class Rollout:
    """Answers polls with ``status()``; ``...`` means never."""

    def __init__(self, status: Callable[[], Any]) -> None:
        self.start_checkpoint = SimpleNamespace(remote=lambda *args: answer(status()))
        self.poll_checkpoint = SimpleNamespace(remote=lambda *args: answer(status()))

    def op(self) -> Op:
        return Op(handle=self, op="receive", request={})


def failing(error: BaseException) -> Op:
    return Rollout(lambda: OpStatus(op="receive", state=OpState.FAILED, error=error)).op()


def working() -> Op:
    return Rollout(lambda: OpStatus(op="receive", state=OpState.RUNNING)).op()


def transfer(seconds: float, release: Callable[[str], None] = lambda reason: None) -> Round:
    def owner(actor: str) -> str:
        number = actor.removeprefix("rank ")
        return MADE.owner(int(number)) if number.isdigit() else actor

    return Round("transfer", Deadline.after(seconds), release=release, owner=owner)


def test_of_many_that_ran_out_of_time_the_one_that_was_in_its_own_work_is_named() -> None:
    waited = SyncTimeout("rank 0 waited 5 s for a transfer")
    stuck = SyncTimeout("transfer did not end within 5 s", actors=("rank 2",))
    with pytest.raises(SyncTimeout) as caught:
        transfer(5).run(
            {"trainer[0]": Call(ref=answer(waited)), "rollout[0]": failing(waited), "rollout[1]": failing(stuck)}
        )
    assert caught.value.actors == ("rollout[1]",)


def test_a_lost_peer_that_nobody_can_name_is_not_blamed_on_the_one_who_reports_it() -> None:
    lost = PeerLost("another rank cannot be reached any more")
    with pytest.raises(PeerLost) as caught:
        transfer(5).run({"rollout[0]": failing(lost), "rollout[1]": Rollout(lambda: ...).op()})
    assert caught.value.actors == ("rollout[1]",)


def test_a_dead_actor_is_named_before_those_who_missed_it() -> None:
    dead = ActorDiedError()
    lost = PeerLost("another rank cannot be reached any more")
    with pytest.raises(PeerLost) as caught:
        transfer(5).run({"rollout[0]": failing(lost), "rollout[1]": Call(ref=answer(dead))})
    assert caught.value.actors == ("rollout[1]",)


def test_for_one_that_is_late_when_all_others_are_done_nobody_waits_any_longer() -> None:
    start = time.monotonic()
    with pytest.raises(SyncTimeout) as caught:
        transfer(0.2).run({"rollout[0]": Call(ref=answer({})), "rollout[1]": Call(ref=answer(...))})
    assert caught.value.actors == ("rollout[1]",)
    assert time.monotonic() - start < 0.2 + 2.0  # of which the driver takes 0.5 s before it says so, and 0.3 s after


def test_rank_1_is_not_found_in_rank_12() -> None:
    lost = PeerLost("rank 1 is gone, said rank 12", actors=("rank 1",))
    with pytest.raises(PeerLost, match=r"rollout\[0\] is gone, said rank 12"):
        transfer(5).run({"rollout[11]": failing(lost)})


def test_input_refused_in_mid_transfer_is_a_failed_sync() -> None:
    late = ManifestMismatch("h.9: yielded where h.8 was agreed", problems=("h.9",))
    with pytest.raises(SyncError, match=r"h\.9") as caught:
        transfer(5).run({"trainer[0]": Call(ref=answer(late))})
    assert caught.value.cause_type == "ManifestMismatch"
    assert caught.value.actors == ("trainer[0]",)
    with pytest.raises(ManifestMismatch):
        Round("agree", Deadline.after(5)).run({"trainer[0]": Call(ref=answer(late))})


def test_an_interrupted_round_lets_everyone_go(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeRay, "wait", staticmethod(interrupt))
    with pytest.raises(KeyboardInterrupt):
        transfer(5, released.append).run({"rollout[0]": working()})
    assert len(released) == 1


def test_everyone_is_let_go_once_at_the_first_failure() -> None:
    released: list[str] = []
    with pytest.raises(SyncError, match="tensor 9"):
        transfer(5, released.append).run(
            {"trainer[0]": Call(ref=answer(KeyError("tensor 9"))), "rollout[0]": working()}
        )
    assert len(released) == 1
    assert "trainer[0]: KeyError" in released[0]


def test_whoever_is_not_done_at_the_deadline_is_named() -> None:
    start = time.monotonic()
    with pytest.raises(SyncTimeout) as caught:
        transfer(0.2).run({"trainer[0]": Call(ref=answer()), "rollout[0]": Rollout(lambda: ...).op()})
    assert caught.value.actors == ("rollout[0]",)
    assert time.monotonic() - start < 4


def test_each_is_asked_before_it_is_called_late() -> None:
    with pytest.raises(SyncTimeout) as caught:
        Round("sleep", Deadline.after(0.2)).run_each({"a": Call(ref=answer(...)), "b": Call(ref=answer("slept"))})
    assert caught.value.actors == ("a",)
    assert caught.value.__dict__["done"] == {"b": "slept"}


def test_an_abort_that_names_its_cause_keeps_it() -> None:
    told = SyncAborted("the group was given up because of rank 2: KeyError", actors=("rank 2",))
    with pytest.raises(SyncAborted) as caught:
        transfer(5).run({"rollout[0]": failing(told)})
    assert caught.value.actors == ("rollout[1]",)


def test_whoever_kept_the_others_may_say_so_before_it_is_let_go() -> None:
    released: list[str] = []
    late = time.monotonic() + 0.4
    stuck = SyncTimeout("transfer did not end within 5 s", actors=("rank 2",))

    def status() -> OpStatus:
        if released:
            return OpStatus(op="receive", state=OpState.FAILED, error=SyncAborted("released"))
        if time.monotonic() < late:
            return OpStatus(op="receive", state=OpState.RUNNING)
        return OpStatus(op="receive", state=OpState.FAILED, error=stuck)

    told = SyncAborted("given up because of rank 1: it waited", actors=("rank 1",))
    waited = SyncTimeout("rank 1 waited 5 s for a transfer")
    members = {"trainer[0]": Call(ref=answer(told)), "rollout[0]": failing(waited), "rollout[1]": Rollout(status).op()}
    with pytest.raises(SyncTimeout) as caught:
        transfer(5, released.append).run(members)
    assert caught.value.actors == ("rollout[1]",)
    assert len(released) == 1


@pytest.mark.parametrize("said", [False, None, {"success": False}], ids=str)
def test_a35_a_rollout_that_only_says_that_it_failed_has_failed(said: Any) -> None:
    released: list[str] = []
    members = {"trainer[0]": Call(ref=answer(...)), "rollout[0]": working(), "rollout[1]": Rollout(lambda: said).op()}
    start = time.monotonic()
    with pytest.raises(SyncError, match=r"rollout\[1\]: it answered") as caught:
        transfer(20, released.append).run(members)
    assert caught.value.actors == ("rollout[1]",)
    assert len(released) == 1
    assert time.monotonic() - start < 4
