"""LoRA adapters in the memory of one vLLM worker, by name and version, without any file.

vLLM loads an adapter from a directory at the first request that names it, and ignores a reload under an integer id that
it knows. Here an adapter is made of tensors, and each version gets a number that no other ever had as its id, so that a
request is served by the version it was given or not at all. Numbers start at :data:`FIRST`, above the small ids that
users give their own requests.

What vLLM does with an adapter's configuration differs between its versions (up to 0.25 it ignores ``rank_pattern`` and
``alpha_pattern``), so nothing of it reaches vLLM: scales are worked into B here, in fp32, rounded once, and vLLM is
told that they are one.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle_ray.errors import ConfigError, ManifestMismatch, SyncError, UnsupportedModel
from twinkle_ray.vllm import cpu
from twinkle_ray.vllm.worker import device_of

FIRST = 1 << 30
"""The least number of a version. vLLM keeps ids in 32 bits with a sign."""

_CHECKED_KEPT = 64
_STORE = "_twinkle_ray_adapters"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_EMBEDDING = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_embedding_(?P<half>[AB])")
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of its B",
    "modules_to_save": "modules_to_save",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trainable_token_indices",
    "target_parameters": "target_parameters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "megatron_config": "a Megatron configuration",
}
"""Entries of a peft configuration that, if they are set, mean what vLLM does not compute; each with its name."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


class Shaped(Protocol):
    """A tensor, or what is known of one before it comes."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """How vLLM filled one of its slots on the device: it copied each of ``sources``, regions of an adapter's tensors,
    to its place in ``dests``, and all else there is zero. So the next version of the same shapes takes the same copies.
    """

    index: int
    dests: list[torch.Tensor]
    sources: list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One registered adapter.

    Attributes:
        model: vLLM's ``LoRAModel``, the same object that vLLM's manager has.
        tensors: those of which it is made, by the names that they came under.
        digest: see :meth:`Adapters.register`.
        slot: ``None``: vLLM does more than to copy.
    """

    version: int
    number: int
    model: Any
    tensors: Mapping[str, torch.Tensor]
    digest: str | None
    slot: _Slot | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a module that an adapter has. A is ``[rank, inputs]``, B ``[outputs, rank]``, both whole."""

    rank: int
    scale: float


class Adapters:
    """The adapters of one worker. To be changed only while no step of the engine runs, and to be replaced or removed
    only when no request needs the version that goes.

    Args:
        worker: vLLM's worker: ``model_runner.lora_manager`` is used, which it has if LoRA is enabled.

    Attributes:
        last: the highest number given so far. A number is never given twice, so that whatever vLLM still knows of an
            adapter that is gone (blocks of its prefix cache) is found by no other.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._held: dict[str, _Held] = {}
        self._checked: OrderedDict[str, dict[str, _Part]] = OrderedDict()
        self.last = FIRST

    def check(self, config: Mapping[str, Any], tensors: Mapping[str, Shaped]) -> None:
        """Whether this worker can serve an adapter exactly as peft computes it. Changes nothing.

        Args:
            config: ``peft.LoraConfig.to_dict()`` or the content of an ``adapter_config.json``.
            tensors: by the names of ``get_peft_model_state_dict``; only their ``shape`` is looked at.

        Raises:
            UnsupportedModel: the engine has LoRA off or a smaller ``max_lora_rank``, or vLLM computes no such kind.
            ManifestMismatch: a tensor that vLLM has no place for, of another shape, or without its other half.
        """
        self._parts(config, tensors)

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
        """Hold an adapter, in place of the version of this name that is held now. Whole, or not at all: after any
        error what was held before is held and served as before.

        Args:
            name: stable, chosen by the caller.
            version: of the weights.
            config: see :meth:`check`.
            tensors: see :meth:`check`; floating point, of any device, whole in each tensor-parallel worker. They are
                copied (in the engine's LoRA dtype, on the device they are on) and may be overwritten afterwards.
            number: the version's number, the same in all workers of an engine; by default the next one of this worker.
            digest: of configuration, names, shapes and dtypes: what was found about them is kept under it, and not
                found again, and if the version before has the same, only its values are replaced, in the same memory.

        Raises:
            UnsupportedModel, ManifestMismatch: see :meth:`check`.
            ConfigError: no room for one more name, or a number that was given before.
            SyncError: vLLM failed to build or to place it.
        """
        number = self.last + 1 if number is None else number
        if number <= self.last:
            raise ConfigError(f"adapter number {number} was given before; the last one is {self.last}")
        parts = self._checked.get(digest) if digest is not None else None
        if parts is None:
            parts = self._parts(config, tensors)
        held, manager = self.held(), self._manager()
        if name not in held and len(held) >= manager.capacity:
            raise ConfigError(
                f"adapter {name!r} finds no room beside {', '.join(map(repr, held))}: the engine holds "
                f"{manager.capacity}; raise max_loras or max_cpu_loras"
            )
        self.last = number
        cpu.keep_base_plain()
        old = self._held.get(name)
        new = None
        with _written(self._worker):
            try:
                if old is not None and digest is not None and digest == old.digest:
                    new = self._refilled(old, version, number, parts, tensors)
                if new is None:
                    copied, model = self._build(number, parts, tensors)
                    if old is not None:
                        manager.remove_adapter(old.number)
                    slot = self._place(number, model, copied)
                    new = _Held(version=version, number=number, model=model, tensors=copied, digest=digest, slot=slot)
            except Exception as error:
                manager.remove_adapter(number)
                if old is not None and name in held:
                    self._held[name] = replace(old, slot=self._place(old.number, old.model, old.tensors))
                raise SyncError(
                    f"vLLM could not register adapter {name!r}, and what was held before stays: "
                    f"{type(error).__name__}: {error}",
                    phase="transfer",
                    cause_type=type(error).__name__,
                ) from error
            finally:
                self._forget_slots()
        self._held[name] = new
        if digest is not None:
            self._checked[digest] = parts
            while len(self._checked) > _CHECKED_KEPT:
                self._checked.popitem(last=False)

    def attach(self, name: str, path: str, version: int = 0, number: int | None = None) -> None:
        """:meth:`register` what peft's ``save_pretrained`` wrote into a directory; see :func:`read_frozen`. Each worker
        reads it once, now."""
        config, tensors = read_frozen(path)
        self.register(name, version, config, tensors, number=number)

    def remove(self, name: str) -> bool:
        """Let go of an adapter; whether there was one."""
        held = self._held.pop(name, None)
        if held is None:
            return False
        removed = self._manager().remove_adapter(held.number)
        self._forget_slots()
        return bool(removed)

    def held(self) -> dict[str, int]:
        """Version of each name that vLLM's manager really has, whatever others did to it."""
        return {name: held.version for name, held in self._present().items()}

    def entries(self) -> dict[str, Any]:
        """Plain data for :class:`~twinkle_ray.vllm.served.ServedAdapters`: ``{"held": {name: [version, number]},
        "last": number}``."""
        return {"held": {n: [h.version, h.number] for n, h in self._present().items()}, "last": self.last}

    def restore(self) -> list[str]:
        """Put back what vLLM dropped with a reload of its weights, and write all slots anew, whose memory a sleep may
        have emptied. The names that were dropped."""
        if not self._held:
            return []
        manager = self._manager()
        present = manager.list_adapters()
        dropped = [name for name, held in self._held.items() if held.number not in present]
        with _written(self._worker):
            for number in present:
                manager.deactivate_adapter(number)
            for name, held in self._held.items():
                self._held[name] = replace(held, slot=self._place(held.number, held.model, held.tensors))
            self._forget_slots()
        return dropped

    def modules(self) -> list[str]:
        """Last parts of the names of all modules that an adapter may have, sorted."""
        return sorted({name.rpartition(".")[2] for name in _places(self._manager())})

    def _present(self) -> dict[str, _Held]:
        if not self._held:
            return {}
        present = self._manager().list_adapters()
        return {name: held for name, held in self._held.items() if held.number in present}

    def _lora(self) -> Any:
        """vLLM's ``WorkerLoRAManager``."""
        lora = getattr(self._worker.model_runner, "lora_manager", None)
        if lora is None:
            raise UnsupportedModel("this vLLM engine was made without enable_lora=True, so it can serve no adapter")
        return lora

    def _manager(self) -> Any:
        """vLLM's ``LoRAModelManager``."""
        return self._lora()._adapter_manager

    def _mapper(self) -> Any:
        """vLLM's table from checkpoint names to its own, without what fuses modules (adapters come unfused)."""
        mapper = getattr(self._manager().model, "hf_to_vllm_mapper", None)
        for plain in ("get_rename_mapper", "get_unstacked_mapper"):
            if hasattr(mapper, plain):
                return getattr(mapper, plain)()
        return mapper

    def _parts(self, config: Mapping[str, Any], tensors: Mapping[str, Shaped]) -> dict[str, _Part]:
        """Checks all, and gives the module of each tensor that vLLM is to get."""
        lora = self._lora()
        _refuse_kinds(config)
        utils = importlib.import_module("vllm.lora.utils")
        places, mapper = _places(lora._adapter_manager), self._mapper()
        skipped = tuple(getattr(lora._adapter_manager.model, "lora_skip_prefixes", None) or ())
        parts: dict[str, _Part] = {}
        halves: dict[str, dict[str, str]] = {}
        problems: list[str] = []
        for name, tensor in tensors.items():
            if utils.is_base_embedding_weights(name) or any(f".{p}" in name or name.startswith(p) for p in skipped):
                continue  # as vLLM itself does: a copy of the base, and layers that it does not run
            found = _LORA.fullmatch(name) or _EMBEDDING.fullmatch(name)
            if found is None:
                problems.append(f"{name} is no lora_A or lora_B")
                continue
            module, half = found["module"], found["half"]
            place = places.get(str(utils.parse_fine_tuned_lora_name(name, mapper)[0]))
            if place is None:
                problems.append(f"{module} is no module for which this engine has LoRA")
                continue
            part = _part(config, module)
            halves.setdefault(module, {})[half] = name
            inputs, outputs, embeds = place
            is_embedding = found.re is _EMBEDDING
            if is_embedding != embeds:
                problems.append(
                    f"{name} is for {'an embedding' if is_embedding else 'a linear layer'}, unlike {module}"
                )
            elif len(tensor.shape) != 2:
                problems.append(f"{name} has {len(tensor.shape)} dimensions, not 2")
            else:
                expected = (part.rank, inputs) if half == "A" else (outputs, part.rank)
                if any(want not in (None, got) for want, got in zip(expected, tensor.shape, strict=True)):
                    wanted = ", ".join("?" if size is None else str(size) for size in expected)
                    problems.append(f"{name} has shape {tuple(tensor.shape)}, not ({wanted})")
            parts[name] = part
        for module, names in halves.items():
            for half in "AB":
                if half not in names:
                    problems.append(f"{module} comes without lora_{half}")
        if problems or not parts:
            problems = list(dict.fromkeys(problems)) or ["it has no tensor"]
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise ManifestMismatch(
                f"this engine cannot serve the adapter, and nothing was changed: {'; '.join(problems[:10])}{more}",
                problems=tuple(problems),
            )
        rank, most = max(part.rank for part in parts.values()), int(lora.lora_config.max_lora_rank)
        if rank > most:
            raise UnsupportedModel(
                f"the adapter has rank {rank}, the vLLM engine was made with max_lora_rank={most}; raise that"
            )
        return parts

    def _build(
        self, number: int, parts: Mapping[str, _Part], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Copies of the tensors, and vLLM's ``LoRAModel`` of them, not registered yet."""
        lora = self._lora()
        dtype = lora.lora_config.lora_dtype
        copied: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            if _is_scaled(name, part):
                copied[name] = (tensors[name].detach().float() * part.scale).to(dtype)
            else:
                copied[name] = tensors[name].detach().to(dtype, copy=True)
        rank = max(part.rank for part in parts.values())
        helper = importlib.import_module("vllm.lora.peft_helper").PEFTHelper
        model = lora._lora_model_cls.from_lora_tensors(
            lora_model_id=number,
            tensors=copied,
            peft_helper=helper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []}),
            device=str(next(iter(copied.values())).device),
            dtype=dtype,
            model_vocab_size=lora.vocab_size,
            weights_mapper=self._mapper(),
        )
        model.is_3d_lora_weight = False
        return copied, model

    def _place(self, number: int, model: Any, tensors: Mapping[str, torch.Tensor]) -> _Slot | None:
        """Register a model that is made of these tensors, and let vLLM fill a slot with it."""
        manager = self._manager()
        manager.add_adapter(model)
        with _Copies(tensors.values()) as copies:
            manager.activate_adapter(number)
        self._pin(number)
        at = list(manager.lora_index_to_id).index(number)
        return _Slot(at, copies.dests, copies.sources) if copies.are_all() else None

    def _refilled(
        self,
        old: _Held,
        version: int,
        number: int,
        parts: Mapping[str, _Part],
        tensors: Mapping[str, torch.Tensor],
    ) -> _Held | None:
        """Put a version into the memory of the one before it, which has the same shapes: twenty times as fast as to let
        vLLM make an adapter and fill a slot. ``None``, and nothing was changed: that is not possible.

        All that can fail comes before the first value is written.
        """
        manager, slot, model = self._manager(), old.slot, old.model
        ids = manager.lora_index_to_id
        if slot is None or manager.list_adapters().get(old.number) is not model or ids[slot.index] != old.number:
            return None
        if None in ids[: slot.index]:  # which vLLM would take
            return None
        if any(tensors[name].device != held.device for name, held in old.tensors.items()):
            return None
        plain = [name for name, part in parts.items() if not _is_scaled(name, part)]
        values = {name: tensors[name] for name in plain}
        for scale in {part.scale for part in parts.values()}:
            names = [name for name, part in parts.items() if part.scale == scale and _is_scaled(name, part)]
            if names:  # in fp32, and rounded once, as they are copied
                wide = [tensors[name].detach().float() for name in names]
                values.update(zip(names, torch._foreach_mul(wide, scale), strict=True))
        manager.remove_adapter(old.number)
        try:
            if not self._take_slot(number, model, slot.index):
                raise SyncError(f"vLLM gave it another slot than {slot.index}")
        except Exception:
            manager.remove_adapter(number)
            if not self._take_slot(old.number, model, slot.index):
                manager.deactivate_adapter(old.number)  # its caller fills whichever slot it gets
            raise
        torch._foreach_copy_([old.tensors[name] for name in parts], [values[name] for name in parts])
        torch._foreach_copy_(slot.dests, slot.sources)
        return replace(old, version=version, number=number)

    def _take_slot(self, number: int, model: Any, index: int) -> bool:
        """Register a model whose values are in a slot already; whether that is the slot which vLLM gives it."""
        manager = self._manager()
        model.id = number
        manager.add_adapter(model)
        modules, manager.modules = manager.modules, {}  # so that none of them is filled
        try:
            manager.activate_adapter(number)
        finally:
            manager.modules = modules
        self._pin(number)
        return bool(manager.lora_index_to_id[index] == number)

    def _pin(self, number: int) -> None:
        manager = self._manager()
        # Were it evicted to make room for an adapter of the user's own, vLLM would look for its file. Its slot on the
        # device is not pinned: vLLM fills that again by itself.
        pin = getattr(manager, "_pin_lora_in_cpu_cache", None)
        if pin is not None:
            pin(number)

    def _forget_slots(self) -> None:
        """vLLM up to 0.25 looks up slots only when the ids of a batch differ from those of the batch before it, though
        an adapter may by now sit in another slot."""
        manager = self._manager()
        if hasattr(manager, "_last_mapping"):
            manager._last_mapping = None


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is copied out of some tensors, and whether anything else but constants is written meanwhile."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dests: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self._known = {_storage(tensor) for tensor in tensors}
        self._other = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].dim() > 0:
            dest, source = args[:2]
            if _storage(source) in self._known and dest.shape == source.shape:
                self.dests.append(dest)
                self.sources.append(source)
            else:
                self._other = True
        elif func._schema.is_mutable and func not in _CONSTANTS:
            self._other = True
        return func(*args, **(kwargs or {}))

    def are_all(self) -> bool:
        """Whether these copies are all that was done, and none was written over."""
        return not self._other and bool(self.dests) and all(map(torch.equal, self.dests, self.sources))


_CONSTANTS = frozenset(
    {
        torch.ops.aten.copy_.default,  # of a scalar
        torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar,
        torch.ops.aten.fill_.Tensor,
    }
)
"""Operations that write one value everywhere."""


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_scaled(name: str, part: _Part) -> bool:
    """Whether a tensor is a B with a scale to be worked into it."""
    return part.scale != 1.0 and name.endswith((".lora_B.weight", ".lora_embedding_B"))


def adapters_of(worker: Any) -> Adapters:
    """The adapters of a worker, as long as it lives."""
    if _STORE not in vars(worker):
        setattr(worker, _STORE, Adapters(worker))
    store: Adapters = vars(worker)[_STORE]
    return store


def read(path: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors (on the CPU) that peft's ``save_pretrained`` wrote into a directory.

    Raises:
        ConfigError: one of the two files is not there.
    """
    folder = Path(path)
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
        if (folder / "adapter_model.safetensors").exists():
            load_file = importlib.import_module("safetensors.torch").load_file
            return config, load_file(folder / "adapter_model.safetensors")
        return config, torch.load(folder / "adapter_model.bin", map_location="cpu", weights_only=True)
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"no adapter can be read from {path}: {error}") from error


def read_frozen(path: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """:func:`read` for an adapter on the base that everybody has.

    Raises:
        ConfigError: as :func:`read`.
        UnsupportedModel: its initialisation changes the base weights (PiSSA and its kin), so it belongs to another one.
    """
    config, tensors = read(path)
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(_CHANGES_BASE):
        raise UnsupportedModel(
            f"the adapter in {path} was initialised by {init}, which changes the base weights; save it with peft's "
            "path_initial_model_for_weight_conversion"
        )
    return config, tensors


def lora_arguments(*configs: Mapping[str, Any], max_loras: int | None = None) -> dict[str, Any]:
    """Arguments for vLLM's constructors with which an engine can serve adapters of these peft configurations.

    Args:
        configs: ``peft.LoraConfig.to_dict()`` of each adapter that is to be held at the same time.
        max_loras: of how many adapters requests may be computed in one batch; by default all of these.

    Raises:
        ConfigError: no configuration.
        UnsupportedModel: vLLM computes no such adapter, or allows no such rank.
    """
    if not configs or None in configs:  # what a trainer without adapters gives
        raise ConfigError("lora_arguments() needs the peft configuration of at least one adapter, and no None")
    for config in configs:
        _refuse_kinds(config)
    rank = max(max(int(c["r"]), *map(int, (c.get("rank_pattern") or {}).values()), 1) for c in configs)
    allowed = sorted(_allowed_ranks())
    if rank > allowed[-1]:
        raise UnsupportedModel(f"the adapter has rank {rank}; vLLM allows {allowed[-1]} at most")
    together = len(configs) if max_loras is None else max_loras
    arguments = {
        "enable_lora": True,
        "max_lora_rank": next(size for size in allowed if size >= rank),
        "max_loras": together,
    }
    if together < len(configs):
        arguments["max_cpu_loras"] = len(configs)
    return arguments


def lora_facts(vllm_config: Any) -> dict[str, Any]:
    """What an engine can hold, as plain data: ``enable_lora``, and if so ``max_lora_rank``, ``max_loras``,
    ``max_cpu_loras``, ``target_modules`` (``None``: all that vLLM has LoRA for) and ``lora_dtype``."""
    lora = vllm_config.lora_config
    if lora is None:
        return {"enable_lora": False}
    targets = getattr(lora, "target_modules", None)
    return {
        "enable_lora": True,
        "max_lora_rank": int(lora.max_lora_rank),
        "max_loras": int(lora.max_loras),
        "max_cpu_loras": int(lora.max_cpu_loras or lora.max_loras),
        "target_modules": None if targets is None else sorted(targets),
        "lora_dtype": str(lora.lora_dtype).removeprefix("torch."),
    }


def _allowed_ranks() -> tuple[int, ...]:
    """What vLLM takes as ``max_lora_rank``."""
    typing = importlib.import_module("typing")
    try:
        ranks = typing.get_args(importlib.import_module("vllm.config.lora").MaxLoRARanks)
    except (ImportError, AttributeError):
        return _RANKS
    return ranks or _RANKS


def _refuse_kinds(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    kind = str(getattr(kind, "value", kind)).upper()
    if kind != "LORA":
        raise UnsupportedModel(f"vLLM serves LoRA adapters only, and this one is {kind}")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise UnsupportedModel(f"vLLM cannot serve an adapter with {what}; sync it merged into the base")
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(f"vLLM cannot serve an adapter with bias={config['bias']!r}; sync it merged")
    if int(config.get("r", 0)) < 1 or config.get("lora_alpha") is None:
        raise UnsupportedModel("the adapter's configuration lacks r or lora_alpha")


def _part(config: Mapping[str, Any], module: str) -> _Part:
    """Rank and scale of one module as peft has them."""
    rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return _Part(rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    # peft's get_pattern_key: the first one that matches the end of the name, from a dot on.
    return next((v for k, v in (patterns or {}).items() if re.match(rf"(.*\.)?({k})$", module)), default)


def _places(manager: Any) -> dict[str, tuple[int | None, int | None, bool]]:
    """``(inputs, outputs, is an embedding)`` of each module that an adapter may have, by vLLM's name for it before it
    is fused with others; a size is ``None`` where it is not known."""
    found: dict[str, tuple[int | None, int | None, bool]] = {}
    for name, layer in manager.modules.items():
        fused = manager.packed_modules.get(name)
        if fused is None:
            if type(layer).__name__ != "FusedMoE3DWithLoRA":  # whose two tensors per layer are of another form
                inputs, outputs, embeds = _sizes(layer, manager)
                found[name] = inputs, outputs[0] if len(outputs) == 1 else _sum(outputs), embeds
        else:
            inputs, outputs, embeds = _sizes(layer, manager)
            known = outputs if len(outputs) == len(fused) else [None] * len(fused)
            found |= {part: (inputs, size, embeds) for part, size in zip(fused, known, strict=True)}
    return found


def _sizes(layer: Any, manager: Any) -> tuple[int | None, list[int | None], bool]:
    """Whole sizes of a module, over all tensor-parallel workers: inputs, outputs of each part, is an embedding."""
    base = layer.base_layer
    if hasattr(base, "org_vocab_size") and hasattr(base, "embedding_dim"):
        return int(base.org_vocab_size), [int(base.embedding_dim)], True
    if hasattr(base, "total_num_kv_heads"):
        # Its own output size counts each head that several workers share as often as it is there.
        key, value = int(base.head_size), int(getattr(base, "v_head_size", None) or base.head_size)
        heads, shared = int(base.total_num_heads), int(base.total_num_kv_heads)
        return int(base.input_size), [heads * key, shared * key, shared * value], False
    if hasattr(base, "input_size") and hasattr(base, "output_size"):
        return int(base.input_size), list(getattr(base, "output_sizes", None) or [int(base.output_size)]), False
    if hasattr(base, "org_vocab_size") or type(layer).__name__ == "LogitsProcessorWithLoRA":
        return int(layer.hidden_size), [int(manager.vocab_size)], False
    return None, [None], False


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


@contextmanager
def _written(worker: Any) -> Iterator[None]:
    """For writes into what the device may read: after all that was launched, and done before anything else is."""
    on_device = device_of(worker).type not in ("cpu", "meta")
    if on_device:
        torch.accelerator.synchronize(device_of(worker))
    with torch.inference_mode():  # which alone may write to what was made in it
        yield
    if on_device:
        torch.accelerator.synchronize(device_of(worker))
