"""The three process models of vLLM behind one interface."""

from __future__ import annotations

import pytest

from .conftest import Probe

pytestmark = pytest.mark.vllm

NAMES = {"llm": "llm in process", "child": "llm in child process", "async": "async llm"}
EACH = pytest.mark.parametrize("name", ["llm", "child", pytest.param("async", marks=pytest.mark.soak)])


@EACH
def test_an_engine_is_known_for_what_it_is(probe: Probe, name: str) -> None:
    facts = probe(name)
    assert facts["kind"] == NAMES[name]
    assert facts["workers"] == len(facts["describe"]) == 1
    assert facts["loop"]
    assert facts["encodes"] is False  # a model that reads text alone


@EACH
def test_a_call_reaches_the_worker_and_errors_keep_their_type(probe: Probe, name: str) -> None:
    facts = probe(name)
    assert facts["describe"][0]["kind"] == "vllm"
    assert facts["describe"][0]["path"] == "load_weights"
    assert facts["typed error"][0] == "SyncError"
    assert "nothing to read back" in facts["typed error"][1]


@pytest.mark.parametrize("name", ["llm", "child"])
def test_only_public_methods_can_be_called(probe: Probe, name: str) -> None:
    facts = probe(name)
    assert "nonsense" in facts["other error"][1]
    assert "not public" in facts["private"][1]


@pytest.mark.parametrize("name", ["llm", "child"])
def test_an_engine_is_adapted_once_and_strangers_are_not(probe: Probe, name: str) -> None:
    assert probe(name)["same"]
    assert probe(name)["stranger"]


def test_without_extension_only_workers_in_this_process_can_be_reached(probe: Probe) -> None:
    assert probe("llm")["without extension"] == []
    kind, text = probe("child")["without extension"]
    assert kind == "UnsupportedActor"
    assert 'worker_extension_cls="twinkle_ray.vllm.worker.WorkerExtension"' in text


@pytest.mark.parametrize("size", ["pipeline_parallel_size", "data_parallel_size"])
def test_parallelism_that_cannot_be_synced_is_named(probe: Probe, size: str) -> None:
    kind, text = probe("llm")[size]
    assert kind == "UnsupportedModel"
    assert size in text


@EACH
def test_what_sleeps_is_known_and_an_update_wakes_nothing(probe: Probe, name: str) -> None:
    facts = probe(name)
    assert facts["asleep"] == [[], ["kv_cache", "weights"], ["kv_cache"], []]
    assert facts["awake"] == facts["undisturbed"]


@EACH
def test_detaching_leaves_no_trace(probe: Probe, name: str) -> None:
    facts = probe(name)
    assert facts["traces"] == []
    assert facts["detached"] == facts["undisturbed"]


@pytest.mark.soak
def test_an_engine_over_two_workers_is_one_engine(probe: Probe) -> None:
    facts = probe("tensor_parallel", "qwen3_moe")
    assert facts["kind"] == "llm in process"
    assert facts["workers"] == 2
    assert facts["ranks"] == [0, 1]
