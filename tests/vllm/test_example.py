"""The RLHF examples, run as their users run them: a Ray head of its own, ``ray job submit``, real vLLM rollouts."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
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

    def __init__(self, root: Path, out: Path, *options: str, example: str = "rlhf_grpo") -> None:
        self.out = out
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "examples/submit.py", example, "--out", str(out), *options],
            cwd=root,
            env=os.environ | {MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Where pytest itself runs in a shell's background, SIGINT is ignored, and that is inherited.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
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


@pytest.mark.soak
def test_trainer_and_rollout_in_one_bundle_take_turns(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path, "--steps", "4", "--offload", example="rlhf_colocated")

    code, output = run.wait()

    assert code == 0, output
    assert "this engine has no sleep mode" in output
    assert "verified: the rollout holds the trainer's weights, bit for bit" in output
    steps = json.loads((tmp_path / "rlhf_colocated.json").read_text())["steps"]
    assert [row["version"] for row in steps] == [2, 3, 4, 5]
    assert steps[-1]["reward"] > steps[0]["reward"]
    assert run.alive() == []


@pytest.mark.soak
def test_a_job_that_fails_fails_the_caller(root: Path, tmp_path: Path) -> None:
    run = Run(root, tmp_path, "--rollouts", "0")

    code, output = run.wait()

    assert code not in (0, None)
    assert "--rollouts between 1 and" in output
    assert run.alive() == []


def test_an_example_that_is_not_there_is_refused_with_those_that_are(root: Path) -> None:
    command = [sys.executable, "examples/submit.py", "rlhf_other", "--steps", "3"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "there is no example 'rlhf_other'; there are rlhf_" in done.stderr


@pytest.mark.soak
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


@pytest.fixture(scope="module")
def job(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    """``job(example, *options)``: what it wrote; all run by `ray job submit` in one Ray."""
    spec = importlib.util.spec_from_file_location("submit", root / "examples" / "submit.py")
    assert spec is not None
    assert spec.loader is not None
    submit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(submit)
    with submit.local_ray() as (address, environ):

        def run(example: str, *options: str) -> dict[str, Any]:
            out = tmp_path_factory.mktemp(example)
            entrypoint = ["python", f"examples/{example}.py", "--out", str(out), *options]
            command = [str(submit.BIN / "ray"), "job", "submit", "--address", address, "--working-dir", ".", "--"]
            done = subprocess.run(
                [*command, *entrypoint], cwd=root, env=environ, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return json.loads((out / f"{example}.json").read_text())

        yield run


def follows(steps: list[dict[str, Any]]) -> bool:
    """Whether all samples came from the weights that the trainer held: fp32 on both sides, computed by each."""
    return max(step["logprob_gap"] for step in steps) < 1e-4


@pytest.mark.soak
def test_lora_sends_the_base_once_and_then_the_adapter_alone(job: Callable[..., dict[str, Any]]) -> None:
    figures = job("rlhf_lora", "--steps", "4", "--rollouts", "1")

    steps = figures["steps"]
    assert figures["first"]["base"] == "plain"
    assert [(step["base"], step["adapter"]) for step in steps] == [("", "default")] * 4
    assert max(step["sync_nbytes"] for step in steps) < figures["first"]["sync_nbytes"] / 5
    assert follows(steps)


@pytest.mark.soak
def test_tenants_are_served_each_with_its_own_adapter(job: Callable[..., dict[str, Any]]) -> None:
    figures = job("rlhf_tenants", "--steps", "3")

    steps = figures["steps"]
    assert [step["tenant"] for step in steps] == ["digits", "capitals"] * 3
    assert all(step["adapter"] == step["tenant"] for step in steps)
    assert follows(steps)
    assert figures["guest"]["refused"] == ("this vLLM engine holds no adapter 'guest'; it holds 'digits', 'capitals'")


@pytest.mark.soak
def test_rollouts_come_and_go_and_all_that_stay_follow(job: Callable[..., dict[str, Any]]) -> None:
    figures = job("rlhf_elastic", "--steps", "5")

    steps = figures["steps"]
    first = steps[0]["versions"]["rollout[0]"]
    assert [step["versions"] for step in steps] == [
        dict.fromkeys(("rollout[0]", "rollout[1]", "rollout[2]"), first),
        dict.fromkeys(("rollout[0]", "rollout[2]"), first + 1),
        dict.fromkeys(("rollout[0]", "rollout[2]"), first + 2),
        {"rollout[2]": first + 3},
        {"rollout[2]": first + 4},
    ]
    said = [" ".join(step["happened"]) for step in steps]
    assert "rollout[2] joined" in said[0]
    assert "no sync has brought its weights yet" in said[0]
    assert "rollout[1] was dropped" in said[1]
    assert "rollout[0] was removed" in said[3]
    assert {step["samples"] for step in steps} == {128}
    assert figures["removed_holds"] == first + 2
    assert follows(steps)


@pytest.mark.soak
@pytest.mark.parametrize(("example", "wanted"), [("rlhf_lora", [None]), ("rlhf_tenants", ["digits", "capitals"])])
def test_adapters_learn(job: Callable[..., dict[str, Any]], example: str, wanted: list[str | None]) -> None:
    figures = job(example)

    for tenant in wanted:
        own = [step for step in figures["steps"] if step.get("tenant") == tenant]
        assert gain({"steps": own}) >= 0.2
