"""Real vLLM runs in processes of its own, each of which answers many tests: it patches the process that imports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent

Probe = Callable[..., dict[str, Any]]


def run(script: str, *args: str, env: dict[str, str] | None = None, timeout_s: float = 280.0) -> None:
    """Run one of this folder's scripts; its output is shown if it fails."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{script} {args}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``<kind>-<seed>`` for each kind and seed of ``models.py``, and ``expected.json``: what Hugging Face generates."""
    root = tmp_path_factory.mktemp("checkpoints")
    run("models.py", str(root))
    return root


@pytest.fixture(scope="session")
def probe(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """``probe(name, *args, mended=True)``: the facts that one run of ``probes.py`` found; each run is made once."""
    answers: dict[tuple[Any, ...], dict[str, Any]] = {}

    def ask(name: str, *args: str, mended: bool = True) -> dict[str, Any]:
        key = (name, *args, mended)
        if key not in answers:
            out = tmp_path_factory.mktemp("probe") / "facts.json"
            env = {
                "TWINKLE_RAY_ROLLOUT": "1" if mended else "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if name == "child" else "0",
            }
            run("probes.py", str(checkpoints), str(out), name, *args, env=env)
            answers[key] = json.loads(out.read_text())
        return answers[key]

    return ask
