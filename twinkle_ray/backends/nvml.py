"""Which other GPUs of this machine a GPU reads directly, told by NVIDIA's management library.

A process sees the GPU that Ray gave it, and can ask CUDA about that one only; the library sees all. By the binding that
Ray brings with it: the package ``nvidia-ml-py`` is no dependency of torch, nor of cupy.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

_PREFIX = "GPU-"  # which torch leaves out


def turned_off() -> bool:
    """Whether this process's environment keeps NCCL from reading other GPUs' memory, as where that does not work."""
    return os.environ.get("NCCL_P2P_DISABLE", "") not in ("", "0") or os.environ.get("NCCL_P2P_LEVEL") in ("LOC", "0")


@functools.cache
def linked(device: str) -> tuple[str, ...]:
    """The GPUs of this machine that are joined to one by NVLink, as the driver said first; none where it cannot tell.

    Args:
        device: UUID of the GPU, as torch has it. The results are such too.
    """
    try:
        return _linked(importlib.import_module("ray._private.thirdparty.pynvml"), device)
    except Exception as error:  # no driver, a part of a GPU (MIG), another Ray
        logger.debug("which GPUs are joined to %s by NVLink cannot be told: %s", device, error)
        return ()


def _linked(nvml: Any, device: str) -> tuple[str, ...]:
    nvml.nvmlInit()
    try:
        own = nvml.nvmlDeviceGetHandleByUUID(_PREFIX + device)
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _text(nvml.nvmlDeviceGetUUID(other)).removeprefix(_PREFIX)
            if name == device:
                continue
            status = nvml.nvmlDeviceGetP2PStatus(own, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status == nvml.NVML_P2P_STATUS_OK:
                found.append(name)
        return tuple(found)
    finally:
        nvml.nvmlShutdown()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
