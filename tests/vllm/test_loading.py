"""New weights in real vLLM models, judged by what Hugging Face generates with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Probe
from .models import KINDS

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def expected(checkpoints: Path) -> dict[str, Any]:
    """``[kind][seed]``: token ids per prompt."""
    return json.loads((checkpoints / "expected.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_three_syncs_in_a_row_generate_what_hugging_face_generates(
    probe: Probe, expected: dict[str, Any], kind: str
) -> None:
    facts = probe("in_process", kind)
    assert facts["before"] == expected[kind]["0"]
    for sync in facts["syncs"]:
        assert sync["tokens"] == expected[kind][str(sync["seed"])]
        assert sync["report"]["tensors"] == len(sync["sent"])
    assert len({json.dumps(t) for t in (facts["before"], *(s["tokens"] for s in facts["syncs"]))}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_that_was_given_up_is_healed_by_the_next(probe: Probe, expected: dict[str, Any], kind: str) -> None:
    facts = probe("in_process", kind)
    assert facts["meta_after_abandon"] == []
    assert facts["healed"] == expected[kind]["3"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_gives_an_engine_our_extension(probe: Probe, kind: str) -> None:
    assert probe("in_process", kind)["extension"] == "twinkle_ray.vllm.worker.WorkerExtension"


def test_an_extension_of_the_users_own_stays(probe: Probe) -> None:
    assert probe("in_process", "llama")["foreign_extension"] == "mine.Extension"


def test_packed_linears_go_by_vllms_own_reload(probe: Probe, expected: dict[str, Any]) -> None:
    facts = probe("layerwise", mended=False)
    assert facts["report"]["path"] == "layerwise reload"
    assert facts["agreement"]["unknown"] == facts["agreement"]["missing"] == facts["agreement"]["mismatched"] == []
    assert facts["tokens"]["1"] == expected["llama"]["1"]
    assert len(facts["misfit"]["unknown"]) == 2
    assert len(facts["misfit"]["mismatched"]) == 3
    assert len(facts["misfit"]["missing"]) == 2


def test_a_reload_that_was_given_up_is_healed_by_the_next(probe: Probe, expected: dict[str, Any]) -> None:
    facts = probe("layerwise", mended=False)
    assert facts["meta_after_abandon"] == []
    assert facts["tokens"]["2"] == expected["llama"]["2"]


def test_what_was_packed_is_listed_as_unverifiable(probe: Probe) -> None:
    facts = probe("layerwise", mended=False)
    assert facts["pieces"] == 0
    assert facts["unverifiable"] == facts["names"]


def test_the_pieces_of_two_workers_make_whole_tensors(probe: Probe, expected: dict[str, Any]) -> None:
    facts = probe("tensor_parallel", "qwen3_moe")
    assert facts["problems"] == facts["unverifiable"] == [[], []]
    assert facts["partial"] == []
    assert facts["held"] == facts["sent"]
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in facts["cut"]
    assert facts["tokens"] == expected["qwen3_moe"]["1"]
