"""Where each tensor of a manifest lands inside a live vLLM model.

vLLM's own ``load_weights`` is the only thing that knows it, so it is run once on *meta* tensors, which have shapes but
no bytes, under a dispatch mode. Each ``copy_`` of a meta tensor into a live parameter is written down instead of done:
its target is the exact live view (slice of a fused parameter, tensor-parallel shard, expert slot), and which part of
the checkpoint tensor it takes is read off the meta view's size, stride and offset. Nothing is written, no parameter's
name is ever looked at, and whatever the loader rebinds on the way is put back.

What cannot be written down so is *indirect*: the engine can load it, but no view of a live parameter holds its bytes.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle_ray.manifest import CASTABLE, Manifest, TensorMeta

_FILLS = frozenset(
    {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default},
)
_COPY = torch.ops.aten.copy_.default

_ALONE_AT_MOST = 512
"""Names that are tried one by one after a failure; beyond it the rest of a failing batch shares one reason."""


@dataclass(frozen=True, slots=True)
class Destination:
    """One live view and the region of the checkpoint tensor that it holds.

    Attributes:
        dest: the live view; writing to it is writing to the parameter.
        size, stride, offset: the region of the (contiguous) checkpoint tensor, in elements; ``size`` is ``dest``'s.
        whole: the region is the whole tensor in its own order.
    """

    dest: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool

    @property
    def contiguous(self) -> bool:
        """Whether ``dest`` is one range of bytes. With ``whole``: the wire may write straight into it."""
        return self.dest.is_contiguous()

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a contiguous checkpoint tensor that belongs into ``dest``."""
        if self.whole:
            return tensor.view(self.size)
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``start`` to ``stop`` of a (contiguous) checkpoint tensor, and the live elements that hold them, 1-D."""

    start: int
    stop: int
    live: torch.Tensor


def slices(destinations: Iterable[Destination]) -> tuple[Slice, ...] | None:
    """The destinations of one tensor as runs of its elements, ascending and disjoint; neighbours that are neighbours in
    memory too are one run. ``None`` if one is not a run on both sides, or if two take the same element."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for d in destinations:
        if not d.dest.numel():
            continue
        if not d.contiguous or not _is_run(d.size, d.stride):
            return None
        other = found.setdefault((d.offset, d.offset + d.dest.numel()), d.dest)
        if not _same(other.view(-1), d.dest.view(-1)) or other.storage_offset() != d.dest.storage_offset():
            return None
    runs: list[tuple[int, int, torch.Tensor]] = []
    for (start, stop), dest in sorted(found.items(), key=lambda item: item[0]):
        if runs and start < runs[-1][1]:
            return None
        if runs and start == runs[-1][1] and _follows(dest, runs[-1][2], start - runs[-1][0]):
            runs[-1] = (runs[-1][0], stop, runs[-1][2])
        else:
            runs.append((start, stop, dest))
    return tuple(
        Slice(start, stop, dest.as_strided((stop - start,), (1,), dest.storage_offset())) for start, stop, dest in runs
    )


def _is_run(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of this size and stride lie one after the other."""
    expected = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _follows(dest: torch.Tensor, before: torch.Tensor, numel: int) -> bool:
    """Whether ``dest`` begins where the ``numel`` elements from the beginning of ``before`` end."""
    same = storage_key(dest) == storage_key(before) and dest.dtype == before.dtype
    return same and dest.storage_offset() == before.storage_offset() + numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a model does with each tensor of a manifest. Keys are ``TensorMeta.name``.

    Attributes:
        destinations: the live views of each tensor that has them.
        offered: under which names (in the engine's spelling) a tensor is to be given to ``load_weights``.
        indirect: why a tensor that loads has no view.
        together: of a tensor from which the loader derives something together with others, all of these in the
            manifest's order: it must be given them in one call, since what it keeps in between may end with the call.
        unknown: one sentence per tensor that has no place.
        mismatched: one sentence per tensor whose shape or dtype does not fit.
        missing: live parameters (the engine's names) that get no or not all of their elements.
        ignored: buffers that the engine drops.
        fills: live views that the loader fills with a number (padding of a vocabulary), and the number.
        seconds: what the recording took.
    """

    destinations: dict[str, tuple[Destination, ...]]
    offered: dict[str, tuple[str, ...]]
    indirect: dict[str, str]
    together: dict[str, tuple[str, ...]]
    unknown: tuple[str, ...]
    mismatched: tuple[str, ...]
    missing: tuple[str, ...]
    ignored: tuple[str, ...]
    fills: tuple[tuple[torch.Tensor, float], ...]
    seconds: float

    def dtype(self, name: str) -> str | None:
        """Torch's name of the one dtype in which a tensor is held, ``None`` if there is no view or more than one."""
        held = {dtype_name(d.dest.dtype) for d in self.destinations.get(name, ())}
        return held.pop() if len(held) == 1 else None


def record(model: torch.nn.Module, manifest: Manifest, vllm_config: Any, *, relaid: bool = False) -> Placement:
    """Find the destinations of a manifest's tensors. The model is unchanged afterwards, whatever is raised.

    Args:
        model: as ``worker.model_runner.get_model()`` returns it.
        manifest: in the trainer's dtypes.
        vllm_config: the worker's; loaders ask for the current one.
        relaid: the live parameters no longer have the checkpoint's layout (quantised, packed). Names and shapes are
            then judged by the layout that vLLM remembers for reloading, and every tensor is indirect.
    """
    start = time.perf_counter()
    config = importlib.import_module("vllm.config")
    with _unchanged(model), config.set_current_vllm_config(vllm_config), torch.no_grad():
        if relaid:
            _checkpoint_layout(model)
        recorder = _Recorder(model)
        recorder.try_all([(name, name, meta) for meta in manifest for name in meta.names])
        recorder.try_wrapped()
        tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
        return _judge(recorder, manifest, tp_size, relaid, start)


def _judge(recorder: _Recorder, manifest: Manifest, tp_size: int, relaid: bool, start: float) -> Placement:
    destinations: dict[str, tuple[Destination, ...]] = {}
    offered: dict[str, tuple[str, ...]] = {}
    indirect: dict[str, str] = {}
    unknown: list[str] = []
    mismatched: list[str] = []
    ignored: list[str] = []
    for meta in manifest:
        found = [recorder.outcomes[name] for name in meta.names]
        bad = [o.mismatch or _half(o, meta, tp_size) or _uncastable(o, meta) for o in found]
        taken = [o for o in found if o.lands]
        if any(bad):
            mismatched.append(f"{meta.name}: {next(reason for reason in bad if reason)}")
        elif taken:
            offered[meta.name] = tuple(o.spelling for o in taken)
            reasons = [o.indirect for o in taken if o.indirect]
            if relaid or reasons:
                indirect[meta.name] = reasons[0] if reasons else "the engine re-lays it after loading"
            else:
                destinations[meta.name] = tuple(d for o in taken for d in o.destinations)
        elif meta.kind == "buffer" and not any(o.error for o in found):
            ignored.append(meta.name)
        else:
            error = next((o.error for o in found if o.error), "the engine drops it without a word")
            unknown.append(f"{meta.name}: {error}")
    return Placement(
        destinations=destinations,
        offered=offered,
        indirect=indirect,
        together=_together(recorder, manifest),
        unknown=tuple(unknown),
        mismatched=tuple(mismatched),
        missing=tuple(recorder.uncovered(relaid)),
        ignored=tuple(ignored),
        fills=tuple(recorder.fills),
        seconds=time.perf_counter() - start,
    )


def _together(recorder: _Recorder, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    if not recorder.groups:
        return {}
    group_of: dict[str, set[str]] = {}
    for names in recorder.groups:
        merged = set(names).union(*(group_of.get(name, ()) for name in names))
        group_of |= dict.fromkeys(merged, merged)
    order = {name: (index, meta.name) for index, meta in enumerate(manifest) for name in meta.names}
    result = {}
    for name, group in group_of.items():
        members = tuple(dict.fromkeys(owner for _, owner in sorted(order[member] for member in group)))
        if len(members) > 1:
            result[order[name][1]] = members
    return result


def _half(outcome: _Outcome, meta: TensorMeta, tp_size: int) -> str:
    """Why a tensor is only half taken: a loader that narrows never says that the source was too large."""
    if not outcome.copies or outcome.indirect:
        return ""
    numel = math.prod(meta.shape)
    regions = {(tuple(s.shape), tuple(s.stride()), s.storage_offset()) for _, s in outcome.copies}
    taken = sum(math.prod(n for n, step in zip(size, stride, strict=True) if step) for size, stride, _ in regions)
    # A worker of several sees its share only; the last shard of a padded vocabulary is short by its padding.
    at_least = taken if tp_size == 1 else (taken + outcome.padding) * tp_size
    return (
        ""
        if at_least >= numel
        else f"the engine takes {taken} of its {numel} elements; shape {meta.shape} is too large"
    )


def _uncastable(outcome: _Outcome, meta: TensorMeta) -> str:
    held = {dtype_name(dest.dtype) for dest, _ in outcome.copies} - {meta.dtype}
    wrong = [d for d in sorted(held) if d not in CASTABLE or meta.dtype not in CASTABLE]
    return f"sent as {meta.dtype}, held as {wrong[0]}" if wrong else ""


@dataclass(slots=True)
class _Outcome:
    """What became of one name."""

    spelling: str
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    padding: int = 0
    indirect: str = ""
    mismatch: str = ""
    error: str = ""

    @property
    def lands(self) -> bool:
        return not self.mismatch and bool(self.copies or self.indirect)

    @property
    def destinations(self) -> list[Destination]:
        return [_destination(dest, source) for dest, source in self.copies]


def _destination(dest: torch.Tensor, source: torch.Tensor) -> Destination:
    size, stride, offset = tuple(source.shape), tuple(source.stride()), int(source.storage_offset())
    whole = offset == 0 and source.is_contiguous() and source.nbytes == source.untyped_storage().nbytes()
    return Destination(dest.detach(), size, stride, offset, whole)


class _Recorder:
    """Runs ``load_weights`` on meta tensors, all at once, and after an exception on ever smaller parts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model: Any = model
        self.names = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self.live = {storage_key(t) for t in [*model.parameters(), *model.buffers()]}
        self.outcomes: dict[str, _Outcome] = {}
        self.written: dict[int, list[torch.Tensor]] = {}
        self.unjudged: set[int] = set()
        self.fills: list[tuple[torch.Tensor, float]] = []
        self.groups: list[frozenset[str]] = []
        self.metas: dict[str, TensorMeta] = {}
        self.alone = 0

    def try_all(self, items: Sequence[tuple[str, str, TensorMeta]]) -> None:
        """Try ``(name, spelling, meta)``; an outcome for each name. A name that fails hides no other's outcome."""
        if not items:
            return
        self.metas.update({name: meta for name, _, meta in items})
        try:
            trace = self._load(items)
        except Exception as error:
            first_half = (len(items) + 1) // 2
            if len(items) == 1:
                self.alone += 1
                self.outcomes[items[0][0]] = self._try_alone(items[0], error)
            elif self.alone >= _ALONE_AT_MOST:
                text = _brief(error)
                self.outcomes.update({n: _Outcome(s, error=f"in a batch that failed: {text}") for n, s, _ in items})
            else:
                self.try_all(items[:first_half])
                self.try_all(items[first_half:])
        else:
            self._take(items, trace)

    def try_wrapped(self) -> None:
        """Give what found no place a second try under the names of LoRA wrappers, if the model has any.

        vLLM before 0.30 wants ``q_proj.base_layer.weight`` as soon as LoRA is enabled; later ones take either.
        """
        if not any(".base_layer." in name for name in self.names.values()):
            return
        lost = [name for name, outcome in self.outcomes.items() if not outcome.lands and not outcome.mismatch]
        before = {name: self.outcomes[name] for name in lost}
        wrapped = [(n, f"{n.rpartition('.')[0]}.base_layer.{n.rpartition('.')[2]}", self.metas[n]) for n in lost]
        self.try_all([item for item in wrapped if not item[1].startswith(".")])
        for name, outcome in before.items():
            if not self.outcomes[name].lands:
                self.outcomes[name] = outcome

    def uncovered(self, relaid: bool = False) -> Iterator[str]:
        """Names of live parameters of which an element is written by nothing.

        In the layout of a quantised engine's checkpoint modules may have scalars only (the scales of attention). A
        checkpoint need not have them, and where it has none the engine keeps what it has: those are not counted.
        """
        seen: set[tuple[int, int]] = set()
        kept = set(self._scalars_of_their_own()) if relaid else set()
        for name, parameter in self.model.named_parameters():
            place = (storage_key(parameter), int(parameter.storage_offset()))
            if id(parameter) in kept:
                continue
            if parameter.numel() == 0 or place[0] in self.unjudged or place in seen:
                continue
            seen.add(place)
            count = covered(parameter, self.written.get(place[0], []))
            if count == 0:
                yield name
            elif count < parameter.numel():
                yield f"{name} ({parameter.numel() - count} of its {parameter.numel()} elements)"

    def _scalars_of_their_own(self) -> Iterator[int]:
        """``id`` of each parameter in modules that have single numbers only, none of which is written."""
        for module in self.model.modules():
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            if all(p.numel() == 1 and storage_key(p) not in self.written for p in own):
                yield from map(id, own)

    def _load(self, items: Sequence[tuple[str, str, TensorMeta]], touched: _Touched | None = None) -> _Trace:
        """One run of ``load_weights``. Raises what it raises, and ``RuntimeError`` if it rebinds a parameter."""
        tensors = [torch.empty(m.shape, dtype=getattr(torch, m.dtype), device="meta") for _, _, m in items]
        trace = _Trace(
            self.live, {storage_key(t): name for t, (name, _, _) in zip(tensors, items, strict=True)}, tensors
        )
        feed = [(spelling, t) for t, (_, spelling, _) in zip(tensors, items, strict=True)]
        with _unchanged(self.model) as changes, trace:
            if touched is None:
                self.model.load_weights(feed)
            else:
                with touched:
                    self.model.load_weights(feed)
        if changes:
            raise RuntimeError(f"the loader rebinds {', '.join(changes[:3])}")
        return trace

    def _take(self, items: Sequence[tuple[str, str, TensorMeta]], trace: _Trace) -> None:
        self.fills += trace.fills
        self.groups += trace.groups
        for dest in trace.padding_views:
            self.written.setdefault(storage_key(dest), []).append(dest)
        for name, spelling, _ in items:
            outcome = _Outcome(spelling, trace.copies.get(name, []), trace.padding.get(name, 0))
            outcome.indirect = trace.derived.get(name, "")
            outcome.mismatch = trace.broadcast.get(name, "")
            if any(storage_key(dest) in trace.dirty for dest, _ in outcome.copies):
                outcome.indirect = outcome.indirect or "the loader changes it in place after copying"
            for dest, _ in outcome.copies:
                self.written.setdefault(storage_key(dest), []).append(dest)
            self.outcomes[name] = outcome
        self.unjudged |= trace.dirty

    def _try_alone(self, item: tuple[str, str, TensorMeta], error: Exception) -> _Outcome:
        """Class the failure of one name by the live tensor that its loader last looked at."""
        _, spelling, meta = item
        touched = _Touched(set(self.names))
        try:
            self._load([item], touched)
        except Exception as again:
            error = again
        target = touched.last
        if target is None:
            return _Outcome(spelling, error=_brief(error))
        self.unjudged.add(storage_key(target))
        if target.numel() == 0:
            return _Outcome(spelling, indirect="the engine has packed the parameter away")
        if isinstance(error, NotImplementedError) or "meta" in str(error).lower() or "rebinds" in str(error):
            return _Outcome(spelling, indirect=_brief(error))
        held = f"{self.names[id(target)]} of shape {tuple(target.shape)}"
        return _Outcome(spelling, mismatch=f"shape {meta.shape} does not go into the engine's {held} ({_brief(error)})")


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down copies of meta tensors into live ones and lets no live tensor be written."""

    def __init__(self, live: set[int], sources: dict[int, str], keep: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.sources = live, sources
        self.owners: dict[int, frozenset[str]] = {key: frozenset((name,)) for key, name in sources.items()}
        # Storages are known by address, so none may be freed while the trace runs.
        self.keep = list(keep)
        self.dtypes = {storage_key(t): t.dtype for t in keep}
        self.copies: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.derived: dict[str, str] = {}
        self.groups: list[frozenset[str]] = []
        self.broadcast: dict[str, str] = {}
        self.dirty: set[int] = set()
        self.padding: dict[str, int] = {}
        self.padding_views: list[torch.Tensor] = []
        self.fills: list[tuple[torch.Tensor, float]] = []
        self.last = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        names = frozenset().union(
            *(self.owners.get(storage_key(t), frozenset()) for t in _tensors((args, tuple(kwargs.values()))))
        )
        into_live = [t for t in written if storage_key(t) in self.live]
        if into_live:
            self._write_live(func, args, into_live, names)
            return args[0] if func._schema.returns else None
        if names and any(not t.is_meta for t in written):
            # Meta bytes into a temporary with real ones cannot be run; remember whose they would be.
            for t in written:
                self._own(t, names)
            return args[0] if func._schema.returns else None
        result = func(*args, **kwargs)
        if names:
            for t in _tensors(result):
                self._own(t, names)
        return result

    def _own(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        key = storage_key(tensor)
        if key not in self.sources and key not in self.live:
            self.owners[key] = self.owners.get(key, frozenset()) | names
            self.keep.append(tensor)

    def _write_live(self, func: Any, args: tuple[Any, ...], dests: list[torch.Tensor], names: frozenset[str]) -> None:
        if func in _FILLS:
            self.padding_views += dests
            value = args[1] if len(args) > 1 else 0
            if isinstance(value, (int, float)):
                self.fills += [(dest.detach(), value) for dest in dests]
            self.padding[self.last] = self.padding.get(self.last, 0) + dests[0].numel()
            return
        name = self.sources.get(storage_key(args[1])) if func is _COPY else None
        # A view as another dtype counts in other elements, so it is no plain source.
        if name is not None and args[1].dtype == self.dtypes[storage_key(args[1])]:
            self._copy(name, args[0], args[1])
            return
        if func is not _COPY or not names:
            self.dirty |= {storage_key(t) for t in dests}
        self.padding_views += dests
        if len(names) > 1:
            self.groups.append(names)
        for owner in names:
            self.derived[owner] = f"the loader derives what it stores ({func._schema.name})"

    def _copy(self, name: str, dest: torch.Tensor, source: torch.Tensor) -> None:
        self.last = name
        if dest.shape != source.shape:
            if dest.numel() != source.numel():
                self.broadcast[name] = f"shape {tuple(source.shape)} would be spread over {tuple(dest.shape)}"
                return
            source = source.expand(dest.shape)
        self.copies.setdefault(name, []).append((dest, source))


class _Touched(TorchFunctionMode):
    """The last live tensor that a loader looked at."""

    def __init__(self, live: set[int]) -> None:
        super().__init__()
        self.live = live
        self.last: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in args:
            if isinstance(value, torch.Tensor) and id(value) in self.live:
                self.last = value
        return func(*args, **(kwargs or {}))


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[list[str]]:
    """Put back every parameter and buffer that the body rebinds or registers; the list names them afterwards."""
    modules = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    tensors = {id(t): (t, t.data) for _, ps, bs in modules for t in (*ps.values(), *bs.values()) if t is not None}
    changes: list[str] = []
    try:
        yield changes
    finally:
        for module, parameters, buffers in modules:
            for now, then in ((module._parameters, parameters), (module._buffers, buffers)):
                if now.keys() != then.keys() or any(now[name] is not then[name] for name in then):
                    changes.append(type(module).__name__)
                    now.clear()
                    now.update(then)  # type: ignore[arg-type]
        for tensor, data in tensors.values():
            if not _same(tensor, data):
                changes.append(f"a parameter of shape {tuple(data.shape)}")
                tensor.data = data


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_key(a) == storage_key(b) and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _checkpoint_layout(model: torch.nn.Module) -> None:
    """Register, on the meta device, the parameters that vLLM had before it re-laid them. Undone by ``_unchanged``."""
    layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    meta = importlib.import_module("vllm.model_executor.model_loader.reload.meta")
    for module in model.modules():
        meta.restore_layer_on_meta(module, layerwise.get_layerwise_info(module))
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            # An earlier reload leaves its own loaders here; outside of a session they drop what they are given.
            if tensor is not None and hasattr(tensor, "weight_loader"):
                tensor.weight_loader = layerwise._get_original_loader(tensor)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, for meta tensors too."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes, by its schema."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def covered(parameter: torch.Tensor, views: Iterable[torch.Tensor]) -> int:
    """How many elements of a parameter the views write."""
    start, end = parameter.storage_offset(), parameter.storage_offset() + parameter.numel()
    regions = {(v.storage_offset(), tuple(v.shape), tuple(v.stride())): v.numel() for v in views}
    inside = {region: n for region, n in regions.items() if n and start <= region[0] < end}
    total = sum(inside.values())
    if total <= parameter.numel() and parameter.is_contiguous():
        return total
    # Views overlap, or the parameter has gaps: count for once element by element.
    hit = torch.zeros(parameter.untyped_storage().nbytes() // parameter.element_size(), dtype=torch.bool)
    for offset, size, stride in inside:
        hit.as_strided(size, stride, offset).fill_(True)
    return int(hit.as_strided(parameter.shape, parameter.stride(), start).sum())


def _brief(error: Exception) -> str:
    # The first sentence: vLLM appends the names of all parameters.
    text = " ".join(str(error).split()).split(". ")[0]
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:157] + '...'}".rstrip(": ")


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype as a manifest writes it."""
    return str(dtype).removeprefix("torch.")
