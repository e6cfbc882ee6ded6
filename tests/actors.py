"""Actors and models that the tests share: TinyLM in its variants, a trainer, a rollout with a plain module."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin


class TinyLM(torch.nn.Module):
    """Embedding, two blocks, head; a float32 buffer, an int64 buffer, a parameter that is stored transposed."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, tied: bool = False, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(32, width, dtype=dtype)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({n: torch.nn.Linear(width, width, bias=n == "q", dtype=dtype) for n in "qkvo"})
            for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(width, dtype=dtype)
        self.lm_head = torch.nn.Linear(width, 32, bias=False, dtype=dtype)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(6, width, dtype=dtype).t())
        self.big = torch.nn.Parameter(torch.randn(3, 40 * width, dtype=dtype))
        self.register_buffer("gate_bias", torch.randn(width))
        self.register_buffer("table", torch.arange(8) + seed)
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["o"](torch.tanh(block["q"](x) * block["k"](x) + block["v"](x)))
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def digests(module: torch.nn.Module) -> dict[str, str]:
    """SHA-256 of every tensor of ``state_dict()``, by hashlib over numpy bytes: not our code."""
    return {
        name: hashlib.sha256(
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, value in module.state_dict().items()
    }


def placed(module: torch.nn.Module) -> torch.nn.Module:
    """On the device of which the environment speaks: ``npu`` in ``tests/ray``, ``cuda`` in ``tests/gpu``."""
    device = os.environ.get("TWINKLE_TEST_DEVICE", "cpu")
    if device == "npu":
        import torch_npu  # noqa: F401

    return module.to(device)


def open_things() -> dict[str, int]:
    """What this process holds that could leak."""
    return {"threads": threading.active_count(), "fds": len(os.listdir("/proc/self/fd"))}


def group_class() -> Any:
    """Of the groups that move this process's tensors."""
    device = os.environ.get("TWINKLE_TEST_DEVICE")
    if device == "npu":
        from twinkle_ray.backends.hccl import HcclGroup

        return HcclGroup
    if device == "cuda":
        from twinkle_ray.backends.nccl import NcclGroup

        return NcclGroup
    from twinkle_ray.backends.gloo import GlooGroup

    return GlooGroup


def at_launch(number: int, act: Callable[[], Any]) -> None:
    """Do this once, instead of the launch of that number (from 0) on any group of this process, when what was launched
    before has arrived."""
    from twinkle_ray.backends.ipc import IpcGroup

    usual = {cls: cls.broadcast_many for cls in (group_class(), IpcGroup)}
    left = number

    def failing(group: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            for cls, launch in usual.items():
                cls.broadcast_many = launch
            time.sleep(0.3 if number else 0.0)
            act()
        return usual[type(group)](group, *args, **kwargs)

    for cls in usual:
        cls.broadcast_many = failing


def no_power() -> None:
    raise OSError("no more power")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Probed:
    """What a test asks any actor."""

    model: torch.nn.Module

    def digests(self) -> dict[str, str]:
        return digests(self.model)

    def logits(self) -> torch.Tensor:
        """Of some tokens, by the model's own forward pass."""
        tokens = torch.arange(12).reshape(2, 6).to(next(self.model.parameters()).device)
        with torch.no_grad():
            found: torch.Tensor = self.model.eval()(tokens)
        return found.cpu()

    def things(self) -> dict[str, int]:
        return open_things()

    def ping(self) -> float:
        return time.time()

    def pid(self) -> int:
        return os.getpid()

    def call(self, function: Any) -> Any:
        """Run a test's function on the actor itself."""
        return function(self)


class TrainerBase(Probed, TrainActorMixin):
    def __init__(self, seed: int = 0, **model: Any) -> None:
        torch.set_num_threads(1)
        self.model = placed(TinyLM(seed, **model))

    def step(self, seed: int) -> None:
        """Change every parameter and buffer."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for value in self.model.state_dict().values():
                value.copy_(torch.randn(value.shape) * 10)


class RolloutBase(Probed, RolloutActorMixin):
    def __init__(self, seed: int = 1000, **model: Any) -> None:
        torch.set_num_threads(1)
        self.model = placed(TinyLM(seed, **model))


Trainer = ray.remote(num_cpus=0.1)(TrainerBase)
Rollout = ray.remote(num_cpus=0.1)(RolloutBase)
