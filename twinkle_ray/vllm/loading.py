"""How tensors of a sync get into a live vLLM worker, and how they are read back.

A tensor whose place in the live model is proven (:mod:`~twinkle_ray.vllm.proof`) needs no loader. Where what is held of
it are ranges of its bytes, in the wire's dtype and in one piece each (a whole tensor, or the rows of a tensor-parallel
worker), the wire writes into the parameter itself, and what other workers hold is dropped. Elsewhere regions of it are
copied from a buffer. For all others there are two ways, chosen once per model by :func:`layout`:

- ``load_weights``: vLLM's own loader writes into the live parameters, batch by batch. Right where these still have the
  checkpoint's layout. Tensors from which it makes one parameter together are kept until it can have them in one call.
- ``layerwise reload``: vLLM puts each module back on the meta device, collects its tensors, loads and post-processes
  them together and copies the result into the old storage. Right where weights are quantised or re-laid after loading.
  It keeps references to what it was given until a module is complete, so every buffer here owns its storage and is
  never reused, and a module of which a part never came would hold rubbish, so only whole manifests are loaded.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from twinkle_ray.digest import bytes_view, torch_dtype
from twinkle_ray.errors import ManifestMismatch, SyncError, UnsupportedModel
from twinkle_ray.fingerprint import Fingerprint
from twinkle_ray.landing import Copy, Landing, Range, lay
from twinkle_ray.manifest import Manifest, TensorMeta
from twinkle_ray.plan import Chunk
from twinkle_ray.sinks import Agreement, LoadReport, Piece, same_device
from twinkle_ray.vllm import cpu
from twinkle_ray.vllm.placement import Destination, Placement, dtype_name, record, slices
from twinkle_ray.vllm.proof import Feed, Proof, prove
from twinkle_ray.vllm.worker import device_of

_log = logging.getLogger(__name__)

_RANGES_AT_MOST = 1024
"""Ranges of one tensor beyond which it is received whole: each is a call of its own on the wire."""

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
    live = True

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._layout: Layout | None = None
        self._placement: Placement | None = None
        self._recorded_by: Manifest | None = None
        self._recorded_for: tuple[Any, ...] = ()
        self._seen: tuple[Any, ...] = ()
        self._fingerprint = Fingerprint(torch.nn.Module())
        self._dtypes_of: Manifest | None = None
        self._dtypes: tuple[str, ...] = ()
        self._proof: Proof | None = None
        self._proven_for: tuple[Any, ...] = ()
        self._manifest: Manifest | None = None
        self._landing: Landing | None = None
        self._landing_for: tuple[Any, ...] = ()
        self._landing_on: torch.device | None = None
        self._direct_bytes = 0
        self._loaded: set[str] = set()
        self._kept: dict[str, torch.Tensor] = {}
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
            # From what is recorded, which is not proven yet: where the proof fails a cut does no harm.
            cuts=_cuts(manifest, placement),
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
        self._loaded, self._kept = set(), {}
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

    def landing(self, plan: Sequence[Chunk], device: torch.device) -> Landing:
        """See :class:`~twinkle_ray.sinks.Sink`. Kept as long as plan, record and proof stay; it holds no more than the
        proof does."""
        placement, manifest = self._placement, self._manifest
        if placement is None or manifest is None:
            raise SyncError("landing() came before begin()", phase="transfer")
        made_for = (plan, placement, self._proof)
        same = all(one is other for one, other in zip(made_for, self._landing_for, strict=False))
        if self._landing is None or not same or self._landing_on != device:
            held = [_ranges(meta, placement, self._proof, device) for meta in manifest]
            copies = {i: found for i, meta in enumerate(manifest) if (found := _copies(meta, self._proof))}
            landing = self._landing = lay(manifest, plan, held, copies)
            not_direct = landing.staged | landing.copied
            self._landing_for, self._landing_on = made_for, device
            self._direct_bytes = sum(
                meta.nbytes
                for index, meta in enumerate(manifest)
                if index not in not_direct and placement.offered.get(meta.name)
            )
        self._placed = bool(self._landing.live or self._landing.copied)
        return self._landing

    def buffer(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        return torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=device)

    def ready(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        placement = self._placement
        if placement is None or self._manifest is None:
            raise SyncError("tensors came before begin()", phase="transfer")
        start = time.perf_counter()
        feed: list[tuple[str, torch.Tensor]] = []
        for meta, tensor in tensors:
            self._loaded.add(meta.name)
            held = tensor.to(self.device)
            if copies := _copies(meta, self._proof):
                self._placed = True
                with torch.inference_mode():  # which alone may write to what was made in it
                    for copy in copies:
                        copy.dest.copy_(held.as_strided(copy.size, copy.stride, held.storage_offset() + copy.offset))
            else:
                self._kept[meta.name] = held
                group = placement.together.get(meta.name, (meta.name,))
                if all(name in self._kept for name in group):
                    feed += [(s, held) for n in group for held in [self._kept.pop(n)] for s in placement.offered[n]]
        if feed:
            self._through_loader = True
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
        manifest, landing, placement = self._manifest, self._landing, self._placement
        if manifest is None or landing is None or placement is None or self._layout is None:
            raise SyncError("finish() came before begin() and landing()", phase="transfer")
        lost = [name for i in sorted(landing.staged) if (name := manifest.tensors[i].name) not in self._loaded]
        if lost:
            raise SyncError(f"{len(lost)} tensors never came, the first of them {lost[0]}", phase="transfer")
        start = time.perf_counter()
        on_host = self.device.type in ("cpu", "meta")
        if self._session is not None or (on_host and cpu.applies()):
            with self._loading():
                if self._session is not None:
                    self._session.finish(self._worker.vllm_config.model_config)
                    self._session = None
                cpu.repack_experts(self._model())
        if placement.fills and self._proof is not None and (self._proof.direct or self._proof.copied):
            with torch.inference_mode():
                for view, value in placement.fills:
                    view.fill_(value)  # after a level-2 sleep padding holds anything
        if not on_host and (landing.copied or landing.staged or placement.fills):
            torch.accelerator.synchronize(self.device)  # what the wire itself wrote is waited for already
        self._seconds["finish"] = time.perf_counter() - start
        ways = [*(["in place"] if self._placed else []), *([self._layout.value] if self._through_loader else [])]
        report = LoadReport(
            path=", ".join(ways),
            tensors=len(manifest),
            nbytes=manifest.nbytes,
            direct_bytes=self._direct_bytes,
            seconds=dict(self._seconds),
        )
        self._manifest = None
        return report

    def _load_all(self, feed: Feed) -> None:
        """All that follows a load, for a whole manifest. Only where the live layout is the checkpoint's."""
        self._model().load_weights(feed)
        cpu.repack_experts(self._model())

    def _proof_key(self, manifest: Manifest) -> tuple[Any, ...]:
        """Of what a proof holds for: tensors in their wire dtypes, however they are cut, and live parameters."""
        if manifest is not self._dtypes_of:
            self._dtypes_of, self._dtypes = manifest, tuple(meta.dtype for meta in manifest)
        return self._dtypes, self._recorded_for

    def abandon(self) -> None:
        """Leave a model that the next full sync heals. Does not raise; what fails is logged."""
        self._manifest, self._kept = None, {}
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
        recorded = self._placement
        if recorded is not None and (model, manifest) == self._seen and self._fingerprint.holds():
            self._seen = (model, manifest)  # this very object, with which the next one is compared in no time
            return recorded
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
        self._seen, self._fingerprint = (model, manifest), Fingerprint(model)
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


def _cuts(manifest: Manifest, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """Where this worker would have each tensor cut, in elements; see :class:`~twinkle_ray.sinks.Agreement`."""
    result = []
    for meta in manifest:
        held = slices(placement.destinations.get(meta.name, ())) or ()
        edges = {edge for run in held for edge in (run.start, run.stop)} if len(held) <= _RANGES_AT_MOST else set()
        result.append(tuple(sorted(edges - {0, math.prod(meta.shape)})))
    return tuple(result) if any(result) else ()


def _ranges(
    meta: TensorMeta, placement: Placement, proof: Proof | None, device: torch.device
) -> tuple[Range, ...] | None:
    """What the wire may write straight into live memory on ``device``; see :func:`~twinkle_ray.landing.lay`."""
    if not placement.offered.get(meta.name):
        return ()  # the engine drops it
    if proof is None:
        return None
    live = proof.direct.get(meta.name)
    if live is not None:
        return (Range(0, meta.nbytes, bytes_view(live)),) if same_device(live.device, device) else None
    places = proof.copied.get(meta.name, ())
    held = slices(places) if places else None
    if held is None or len(held) > _RANGES_AT_MOST:
        return None
    dtype = torch_dtype(meta.dtype)
    if any(run.live.dtype != dtype or not same_device(run.live.device, device) for run in held):
        return None
    return tuple(Range(run.start * dtype.itemsize, run.stop * dtype.itemsize, bytes_view(run.live)) for run in held)


def _copies(meta: TensorMeta, proof: Proof | None) -> tuple[Copy, ...]:
    """Where regions of a tensor go that is received whole; none if only the loader knows."""
    if proof is None:
        return ()
    if (live := proof.direct.get(meta.name)) is not None:
        return (Copy(live, tuple(live.shape), live.stride(), 0),)
    return tuple(Copy(d.dest, d.size, d.stride, d.offset) for d in proof.copied.get(meta.name, ()))


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
