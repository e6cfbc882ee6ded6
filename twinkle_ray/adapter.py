"""One LoRA adapter of a trainer, as it is sent alone: its tensors and its configuration, without the base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twinkle_ray.digest import DTYPE_NAMES
from twinkle_ray.errors import ConfigError, UnsupportedModel
from twinkle_ray.lora import adapter_config, adapter_tensors, check_scales
from twinkle_ray.manifest import Manifest, TensorMeta


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """What is sent of one adapter.

    Attributes:
        name: PEFT's.
        config: PEFT's, as JSON values.
        manifest: of its tensors, under the names of PEFT's checkpoints and in their own dtypes.
        tensors: the trainer's own memory, in the manifest's order; perhaps shards.
        digest: 64 bits, of configuration and manifest.
    """

    name: str
    config: dict[str, Any]
    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]
    digest: str

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors."""
        return zip((meta.name for meta in self.manifest), self.tensors, strict=True)

    def as_json(self) -> dict[str, Any]:
        """``name``, ``config``, ``manifest``, ``digest`` and ``wire`` (the manifest's digest): plain JSON values."""
        return {
            "name": self.name,
            "config": self.config,
            "manifest": self.manifest.as_json(),
            "digest": self.digest,
            "wire": self.manifest.digest,
        }

    @staticmethod
    def of(root: nn.Module, name: str) -> Adapter:
        """The adapter of this name in a trainer's model.

        Raises:
            ConfigError: there is none.
            UnsupportedModel: it cannot be told apart from the base, or is not what its configuration says.
        """
        config = adapter_config(root, name)
        if config.get("bias", "none") != "none":
            raise UnsupportedModel(
                f"adapter {name!r} has bias={config['bias']!r}: it trains biases of the base itself, which an adapter "
                "alone does not bring; sync merged"
            )
        check_scales(root, name)
        pairs = adapter_tensors(root, name)
        if not pairs:
            raise ConfigError(f"the trainer's adapter {name!r} has no tensors")
        manifest = Manifest(
            tuple(
                TensorMeta(name=key, shape=tuple(tensor.shape), dtype=DTYPE_NAMES[tensor.dtype])
                for key, tensor in pairs
            )
        )
        text = json.dumps([manifest.digest, config], sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return Adapter(name, config, manifest, tuple(tensor for _, tensor in pairs), digest)
