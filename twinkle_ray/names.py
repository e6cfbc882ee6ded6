"""From the names of a trainer's tensors to the names that an engine loads.

``torch.compile``, DDP, FSDP1 and checkpoint wrappers each put one segment of their own into every name below them.
Which segments those are is read from the live module tree, by type: a submodule that its author called ``module`` or
``_orig_mod`` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

from twinkle_ray.errors import UnsupportedModel

WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Where a wrapper's class is, its name, and the attribute that holds the wrapped module."""

_LONGEST_NAME = 10_000


def loaded_class(module: str, name: str) -> type | None:
    """The class, if its module is imported already; no instance can exist otherwise, so nothing is imported."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def walk(root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Every place in the tree of ``root``, parents first, in the order of ``state_dict``.

    Yields:
        The place's prefix as torch spells it, its prefix without wrapper segments (both end with a dot, or are
        empty at the root), and the module there. A module that stands in two places comes twice.

    Raises:
        UnsupportedModel: a module contains itself.
    """
    wrappers = [(cls, attribute) for module, name, attribute in WRAPPERS if (cls := loaded_class(module, name))]
    attribute_of: dict[type, str | None] = {}
    stack = [("", "", root)]
    while stack:
        raw, clean, module = stack.pop()
        yield raw, clean, module
        if not module._modules:
            continue
        if len(raw) > _LONGEST_NAME:
            raise UnsupportedModel(f"the module tree does not end: {raw[:80]}... contains itself")
        kind = type(module)
        if kind not in attribute_of:
            attribute_of[kind] = next((attribute for cls, attribute in wrappers if issubclass(kind, cls)), None)
        hidden = attribute_of[kind]
        for key, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((f"{raw}{key}.", clean if key == hidden else f"{clean}{key}.", child))


def clean_names(root: nn.Module) -> dict[str, str]:
    """Names of all parameters and buffers, non-persistent ones too: torch's spelling to the one without wrappers.

    Names that PEFT makes are left as they are.
    """
    return {
        raw + key: clean + key
        for raw, clean, module in walk(root)
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None
    }
