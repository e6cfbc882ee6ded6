"""``python -m twinkle_ray status``, from another process, while a sync runs and when its job has ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.conftest import Program

ASK = """
import json, logging, sys, time
import ray
ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
from ray.experimental.internal_kv import _internal_kv_list
from twinkle_ray import status
start = time.perf_counter()
found = status.read()
seconds = time.perf_counter() - start
keys = [key.decode() for key in _internal_kv_list("status/", namespace="twinkle_ray")]
print(json.dumps({"found": [one.as_json() for one in found], "seconds": seconds, "keys": keys}))
"""


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True, timeout=60)


def ask(root: Path, address: str) -> dict[str, Any]:
    ran = run(root, "-c", ASK, address)
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def slow(ray_cluster: str, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A driver in the middle of a sync that takes about a minute."""
    log = tmp_path_factory.mktemp("slow") / "driver.log"
    program = Program(root, log, "tests.ray.watched", "slow", ray_cluster)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.wait(timeout=30)


def test_a_sync_that_runs_is_seen_from_another_process(ray_cluster: str, slow: Program, root: Path) -> None:
    job, address = slow.said["job"], ray_cluster
    seen: list[dict[str, Any]] = []
    deadline = time.monotonic() + 40
    while len({one["members"][0]["step"] for one in seen if one["phase"] == "transfer"}) < 2:
        assert time.monotonic() < deadline, seen
        answer = ask(root, address)
        assert answer["seconds"] < 1
        seen += [one for one in answer["found"] if one["job"] == job]

    last = seen[-1]
    (member,) = last["members"]
    assert (member["name"], member["state"], member["version"]) == ("rollout[0]", "updating", None)
    assert 0 < member["step"] < member["steps"]
    assert (last["version"], last["generation"], last["last"]) == (1, 1, None)
    assert last["started"] <= last["written"] <= time.time()
    assert f"status/{job}/{last['manager']}" in answer["keys"]


def test_the_command_prints_json_or_a_table(ray_cluster: str, slow: Program, root: Path) -> None:
    command = (
        "import argparse, sys; from twinkle_ray import cli_status; parser = argparse.ArgumentParser(); "
        "cli_status.add_parser(parser.add_subparsers()); sys.exit(cli_status.status(parser.parse_args(sys.argv[1:])))"
    )
    arguments = ("-c", command, "status", "--address", ray_cluster)

    plain, table = run(root, *arguments, "--json"), run(root, *arguments)

    (one,) = [one for one in json.loads(plain.stdout) if one["job"] == slow.said["job"]]
    assert one["phase"] == "transfer"
    text = table.stdout[table.stdout.index(one["manager"]) :]
    assert "updating" in text
    assert f" of {one['members'][0]['steps']}" in text


def test_what_a_dead_driver_leaves_is_ignored_and_removed(ray_cluster: str, slow: Program, root: Path) -> None:
    job, address = slow.said["job"], ray_cluster
    answer = ask(root, address)
    assert job in {one["job"] for one in answer["found"]}

    slow.process.kill()
    slow.process.wait(timeout=30)

    deadline = time.monotonic() + 30
    while job in {one["job"] for one in answer["found"]}:
        assert time.monotonic() < deadline  # until Ray has noticed
        answer = ask(root, address)
    assert not [key for key in answer["keys"] if job in key]
