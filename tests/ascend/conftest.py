"""The simulator, and the fixtures with which tests of ``tests/ray`` run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend import simulator


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in's ``libhccl.so``."""
    return simulator.build(tmp_path_factory.mktemp("cann"))
