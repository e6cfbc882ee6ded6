"""The RLHF example, run as its users run it: a Ray head of its own, ``ray job submit``, real vLLM rollouts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.vllm

RUN_TIMEOUT_S = 270.0
STOP_TIMEOUT_S = 60.0
MARK = "TWINKLE_RAY_TEST_RUN"  # inherited by all that a run starts, however it detaches itself


class Run:
    """One ``examples/submit.py`` in a process of its own."""

    def __init__(self, root: Path, out: Path, *options: str) -> None:
        self.out = out
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "examples/submit.py", "--out", str(out), *options],
            cwd=root,
            env=os.environ | {MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        """Return exit code and output; a run that takes too long is asked to end, so that it can clean up."""
        try:
            output, _ = self.process.communicate(timeout=RUN_TIMEOUT_S)
        except BaseException:
            self.process.terminate()
            self.process.communicate(timeout=STOP_TIMEOUT_S)
            raise
        return self.process.returncode, output

    def alive(self) -> list[str]:
        """Return the command lines of this run's processes that are there now."""
        return [" ".join(process.cmdline()) for process in processes_with(MARK, self.mark)]

    def figures(self) -> dict[str, Any]:
        """Return what the example wrote."""
        return json.loads((self.out / "rlhf_grpo.json").read_text())


def processes_with(name: str, value: str) -> Iterator[psutil.Process]:
    """Yield the live processes that have this in their environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def gain(figures: dict[str, Any]) -> float:
    """Return by how much the mean reward of the last five steps exceeds that of the first five."""
    rewards = [row["reward"] for row in figures["steps"]]
    return fmean(rewards[-5:]) - fmean(rewards[:5])


def test_twelve_steps_sync_after_each_and_leave_chart_figures_and_no_process(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path, "--steps", "12")

    code, output = run.wait()

    assert code == 0, output
    steps = run.figures()["steps"]
    assert [row["step"] for row in steps] == list(range(1, 13))
    first = steps[0]["version"]
    assert [row["version"] for row in steps] == list(range(first, first + 12))
    assert all(row["sync_seconds"] > 0 and row["sync_nbytes"] > 0 for row in steps)
    # fp32 on both sides: had a rollout sampled from other weights than the trainer's, they would differ by far more.
    assert max(row["logprob_gap"] for row in steps) < 1e-4
    assert (tmp_path / "rlhf_grpo.png").read_bytes().startswith(b"\x89PNG")
    assert run.alive() == []


def test_trainer_and_rollout_in_one_bundle_take_turns(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path, "--example", "rlhf_colocated", "--steps", "4", "--offload")

    code, output = run.wait()

    assert code == 0, output
    assert "this engine has no sleep mode" in output
    assert "verified: the rollout holds the trainer's weights, bit for bit" in output
    steps = json.loads((tmp_path / "rlhf_colocated.json").read_text())["steps"]
    assert [row["version"] for row in steps] == [2, 3, 4, 5]
    assert steps[-1]["reward"] > steps[0]["reward"]
    assert run.alive() == []


def test_a_job_that_fails_fails_the_caller(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path, "--rollouts", "0")

    code, output = run.wait()

    assert code not in (0, None)
    assert "--rollouts between 1 and" in output
    assert run.alive() == []


def test_ctrl_c_ends_all_that_was_started(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path)
    assert run.process.stdout
    for line in run.process.stdout:
        if "Running entrypoint" in line:
            break
    assert any("raylet" in command for command in run.alive())

    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()

    assert code == 130, output
    assert run.alive() == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_policy_learns_when_the_rollouts_follow_the_trainer(root: Path, tmp_path: Path, seed: int) -> None:
    run = Run(root, tmp_path, "--seed", str(seed))

    code, output = run.wait()

    assert code == 0, output
    assert gain(run.figures()) >= 0.2


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_samples_do_not_improve_when_the_weights_are_never_sent(root: Path, tmp_path: Path, seed: int) -> None:
    run = Run(root, tmp_path, "--seed", str(seed), "--no-sync")

    code, output = run.wait()

    assert code == 0, output
    assert gain(run.figures()) < 0.2
