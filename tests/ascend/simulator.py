"""Ascend NPUs without one: ``stand_in/`` built and put before the processes of a test, never those of another one.

What it is like and what not is said at the head of ``stand_in/cann.c`` and ``stand_in/torch_npu/__init__.py``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.members import Seat, members

STAND_IN = Path(__file__).resolve().parent / "stand_in"
IMPATIENT = {"FAKE_HCCL_EXEC_MS": "1500"}
"""For ranks of which one will not come to a collective: the stand-in gives it up after so long."""


def build(folder: Path) -> Path:
    """Compile ``libhccl.so`` into this folder."""
    library = folder / "libhccl.so"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
    shared = ["-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-soname,libhccl.so"]
    source = STAND_IN / "cann.c"
    made = subprocess.run(["gcc", *flags, *shared, "-o", library, source], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    return library


def environment(library: Path) -> dict[str, str]:
    """What a process must be started with to find NPUs."""
    paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "FAKE_CANN": str(library),
        "FAKE_NPU_COUNT": "16",
        "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def knob(name: str, value: object = "") -> None:
    """Turn a knob of ``cann.c`` in this process; without a value back to its default."""
    assert fake().fake_knob(name.encode(), str(value).encode()) == 0, name


def fake() -> Any:
    """The stand-in's own functions, in a process that has imported torch_npu."""
    library = ctypes.CDLL(os.environ["FAKE_CANN"])
    library.fake_calls.restype = library.fake_last_count.restype = ctypes.c_uint64
    return library


def npus(library: Path, body: Callable[..., Any], world_size: int, *args: Any, **env: str) -> Any:
    """:func:`tests.unit.members.members`, each rank with an NPU of its own and ``env`` in its environment."""
    return members(_with_npu, world_size, {**environment(library), **env}, body, args)


def _with_npu(seat: Seat, env: Mapping[str, str], body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update({"ASCEND_RT_VISIBLE_DEVICES": str(seat.rank), **env})
    sys.path.insert(0, str(STAND_IN))
    import torch_npu  # noqa: F401

    return body(replace(seat, backend="TWINKLE_HCCL"), *args)


def patient() -> None:
    """From now on a collective waits as long as a real one: a machine that is busy makes ranks late."""
    knob("FAKE_HCCL_EXEC_MS")


@contextmanager
def turned(name: str, value: object) -> Iterator[None]:
    """:func:`knob` for the length of a block."""
    knob(name, value)
    try:
        yield
    finally:
        knob(name)
