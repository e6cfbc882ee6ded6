"""A cluster of two nodes, one of which is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu("the two nodes that it makes have no NPUs")


@pytest.mark.soak
def test_a_node_that_is_lost(root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray.two_nodes", folder],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] == 2
    assert found["across"] == [True] * 3
    kind, actors, text, taken = found["error"]
    assert (kind, actors) == ("PeerLost", ["rollout[1]"]), text
    assert taken < 10
    assert found["ping"] < 2
    assert found["afterwards"]
    assert found["name"] == "rollout[2]"
    assert found["replaced"]
