"""How tensors of a sync get into a live vLLM worker, and how they are read back.

A tensor whose place in the live model is proven (:mod:`~twinkle_ray.vllm.proof`) needs no loader: the wire writes into
the parameter itself, or, where that is not one range of bytes of the wire's dtype, regions of it are copied there. For
all others there are two ways, chosen once per model by :func:`layout`:

- ``load_weights``: vLLM's own loader writes into the live parameters, batch by batch. Right where these still have the
  checkpoint's layout.
- ``layerwise reload``: vLLM puts each module back on the meta device, collects its tensors, loads and post-processes
  them together and copies the result into the old storage. Right where weights are quantised or re-laid after loading.
  It keeps references to what it was given until a module is complete, so every buffer here owns its storage and is
  never reused, and a module of which a part never came would hold rubbish, so only whole manifests are loaded.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from twinkle_ray.errors import ManifestMismatch, SyncError, UnsupportedModel
from twinkle_ray.manifest import Manifest, TensorMeta
from twinkle_ray.sinks import Agreement, LoadReport, Piece, same_device
from twinkle_ray.vllm import cpu
from twinkle_ray.vllm.placement import Destination, Placement, dtype_name, record
from twinkle_ray.vllm.proof import Feed, Proof, prove
from twinkle_ray.vllm.worker import device_of

_log = logging.getLogger(__name__)

_PLAIN_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON", "CPU"})
"""Backends of unquantised experts that keep w13/w2 as loaded (CPU: permuted in place, which :mod:`cpu` mends)."""


class Layout(Enum):
    """What vLLM did with the parameters after it had loaded them."""

    PLAIN = "load_weights"  # as the checkpoint has them
    RELAID = "layerwise reload"  # quantised, packed, or with copies that the loader does not refresh


class EngineSink:
    """A vLLM worker as a :class:`~twinkle_ray.sinks.Sink`.

    Args:
        worker: vLLM's worker: ``model_runner.get_model()``, ``vllm_config`` and ``device`` are used.
    """

    in_place = False

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._layout: Layout | None = None
        self._placement: Placement | None = None
        self._recorded_by: Manifest | None = None
        self._recorded_for: tuple[Any, ...] = ()
        self._proof: Proof | None = None
        self._proven_for: tuple[Any, ...] = ()
        self._manifest: Manifest | None = None
        self._lent: set[str] = set()
        self._loaded: set[str] = set()
        self._nbytes = 0
        self._direct_bytes = 0
        self._placed = self._through_loader = False  # whether any tensor went this way
        self._seconds: dict[str, float] = {}
        self._session: _LayerwiseSession | None = None

    @property
    def device(self) -> torch.device:
        return device_of(self._worker)

    def agree(self, manifest: Manifest) -> Agreement:
        """See :class:`~twinkle_ray.sinks.Sink`.

        Raises:
            UnsupportedModel: neither way of loading is right for this engine; says why.
        """
        self._placement = None
        placement = self._place(manifest)
        return Agreement(
            dtypes=tuple(placement.dtype(meta.name) for meta in manifest),
            unknown=placement.unknown,
            missing=placement.missing,
            mismatched=placement.mismatched,
            ignored=placement.ignored,
        )

    def begin(self, manifest: Manifest) -> None:
        """See :class:`~twinkle_ray.sinks.Sink`.

        Raises:
            ManifestMismatch: it does not fit this model; nothing was touched.
        """
        placement = self._place(manifest)
        wrong = (*placement.unknown, *placement.mismatched, *placement.missing)
        if wrong:
            raise ManifestMismatch(f"the engine cannot load this manifest: {'; '.join(wrong[:10])}", problems=wrong)
        if self._proven_for != self._proof_key(manifest):
            self._proof = None
        self._manifest = manifest
        self._lent, self._loaded = set(), set()
        self._nbytes = self._direct_bytes = 0
        self._placed = self._through_loader = False
        self._seconds = {"load": 0.0}
        if self.device.type not in ("cpu", "meta"):
            # What generation has launched may still read the parameters.
            torch.accelerator.synchronize(self.device)

    def arm(self, touch: Callable[[], None]) -> None:
        """See :class:`~twinkle_ray.sinks.Sink`. The first time for a manifest the placement is proven here, which
        leaves patterns in the whole model."""
        placement, manifest = self._placement, self._manifest
        if placement is None or manifest is None:
            raise SyncError("arm() came before begin()", phase="transfer")
        if self._proof is None and placement.destinations:
            touch()
            with self._loading():
                self._proof = prove(self._model(), manifest, placement, self._load_all, touch)
            if self.device.type not in ("cpu", "meta"):
                torch.accelerator.empty_cache()  # the patterns' memory, of which no later sync needs any
            self._proven_for = self._proof_key(manifest)
            self._seconds["proof"] = self._proof.seconds
            for name, reason in list(self._proof.indirect.items())[:10]:
                _log.info("%s goes through vLLM's loader: %s", name, reason)
        self.in_place = bool(self._proof and self._proof.direct)
        if self.in_place:
            touch()

    def buffer(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        live = self._proof.direct.get(meta.name) if self._proof is not None else None
        if live is not None and same_device(live.device, device):
            self._lent.add(meta.name)
            return live
        return torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=device)

    def lends(self, meta: TensorMeta) -> bool:
        return meta.name in self._lent

    def ready(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        placement = self._placement
        if placement is None or self._manifest is None:
            raise SyncError("tensors came before begin()", phase="transfer")
        start = time.perf_counter()
        feed: list[tuple[str, torch.Tensor]] = []
        for meta, tensor in tensors:
            self._loaded.add(meta.name)
            self._nbytes += meta.nbytes
            if meta.name in self._lent:
                self._direct_bytes += meta.nbytes
                self._placed = True
            elif self._copy(meta, tensor):
                self._placed = True
            else:
                self._through_loader = True
                offered = placement.offered.get(meta.name, ())
                held = tensor.to(self.device) if offered else tensor
                feed += [(spelling, held) for spelling in offered]
        if feed:
            with self._loading():
                if self._layout is Layout.RELAID and self._session is None:
                    self._session = _LayerwiseSession(self._model())
                    self._session.start()
                self._model().load_weights(feed)
        self._seconds["load"] += time.perf_counter() - start

    def finish(self) -> LoadReport:
        """See :class:`~twinkle_ray.sinks.Sink`.

        Raises:
            SyncError: a tensor of the manifest never came.
        """
        if self._manifest is None or self._layout is None:
            raise SyncError("finish() came before begin()", phase="transfer")
        lost = [meta.name for meta in self._manifest if meta.name not in self._loaded]
        if lost:
            raise SyncError(f"{len(lost)} tensors never came, the first of them {lost[0]}", phase="transfer")
        start = time.perf_counter()
        with self._loading():
            if self._session is not None:
                self._session.finish(self._worker.vllm_config.model_config)
                self._session = None
            cpu.repack_experts(self._model())
        if self._proof is not None and self._proof.direct:
            with torch.inference_mode():
                for view, value in self._placement.fills if self._placement else ():
                    view.fill_(value)  # after a level-2 sleep padding holds anything
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        self._seconds["finish"] = time.perf_counter() - start
        ways = [*(["in place"] if self._placed else []), *([self._layout.value] if self._through_loader else [])]
        report = LoadReport(
            path=", ".join(ways),
            tensors=len(self._manifest),
            nbytes=self._nbytes,
            direct_bytes=self._direct_bytes,
            seconds=dict(self._seconds),
        )
        self._manifest = None
        return report

    def _copy(self, meta: TensorMeta, tensor: torch.Tensor) -> bool:
        """Copy a received tensor to its proven places; whether it has any."""
        if self._proof is None:
            return False
        live = self._proof.direct.get(meta.name)
        # In inference mode, which alone may write to what was made in it.
        with torch.inference_mode():
            if live is not None:  # on another device than the wire
                live.copy_(tensor)
                return True
            places = self._proof.copied.get(meta.name, ())
            held = tensor.to(self.device) if places else tensor
            for place in places:
                place.dest.copy_(place.source(held))
        return bool(places)

    def _load_all(self, feed: Feed) -> None:
        """All that follows a load, for a whole manifest. Only where the live layout is the checkpoint's."""
        self._model().load_weights(feed)
        cpu.repack_experts(self._model())

    def _proof_key(self, manifest: Manifest) -> tuple[Any, ...]:
        return manifest.digest, self._recorded_for[-1:]

    def abandon(self) -> None:
        """Leave a model that the next full sync heals. Does not raise; what fails is logged."""
        self._manifest = None
        session, self._session = self._session, None
        if session is not None:
            with self._loading():
                session.abandon(self._worker.vllm_config.model_config)

    def pieces(self, manifest: Manifest, names: Sequence[str] | None) -> tuple[list[Piece], list[str]]:
        """See :class:`~twinkle_ray.sinks.Sink`. Must not run while the engine's weights are asleep."""
        placement = self._place(manifest)
        asked = None if names is None else set(names)
        chosen = [meta for meta in manifest if asked is None or meta.name in asked]
        experts = cpu.plain_experts(self._model()) if any(m.name in placement.destinations for m in chosen) else {}
        pieces: list[Piece] = []
        unverifiable: list[str] = []
        for meta in chosen:
            held = [_true_view(d.dest, experts) for d in placement.destinations.get(meta.name, ())]
            if not held or any(view is None for view in held):
                unverifiable.append(meta.name)
                continue
            for destination, view in zip(placement.destinations[meta.name], held, strict=True):
                pieces.append(_piece(meta, destination, view))  # type: ignore[arg-type]
        return pieces, unverifiable

    def describe(self) -> dict[str, Any]:
        """Facts of this worker. ``path`` says how it would be loaded, or why it cannot be."""
        config = self._worker.vllm_config
        parallel = config.parallel_config
        try:
            path = self._find_layout().value
        except UnsupportedModel as error:
            path = f"unsupported: {error}"
        return {
            "kind": "vllm",
            "vllm": str(importlib.import_module("vllm").__version__),
            "device": str(self.device),
            "path": path,
            "model": type(self._model()).__name__,
            "dtype": dtype_name(config.model_config.dtype),
            "quantization": config.model_config.quantization,
            "rank": int(self._worker.rank),
            "tp_rank": int(self._worker.rank) % int(parallel.tensor_parallel_size),
            "tp_size": int(parallel.tensor_parallel_size),
            "lora": config.lora_config is not None,
        }

    def placement(self, manifest: Manifest) -> Placement:
        """The record for a manifest; made anew if the live parameters are others than at the last time."""
        return self._place(manifest)

    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    def _loading(self) -> Any:
        return _Loading(self._worker.vllm_config)

    def _find_layout(self) -> Layout:
        if self._layout is None:
            self._layout = layout(self._model(), self._worker.vllm_config)
        return self._layout

    def _place(self, manifest: Manifest) -> Placement:
        model = self._model()
        relaid = self._find_layout() is Layout.RELAID
        live = tuple((p.data_ptr(), tuple(p.shape)) for p in model.parameters())
        if manifest is not self._recorded_by:  # tens of thousands of tensors are not compared at each sync
            self._recorded_by = manifest
            tensors = tuple((m.names, m.shape, m.kind) for m in manifest)
        else:
            tensors = self._recorded_for[0]
        if self._placement is None or (tensors, live) != self._recorded_for:
            self._placement = record(model, manifest, self._worker.vllm_config, relaid=relaid)
            self._recorded_for = (tensors, live)
        return self._placement


def layout(model: torch.nn.Module, vllm_config: Any) -> Layout:
    """How a model must be loaded while it is live.

    Raises:
        UnsupportedModel: nothing is known to load it exactly.
    """
    parallel, config = vllm_config.parallel_config, vllm_config.model_config
    if int(parallel.pipeline_parallel_size) > 1:
        raise UnsupportedModel(
            "pipeline parallelism (pipeline_parallel_size > 1) is not supported; use tensor parallelism"
        )
    if getattr(parallel, "enable_expert_parallel", False):
        raise UnsupportedModel("expert parallelism (enable_expert_parallel) is not supported; use tensor parallelism")
    cpu.check(model)
    reason = _relaid_because(model, config)
    if not reason:
        return Layout.PLAIN
    if getattr(config, "is_hybrid", False) or getattr(config, "has_inner_state", False):
        raise UnsupportedModel(
            f"{type(model).__name__} has state-space layers, which vLLM's layerwise reload corrupts, and {reason}, "
            "which its plain loader does not refresh"
        )
    if cpu.applies() and _is_tied(model):
        raise UnsupportedModel(
            f"{type(model).__name__} has tied embeddings, of which vLLM's CPU build keeps a packed copy that nothing "
            "refreshes; set TWINKLE_RAY_ROLLOUT=1 before the engine is made"
        )
    return Layout.RELAID


def _relaid_because(model: torch.nn.Module, config: Any) -> str:
    """Why the live parameters are not, or not only, what a checkpoint has; empty if they are."""
    if config.quantization is not None:
        return f"its weights are quantised ({config.quantization})"
    if getattr(config, "use_mla", False):
        return "its attention keeps matrices derived from kv_b_proj"
    for module in model.modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and getattr(backend, "name", str(backend)) not in _PLAIN_EXPERTS:
            return f"its experts are laid out for {getattr(backend, 'value', backend)}"
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            return f"{name} is packed away"
    return ""


def _is_tied(model: torch.nn.Module) -> bool:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(names) > len(list(model.parameters()))


class _Loading:
    """vLLM's current configuration and no autograd, as its loaders expect."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = importlib.import_module("vllm.config").set_current_vllm_config(vllm_config)
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._no_grad.__enter__()
        self._config.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._config.__exit__(*error)
        self._no_grad.__exit__(*error)


class _LayerwiseSession:
    """One layerwise reload from first to last, with a way out: an error in it leaves modules on the meta device."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._reload = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
        self._before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]

    def start(self) -> None:
        self._reload.initialize_layerwise_reload(self._model)

    def finish(self, model_config: Any) -> None:
        """Process what is left. Raises ``SyncError`` if a parameter stayed on the meta device."""
        self._reload.finalize_layerwise_reload(self._model, model_config)
        lost = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
        if lost:
            raise SyncError(f"after vLLM's layerwise reload {lost[0]} has no storage", phase="transfer")

    def abandon(self, model_config: Any) -> None:
        """Close vLLM's session, then put the live parameters back by hand where that left others."""
        try:
            self._reload.finalize_layerwise_reload(self._model, model_config)
        except Exception:
            _log.warning("vLLM's layerwise reload could not be finalised after a failed sync", exc_info=True)
        for module, parameters, buffers in self._before:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            self._reload.get_layerwise_info(module).reset()


def _true_view(dest: torch.Tensor, experts: dict[int, torch.Tensor | None]) -> torch.Tensor | None:
    """A destination's values in the checkpoint's order; ``None`` if they cannot be told."""
    key = int(dest.untyped_storage()._cdata)
    if key not in experts:
        return dest
    plain = experts[key]
    return None if plain is None else plain.as_strided(dest.shape, dest.stride(), dest.storage_offset())


def _piece(meta: TensorMeta, destination: Destination, view: torch.Tensor) -> Piece:
    held = view.detach().contiguous()
    whole = destination.whole
    return Piece(
        name=meta.name,
        shape=meta.shape,
        dtype=dtype_name(held.dtype),
        size=destination.size,
        stride=destination.stride,
        offset=destination.offset,
        sha256=_sha256(held) if whole else None,
        data=None if whole else bytes(held.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()),
    )


def _sha256(tensor: torch.Tensor) -> str:
    from twinkle_ray.digest import tensor_sha256

    return str(tensor_sha256(tensor))
