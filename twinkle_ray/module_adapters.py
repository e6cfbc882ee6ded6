"""LoRA adapters on a rollout's plain torch module, through PEFT: the counterpart of :mod:`twinkle_ray.vllm.adapters`.

PEFT puts its layers into the module while an adapter is held, and they are taken out again with the last one. PEFT is
imported when the first adapter comes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from twinkle_ray.errors import ConfigError, ManifestMismatch, SyncError, UnsupportedModel
from twinkle_ray.names import loaded_class

_HALF = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.weight)?$")
_PREFIX = "base_model.model."


class ModuleAdapters:
    """The adapters of one module. The last one that was registered under the default's name is active; others are held,
    and a user's forward reaches them by PEFT's ``set_adapter``.

    Args:
        module: into which PEFT's layers are put.

    Attributes:
        last: the highest number given so far.
        default: name of the adapter that the forward pass uses; ``None``: the base alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held: dict[str, tuple[int, int]] = {}
        self._trained: list[nn.Parameter] = []
        self.last = 0
        self.default: str | None = None

    def holds_any(self) -> bool:
        """Whether PEFT's layers are in the module because of us."""
        return bool(self._held)

    def check(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Whether the module can hold an adapter. Changes nothing.

        Raises:
            UnsupportedModel: PEFT is missing, or the adapter is of a kind that cannot be held.
            ManifestMismatch: a tensor for which the module has no place, or one without its other half.
        """
        _config(config)
        found = {name for name, _ in self._module.named_modules()}
        problems = []
        halves: dict[str, set[str]] = {}
        for name in tensors:
            place = name.removeprefix(_PREFIX)
            path = place.split(".lora_")[0] if ".lora_" in place else place.rpartition(".")[0]
            if path not in found:
                problems.append(f"{name}: the module has no {path}")
            if half := _HALF.search(place):
                halves.setdefault(path, set()).add(half[1])
        problems += [f"{path} comes without lora_{h}" for path, has in halves.items() for h in "AB" if h not in has]
        if problems or not tensors:
            problems = problems or ["it has no tensor"]
            raise ManifestMismatch(
                f"this rollout's module cannot hold the adapter, and nothing was changed: {'; '.join(problems[:10])}",
                problems=tuple(problems),
            )

    def register(
        self,
        name: str,
        version: int,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        number: int | None = None,
        digest: str | None = None,
    ) -> None:
        """Hold an adapter, in place of the version of this name that is held now; a configuration that differs from
        that one's is put in anew.

        Raises:
            UnsupportedModel, ManifestMismatch: see :meth:`check`.
            SyncError: PEFT could not put it in; none of this name is held then.
        """
        peft = importlib.import_module("peft")
        made = _config(config)
        number = self.last + 1 if number is None else number
        self.last = max(self.last, number)
        try:
            present = getattr(self._module, "peft_config", {}).get(name) if name in self._held else None
            default = self.default
            if present is None or _fields(present) != _fields(made):
                self.remove(name)
                if not self._held:  # PEFT freezes the base
                    self._trained = [p for p in self._module.parameters() if p.requires_grad]
                self._held[name] = (version, number)  # from here on there may be something to take out again
                peft.inject_adapter_in_model(made, self._module, adapter_name=name)
            self._take_dtype(name, next(iter(tensors.values())).dtype)
            plain = {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}
            result = peft.set_peft_model_state_dict(self._module, plain, adapter_name=name)
            strange = list(getattr(result, "unexpected_keys", ()))
            lacking = [key for key in getattr(result, "missing_keys", ()) if "lora_" in key and f".{name}" in key]
            if lacking:
                raise ValueError(f"nothing came for {', '.join(lacking[:5])}")
            if strange:
                raise ValueError(f"PEFT has no place for {', '.join(strange[:5])}")
        except Exception as error:
            self.remove(name)
            raise SyncError(
                f"PEFT could not put adapter {name!r} into this rollout's module: {type(error).__name__}: {error}",
                phase="transfer",
                cause_type=type(error).__name__,
            ) from error
        self._held[name] = (version, number)
        self.default = default
        self._activate()

    def attach(self, name: str, path: str, version: int = 0, number: int | None = None) -> None:
        """:meth:`register` what PEFT's ``save_pretrained`` wrote into a directory. What was held of that name before is
        held on if that does not fit."""
        from twinkle_ray.vllm.adapters import read_frozen

        config, tensors = read_frozen(path)
        self.check(config, tensors)
        before = self._copy_of(name)
        try:
            self.register(name, version, config, tensors, number=number)
        except SyncError:
            if before is not None:
                entry, default, *parts = before
                self.register(name, entry[0], *parts, number=entry[1])
                self.choose(default)
            raise

    def _copy_of(self, name: str) -> tuple[tuple[int, int], str | None, dict[str, Any], dict[str, torch.Tensor]] | None:
        """Entry, the default beside it, configuration and tensors of an adapter that is held."""
        if name not in self._held:
            return None
        peft = importlib.import_module("peft")
        found = peft.get_peft_model_state_dict(self._module, adapter_name=name)
        tensors = {f"{_PREFIX}{key}": tensor.detach().clone() for key, tensor in found.items()}
        config = {**_fields(vars(self._module)["peft_config"][name]), "peft_type": "LORA"}
        return self._held[name], self.default, config, tensors

    def remove(self, name: str) -> bool:
        """Let go of an adapter; whether there was one. With the last one the module is as it was."""
        if self._held.pop(name, None) is None:
            return False
        if not self._held:
            self.default = None
            self._unwrap()
        else:
            self._delete(name)
            if self.default == name:
                self.default = None
            self._activate()
        return True

    def entries(self) -> dict[str, Any]:
        """See :meth:`twinkle_ray.vllm.adapters.Adapters.entries`."""
        return {"held": {name: list(entry) for name, entry in self._held.items()}, "last": self.last}

    def restore(self) -> list[str]:
        """Nothing is dropped by a load into a plain module."""
        return []

    def choose(self, name: str | None) -> None:
        """Let the forward pass use this adapter; ``None``: none.

        Raises:
            ConfigError: it is not held.
        """
        if name is not None and name not in self._held:
            raise ConfigError(f"this rollout's module holds no adapter {name!r}")
        self.default = name
        self._activate()

    def _activate(self) -> None:
        saved = loaded_class("peft.utils.other", "AuxiliaryTrainingWrapper")
        for layer in self._layers():
            # of modules_to_save another adapter may have none here, and PEFT then uses the original
            saves = saved is not None and isinstance(layer, saved)
            used = self.default in layer._adapters if saves else self.default is not None
            layer.enable_adapters(used)
            if used:
                layer.set_adapter(self.default)
                for parameter in layer.parameters():
                    parameter.requires_grad_(requires_grad=False)

    def _layers(self) -> list[Any]:
        kinds = tuple(
            cls
            for module, name in (
                ("peft.tuners.tuners_utils", "BaseTunerLayer"),
                ("peft.utils.other", "AuxiliaryTrainingWrapper"),
            )
            if (cls := loaded_class(module, name))
        )
        return [place for place in self._module.modules() if kinds and isinstance(place, kinds)]

    def _take_dtype(self, name: str, dtype: torch.dtype) -> None:
        """PEFT makes an adapter in the base's dtype; the trainer's may be another one, and its forward then too."""
        for layer in self._layers():
            for attribute in getattr(layer, "adapter_layer_names", ()):
                table = getattr(layer, attribute, None)
                if isinstance(table, (nn.ModuleDict, nn.ParameterDict)) and name in table:
                    item = table[name]
                    if isinstance(item, nn.Module):
                        item.to(dtype)
                    else:
                        item.data = item.data.to(dtype)

    def _delete(self, name: str) -> None:
        saved = loaded_class("peft.utils.other", "AuxiliaryTrainingWrapper")
        for layer in self._layers():
            # of modules_to_save it wants to know which adapters are to be active then
            layer.delete_adapter(*([name, []] if saved is not None and isinstance(layer, saved) else [name]))
        getattr(self._module, "peft_config", {}).pop(name, None)

    def _unwrap(self) -> None:
        """Put the modules back that PEFT has wrapped, the very ones."""
        layers = {id(layer): layer for layer in self._layers()}
        for parent in list(self._module.modules()):
            for key, child in parent._modules.items():
                while id(child) in layers:
                    inner = layers[id(child)]
                    child = inner.base_layer if hasattr(inner, "base_layer") else inner.original_module
                    parent._modules[key] = child
        vars(self._module).pop("peft_config", None)
        for parameter in self._trained:
            parameter.requires_grad_()
        self._trained = []


def _config(config: Mapping[str, Any]) -> Any:
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise UnsupportedModel(
            "this rollout's plain module can hold an adapter only through peft, which is not installed here; install "
            "peft"
        ) from error
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is of type {kind}; only LoRA can be synced")
    fields = {key: value for key, value in config.items() if key in peft.LoraConfig.__dataclass_fields__}
    # Its values come from the trainer: no initialisation of the base, which some would change.
    return peft.LoraConfig(**{**fields, "init_lora_weights": False, "inference_mode": True, "lora_dropout": 0.0})


def _fields(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = config.to_dict()
    return fields
