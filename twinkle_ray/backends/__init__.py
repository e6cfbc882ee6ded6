"""Groups for ``ray.util.collective``: which there are, whether they can work here, and how one is made and unmade.

Ray's own names (NCCL, GLOO) are taken, and HCCL by other packages, so ours have a prefix. Registration is per process
and is done by :func:`create_group`. In a Ray worker a group goes through Ray's API and is found there by its name; a
process that is no Ray worker (vLLM's child, a test) makes the same class directly.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable
from typing import Any, cast

import ray
import torch
from ray.util import collective as _ray_collective
from ray.util.collective.backend_registry import _global_registry, register_collective_backend

from twinkle_ray.backends.base import SyncGroup, generation, living_groups
from twinkle_ray.backends.rendezvous import Meeting, unique_group_name
from twinkle_ray.errors import BackendUnavailable, ConfigError

__all__ = [
    "DEVICE_TYPES",
    "GLOO",
    "HCCL",
    "IPC",
    "NCCL",
    "Meeting",
    "SyncGroup",
    "backend_for",
    "create_group",
    "destroy_group",
    "end_group",
    "generation",
    "group_class",
    "identity",
    "linked",
    "neighbourhood",
    "ray_resources",
    "register",
    "require",
    "shareable",
    "unique_group_name",
]

GLOO = "TWINKLE_GLOO"
NCCL = "TWINKLE_NCCL"
HCCL = "TWINKLE_HCCL"
IPC = "TWINKLE_IPC"

_CLASSES: dict[str, tuple[str, str]] = {
    GLOO: ("twinkle_ray.backends.gloo", "GlooGroup"),
    NCCL: ("twinkle_ray.backends.nccl", "NcclGroup"),
    HCCL: ("twinkle_ray.backends.hccl", "HcclGroup"),
    IPC: ("twinkle_ray.backends.ipc", "IpcGroup"),
}
_BY_DEVICE = {"cpu": GLOO, "cuda": NCCL, "npu": HCCL}
_RESOURCE = {"cuda": "GPU", "npu": "NPU"}

DEVICE_TYPES = tuple(_BY_DEVICE)
"""The kinds of devices that models may be on, as torch names them."""

collective: Any = _ray_collective  # half of its functions are not annotated


def group_class(name: str) -> type[SyncGroup]:
    """The class of a backend; importing it needs no device and no optional package.

    Raises:
        ConfigError: no such backend.
    """
    if name not in _CLASSES:
        raise ConfigError(f"there is no backend {name!r}; there are {', '.join(sorted(_CLASSES))}")
    module, attribute = _CLASSES[name]
    return cast(type[SyncGroup], getattr(importlib.import_module(module), attribute))


def backend_for(device_type: str) -> str:
    """The backend that moves tensors on devices of this type (``cpu``, ``cuda``, ``npu``).

    Raises:
        ConfigError: there is none.
    """
    if device_type not in _BY_DEVICE:
        raise ConfigError(f"there is no backend for {device_type!r} devices; there are {', '.join(sorted(_BY_DEVICE))}")
    return _BY_DEVICE[device_type]


def ray_resources(device_type: str) -> dict[str, float]:
    """What an actor asks of Ray to have one such device, by Ray's name of the resource; empty for a CPU."""
    name = _RESOURCE.get(device_type)
    return {} if name is None else {name: 1.0}


def identity(device: torch.device) -> str:
    """Names one physical device of the cluster: equal for two processes that share it, ``""`` for a CPU."""
    name = _BY_DEVICE.get(device.type)
    return (SyncGroup if name is None else group_class(name)).identity(device)


def linked(device: torch.device) -> tuple[str, ...]:
    """Other devices of this machine whose memory this one reads at a rate that is not less than a group's, by their
    :func:`identity`."""
    name = _BY_DEVICE.get(device.type)
    return () if name is None else group_class(name).linked(device)


def shareable(device: torch.device, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether processes that use other devices can open the memory in which these tensors lie, and such as comes to be
    on this device."""
    name = _BY_DEVICE.get(device.type)
    return name is not None and group_class(name).shareable(device, tensors)


@functools.cache
def neighbourhood(device_type: str) -> str:
    """Names this machine, as far as processes can share memory of such a device and talk over Unix sockets: equal for
    two that can. That of a CPU is handed over with a descriptor; drivers of other devices want more in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        common = [os.stat("/proc/self/ns/net").st_ino]
        if device_type != "cpu":
            common += [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "ipc")]
        return "/".join([boot, *map(str, common)])
    except OSError:
        return ""


def wait_for(device: torch.device) -> None:
    """Wait until all work that this process has put on a device has ended."""
    name = _BY_DEVICE.get(device.type)
    (SyncGroup if name is None else group_class(name)).wait_for(device)


def require(name: str) -> None:
    """Say in one sentence what a backend lacks here.

    Raises:
        BackendUnavailable: a package or a device is missing; the message says which, and what to install.
        ConfigError: no such backend.
    """
    if (problem := group_class(name).missing()) is not None:
        raise BackendUnavailable(f"{name} cannot work in this process: {problem}")


def register() -> None:
    """Make our backends known to ``ray.util.collective`` in this process. Idempotent."""
    for name in _CLASSES:
        if not _global_registry.is_registered(name):
            register_collective_backend(name, group_class(name))


def create_group(name: str, world_size: int, rank: int, group_name: str) -> SyncGroup:
    """Make an unconnected group; see :meth:`SyncGroup.connect`.

    Raises:
        BackendUnavailable: the backend cannot work here.
        ConfigError: no such backend, a rank outside the world, or a group of that name exists in this process.
    """
    require(name)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not one of a world of {world_size}")
    if not _in_ray_worker():
        return group_class(name)(world_size, rank, group_name)
    register()
    if collective.is_group_initialized(group_name):
        raise ConfigError(f"this process has a group named {group_name!r} already")
    collective.init_collective_group(world_size, rank, name, group_name)
    return cast(SyncGroup, collective.get_group_handle(group_name))


def destroy_group(group: SyncGroup) -> None:
    """Destroy a group and take it out of Ray's registry. Idempotent."""
    group.destroy_group()  # first, since Ray's function holds a process-wide lock and this may take a second
    if _in_ray_worker() and collective.is_group_initialized(group.group_name):
        collective.destroy_collective_group(group.group_name)


def end_group(name: str, reason: str) -> None:
    """Give up the groups of the sync of this name that this process is in, whoever made them: an engine or a module
    that was replaced meanwhile leaves its membership behind, of which its successor knows nothing."""
    for group in living_groups():
        if generation(group.group_name) == name:
            group.abort(reason)
            destroy_group(group)


def _in_ray_worker() -> bool:
    return bool(ray.is_initialized() and ray._private.worker.global_worker.mode == ray.WORKER_MODE)
