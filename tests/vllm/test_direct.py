"""Weights written straight into real vLLM's parameters, judged by what Hugging Face generates with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Probe
from .models import KINDS, ODD, SEEDS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def expected(checkpoints: Path) -> dict[str, Any]:
    """``[kind][seed]``: token ids per prompt."""
    return json.loads((checkpoints / "expected.json").read_text())


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.soak), "qwen3"])
def test_every_byte_of_a_dense_model_goes_straight(probe: Probe, expected: dict[str, Any], kind: str) -> None:
    for sync in probe("in_process", kind)["syncs"]:
        assert sync["report"]["direct_bytes"] == sync["report"]["nbytes"] > 0
        assert sync["report"]["path"] == "in place"
        assert sync["tokens"] == expected[kind][str(sync["seed"])]
        assert sync["held"] == sync["sent"]


def test_permuted_experts_stay_with_the_loader_and_the_rest_goes_straight(probe: Probe) -> None:
    facts = probe("in_process", "qwen3_moe")
    experts = {name for name in facts["syncs"][0]["sent"] if ".experts." in name}
    assert set(facts["proof"]["indirect"]) == experts != set()
    for sync in facts["syncs"]:
        assert 0 < sync["report"]["direct_bytes"] < sync["report"]["nbytes"]
        assert sync["report"]["path"] == "in place, load_weights"


@pytest.mark.parametrize("kind", KINDS)
def test_a_placement_is_proven_once(probe: Probe, kind: str) -> None:
    assert ["proof" in sync["report"]["seconds"] for sync in probe("in_process", kind)["syncs"]] == [True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_two_swapped_destinations_are_caught_and_the_sync_is_right(
    probe: Probe, expected: dict[str, Any], kind: str
) -> None:
    found = probe("in_process", kind)["sabotaged"]
    assert found["swapped"]
    assert set(found["swapped"]) <= set(found["indirect"])
    assert 0 < found["report"]["direct_bytes"] < found["report"]["nbytes"]
    assert found["tokens"] == expected[kind]["2"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_failure_after_the_proof_leaves_is_healed_by_the_next_sync(
    probe: Probe, expected: dict[str, Any], kind: str
) -> None:
    found = probe("in_process", kind)["cut off after the proof"]
    assert found["touched"]
    assert found["patterns"], "the proof wrote nothing"
    assert found["tokens"] == expected[kind]["1"]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_one_do_not_fool_the_proof(probe: Probe, kind: str) -> None:
    found = probe("in_process", kind)["constants"]
    assert found["held"] == found["sent"]
    assert found["caught"] == found["swapped"]


@pytest.mark.soak
def test_slices_of_two_workers_are_proven(probe: Probe, expected: dict[str, Any]) -> None:
    facts = probe("tensor_parallel", "llama")
    assert facts["tokens"] == expected["llama"]["1"]
    assert facts["held"] == facts["sent"]
    for way, not_direct in {
        # Norms alone go whole to both workers; each slice of the others is copied to its proven place.
        "whole": [name for name in facts["nbytes"] if "norm" not in name],
        # Rows are received in place; a slice of columns is no run of bytes.
        "cut": [name for name in facts["nbytes"] if "o_proj" in name or "down_proj" in name],
    }.items():
        for report in facts["reports"][way]:
            assert report["path"] == "in place"
            assert report["nbytes"] == sum(facts["nbytes"].values())
            assert report["nbytes"] - report["direct_bytes"] == sum(facts["nbytes"][name] for name in not_direct) > 0


@pytest.mark.soak
def test_experts_of_two_workers_are_right(probe: Probe, expected: dict[str, Any]) -> None:
    facts = probe("tensor_parallel", "qwen3_moe")
    assert facts["tokens"] == expected["qwen3_moe"]["1"]
    for way in ("whole", "cut"):
        assert {report["path"] for report in facts["reports"][way]} == {"in place, load_weights"}


def test_a20_an_engine_that_nests_its_model_takes_the_trainers_names(probe: Probe, expected: dict[str, Any]) -> None:
    facts = probe("nested_model")
    assert all(name.startswith("language_model.") for name in facts["names"])
    for sync in facts["syncs"]:
        assert sync["problems"] == []
        assert sync["report"]["direct_bytes"] == sync["report"]["nbytes"]
        assert sync["tokens"] == expected["llama"][str(sync["seed"])]
    assert len(facts["wrong"]) == 2
    for text in (str(facts["wrong"]), facts["error"][1]):  # each by the name of whoever has it
        assert "model.other.weight" in text
        assert "language_model.model.norm.weight" in text
    assert facts["error"][0] == "NotAgreed"  # at the start of a transfer, of which nothing is written
    assert facts["unchanged"]


class TestLoadersThatComputeWhatTheyStore:
    """A model registered from outside whose loader transposes, sums and pads. Norms are 1 and biases 0."""

    def test_each_sync_is_what_a_fresh_load_from_disk_is(self, probe: Probe, expected: dict[str, Any]) -> None:
        facts = probe("odd_model")
        assert facts["model"] == "OddLlamaForCausalLM"
        assert facts["before"] == expected["odd"]["0"]
        for sync in facts["syncs"]:
            assert sync["problems"] == []
            assert sync["tokens"] == expected["odd"][str(sync["seed"])]
        last = facts["syncs"][-1]
        fresh = probe("odd_from_disk", str(last["seed"]))
        assert last["parameters"] == fresh["parameters"]
        assert last["tokens"] == fresh["tokens"]
        assert len({json.dumps(expected["odd"][str(seed)]) for seed in SEEDS}) == len(SEEDS)

    def test_what_is_computed_never_counts_as_direct(self, probe: Probe) -> None:
        for sync in probe("odd_model")["syncs"]:
            assert not set(ODD.values()) & set(sync["direct"])
            odd = sum(sync["nbytes"][name] for name in ODD.values())
            assert sync["report"]["nbytes"] - sync["report"]["direct_bytes"] >= odd
            assert sync["report"]["path"] == "in place, load_weights"

    def test_constants_are_told_apart_all_the_same(self, probe: Probe) -> None:
        for sync in probe("odd_model")["syncs"]:
            assert len(sync["constant"]) == 5 + 2 * 4  # norms, and biases of q, k, v and o
            module = "model.layers.1.self_attn.o_proj"  # shares its module with what is summed
            assert {n for n in sync["constant"] if n not in sync["direct"]} == {f"{module}.bias"}
