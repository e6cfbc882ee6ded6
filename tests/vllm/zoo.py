"""Models of the user's own, registered with vLLM from outside. For ``probes.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import models
import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix


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


class NestedLlamaForCausalLM(torch.nn.Module):
    """A Llama within another module, as vLLM has the language model of one that sees: a checkpoint's names are mapped
    to its own."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    )

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.language_model = LlamaForCausalLM(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "language_model"))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.language_model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def register() -> None:
    ModelRegistry.register_model("NestedLlamaForCausalLM", NestedLlamaForCausalLM)
    ModelRegistry.register_model("OddLlamaForCausalLM", OddLlamaForCausalLM)
