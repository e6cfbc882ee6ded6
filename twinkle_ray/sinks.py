"""Where received tensors go.

A sink is what one process that owns parameters does with the tensors of a sync. It says which bytes have a place in
live memory, where the wire then writes them (zero copy); for each other tensor it gives a buffer, which is filled from
the wire and handed back. Two sinks exist: :class:`ModuleSink` here for a torch module, and
:class:`twinkle_ray.vllm.loading.EngineSink` for a vLLM worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from twinkle_ray.digest import DTYPE_NAMES, bytes_view, has_own_bytes, tensor_sha256, torch_dtype
from twinkle_ray.errors import ManifestMismatch, SyncError, UnsupportedModel
from twinkle_ray.landing import ALIGNED, Landing, Range, Step, lay
from twinkle_ray.manifest import CASTABLE, Manifest, TensorMeta
from twinkle_ray.plan import Chunk
from twinkle_ray.sources import collect, device_of, is_dtensor, view_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What one receiver says to a manifest. Plain data: it travels to the driver.

    Attributes:
        dtypes: per tensor of the manifest the dtype held here, ``None`` where any will do.
        unknown: one sentence per tensor that has no place here.
        missing: names held here for which the manifest has nothing.
        mismatched: one sentence per tensor whose shape, or not castable dtype, differs.
        ignored: names of buffers that the receiver drops by design (they are not synced and not verified).
        cuts: per tensor of the manifest the offsets, in elements and ascending, at which the wire should cut it, so
            that a part that is held here can be received in place; ``()`` for none at all.
    """

    dtypes: tuple[str | None, ...]
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.unknown, *self.mismatched, *(f"{name}: the trainer does not send it" for name in self.missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How a manifest came into a model.

    Attributes:
        path: names the way: ``in place``, ``load_weights``, ``layerwise reload``.
        tensors, nbytes: of the manifest.
        direct_bytes: of the tensors of which every byte that is held here came from the wire straight into a parameter.
            A worker that holds a slice of a tensor counts the whole tensor, as ``nbytes`` does.
        seconds: per part.
    """

    path: str
    tensors: int
    nbytes: int
    direct_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a tensor as it is really held: enough to put a tensor together from several workers.

    Attributes:
        name: the manifest's name.
        shape: of the whole tensor.
        dtype: torch's name of the dtype held.
        size, stride, offset: the region of the whole (contiguous) tensor that this piece holds, in elements.
        sha256: hex digest of the bytes if the piece is the whole tensor, else ``None``.
        data: the piece's bytes, row-major, if it is not the whole tensor, else ``None``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    sha256: str | None = None
    data: bytes | None = None


class Receiver(Protocol):
    """Takes in the tensors of one sync. All calls come from one thread, in this order: ``begin``, ``arm``, ``landing``,
    then for each tensor that is not received straight into live memory ``buffer`` as its first chunk is launched and
    ``ready`` with those that are complete, at last ``finish``; or ``abandon`` after an error anywhere. Tensors become
    ready in the manifest's order, but buffers of later ones may have been asked for by then.
    """

    in_place: bool
    """Whether a buffer may be a live parameter; if not, what ``landing`` does not name is not written before
    ``ready``."""

    live: bool
    """Whether ``ready`` and ``finish`` write to what is served."""

    @property
    def device(self) -> torch.device:
        """The device on which the parameters live."""
        ...

    def begin(self, manifest: Manifest) -> None:
        """A sync of this (agreed) manifest starts. No parameter is touched yet."""
        ...

    def arm(self, touch: Callable[[], None]) -> None:
        """The sender has begun to send. Whatever the sink must try on live parameters it tries now.

        Args:
            touch: to be called before anything live is written here; it raises if the sync was given up.
        """
        ...

    def landing(self, plan: Sequence[Chunk], device: torch.device) -> Landing:
        """Where each segment of the plan goes that is received on ``device``. Every byte that has a place in live
        memory on that device and can be received there is; see :func:`~twinkle_ray.landing.lay`."""
        ...

    def buffer(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        """A contiguous tensor of ``meta``'s shape and dtype on ``device``, to be overwritten from the wire.

        It may be a live parameter (``in_place``). What is yielded or loaded later owns its storage: it is never reused.
        """
        ...

    def ready(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        """These tensors (as ``buffer`` gave them, now filled) are complete, in manifest order."""
        ...

    def finish(self) -> LoadReport:
        """All tensors are in; do what must follow loading. Raises if the model is not whole."""
        ...

    def abandon(self) -> None:
        """The sync failed; drop all buffers and leave the model in a state from which a full sync heals it."""
        ...


class Sink(Receiver, Protocol):
    """One process's way of taking in weights. ``agree`` comes once per manifest, before the first sync of it."""

    def agree(self, manifest: Manifest) -> Agreement:
        """Compare a manifest (in the trainer's dtypes) with what is held. Changes nothing."""
        ...

    def pieces(self, manifest: Manifest, names: Sequence[str] | None) -> tuple[list[Piece], list[str]]:
        """Read back what is really held.

        Returns:
            The pieces held here for ``names`` (``None``: all), and the names that cannot be read back here.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Plain facts for status and reports: ``kind``, ``device``, versions."""
        ...


class ModuleSink:
    """Loads into a torch module, in place.

    A tensor goes to every parameter or persistent buffer that has one of its names, so a tied trainer fills an untied
    module. Names are without wrapper segments on both sides, and of a module to which
    :class:`~twinkle_ray.module_adapters.ModuleAdapters` has added adapters those of its base. Memory is received
    straight into a parameter that is contiguous and of the wire's dtype and device; for any other a tensor of its own
    is received and then copied.

    Args:
        target: the module. It is walked again at each ``agree`` and ``begin``, so it may be moved in between.
        adapted: whether LoRA adapters are in it that are ours to know of; the base under any other is refused.

    Raises:
        UnsupportedModel: from ``agree`` and ``begin``: a tensor of ``target`` is a DTensor, or has no plain bytes.
    """

    in_place = True
    live = True

    def __init__(self, target: nn.Module, adapted: Callable[[], bool] = lambda: False) -> None:
        self._target = target
        self._adapted = adapted
        self._places: dict[str, list[torch.Tensor]] = {}
        self._direct: set[str] = set()
        self._waiting: dict[str, TensorMeta] = {}
        self._manifest: Manifest | None = None
        self._load_s = 0.0

    @property
    def device(self) -> torch.device:
        """Raises UnsupportedModel if the module is spread over several."""
        return device_of(self._target)

    def agree(self, manifest: Manifest) -> Agreement:
        return self._match(manifest)[0]

    def begin(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch if the module no longer fits."""
        agreement, places = self._match(manifest)
        problems = agreement.problems
        if problems:
            raise ManifestMismatch("the module changed since it agreed: " + "; ".join(problems[:10]), problems=problems)
        self._places = places
        self._manifest = manifest
        self._waiting = {meta.name: meta for meta in manifest}
        self._direct = set()
        self._load_s = 0.0

    def arm(self, touch: Callable[[], None]) -> None:
        pass

    def landing(self, plan: Sequence[Chunk], device: torch.device) -> Landing:
        """Made anew at each sync: kept, it would hold the memory of a module that is moved in between."""
        manifest = self._manifest
        if manifest is None:
            raise SyncError("landing() came before begin()", phase="transfer")
        landing = lay(manifest, plan, [self._ranges(meta, device) for meta in manifest])
        self._waiting = {meta.name: meta for i, meta in enumerate(manifest) if i in landing.staged}
        self._direct = {meta.name for meta in manifest if meta.name not in self._waiting}
        return landing

    def _ranges(self, meta: TensorMeta, device: torch.device) -> tuple[Range, ...] | None:
        first, *more = self._places[meta.name]
        if more or not self._fits(first, meta, device):
            return None
        return (Range(0, nbytes, bytes_view(first)),) if (nbytes := meta.nbytes) else ()

    def _fits(self, place: torch.Tensor, meta: TensorMeta, device: torch.device) -> bool:
        return place.dtype == torch_dtype(meta.dtype) and same_device(place.device, device) and has_own_bytes(place)

    def buffer(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        place = self._places[meta.name][0]
        if self._fits(place, meta, device):
            self._direct.add(meta.name)
            return place.detach()
        return torch.empty(meta.shape, dtype=torch_dtype(meta.dtype), device=device)

    def ready(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        started = time.perf_counter()
        # unlike no_grad, inference mode may also write to parameters that were made under it
        with torch.inference_mode():
            for meta, tensor in tensors:
                places = self._places[meta.name]
                for place in places[1:] if meta.name in self._direct else places:
                    place.copy_(tensor)
                self._waiting.pop(meta.name, None)
        self._load_s += time.perf_counter() - started

    def finish(self) -> LoadReport:
        """Raises SyncError if a tensor never came."""
        if self._manifest is None or self._waiting:
            names = ", ".join(list(self._waiting)[:10])
            raise SyncError(f"{len(self._waiting)} tensors never came: {names}", phase="transfer")
        report = LoadReport(
            path="in place",
            tensors=len(self._manifest),
            nbytes=self._manifest.nbytes,
            direct_bytes=sum(meta.nbytes for meta in self._manifest if meta.name in self._direct),
            seconds={"load": self._load_s},
        )
        self.abandon()
        return report

    def abandon(self) -> None:
        self._places, self._direct, self._waiting, self._manifest = {}, set(), {}, None

    def pieces(self, manifest: Manifest, names: Sequence[str] | None) -> tuple[list[Piece], list[str]]:
        """One piece per parameter: a tied tensor that is held twice gives two, and they must agree."""
        chosen = None if names is None else set(names)
        places = self._match(manifest)[1]
        pieces: list[Piece] = []
        absent: list[str] = []
        for meta in manifest:
            if chosen is not None and chosen.isdisjoint(meta.names):
                continue
            if not places[meta.name]:
                absent.append(meta.name)
            for tensor in places[meta.name]:
                pieces.append(
                    Piece(
                        name=meta.name,
                        shape=tuple(tensor.shape),
                        dtype=DTYPE_NAMES[tensor.dtype],
                        size=tuple(tensor.shape),
                        stride=_row_major(tensor.shape),
                        offset=0,
                        sha256=tensor_sha256(tensor),
                    )
                )
        if chosen is not None:
            known = {name for meta in manifest for name in meta.names}
            absent += [name for name in dict.fromkeys(names or ()) if name not in known]
        return pieces, absent

    def describe(self) -> dict[str, Any]:
        held = [tensor for _, tensor in self._held()]
        return {
            "kind": "module",
            "device": str(self.device),
            "tensors": len(held),
            "nbytes": sum(tensor.nbytes for tensor in held),
        }

    def _held(self) -> list[tuple[list[str], torch.Tensor]]:
        """Each tensor once, with all its names."""
        groups: dict[tuple[Any, ...], tuple[list[str], torch.Tensor]] = {}
        for name, tensor, _ in collect(self._target, frozen=self._adapted()):
            if is_dtensor(tensor):
                raise UnsupportedModel(f"{name}: the receiving module is sharded (DTensor); only whole ones can load")
            groups.setdefault(view_key(name, tensor), ([], tensor))[0].append(name)
        return list(groups.values())

    def _match(self, manifest: Manifest) -> tuple[Agreement, dict[str, list[torch.Tensor]]]:
        held = self._held()
        index_of = {name: index for index, (names, _) in enumerate(held) for name in names}
        taken: dict[int, str] = {}
        places: dict[str, list[torch.Tensor]] = {}
        dtypes: list[str | None] = []
        unknown: list[str] = []
        mismatched: list[str] = []
        for meta in manifest:
            indices = list(dict.fromkeys(index_of[name] for name in meta.names if name in index_of))
            places[meta.name] = [held[index][1] for index in indices]
            if not indices:
                unknown.append(f"{meta.name}: no parameter or persistent buffer has this name")
            for index in indices:
                names, tensor = held[index]
                other = taken.setdefault(index, meta.name)
                if other != meta.name:
                    mismatched.append(f"{meta.name}: two different tensors for one tied weight, the other is {other}")
                mismatched += _differences(meta, names[0], tensor)
            found = {DTYPE_NAMES[place.dtype] for place in places[meta.name]}
            dtypes.append(found.pop() if len(found) == 1 else None)
        agreement = Agreement(
            dtypes=tuple(dtypes),
            unknown=tuple(unknown),
            missing=tuple(names[0] for index, (names, _) in enumerate(held) if index not in taken),
            mismatched=tuple(mismatched),
        )
        return agreement, places


class StagedSink:
    """Keeps what it receives and touches nothing else. All tensors lie in one buffer: an adapter has hundreds of small
    ones, and to allocate each of them takes longer than the wire does.

    Args:
        device: where.

    Attributes:
        tensors: by name, after ``finish``.
    """

    in_place = False
    live = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        self._manifest = Manifest(())
        self._parts: Sequence[torch.Tensor] = ()

    def begin(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def arm(self, touch: Callable[[], None]) -> None:
        pass

    def landing(self, plan: Sequence[Chunk], device: torch.device) -> Landing:
        sizes = [size for meta in self._manifest for size in (meta.nbytes, -meta.nbytes % ALIGNED)]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = self._parts = buffer.split_with_sizes(sizes)[::2]
        wholes = [meta.nbytes for meta in self._manifest]
        steps = []
        for chunk in plan:
            step = Step()
            for segment in chunk.segments:
                whole = parts[segment.tensor]
                cut = segment.stop - segment.start < wholes[segment.tensor]
                step.views.append(whole[segment.start : segment.stop] if cut else whole)
            steps.append(step)
        return Landing(
            steps=tuple(steps), staged=frozenset(), copied=frozenset(), largest=0, live=False, scratch_nbytes=0
        )

    def buffer(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        raise SyncError(f"{meta.name}: a tensor of an adapter has its place already", phase="transfer")

    def ready(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        pass

    def finish(self) -> LoadReport:
        self.tensors = {
            meta.name: part.to(self.device).view(torch_dtype(meta.dtype)).view(meta.shape)
            for meta, part in zip(self._manifest, self._parts, strict=True)
        }
        return LoadReport(path="staged", tensors=len(self._manifest), nbytes=self._manifest.nbytes, direct_bytes=0)

    def abandon(self) -> None:
        self.tensors, self._parts = {}, ()


def _differences(meta: TensorMeta, held_as: str, tensor: torch.Tensor) -> Iterator[str]:
    if tuple(tensor.shape) != meta.shape:
        yield f"{meta.name}: shape {meta.shape} from the trainer, {tuple(tensor.shape)} held as {held_as}"
    dtype = DTYPE_NAMES[tensor.dtype]
    if dtype != meta.dtype and not {dtype, meta.dtype} <= CASTABLE:
        yield f"{meta.name}: {meta.dtype} from the trainer cannot be cast to {dtype} held as {held_as}"


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether both are one physical device; without an index the current one is meant."""
    return one.type == other.type and (one.type == "cpu" or _index(one) == _index(other))


def _index(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return int(torch.get_device_module(device.type).current_device())


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
