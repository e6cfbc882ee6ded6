"""LoRA adapters of PEFT in the trainer's model: what they make of the base, computed beside it.

A model under PEFT has other modules than the base model whose names an engine knows, and its weights are spread over a
base and factors. :func:`places` walks such a tree under the base model's names, :class:`Merging` is one tensor that
does not exist in the trainer, only while it is sent: ``base + scaling * B @ A``. PEFT's own merge writes the trainer's
weights and subtracts later, which in bfloat16 is no inverse; here no storage of the trainer is ever written.

What is right is what the model computes in its forward pass, which PEFT's merge equals: an adapter counts while it is
active, not while it is disabled, and not once more after ``merge_adapter()`` has put it into the base.

The product is PEFT's own: its layer's ``get_delta_weight`` is called on a stand-in for the layer that holds whole
copies of the factors in fp32 (float64 beside a float64 base). On the layer itself it would not do: it multiplies in the
factors' dtype, or rounds to it, and it knows nothing of shards.

PEFT is never imported here: where it is not loaded there is no adapter.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from twinkle_ray.errors import ConfigError, UnsupportedModel
from twinkle_ray.names import WRAPPERS, loaded_class

_LAYERS = "peft.tuners.lora.layer"
_MATRICES = ("Linear", "ParamWrapper")
_CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
_KNOWN = (*_MATRICES, "Embedding", *_CONVOLUTIONS)
"""Layers of ``peft.tuners.lora.layer`` that can be merged exactly. Not ``MultiheadAttention``: PEFT adds the delta of
its output projection twice, and while merged its weights are no parameters."""

_DORA = ("DoraLinearVariant", "DoraEmbeddingVariant", "DoraConv1dVariant", "DoraConv2dVariant", "DoraConv3dVariant")
_AS_PLAIN = ("MiCALinearVariant", "MiCAEmbeddingVariant")
"""Variants that merge like plain LoRA."""

_PRODUCTS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    getattr(torch.backends.cudnn, "conv", torch.backends.cudnn),
    *(getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv")),
)
"""Whose precision of fp32 a trainer may have lowered, to TF32 or to bfloat16."""

_MERGEABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Place(NamedTuple):
    """One module that the base model has too.

    Attributes:
        prefix: its name in the base model, with a dot at the end, or empty.
        module: whose tensors count, while adapters do.
        layers: PEFT's layers around it, outermost first.
        frozen: the module of the same names whose tensors count without adapters, if it is another one.
    """

    prefix: str
    module: nn.Module
    layers: tuple[Any, ...] = ()
    frozen: nn.Module | None = None


class _Role(enum.Enum):
    PLAIN = enum.auto()
    WRAPPER = enum.auto()  # one child has the wrapper's own name
    TUNER = enum.auto()
    SAVED = enum.auto()  # modules_to_save


def has_adapters(root: nn.Module) -> bool:
    """Whether any module of the tree is one of PEFT's."""
    kinds = tuple(
        cls
        for module, name in (
            ("peft.peft_model", "PeftModel"),
            ("peft.mixed_model", "PeftMixedModel"),
            ("peft.tuners.tuners_utils", "BaseTuner"),
            ("peft.tuners.tuners_utils", "BaseTunerLayer"),
            ("peft.utils.other", "ModulesToSaveWrapper"),
            ("peft.utils.other", "AuxiliaryTrainingWrapper"),
        )
        if (cls := loaded_class(module, name))
    )
    return bool(kinds) and any(issubclass(kind, kinds) for kind in {type(place) for place in root.modules()})


def places(root: nn.Module) -> Iterator[Place]:
    """The modules of the base model, parents first, in the order of its ``state_dict``.

    Raises:
        UnsupportedModel: something of PEFT is there that cannot be sent exactly, named with the reason.
    """
    return _places(root, "", _Kinds())


class AdapterState:
    """What decides about the sent values without showing in the tree: which adapters are active, disabled or already
    merged, and their scales."""

    def __init__(self, root: nn.Module) -> None:
        kinds = tuple(
            cls
            for module, name in (
                ("peft.tuners.tuners_utils", "BaseTunerLayer"),
                ("peft.utils.other", "ModulesToSaveWrapper"),
            )
            if (cls := loaded_class(module, name))
        )
        self._layers: list[Any] = [place for place in root.modules() if kinds and isinstance(place, kinds)]
        self._was = self._now()

    def holds(self) -> bool:
        """Whether it is the same. About a microsecond a layer."""
        return self._now() == self._was

    def _now(self) -> list[tuple[Any, ...]]:
        return [
            (
                tuple(layer.active_adapters),
                layer.disable_adapters,
                tuple(getattr(layer, "merged_adapters", ())),  # older wrappers of modules_to_save have none
                dict(getattr(layer, "scaling", ())),
            )
            for layer in self._layers
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One adapter's part in one tensor.

    Attributes:
        layer: PEFT's layer.
        adapter: its name.
        scaling: as it was when the tree was walked.
        tensors: A and B, and the magnitude of DoRA, in PEFT's shapes, perhaps shards; of a bias the one bias of B.
    """

    layer: Any
    adapter: str
    scaling: float
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Merging:
    """A tensor that is to be computed: a base and at least one adapter's factors."""

    base: torch.Tensor
    factors: tuple[Factors, ...]

    def gather(self, whole: Callable[[torch.Tensor], torch.Tensor]) -> Gathered:
        """Base and factors as ``whole`` makes them of shards, always in the same order. All collectives are in here."""
        base = whole(self.base)
        return Gathered(base, [(part, [whole(tensor) for tensor in part.tensors]) for part in self.factors])


class Gathered:
    """A tensor to be computed of which all is there: no other rank is needed any more.

    Attributes:
        shape, dtype: of the base.
    """

    def __init__(self, base: torch.Tensor, factors: list[tuple[Factors, list[torch.Tensor]]]) -> None:
        self.shape, self.dtype = base.shape, base.dtype
        self._base = base
        self._factors = factors

    def merged(self) -> torch.Tensor:
        """In fp32 (float64 of such a base) and of the base's shape and device, in memory of its own."""
        base = self._base
        dtype = torch.promote_types(base.dtype, torch.float32)
        with torch.no_grad(), _full_precision(base.device):
            start = base.detach().to(dtype)
            total = start
            for part, tensors in self._factors:
                total = _add(start, total, part, [t.detach().to(base.device, dtype) for t in tensors])
        return total


def frozen_or_refuse(name: str, layers: tuple[Any, ...]) -> None:
    """Refuse a base into which its adapter was merged: it cannot be sent without.

    Raises:
        UnsupportedModel: so it is.
    """
    for layer in layers:
        if merged := _here(layer, layer.merged_adapters):
            raise UnsupportedModel(
                f"{name}: merge_adapter() has put {_listed(merged)} into the base, which cannot be sent without it; "
                "call unmerge_adapter() first, or sync merged"
            )


def merging(name: str, key: str, base: torch.Tensor, place: Place) -> torch.Tensor | Merging:
    """What ``base``, ``key`` of that place, becomes with the adapters that count: ``base`` itself if none does.

    Raises:
        UnsupportedModel: that cannot be computed exactly.
    """
    factors: list[Factors] = []
    for layer in place.layers:
        for adapter in _counting(name, layer):
            found = _factors(name, key, layer, adapter, place.module)
            if found is not None:
                factors.append(found)
    if not factors:
        return base
    for part in factors:
        for tensor in part.tensors:
            if tensor.is_meta:
                raise UnsupportedModel(f"{name}: its adapter {part.adapter} is on the meta device and has no values")
    if base.dtype not in _MERGEABLE:
        raise UnsupportedModel(
            f"{name}: an adapter on a base of dtype {base.dtype}, which is quantised, cannot be merged"
        )
    return Merging(base, tuple(factors))


def adapter_names(root: nn.Module) -> list[str]:
    """All adapters in the tree, by PEFT's names for them, in no order but a fixed one."""
    found: set[str] = set()
    for _, holder in _configs(root):
        found.update(holder)
    return sorted(found)


def active_adapters(root: nn.Module) -> list[str]:
    """The adapters that the forward pass uses, by name, in the order in which layers name them."""
    layers = loaded_class("peft.tuners.tuners_utils", "BaseTunerLayer")
    found: dict[str, None] = {}
    for place in root.modules():
        if layers is not None and isinstance(place, layers):
            layer = cast(Any, place)
            found.update(dict.fromkeys([] if layer.disable_adapters else _here(layer, layer.active_adapters)))
    return list(found)


def check_scales(root: nn.Module, name: str) -> None:
    """Refuse an adapter that its configuration does not describe any more: alone it is sent with nothing else.

    Raises:
        UnsupportedModel: the scale of a layer was changed after it was made (``set_scale``, ``scale_layer``).
    """
    rslora = bool(adapter_config(root, name).get("use_rslora"))
    for place in places(root):
        for layer in place.layers:
            if name not in layer.scaling:
                continue
            rank = layer.r[name]
            usual = layer.lora_alpha[name] / (math.sqrt(rank) if rslora else rank)
            if not math.isclose(layer.scaling[name], usual, rel_tol=1e-6):
                raise UnsupportedModel(
                    f"{place.prefix.rstrip('.')}: the scale of adapter {name} is {layer.scaling[name]}, while its "
                    f"configuration says {usual}; restore it, or sync merged"
                )


def adapter_config(root: nn.Module, name: str = "default") -> dict[str, Any]:
    """The configuration of one adapter as plain JSON values: PEFT's own fields, enums and dtypes as their strings, sets
    as sorted lists. The live configuration is not touched.

    Raises:
        ConfigError: there is no such adapter.
    """
    for _, configs in _configs(root):
        if name in configs:
            return cast("dict[str, Any]", _plain(configs[name].to_dict()))
    raise ConfigError(f"the trainer has no adapter {name!r}; it has {_listed(adapter_names(root)) or 'none'}")


def adapter_tensors(root: nn.Module, name: str = "default") -> list[tuple[str, torch.Tensor]]:
    """One adapter's tensors under the names of PEFT's checkpoints, which vLLM's LoRA loader expects:
    ``base_model.model.<module>.lora_A.weight``. The trainer's own memory, detached; shards stay shards.

    ``modules_to_save`` are there under the module's own name, and trained biases, as PEFT saves them.

    Raises:
        ConfigError: there is no such adapter.
        UnsupportedModel: as :func:`places`.
    """
    bias = adapter_config(root, name).get("bias", "none")
    found: dict[str, torch.Tensor] = {}
    done: set[int] = set()
    for place in places(root):
        prefix = f"base_model.model.{place.prefix}"
        for layer in place.layers:
            if id(layer) not in done:  # a shared module is saved under its first name, as it is loaded
                done.add(id(layer))
                found.update((prefix + key, tensor) for key, tensor in _own(layer, name))
            prefix += "base_layer."
        trained = place.module._parameters.get("bias")
        if trained is not None and (bias == "all" or (bias.endswith("_only") and place.layers)):
            found[prefix + "bias"] = trained
    for prefix, wrapper in _saved_wrappers(root):
        if name in wrapper.modules_to_save:
            for part in _places(wrapper.modules_to_save[name], prefix, _Kinds()):
                for tables in (part.module._parameters, part.module._buffers):
                    for key, tensor in tables.items():
                        if tensor is not None and key not in part.module._non_persistent_buffers_set:
                            found[f"base_model.model.{part.prefix}{key}"] = tensor
    return [(key, tensor.detach()) for key, tensor in found.items()]


class _Kinds:
    """What a class of modules means in the walk, found out once per class."""

    def __init__(self) -> None:
        self._known: dict[type, tuple[_Role, str]] = {}
        self._tuner = loaded_class("peft.tuners.tuners_utils", "BaseTunerLayer")
        self._saved = loaded_class("peft.utils.other", "ModulesToSaveWrapper")
        self._auxiliary = loaded_class("peft.utils.other", "AuxiliaryTrainingWrapper")
        self._mixed = loaded_class("peft.mixed_model", "PeftMixedModel")
        self.model = loaded_class("peft.peft_model", "PeftModel")
        wrappers = [*WRAPPERS, ("peft.peft_model", "PeftModel", "base_model")]
        wrappers.append(("peft.tuners.tuners_utils", "BaseTuner", "model"))
        self._wrappers = [
            (cls, attribute) for module, name, attribute in wrappers if (cls := loaded_class(module, name))
        ]

    def __call__(self, prefix: str, module: nn.Module) -> tuple[_Role, str]:
        kind = type(module)
        if kind not in self._known:
            self._known[kind] = self._role(prefix, kind)
        return self._known[kind]

    def _role(self, prefix: str, kind: type) -> tuple[_Role, str]:
        where = prefix.rstrip(".") or "the trainer's model"
        if self._mixed is not None and issubclass(kind, self._mixed):
            raise UnsupportedModel(f"{where} is a PeftMixedModel; of PEFT only LoRA adapters can be synced")
        if self._tuner is not None and issubclass(kind, self._tuner):
            layer = layer_class(kind)
            if layer.__module__ != _LAYERS or layer.__name__ not in _KNOWN:
                raise UnsupportedModel(
                    f"{where} has an adapter of PEFT's {layer.__module__.removeprefix('peft.tuners.')}."
                    f"{layer.__name__}, which cannot be merged exactly: only LoRA on unquantised linear, embedding and "
                    "convolution layers and on target_parameters can be synced"
                )
            return _Role.TUNER, "base_layer"
        if self._saved is not None and issubclass(kind, self._saved):
            return _Role.SAVED, ""
        if self._auxiliary is not None and issubclass(kind, self._auxiliary):
            raise UnsupportedModel(f"{where} is a {kind.__name__} of PEFT, which cannot be merged exactly")
        for cls, attribute in self._wrappers:
            if issubclass(kind, cls):
                return _Role.WRAPPER, attribute
        return _Role.PLAIN, ""


def layer_class(kind: type) -> type:
    """The class without those that FSDP2 puts in front of it."""
    fsdp2 = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return next(cls for cls in kind.__mro__ if fsdp2 is None or not issubclass(cls, fsdp2))


def _places(root: nn.Module, start: str, kinds: _Kinds) -> Iterator[Place]:
    stack: list[tuple[str, nn.Module, tuple[Any, ...]]] = [(start, root, ())]
    while stack:
        prefix, module, layers = stack.pop()
        role, hidden = kinds(prefix, module)
        if len(prefix) > 10_000:
            raise UnsupportedModel(f"the module tree does not end: {prefix[:80]}... contains itself")
        if role is _Role.TUNER:
            _check_layer(prefix, module)
            stack.append((prefix, cast(nn.Module, module.base_layer), (*layers, module)))
            continue
        if role is _Role.SAVED:
            if layers:
                raise UnsupportedModel(f"{prefix}: an adapter around modules_to_save cannot be merged exactly")
            yield from _saved(prefix, module, kinds)
            continue
        if kinds.model is not None and isinstance(module, kinds.model):
            _check_configs(cast(Any, module).peft_config)
        if layers and role is _Role.PLAIN:
            _check_base(prefix, module, layers)
        yield Place(prefix, module, layers if role is _Role.PLAIN else ())
        for key, child in reversed(module._modules.items()):
            if child is not None:
                inside = role is _Role.WRAPPER and key == hidden
                stack.append((prefix if inside else f"{prefix}{key}.", child, layers if inside else ()))


def _saved(prefix: str, wrapper: Any, kinds: _Kinds) -> Iterator[Place]:
    frozen = list(_places(wrapper.original_module, prefix, kinds))
    active = list(wrapper.active_adapters)
    # as the wrapper's own forward decides
    if wrapper.disable_adapters or not active or any(name not in wrapper.modules_to_save for name in active):
        yield from frozen
        return
    copies = list(_places(wrapper.modules_to_save[active[0]], prefix, kinds))
    if [place.prefix for place in copies] != [place.prefix for place in frozen]:
        raise UnsupportedModel(f"{prefix}: the copy in modules_to_save has other parts than the original")
    for copy, original in zip(copies, frozen, strict=True):
        if copy.layers or original.layers:
            raise UnsupportedModel(f"{copy.prefix}: an adapter within modules_to_save cannot be merged exactly")
        yield Place(copy.prefix, copy.module, (), original.module)


def _check_configs(configs: dict[str, Any]) -> None:
    for name, config in configs.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise UnsupportedModel(f"the trainer's adapter {name} is of type {kind}; of PEFT only LoRA can be synced")


def _check_layer(prefix: str, layer: Any) -> None:
    if getattr(layer, "tp_layer", None) is not None:
        raise UnsupportedModel(f"{prefix}: an adapter under tensor parallelism cannot be merged")
    if getattr(layer, "quantization_backend", None) is not None:
        raise UnsupportedModel(f"{prefix}: an adapter on a quantised layer cannot be merged")


def _check_base(prefix: str, base: nn.Module, layers: tuple[Any, ...]) -> None:
    for layer in layers:
        key = _target(layer)
        if base._parameters.get(key) is None:
            raise UnsupportedModel(
                f"{prefix}{key}: an adapter changes it, but the {type(base).__name__} there has no such parameter"
            )


def _counting(name: str, layer: Any) -> list[str]:
    """The adapters of this layer that the forward pass adds to what the base holds, in its order."""
    active = _here(layer, layer.active_adapters)
    merged = _here(layer, layer.merged_adapters)
    if merged:
        # With one merged in place the forward pass is the base's alone, while PEFT's merge adds the others first.
        if layer.disable_adapters:
            raise UnsupportedModel(
                f"{name}: adapters are disabled, but merge_adapter() has put {_listed(merged)} into the base; call "
                "unmerge_adapter() first"
            )
        if missing := [adapter for adapter in active if adapter not in merged]:
            raise UnsupportedModel(
                f"{name}: merge_adapter() has put {_listed(merged)} into the base, but {_listed(missing)} is active "
                "too; call unmerge_adapter() first"
            )
        return []
    return [] if layer.disable_adapters else active


def _factors(name: str, key: str, layer: Any, adapter: str, base: nn.Module) -> Factors | None:
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    kind = type(variant).__name__
    if variant is not None and kind not in (*_DORA, *_AS_PLAIN):
        raise UnsupportedModel(
            f"{name}: its adapter {adapter} is a {kind.removesuffix('Variant')} of PEFT, which cannot be merged exactly"
        )
    if getattr(base, "groups", 1) > 1:
        raise UnsupportedModel(f"{name}: PEFT cannot merge an adapter of a convolution in groups")
    scaling = layer.scaling[adapter]
    biased = layer.lora_bias.get(adapter) if hasattr(layer, "lora_bias") else False
    if biased and base._parameters.get("bias") is None:
        raise UnsupportedModel(f"{name}: its adapter {adapter} has a bias, but the layer has none to add it to")
    if key == "bias" and biased:
        return Factors(layer, adapter, scaling, (layer.lora_B[adapter].bias,))
    if key != _target(layer):
        return None
    if adapter in layer.lora_embedding_A:
        tensors = [layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]]
    else:
        tensors = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]
    if kind in _DORA:
        tensors.append(layer.lora_magnitude_vector[adapter].weight)
    return Factors(layer, adapter, scaling, tuple(tensors))


def _add(start: torch.Tensor, total: torch.Tensor, part: Factors, tensors: list[torch.Tensor]) -> torch.Tensor:
    """``total`` with one more adapter, as PEFT's ``merge`` does it; ``start`` is the base without any."""
    if len(tensors) == 1:
        return total + tensors[0] * part.scaling
    layer, adapter = part.layer, part.adapter
    stand_in = _StandIn(part, start, tensors)
    delta: torch.Tensor = type(layer).get_delta_weight(stand_in, adapter)
    if len(tensors) == 2:
        return total + delta
    dora = layer.lora_magnitude_vector[adapter]
    kind = layer_class(type(layer)).__name__
    turned = kind == "Embedding" or (kind == "Linear" and layer.fan_in_fan_out)
    norm = dora.get_weight_norm(start, delta.T if turned else delta, scaling=1)
    factor = tensors[2] / norm
    if kind in _CONVOLUTIONS:
        factor = factor.view(-1, *(1,) * (start.dim() - 1))
    else:
        factor = factor.view(1, -1) if turned else factor.view(-1, 1)
    merged: torch.Tensor = factor * (total + delta)
    return merged


class _StandIn:
    """A layer of PEFT as its ``get_delta_weight`` sees it, with whole factors in the dtype to compute in."""

    def __init__(self, part: Factors, base: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        a, b = tensors[:2]
        self._layer, self._base = part.layer, base
        self.scaling = {part.adapter: part.scaling}
        self.lora_A = {part.adapter: SimpleNamespace(weight=a)}
        self.lora_B = {part.adapter: SimpleNamespace(weight=b)}
        self.lora_embedding_A = {part.adapter: a}
        self.lora_embedding_B = {part.adapter: b}

    def get_base_layer(self) -> Any:
        return SimpleNamespace(weight=self._base, groups=1)

    def get_param(self) -> torch.Tensor:
        return self._base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, and fp32 in full in products and convolutions, whatever the trainer has chosen for itself."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # Attributes of whichever interface this torch prefers: to mix it with the other one raises in torch.
        for place in _PRODUCTS:
            new = hasattr(place, "fp32_precision")
            name, value = ("fp32_precision", "ieee") if new else ("allow_tf32", False)
            if hasattr(place, name):
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, value)
        yield


def _target(layer: Any) -> str:
    if layer_class(type(layer)).__name__ == "ParamWrapper":
        return cast(str, layer.parameter_name)
    return "weight"


def _here(layer: Any, adapters: list[str]) -> list[str]:
    return [name for name in adapters if name in layer.lora_A or name in layer.lora_embedding_A]


def _own(layer: Any, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """One adapter's tensors in one layer, as PEFT's checkpoints call them."""
    for attribute in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        table = getattr(layer, attribute, None)
        if table is None or adapter not in table:
            continue
        item = table[adapter]
        if isinstance(item, torch.Tensor):
            yield attribute, item
        elif attribute == "lora_magnitude_vector":  # once was no module, and keeps its name
            yield attribute, item.weight
        else:
            for key, tensor in item._parameters.items():
                if tensor is not None:
                    yield f"{attribute}.{key}", tensor


def _configs(root: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Where PEFT has put its configurations: by adapter name, on its wrappers and on what it changed in place."""
    base = loaded_class("peft.config", "PeftConfigMixin")
    for place in root.modules():
        configs = place.__dict__.get("peft_config")
        if base is not None and isinstance(configs, dict) and all(isinstance(c, base) for c in configs.values()):
            yield place, configs


def _saved_wrappers(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """``modules_to_save`` by the base model's names."""
    kinds = _Kinds()
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        prefix, module = stack.pop()
        role, hidden = kinds(prefix, module)
        if role is _Role.SAVED:
            yield prefix, module
            continue
        for key, child in reversed(module._modules.items()):
            if child is not None and (role is not _Role.TUNER or key == hidden):
                stack.append((prefix if key == hidden else f"{prefix}{key}.", child))


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _listed(names: list[str]) -> str:
    return ", ".join(names)
