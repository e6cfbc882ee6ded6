"""Requests to real engines while their weights change (the door's own logic: ``tests/unit/test_door.py``)."""

from __future__ import annotations

import pytest

from .conftest import Probe

pytestmark = pytest.mark.vllm

SOAK = pytest.mark.soak
ENGINES = pytest.mark.parametrize("name", ["llm", pytest.param("child", marks=SOAK), pytest.param("async", marks=SOAK)])

FULL = [["length", 200]] * 4


@ENGINES
def test_waiting_lets_running_requests_end_first(probe: Probe, name: str) -> None:
    assert probe(name)["wait"]["early"] == FULL


@ENGINES
def test_aborted_requests_tell_their_caller_at_once(probe: Probe, name: str) -> None:
    early = probe(name)["abort"]["early"]
    assert [reason for reason, _ in early] == ["abort"] * 4
    assert all(0 < count < 200 for _, count in early)


@ENGINES
def test_kept_requests_stand_still_and_end_after_it(probe: Probe, name: str) -> None:
    assert probe(name)["keep"]["early"] is None
    assert probe(name)["keep"]["late"][0] == FULL


# Frozen requests and a newcomer of one LLM would be two threads in LLM.generate, which get each other's outputs.
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("llm", mode) for mode in ("wait", "abort")),
        *(pytest.param("child", mode, marks=SOAK) for mode in ("wait", "abort")),
        *(pytest.param("async", mode, marks=SOAK) for mode in ("wait", "abort", "keep")),
    ],
)
def test_new_requests_wait_for_the_end_of_the_update(probe: Probe, name: str, mode: str) -> None:
    assert probe(name)[mode]["newcomer"] is None
    assert probe(name)[mode]["late"][1] == FULL


@ENGINES
def test_requests_that_outlast_the_deadline_stop_the_update_and_go_on(probe: Probe, name: str) -> None:
    assert probe(name)["deadline"][0] == "SyncTimeout"
    assert probe(name)["serves on"] == FULL


@ENGINES
def test_a_poisoned_engine_refuses_running_waiting_and_new_requests(probe: Probe, name: str) -> None:
    assert probe(name)["refused"] == [["ReplicaUnavailable", "poisoned"]] * 3
    assert probe(name)["healed"] == FULL


@ENGINES
def test_a_request_does_not_wait_for_ever(probe: Probe, name: str) -> None:
    kind, text = probe(name)["impatient"]
    assert kind == "ReplicaUnavailable"
    assert "updating" in text


# An AsyncLLM's update is driven by its event loop.
@pytest.mark.parametrize("name", ["llm", pytest.param("child", marks=SOAK)])
def test_the_only_thread_drives_the_update_for_which_it_waits(probe: Probe, name: str) -> None:
    assert probe(name)["single thread"] == FULL
