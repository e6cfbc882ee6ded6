"""``python -m twinkle_ray`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def ran(root: Path, *args: str, timeout_s: float = 200.0, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(root), env.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "twinkle_ray", *args],
        env={**os.environ, **env, "PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture
def without_vllm(tmp_path: Path) -> str:
    """A folder for PYTHONPATH whose vllm is a stub: the real one takes ten seconds to import."""
    (tmp_path / "vllm.py").write_text("")
    return str(tmp_path)


@pytest.mark.vllm
def test_doctor_finds_nothing_wrong_with_every_node_of_this_cluster(ray_cluster: str, root: Path) -> None:
    done = ran(root, "doctor", "--cluster", "--address", ray_cluster, "--json")

    said = json.loads(done.stdout)
    assert (done.returncode, said["exit_code"], said["cluster"]) == (0, 0, []), done.stdout
    (node,) = said["nodes"].values()
    assert not [finding for finding in node["findings"] if finding["level"] == "error"]
    assert {"ray", "torch", "vllm", "peft", "GPU", "vLLM's hooks", "/dev/shm"} <= {f["check"] for f in node["findings"]}
    assert node["facts"]["vllm_lacks"] == []


def test_doctor_prints_each_error_with_its_mend_and_fails(root: Path, without_vllm: str) -> None:
    done = ran(root, "doctor", PYTHONPATH=without_vllm, TWINKLE_RAY_ROLLOUT="0", COLUMNS="200")

    assert done.returncode == 1, done.stderr
    assert "vLLM's hooks" in done.stdout
    assert "-> unset TWINKLE_RAY_ROLLOUT" in done.stdout
    assert "2 error(s)" in done.stdout


def test_doctor_says_what_to_do_where_no_ray_runs(root: Path) -> None:
    done = ran(root, "doctor", "--cluster", "--address", "127.0.0.1:1")

    assert done.returncode == 2
    assert "start one with `ray start --head`" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_measures_in_the_running_ray_and_prints_rows(ray_cluster: str, root: Path) -> None:
    small = ["--model", "0.6b", "--rollout", "module", "--scale", "64", "--rounds", "2", "--replicas", "1", "2"]
    done = ran(root, "bench", *small, "--json", RAY_ADDRESS=ray_cluster)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ray"] == ray_cluster
    assert [row["replicas"] for row in said["rows"]] == [1, 2]
    for row in said["rows"]:
        assert (row["model"], row["rollout"], row["tensors"], row["direct"]) == ("0.6b", "module", 310, "100.0%")
        assert row["raw ms"] > 0
        assert 0 < row["sync ms"] <= row["worst ms"]


def test_bench_says_which_devices_are_not_there(ray_cluster: str, root: Path) -> None:
    done = ran(root, *["bench", "--device", "cuda", "--replicas", "1", "3"], RAY_ADDRESS=ray_cluster)

    assert done.returncode == 2
    assert "needs 4 GPU in the cluster, for one trainer and 3 rollout(s), and Ray sees 0" in done.stderr


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_help_imports_neither_torch_nor_rich(root: Path, command: str) -> None:
    code = (
        "import contextlib, sys\n"
        "from twinkle_ray.cli import main\n"
        f"with contextlib.suppress(SystemExit): main(['{command}', '--help'])\n"
        "print([name for name in ('torch', 'rich', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)

    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
