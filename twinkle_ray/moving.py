"""Moving a torch module to another device and back, under the feet of whoever holds its parameters."""

from __future__ import annotations

import gc

import torch
from torch import nn


def move(module: nn.Module, device: torch.device) -> None:
    """``module.to(device)``, after which every parameter is the same object, as an optimizer needs.

    Between some kinds of devices (a CPU and an NPU, other than a CPU and a GPU) torch would make new parameters; there
    the objects exchange what they hold, which torch refuses while anything has a weak reference to one of them.
    """
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    there = torch.empty(0, device=device)
    alike = all(torch._has_compatible_shallow_copy_type(p, there) for p in module.parameters())
    if not alike:
        gc.collect()  # views in forgotten cycles count as users of a parameter
    torch.__future__.set_swap_module_params_on_conversion(swapping or not alike)
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)


def empty_cache(device: torch.device) -> None:
    """Give memory back to this kind of device that torch's allocator keeps and nobody uses."""
    empty = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if empty is not None:
        empty()
