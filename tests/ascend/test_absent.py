"""What is said where a part of an Ascend installation is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.ascend import simulator
from tests.unit.members import Seat, members, results
from twinkle_ray.checkpoint_engine import HCCLCheckpointEngine
from twinkle_ray.errors import BackendUnavailable


def prepare(seat: Seat, env: dict[str, str]) -> str:
    """What the engine says in a process that starts with this environment."""
    os.environ.update(env)
    sys.path[:0] = filter(None, env["PYTHONPATH"].split(os.pathsep))
    engine = HCCLCheckpointEngine()
    engine.is_master = True
    try:
        engine.prepare()
    except BackendUnavailable as error:
        return str(error)
    engine.finalize()
    return "it can work"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({}, ["it can work"]),
        ({"PYTHONPATH": ""}, ["the package torch_npu is missing", "twinkle_ray[npu]", "CANN"]),
        ({"FAKE_CANN": "/nowhere/libhccl.so"}, ["torch_npu does not import (libhccl.so", "CANN", "set_env.sh"]),
        ({"HCCL_SO_PATH": "/nowhere/libhccl.so"}, ["libhccl.so does not load", "set_env.sh", "HCCL_SO_PATH"]),
        ({"HCCL_SO_PATH": "libm.so.6"}, ["libhccl.so is of a CANN that is too old", "HcclGetErrorString"]),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, ["torch_npu sees no NPU", "resources={'NPU': 1}"]),
        ({"ASCEND_RT_VISIBLE_DEVICES": "3,77"}, ["ASCEND_RT_VISIBLE_DEVICES=3,77 names 2 NPUs", "sees 1"]),
    ],
)
def test_one_sentence_names_what_is_missing(library: Path, change: dict[str, str], parts: list[str]) -> None:
    with members(prepare, 1, {**simulator.environment(library), **change}) as people:
        (said,) = results(people)
    assert [part for part in parts if part not in said] == []
    assert "\n" not in said
    assert parts == ["it can work"] or said.startswith("TWINKLE_HCCL cannot work in this process: ")
