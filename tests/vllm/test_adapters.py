"""LoRA adapters held by real vLLM in memory, against what peft's own forward generates with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import HERE, Probe, run

pytestmark = pytest.mark.vllm

FLOWS = {"llm": "llm in process", "child": "llm in child process"}
EACH = pytest.mark.parametrize("name", ["llm", pytest.param("child", marks=pytest.mark.soak)])
UPDATES = 5
OURS = {"a": 5, "b": 8, "c": 0}


@pytest.fixture(scope="session")
def seen(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """``seen(name)``: the facts that one run of ``adapter_probes.py`` found; each run is made once."""
    adapters = tmp_path_factory.mktemp("adapters")
    run("adapter_probes.py", str(checkpoints), str(adapters))
    answers: dict[str, dict[str, Any]] = {}

    def ask(name: str) -> dict[str, Any]:
        if name not in answers:
            out = tmp_path_factory.mktemp("probe") / "facts.json"
            env = {
                "PYTHONPATH": f"{HERE.parents[1]}:{HERE}",
                "TWINKLE_RAY_ROLLOUT": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if name == "child" else "0",
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
            }
            run("adapter_probes.py", str(checkpoints), str(adapters), str(out), name, env=env)
            answers[name] = json.loads(out.read_text())
        return answers[name]

    return ask


def are(facts: dict[str, Any]) -> list[str | None]:
    answers: list[str | None] = facts["are"]
    return answers


@EACH
def test_the_oracle_tells_all_versions_apart(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert facts["kind"] == FLOWS[name]
    assert facts["distinct"] == 15
    assert are(facts["base"]) == ["base"]


@EACH
def test_after_each_update_requests_get_the_new_version_and_the_old_one_is_gone(seen: Probe, name: str) -> None:
    updates = seen(name)["updates"]
    assert [are(u["first"]) for u in updates] == [[f"a{k}"] for k in range(1, UPDATES + 1)]
    assert [u["held"] for u in updates] == [{"a": k} for k in range(1, UPDATES + 1)]
    assert all(len(u["ids"]) == 1 for u in updates)
    assert len({u["ids"][0] for u in updates}) == UPDATES
    assert len({str(u["memory"]) for u in updates}) == 1


@EACH
def test_no_block_of_the_prefix_cache_outlives_its_version(seen: Probe, name: str) -> None:
    facts = seen(name)
    for update in facts["updates"]:
        assert update["first"]["cached"] == 0
        assert update["second"]["cached"] > 0  # so there would have been something stale to hit
        assert are(update["second"]) == are(update["first"])
    outcome, again = facts["restarted"]
    assert outcome is None
    assert again == {"are": ["a1"], "cached": 0}


@EACH
def test_a_request_for_an_older_version_gets_the_present_one(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert are(facts["older request"]) == ["a5"]
    assert facts["gone"][0] == "ConfigError"
    assert "no adapter 'b'" in facts["gone"][1]


@EACH
def test_names_and_the_base_are_served_side_by_side_and_an_update_touches_one(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert are(facts["side by side"]) == ["a5", "base", "b1", "c"]  # c is from a directory
    assert are(facts["after b"]) == ["a5", "base", "b2", "c"]
    assert facts["held"] == OURS


@EACH
def test_without_a_default_requests_get_the_base(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert are(facts["no default"]) == ["base"]
    assert facts["unknown default"][0] == "ConfigError"
    removed, base, others = facts["removed default"]
    assert removed
    assert are(base) == ["base"]
    assert are(others) == ["a5", "c"]
    assert facts["left"] == [{"c": 0}, 1]


@EACH
def test_the_users_own_adapters_are_served_beside_and_evict_none_of_ours(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert [are(f) for f in facts["own"]] == [["rslora", "base"], ["b1"], ["rslora"], ["a5", "b2", "c"]]
    assert "1073741824" in facts["own id"][1]
    assert facts["no room for own"][0] == "ConfigError"
    assert "max_cpu_loras" in facts["no room for own"][1]


@EACH
def test_more_names_than_the_engine_holds_are_refused(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert facts["no room"][0] == "ConfigError"
    assert "'a', 'b', 'c', 'd'" in facts["no room"][1]
    assert facts["removed"] == [True, False]
    assert are(facts["after no room"]) == ["a5", "b2", "c"]


@EACH
@pytest.mark.parametrize("where", ["add", "activate", "slots"])
def test_a_failure_in_the_middle_leaves_the_old_version(seen: Probe, name: str, where: str) -> None:
    broken = seen(name)["broken"][where]
    for kind, text in broken["outcomes"]:
        assert kind == "SyncError"
        assert "no more memory" in text
    assert broken["held"] == OURS
    assert are(broken) == ["a5", "b2", "c"]


WRONG = {
    "prefix": ("ManifestMismatch", "other.model.layers.1.mlp.down_proj is no module"),
    "no B": ("ManifestMismatch", "model.layers.0.self_attn.q_proj comes without lora_B"),
    "no A": ("ManifestMismatch", "model.layers.0.self_attn.k_proj comes without lora_A"),
    "rows": ("ManifestMismatch", "has shape (128, 4), not (64, 4)"),
    "columns": ("ManifestMismatch", "has shape (4, 64), not (4, 128)"),
    "another rank": ("ManifestMismatch", "has shape (4, 256), not (8, 256)"),
    "flat": ("ManifestMismatch", "has 1 dimensions, not 2"),
    "fused": ("ManifestMismatch", "qkv_proj is no module"),
    "base tensor": ("ManifestMismatch", "lm_head.weight is no lora_A or lora_B"),
    "empty": ("ManifestMismatch", "it has no tensor"),
    "bias": ("UnsupportedModel", "bias='lora_only'"),
    "saved": ("UnsupportedModel", "modules_to_save"),
    "kind": ("UnsupportedModel", "IA3"),
    "dora": ("UnsupportedModel", "DoRA"),
    "large": ("UnsupportedModel", "rank 16, the vLLM engine was made with max_lora_rank=8"),
    "pissa": ("UnsupportedModel", "initialised by pissa"),
}


@EACH
@pytest.mark.parametrize("change", WRONG)
def test_what_cannot_be_served_is_refused_and_nothing_changes(seen: Probe, name: str, change: str) -> None:
    (kind, text), unchanged = seen(name)["wrong"][change]
    assert kind == WRONG[change][0]
    assert WRONG[change][1] in text
    assert unchanged
    assert are(seen(name)["after wrong"]) == ["a5", "b2", "c"]


@EACH
@pytest.mark.parametrize("kind", ["rslora", "patterns", "embeddings"])
def test_what_peft_scales_in_other_ways_is_served_as_peft_does(seen: Probe, name: str, kind: str) -> None:
    assert seen(name)["kinds"][kind] == [None, [kind]]


@EACH
def test_what_a_reload_of_weights_drops_can_be_put_back(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert facts["dropped"] == {}
    assert facts["restored"] == [["a", "b", "c"]]
    assert are(facts["after restore"]) == ["a5", "b2", "c", "base"]


@EACH
def test_an_engine_says_what_it_can_hold(seen: Probe, name: str) -> None:
    facts = seen(name)
    assert facts["lora_facts"] == {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 3,
        "max_cpu_loras": 4,
        "target_modules": None,
        "lora_dtype": "float32",
    }
    assert {"q_proj", "down_proj", "embed_tokens", "lm_head"} <= set(facts["modules"])
    assert "no adapter can be read from" in facts["attached nothing"][1]
    assert are(facts["detached"]) == ["base"]


@pytest.mark.soak
def test_an_async_engine_serves_the_default_in_its_present_version(seen: Probe) -> None:
    facts = seen("async")
    assert facts["kind"] == "async llm"
    assert facts["base"] == facts["no default"] == "base"
    assert facts["updates"] == [[f"a{k}"] * 2 for k in range(1, UPDATES + 1)]
    assert facts["named"] == ["c", "a5"]
    assert facts["error"][0] == "ConfigError"
    assert facts["removed"] == [True, "base"]
    assert facts["held"] == {"c": 0}


@pytest.mark.soak
def test_two_workers_slice_whole_tensors(seen: Probe) -> None:
    facts = seen("tensor_parallel")
    assert facts["workers"] == 2
    assert facts["base"] == ["base"]
    assert facts["updates"] == [[f"a{k}"] for k in range(1, UPDATES + 1)]
    assert facts["side by side"] == ["embeddings", "a5"]  # which is the default
    assert facts["beside the base"] == ["embeddings", "base"]
    assert {change: outcome[0] for change, outcome in facts["wrong"].items()} == {
        change: WRONG[change][0] for change in facts["wrong"]
    }


@pytest.mark.soak
def test_workers_that_hold_different_versions_serve_none_until_they_agree(seen: Probe) -> None:
    facts = seen("tensor_parallel")
    outcomes, (kind, text) = facts["one of two"]
    assert outcomes == [None, "lost"]
    assert kind == "SyncError"
    assert "hold different adapters" in text
    assert facts["unusable"][0] == "ConfigError"
    assert facts["healed"] == ["a1"]


def test_an_engine_without_lora_refuses_and_still_answers(seen: Probe) -> None:
    facts = seen("without_lora")
    assert facts["lora_facts"] == {"enable_lora": False}
    for kind, text in (facts["put"], facts["attach"], facts["stranger"]):
        assert kind == "UnsupportedModel"
        assert "enable_lora=True" in text
    assert facts["held"] == {}
    assert not facts["removed"]
    assert facts["base"] == ["base"]


def test_arguments_for_an_engine_fit_the_adapters(seen: Probe) -> None:
    facts = seen("without_lora")
    ranks = {name: arguments["max_lora_rank"] for name, arguments in facts["arguments"].items()}
    assert ranks == {"a1": 8, "b1": 8, "large": 16, "patterns": 8}
    assert facts["several"] == {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1, "max_cpu_loras": 2}
