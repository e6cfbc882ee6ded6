"""Rules of sleeping and waking, and moves of a model under its optimizer's feet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.actors import TinyLM, TrainerBase, digests
from twinkle_ray.colocated import TrainGroup
from twinkle_ray.errors import ConfigError, UnsupportedActor
from twinkle_ray.moving import move
from twinkle_ray.residency import described, left_asleep, require_tags, why_refused
from twinkle_ray.sources import WeightSource

BOTH = {"weights", "kv_cache"}


@pytest.mark.parametrize(
    ("before", "tags", "awake", "left"),
    [
        (BOTH, None, True, set()),
        (BOTH, None, None, set()),  # vLLM 0.25 does not say
        (BOTH, ["weights"], False, {"kv_cache"}),
        (BOTH, ["weights"], None, {"kv_cache"}),
        (BOTH, ["scheduling"], False, BOTH),
        ({"kv_cache"}, ["kv_cache"], True, set()),
        ({"kv_cache"}, ["kv_cache"], False, {"kv_cache"}),  # it did not, whatever was asked
        (BOTH, ["scheduling"], True, set()),  # taken for asleep after a sleep that had failed
    ],
)
def test_what_sleeps_after_a_wake_up(before: set[str], tags: Any, awake: bool | None, left: set[str]) -> None:
    assert left_asleep(before, tags, awake) == left


def test_a_request_is_told_what_sleeps_and_which_call_mends_it() -> None:
    assert why_refused((), lost=False) is None
    for asleep, call in ((BOTH, "wake_up_rollout()"), ({"weights"}, "wake_up_rollout(['weights'])")):
        told = str(why_refused(asleep, lost=True))
        assert f"asleep ({', '.join(sorted(asleep))}); wake it with manager.{call} before" in told
    assert "discarded by a sleep at level 2; manager.sync_weights() brings" in str(why_refused((), lost=True))


def test_tags_that_vllm_does_not_have_are_named() -> None:
    require_tags(None)
    require_tags(["weights", "kv_cache"])
    with pytest.raises(ConfigError, match="no tag 'scheduling' that could wake; the tags are kv_cache, weights"):
        require_tags(["weights", "scheduling"])


def test_who_is_in_which_state_is_one_line() -> None:
    states = {"rollout[0]": ("kv_cache",), "rollout[1]": (), "rollout[2]": None}
    assert described(states) == "rollout[0] asleep (kv_cache); rollout[1] awake; rollout[2] did not say"


def test_a_model_moves_with_its_parameters_its_gradients_and_its_ties() -> None:
    # A meta device is as foreign to a CPU as an NPU is: its tensors cannot become a CPU's.
    model = TinyLM(0, tied=True)
    model.big.grad = torch.ones_like(model.big)
    before = list(model.parameters())
    flag = torch.__future__.get_swap_module_params_on_conversion()
    move(model, torch.device("meta"))
    after = list(model.parameters())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert {p.device.type for p in after} == {"meta"}
    assert model.lm_head.weight is model.embed.weight
    assert model.big.grad is not None
    assert model.big.grad.device.type == "meta"
    assert torch.__future__.get_swap_module_params_on_conversion() is flag


def test_a_base_that_was_only_moved_is_still_the_base_that_was_sent() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(TinyLM(0), peft.LoraConfig(r=2, target_modules=["q"]))
    source = WeightSource(model)
    before = source.base_id()

    def moved() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    with source.base_stays():
        moved()
    assert source.base_id() == before
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert source.base_id() != before
    before = source.base_id()
    moved()
    assert source.base_id() != before


class Inherited:
    def offload_to_cpu(self) -> None:
        self.moved = "away"

    def reload_to_gpu(self) -> None:
        self.moved = "back"


class Own(TrainerBase, Inherited):
    moved = ""


def test_a_users_own_methods_to_move_take_the_mixins_place() -> None:
    actor = Own()
    actor.offload_to_cpu()
    assert actor.moved == "away"
    actor.reload_to_gpu()
    assert actor.moved == "back"


def test_a_model_on_the_cpu_stays_there_and_one_on_several_devices_is_refused() -> None:
    actor = TrainerBase()
    before = digests(actor.model)
    for method in (actor.offload_to_cpu, actor.reload_to_gpu, actor.release_cached_memory):
        method()
    assert digests(actor.model) == before
    actor.model.lm_head.to("meta")
    with pytest.raises(UnsupportedActor, match=r"model is on cpu, meta.*override offload_to_cpu"):
        actor.offload_to_cpu()


def test_a_train_group_says_what_it_lacks() -> None:
    synced: list[bool] = []
    with pytest.raises(ConfigError, match="nobody to sync by"):
        TrainGroup([]).update_weights()
    group = TrainGroup([object()], synced.append)
    group.merge_lora()
    group.update_weights(adapter_only=False)
    group.unmerge_lora()
    group.update_weights(adapter_only=True)
    assert synced == [True, False]
    with pytest.raises(UnsupportedActor, match=r"trainer\[0\] has no offload_to_cpu\(\)"):
        group.offload_to_cpu()
