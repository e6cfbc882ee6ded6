"""What is said where a part of an Ascend installation is missing."""

from __future__ import annotations

import json
import os
import subprocess
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


@pytest.mark.parametrize(
    ("change", "check", "level", "part"),
    [
        ({}, "NPU", "ok", "with torch_npu"),
        ({"HCCL_SO_PATH": "/nowhere/libhccl.so"}, "HCCL", "error", "libhccl.so does not load"),
    ],
)
def test_the_doctor_sees_it(
    library: Path, root: Path, tmp_path: Path, change: dict[str, str], check: str, level: str, part: str
) -> None:
    (tmp_path / "vllm.py").write_text("")  # the real one takes ten seconds to import
    env = {**os.environ, **simulator.environment(library), **change}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(tmp_path), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "twinkle_ray", "doctor", "--json"], env=env, capture_output=True, text=True, timeout=120
    )
    (node,) = json.loads(done.stdout)["nodes"].values()
    (finding,) = [finding for finding in node["findings"] if finding["check"] == check]
    assert finding["level"] == level
    assert part in finding["text"]
