"""The seeds' engines where no group is needed; the transfers are in ``tests/ray/test_engines_by_hand.py``."""

from __future__ import annotations

import inspect
from abc import ABC

import pytest
import torch

from twinkle_ray import BackendUnavailable
from twinkle_ray.checkpoint_engine import CheckpointEngine, GlooCheckpointEngine, NCCLCheckpointEngine


def test_the_abstract_surface_is_the_seeds() -> None:
    assert issubclass(CheckpointEngine, ABC)
    assert CheckpointEngine.__abstractmethods__ == {
        "prepare",
        "init_process_group",
        "send_weights",
        "receive_weights",
        "finalize",
    }
    for engine in (NCCLCheckpointEngine, GlooCheckpointEngine):
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


def test_rank_minus_one_joins_nothing() -> None:
    engine = GlooCheckpointEngine()
    engine.prepare()
    engine.init_process_group(rank=-1, world_size=3, master_metadata={"of": "the master"})
    engine.finalize()
