"""Where a manifest's tensors land in real vLLM models."""

from __future__ import annotations

import pytest

from .conftest import Probe
from .models import KINDS

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_vllm_loaded_are_found_at_the_recorded_destinations(probe: Probe, kind: str) -> None:
    for sync in probe("in_process", kind)["syncs"]:
        assert sync["agreement"]["unknown"] == sync["agreement"]["missing"] == sync["agreement"]["mismatched"] == []
        assert set(sync["agreement"]["dtypes"]) == {"float32"}
        assert sync["held"] == sync["sent"]
        assert sync["unverifiable"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_does_not_fit_is_named_at_once(probe: Probe, kind: str) -> None:
    said = probe("in_process", kind)["misfits"]["several"]
    assert {s.split(":")[0] for s in said["unknown"]} == {"model.layers.0.nonsense.weight", "banana"}
    assert {s.split(":")[0] for s in said["mismatched"]} == {
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
    }
    assert said["missing"] == [
        "model.layers.1.self_attn.qkv_proj.weight (8192 of its 32768 elements)",
        "model.layers.1.post_attention_layernorm.weight",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_another_wrapper_are_all_unknown_and_everything_is_missing(probe: Probe, kind: str) -> None:
    facts = probe("in_process", kind)
    prefix = facts["misfits"]["prefix"]
    assert {s.split(":")[0] for s in prefix["unknown"]} == {f"module.{n}" for n in facts["syncs"][0]["sent"]}
    assert prefix["missing"] == facts["misfits"]["empty"]["missing"] != []
    assert facts["misfits"]["empty"]["unknown"] == []


def test_a_head_of_its_own_is_refused_by_a_tied_engine_and_taken_by_others(probe: Probe) -> None:
    assert probe("in_process", "qwen3")["misfits"]["own head"]["unknown"] == [
        "lm_head.weight: the engine drops it without a word"
    ]
    assert probe("in_process", "llama")["misfits"]["own head"]["unknown"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_question_changes_the_model(probe: Probe, kind: str) -> None:
    assert probe("in_process", kind)["unchanged"]


def test_what_a_loader_may_do_besides_copying_is_indirect(probe: Probe) -> None:
    odd = probe("in_process", "llama")["odd"]
    assert odd["destinations"] == ["padded", "plain", "transposed"]
    assert set(odd["indirect"]) == {"derived", "scaled", "rebound", "read", "each", "gone"}
    assert [s.split(":")[0] for s in odd["unknown"]] == ["unheard"]
    assert odd["mismatched"] == []
    assert odd["missing"] == ["never"]
    assert odd["transposed"]
    assert odd["whole"]
    assert odd["sevens"], "recording wrote into a live parameter"
