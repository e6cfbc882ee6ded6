"""What ``python -m twinkle_ray status`` prints, and its exit code."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import pytest
import ray

from twinkle_ray import cli_status
from twinkle_ray.cli_status import status
from twinkle_ray.status import LastFailure, LastSync, ManagerStatus, MemberStatus

LAST = LastSync(version=4, mode="nccl", seconds=0.5, nbytes=10**9, phases={"transfer": 0.4}, ended=0.0)
FAILURE = LastFailure(phase="init", error="PeerLost", members=("rollout[1]",), message="it\ndied", ended=0.0)


def manager(*states: str, **changes: Any) -> ManagerStatus:
    members = tuple(MemberStatus(name=f"rollout[{i}]", state=s, version=4) for i, s in enumerate(states))
    given: dict[str, Any] = {"manager": "01000000-abcdef", "job": "01000000", "host": "head", "pid": 7, "version": 4}
    given |= {"generation": 2, "phase": "", "started": None, "written": time.time(), "members": members, "last": LAST}
    return ManagerStatus(**{**given, **changes})


def run(monkeypatch: pytest.MonkeyPatch, *found: ManagerStatus, as_json: bool = False) -> int:
    def read() -> list[ManagerStatus]:
        print("(raylet) WARNING: what Ray prints whenever a node says it")
        return list(found)

    monkeypatch.setattr(cli_status, "read", read)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    return status(argparse.Namespace(address="auto", json=as_json, watch=False))


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (manager("whole", "asleep"), 0),
        (manager("whole", "updating", phase="transfer", started=time.time()), 0),
        (manager("empty", version=0, last=None), 0),  # before its first sync
        (manager("whole", "empty"), 1),
        (manager("whole", "mixed", failure=FAILURE), 1),
        (manager("whole", "whole", failure=FAILURE), 1),
    ],
)
def test_exit_code(monkeypatch: pytest.MonkeyPatch, one: ManagerStatus, code: int) -> None:
    assert run(monkeypatch, one) == code


def test_json_is_the_records(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = manager("whole", failure=FAILURE)
    run(monkeypatch, one, as_json=True)
    assert [ManagerStatus.from_json(value) for value in json.loads(capsys.readouterr().out)] == [one]


def test_the_table_says_who_is_behind_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, manager("whole", "mixed", version=6, failure=FAILURE, written=time.time() - 500))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rollout[0]", "whole", "4", "2"] in lines
    assert ["rollout[1]", "mixed", "4", "2"] in lines
    text = " ".join(word for line in lines for word in line)
    assert "in init because of rollout[1]: PeerLost: it died" in text
    assert "1000.00 MB in 500.0 ms, 2.00 GB/s (ms: transfer 400)" in text
    assert "nothing for 500 s" in text


def test_the_table_says_what_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    member = MemberStatus(name="rollout[0]", state="updating", version=4, step=3, steps=17)
    now = time.time()
    run(monkeypatch, manager(version=5, phase="transfer", started=now - 2, written=now, members=(member,)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rollout[0]", "updating", "4", "1", "3", "of", "17"] in lines
    assert "syncing version 5, transfer, 2.0 s" in " ".join(word for line in lines for word in line)


def test_no_manager(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 0
    assert capsys.readouterr().out == "No manager runs on this cluster.\n"
