"""The seeds' engines where no group is needed; the transfers are in ``tests/ray/test_engines_by_hand.py``."""

from __future__ import annotations

import inspect
from abc import ABC

import pytest
import torch

from twinkle_ray import BackendUnavailable, ConfigError
from twinkle_ray.checkpoint_engine import (
    CheckpointEngine,
    GlooCheckpointEngine,
    HCCLCheckpointEngine,
    NCCLCheckpointEngine,
)


def test_the_abstract_surface_is_the_seeds() -> None:
    assert issubclass(CheckpointEngine, ABC)
    assert CheckpointEngine.__abstractmethods__ == {
        "prepare",
        "init_process_group",
        "send_weights",
        "receive_weights",
        "finalize",
    }
    for engine in (NCCLCheckpointEngine, HCCLCheckpointEngine, GlooCheckpointEngine):
        assert issubclass(engine, CheckpointEngine)
        assert inspect.iscoroutinefunction(engine.send_weights)
        assert inspect.isasyncgenfunction(engine.receive_weights)


def test_nccl_without_a_gpu_says_so_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = NCCLCheckpointEngine(bucket_size=512 << 20)
    engine.is_master = True
    with pytest.raises(BackendUnavailable, match="TWINKLE_NCCL cannot work in this process"):
        engine.prepare()
    engine.finalize()


def test_hccl_without_torch_npu_names_it_and_cann() -> None:
    engine = HCCLCheckpointEngine(bucket_size=512 << 20)
    engine.is_master = True
    with pytest.raises(BackendUnavailable, match=r"torch_npu is missing; .*CANN"):
        engine.prepare()


@pytest.mark.parametrize("text", ["0", "-5", "abc", "1.5", "1e3", "٣"])
def test_a_handshake_time_out_that_is_no_number_of_seconds_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TWINKLE_CKPT_HCCL_META_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match=r"TWINKLE_CKPT_HCCL_META_TIMEOUT_S is .*integer of seconds above 0"):
        HCCLCheckpointEngine()


@pytest.mark.parametrize(("text", "seconds"), [(None, 300), ("", 300), ("17", 17)])
def test_the_handshake_time_out_is_300_seconds_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: int
) -> None:
    monkeypatch.delenv("TWINKLE_CKPT_HCCL_META_TIMEOUT_S", raising=False)
    if text is not None:
        monkeypatch.setenv("TWINKLE_CKPT_HCCL_META_TIMEOUT_S", text)
    assert HCCLCheckpointEngine()._handshake_s == seconds


def test_rank_minus_one_joins_nothing() -> None:
    engine = GlooCheckpointEngine()
    engine.prepare()
    engine.init_process_group(rank=-1, world_size=3, master_metadata={"of": "the master"})
    engine.finalize()
