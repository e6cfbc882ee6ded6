"""Environment of all tests, and the one local Ray that they share."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports ray, torch or vllm: they read these at import, and Ray's processes inherit them.
# Ray binds all interfaces on Linux even when it is told 127.0.0.1, unless the first one is 0.
# Without RAY_AUTH_TOKEN it writes a token into the home folder.
_DEFAULTS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # torch asks the name server for the name of each address that a store connects to; a lost packet costs 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "twinkle_ray_tests" / "vllm"),
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)
# A driver must start its own Ray here, not join whatever the shell points at.
for _name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_NAMESPACE"):
    os.environ.pop(_name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cpu", "npu"], default="cpu", help="where tests/ray puts models; npu: simulated"
    )


def pytest_configure(config: pytest.Config) -> None:
    Path(os.environ["VLLM_CACHE_ROOT"]).mkdir(parents=True, exist_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device tests that are marked ``cpu`` are skipped, and pytest prints their reasons."""
    device = config.getoption("--device")
    for item in items:
        if device != "cpu" and (mark := item.get_closest_marker("cpu")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"not on {device}: {mark.args[0]}"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A local Ray with eight logical CPUs and 16 logical NPUs, started once; the value is its address.

    Actors outlive a test that forgets them, so tests kill what they start.
    """
    import ray

    # Unix sockets lie below it and their paths may have 107 characters: hence /tmp and not pytest's tmp_path.
    temp_dir = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    try:
        ray.init(
            num_cpus=8,
            num_gpus=0,
            resources={"NPU": 16},
            include_dashboard=False,
            namespace=f"test-{uuid.uuid4().hex[:8]}",
            logging_level=logging.WARNING,
            _temp_dir=str(temp_dir),
        )
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``libhccl.so`` of the simulator; see ``tests/ascend/simulator.py``."""
    from tests.ascend import simulator

    return simulator.build(tmp_path_factory.mktemp("cann"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Kind of device on which the actors of a test have their models."""
    return str(request.config.getoption("--device"))
