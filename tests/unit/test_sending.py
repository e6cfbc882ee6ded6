"""What a sync has to send, for every state that rollouts can be in."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from twinkle_ray.errors import ConfigError
from twinkle_ray.sending import Sending, Wanted, decide, idle_lora
from twinkle_ray.types import Contents, RolloutStatus, TrainerStatus

TRAINER = TrainerStatus(
    digest="d",
    tensors=1,
    nbytes=4,
    device=("cpu", ""),
    group="",
    pid=1,
    adapters=("default", "tenant"),
    active=("default",),
    base_id="b1",
)
BARE = replace(TRAINER, adapters=(), active=(), base_id="")


def holds(base: str = "", base_id: str = "", contents: Contents = Contents.WHOLE, **more: Any) -> RolloutStatus:
    usual: dict[str, Any] = {"kind": "module", "version": 1, "updating": False, "asleep": (), "group": "", "workers": 1}
    return RolloutStatus(contents=contents, base=base, base_id=base_id, **{**usual, **more})


STATES = {
    "nothing": holds(contents=Contents.NONE),
    "merged": holds("merged"),
    "plain": holds("plain", "b1"),
    "another plain": holds("plain", "b0"),
    "a mixture": holds("plain", "b1", Contents.MIXED),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.product(STATES, STATES)))
def test_the_base_is_sent_unless_all_hold_the_trainers_present_one(one: str, other: str) -> None:
    rollouts = {"rollout[0]": STATES[one], "rollout[1]": STATES[other]}
    alone = decide(Wanted(merge=False), TRAINER, rollouts, "wait")
    assert alone == Sending(
        base=None if one == other == "plain" else "plain", base_id="b1", adapter="default", default=True
    )
    tenant = decide(Wanted(merge=False, adapter="tenant"), TRAINER, rollouts, "wait")
    assert tenant == replace(alone, adapter="tenant", default=False)
    assert decide(Wanted(merge=True), TRAINER, rollouts, "wait") == Sending(base="merged")
    assert decide(Wanted(merge=True), BARE, rollouts, "wait") == Sending(base="plain")


LORA = {"enable_lora": True}
SERVES = holds("plain", "b1", adapters={"default": 1}, default_adapter="default", lora=LORA)


@pytest.mark.parametrize(
    ("wanted", "trainer", "status", "in_flight", "text"),
    [
        (Wanted(merge=False), BARE, SERVES, "wait", "no LoRA adapter that could be sent alone"),
        (Wanted(merge=False, adapter="x"), BARE, SERVES, "wait", "no LoRA adapter 'x'; it has none"),
        (Wanted(merge=False, adapter="x"), TRAINER, SERVES, "wait", "'x'; it has 'default', 'tenant'"),
        (Wanted(merge=False), replace(TRAINER, active=()), SERVES, "wait", "none is active; name it"),
        (Wanted(merge=False), replace(TRAINER, active=("a", "b")), SERVES, "wait", "a, b are active at once"),
        (
            Wanted(merge=False),
            TRAINER,
            holds(lora={"enable_lora": False}),
            "wait",
            r"rollout\[0\]: its vLLM engine was",
        ),
        (Wanted(merge=False), TRAINER, SERVES, "keep", "'keep' is not for adapters"),
        (Wanted(merge=True), TRAINER, SERVES, "keep", "'keep' is not for adapters"),
        (
            Wanted(merge=True),
            TRAINER,
            holds("plain", "b1", adapters={"t": 3}),
            "wait",
            r"rollout\[0\] holds 't', which",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    wanted: Wanted, trainer: TrainerStatus, status: RolloutStatus, in_flight: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        decide(wanted, trainer, {"rollout[0]": status}, in_flight)
    assert "\n" not in str(caught.value)


def test_a_whole_model_may_go_beside_adapters_and_frozen_requests() -> None:
    other = holds("plain", "", adapters={"from disk": 0})
    assert decide(Wanted(merge=True), BARE, {"rollout[0]": other}, "keep") == Sending(base="plain")


def test_only_an_engine_that_has_lora_on_for_nothing_is_idle() -> None:
    states = {"a": holds(lora=LORA), "b": SERVES, "c": holds(lora={"enable_lora": False}), "d": holds()}
    assert idle_lora(states) == ["a"]
