"""Mends for vLLM's CPU build, whose kernels keep weights in layouts of their own. Nothing happens elsewhere.

Three habits of that build stand in the way of new weights:

- Linear layers are packed into oneDNN handles while the model loads, and ``weight`` becomes an empty tensor. A loader
  then has nothing to write to, and tied embeddings keep a packed copy that no reload refreshes. With oneDNN off, the
  layers call ``torch.nn.functional.linear`` on plain weights, as on other devices. :func:`keep_linears_plain`.
- Expert weights are permuted for the grouped GEMM once, in the parameter itself, after the first load. A later load
  writes plain rows over them, which compute nonsense until they are permuted again. :func:`repack_experts`.
- A request without an adapter, in one batch with a request that has one, is computed with the adapter of the last slot:
  its slot is -1, which the kernels in Python take as an index from the end. :func:`keep_base_plain`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, wraps
from typing import Any

import torch

from twinkle_ray.errors import UnsupportedModel

_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
_LORA_KERNELS = ("ops.torch_ops.lora_ops", "ops.torch_ops", "punica_wrapper.punica_cpu")
"""Where the kernels are defined, and where they are imported by name."""
_MARK = "_twinkle_ray_original"


@cache
def applies() -> bool:
    """Whether this process runs vLLM's CPU build."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def keep_linears_plain() -> None:
    """Switch oneDNN linears off. Must run before the model is loaded; costs some speed of large matrices on a CPU."""
    if applies():
        operators: Any = importlib.import_module("vllm._custom_ops")
        operators._supports_onednn = False


def keep_base_plain() -> None:
    """Let rows without an adapter get nothing added. May be called any number of times."""
    if not applies():
        return
    holders = [importlib.import_module(f"vllm.lora.{name}") for name in _LORA_KERNELS]
    for name in ("bgmv_expand", "bgmv_expand_slice"):
        original = getattr(holders[0], name, None)
        if original is None or hasattr(original, _MARK):
            continue
        mended = _without_base(original)
        for holder in holders:
            if getattr(holder, name, None) is original:
                setattr(holder, name, mended)


def _without_base(kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel that adds ``inputs @ B[index]``, with zeros as the inputs of rows whose index is -1."""

    @wraps(kernel)
    def expand(
        inputs: torch.Tensor, lora_b: torch.Tensor, output: torch.Tensor, index: torch.Tensor, *more: Any, **named: Any
    ) -> None:
        kernel(inputs.masked_fill((index < 0).unsqueeze(-1), 0), lora_b, output, index, *more, **named)

    setattr(expand, _MARK, kernel)
    return expand


def repack_experts(model: torch.nn.Module) -> int:
    """Permute freshly loaded, plain expert weights for the kernel again, in the storage that they have.

    Returns:
        The number of layers.

    Call it once after *all* experts were written: what is permuted already would be permuted twice.
    """
    count = 0
    for layer, experts in _layers(model):
        parameters: dict[str, torch.nn.Parameter] = {name: getattr(layer, name) for name in _EXPERT_WEIGHTS}
        experts.process_weights_after_loading(layer)
        for name, parameter in parameters.items():
            # vLLM registers new parameters here. The old ones stay, so that recorded destinations stay true.
            packed = getattr(layer, name)
            if packed is not parameter:
                parameter.data.copy_(packed.data)
                layer._parameters[name] = parameter
        count += 1
    return count


def plain_experts(model: torch.nn.Module) -> dict[int, torch.Tensor | None]:
    """Expert weights as a checkpoint has them, put back from the kernel's layout, by storage of the parameter.

    ``None`` where permuting the result again does not give the live bytes: then nothing true can be said.
    """
    found: dict[int, torch.Tensor | None] = {}
    for layer, experts in _layers(model):
        for name in _EXPERT_WEIGHTS:
            packed: torch.Tensor = getattr(layer, name).data
            found[int(packed.untyped_storage()._cdata)] = _unpack(packed, experts)
    return found


def check(model: torch.nn.Module) -> None:
    """Raise ``UnsupportedModel`` for experts that vLLM pads: nothing can be loaded into them a second time."""
    for layer, experts in _layers(model):
        padded = getattr(type(experts), "_padded_intermediate_size", None)
        config = getattr(experts, "moe_config", None)
        if padded is not None and config is not None:
            size = int(config.intermediate_size_per_partition)
            if int(padded(config)) != size:
                raise UnsupportedModel(
                    f"the CPU build pads the experts of {type(layer).__name__} (intermediate size {size}) while it "
                    "loads, so they cannot be loaded again; use a size divisible by 32"
                )


def _layers(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """``(layer, its experts kernel)`` of each layer whose experts the CPU build permutes."""
    if not applies():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        packs = hasattr(experts, "isa") and not getattr(experts, "_use_zentorch", False)
        if packs and all(hasattr(module, name) for name in _EXPERT_WEIGHTS):
            yield module, experts


def _unpack(packed: torch.Tensor, experts: Any) -> torch.Tensor | None:
    rows, columns = int(packed.shape[1]), int(packed.shape[2])
    order = _order(rows, columns, packed.dtype, str(experts.isa))
    if order is None:
        return None
    plain = torch.empty_like(packed)
    plain.view(packed.shape[0], -1)[:, order] = packed.reshape(packed.shape[0], -1)
    again = _pack(plain, str(experts.isa))
    return plain if torch.equal(again.view(torch.uint8), packed.view(torch.uint8)) else None


@lru_cache(maxsize=16)
def _order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor | None:
    """Which plain element stands at each place of a permuted expert, found by permuting the numbers themselves.

    They go digit by digit to base 256, which every float dtype holds exactly. ``None`` if it is no permutation.
    """
    count = rows * columns
    index = torch.arange(count).reshape(1, rows, columns)
    order = torch.zeros(count, dtype=torch.int64)
    for shift in range(0, max(1, count.bit_length()), 8):
        digit = ((index >> shift) & 255).to(dtype)
        order += _pack(digit, isa).reshape(-1)[:count].to(torch.int64) << shift
    return order if torch.equal(order.sort().values, torch.arange(count)) else None


def _pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
    packed: torch.Tensor = importlib.import_module("vllm._custom_ops").cpu_prepack_moe_weight(weight, isa)
    return packed
