"""Tests of ``tests/ray`` that are listed here run on the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ray.conftest import pool as pool
from tests.ray.conftest import reused as reused
from tests.ray.conftest import stage as stage


@pytest.fixture
def device() -> str:
    return "npu"


@pytest.fixture
def actors(reused: Any) -> Any:
    return reused
