"""A model of the user's own, registered with vLLM from outside, whose loader does more than copy. For ``probes.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import models
import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM


class OddLlamaForCausalLM(LlamaForCausalLM):
    """A Llama for the checkpoints of ``models.make_odd``."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(self._plain(weights))

    def _plain(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        parts: dict[str, torch.Tensor] = {}  # of this call only, as loaders do
        for name, value in weights:
            if name == models.ODD["turned"]:
                yield name, value.t()
            elif name == models.ODD["short"]:
                yield name, torch.nn.functional.pad(value, (0, models.SHORT_BY))
            elif name in (models.ODD["coarse"], models.ODD["fine"]):
                parts[name] = value
                if len(parts) == 2:
                    yield f"{name.rpartition('.')[0]}.weight", parts[models.ODD["coarse"]] + parts[models.ODD["fine"]]
            else:
                yield name, value


def register() -> None:
    ModelRegistry.register_model("OddLlamaForCausalLM", OddLlamaForCausalLM)
