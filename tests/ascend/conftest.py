"""Tests of ``tests/ray`` that are listed here run on the simulator."""

from __future__ import annotations

import pytest

from tests.ray.conftest import actors as actors


@pytest.fixture
def device() -> str:
    return "npu"
