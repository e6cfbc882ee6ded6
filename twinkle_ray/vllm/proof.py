"""Proof that recorded destinations are where an engine really keeps its tensors.

A placement was read off a loader that ran on tensors without bytes; nothing yet says that the loader does no more than
that, or that what it wrote is what the kernels read. So, once per placement and before the first direct write, every
tensor is filled with a pattern of its own and goes through the engine's full loading with all that follows it, and
then each recorded view must hold exactly its region of that pattern. Values that are there already prove nothing: all
norms may be ones and all biases zeros. What fails, or shares its module with something that fails, is *indirect* and
stays with the engine's loader.

Afterwards the model holds patterns: only a full sync makes it a model again.

Not tried here: that logits after a direct write equal those after a reload. A forward of vLLM's model runner takes
attention metadata, collectives of all workers and perhaps captured graphs, and what it would find (a kernel that reads
a copy) is looked for directly: a module that holds a tensor of its own beside its parameters is indirect.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from twinkle_ray.digest import bytes_view, torch_dtype
from twinkle_ray.errors import TwinkleRayError
from twinkle_ray.manifest import Manifest, TensorMeta
from twinkle_ray.vllm.placement import Destination, Placement, covered, storage_key

Feed = Iterator[tuple[str, torch.Tensor]]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OFFSETS = 1 << 20
_BLOCK = 1 << 22
"""Elements of a pattern that are made at a time."""

# Bits that are free and bits that are always set, so that each value is finite, normal and of magnitude 2**-7 to 1.
_FLOATS: dict[torch.dtype, tuple[int, int]] = {
    torch.bfloat16: (0x83FF, 0x3C00),
    torch.float16: (0x9FFF, 0x2000),
    torch.float32: (0x83FFFFFF, 0x3C000000),
    torch.float64: (0x807FFFFFFFFFFFFF, 0x3F80000000000000),
}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What may be written without the engine's loader. Keys are ``TensorMeta.name``.

    Attributes:
        direct: the live tensor itself, of the checkpoint tensor's shape and dtype, in one range of bytes.
        copied: the live views to which regions of a received tensor are to be copied.
        indirect: why a tensor with destinations is neither.
        seconds: what the proof took.
    """

    direct: dict[str, torch.Tensor]
    copied: dict[str, tuple[Destination, ...]]
    indirect: dict[str, str]
    seconds: float


def prove(
    model: torch.nn.Module,
    manifest: Manifest,
    placement: Placement,
    load: Callable[[Feed], None],
    touch: Callable[[], None] = lambda: None,
) -> Proof:
    """Overwrite the whole model with patterns and see where they arrive.

    Args:
        model: the live model.
        manifest: in the wire's dtypes.
        placement: recorded for this model and manifest.
        load: gives names and tensors to the engine and does all that follows loading. It takes each tensor as it
            comes, so that no second model is held.
        touch: called before each tensor; what it raises ends the proof.

    Raises:
        TwinkleRayError: from ``load`` or ``touch``. Any other error of ``load`` makes everything indirect.
    """
    start = time.perf_counter()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    indirect: dict[str, str] = {}
    found = {name: _distinct(destinations) for name, destinations in placement.destinations.items() if destinations}
    if found:
        patterns = Patterns(manifest, device)
        indirect |= _overlapping(found)
        try:
            load(_feed(manifest, placement, patterns, touch))
        except TwinkleRayError:
            raise
        except Exception as error:
            indirect |= dict.fromkeys(found, f"loading patterns raised {type(error).__name__}: {error}"[:200])
        else:
            indirect |= _misplaced(model, manifest, found, indirect, patterns)
        indirect |= _of_broken_modules(model, placement, found, indirect)
    direct: dict[str, torch.Tensor] = {}
    copied: dict[str, tuple[Destination, ...]] = {}
    for meta in manifest:
        if meta.name not in found or meta.name in indirect:
            continue
        first, *more = found[meta.name]
        if not more and first.whole and first.contiguous and first.dest.dtype == torch_dtype(meta.dtype):
            direct[meta.name] = first.dest.view(meta.shape)
        else:
            copied[meta.name] = (first, *more)
    return Proof(direct=direct, copied=copied, indirect=indirect, seconds=time.perf_counter() - start)


class Patterns:
    """Contents for every tensor of a manifest that no other tensor, and no other place in it, has.

    A long run of random bits is cut at an offset that belongs to one block of one tensor only, and turned by bits that
    belong to it as well. They depend on the manifest's order and on nothing else.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        self._longest = min(_BLOCK, max((_elements(meta) for meta in manifest), default=1))
        self._runs: dict[torch.dtype, torch.Tensor] = {}
        self._first: dict[str, int] = {}
        blocks = 1
        for meta in manifest:
            self._first[meta.name] = blocks
            blocks += max(1, math.ceil(_elements(meta) / _BLOCK))

    def of(self, meta: TensorMeta) -> torch.Tensor:
        """A new tensor of ``meta``'s shape and dtype on the device."""
        dtype = torch_dtype(meta.dtype)
        result = torch.empty(meta.shape, dtype=dtype, device=self._device)
        part = _PARTS.get(dtype, dtype)
        flat = bytes_view(result).view(_INTS[part.itemsize])
        run, (free, always) = self._run(part), _bits(part)
        for index, at in enumerate(range(0, flat.numel(), _BLOCK)):
            block = flat[at : at + _BLOCK]
            number = self._first[meta.name] + index
            if flat.numel() <= 4:  # too few bits to be unlike others by chance
                values = [_signed(_spread(number * 5 + i, free) | always, part.itemsize) for i in range(flat.numel())]
                block.copy_(torch.tensor(values, dtype=block.dtype))
                continue
            offset = number * 0x9E3B1 % _OFFSETS
            turn = _signed(number * 0x9E3779B97F4A7C15 & free, part.itemsize)
            torch.bitwise_xor(run[offset : offset + block.numel()], turn, out=block)
        return result

    def _run(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._runs:
            free, always = _bits(dtype)
            kind = _INTS[dtype.itemsize]
            made = torch.Generator().manual_seed(dtype.itemsize)
            count = (self._longest + _OFFSETS) * dtype.itemsize // 8 * 2 + 2
            words = torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int32, generator=made)
            bits = words.to(self._device).view(kind)
            bits &= _signed(free, dtype.itemsize)
            bits |= _signed(always, dtype.itemsize)
            self._runs[dtype] = bits
        return self._runs[dtype]


def _elements(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * (2 if meta.dtype.startswith("complex") else 1)


def _bits(dtype: torch.dtype) -> tuple[int, int]:
    """Which bits of an element may be anything, and which are set."""
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    if dtype == torch.bool:
        return 1, 0
    if dtype.is_floating_point and dtype.itemsize == 1:
        return 0x3F, 0  # of fp8 no NaN and no infinity
    return (1 << 8 * dtype.itemsize) - 1, 0


def _spread(number: int, free: int) -> int:
    """The bits of ``number`` put into the free places, the highest first, which a cast to fewer bits keeps."""
    bits = 0
    for place in reversed(range(free.bit_length())):
        if free >> place & 1:
            bits |= (number & 1) << place
            number >>= 1
    return bits


def _signed(bits: int, itemsize: int) -> int:
    """As the integer dtype of this size has it; uint8 has no sign."""
    return bits - (1 << 8 * itemsize) if itemsize > 1 and bits >> (8 * itemsize - 1) else bits


def _feed(manifest: Manifest, placement: Placement, patterns: Patterns, touch: Callable[[], None]) -> Feed:
    for meta in manifest:
        touch()
        for spelling in placement.offered.get(meta.name, ()):
            yield spelling, patterns.of(meta)  # one each: a reload may keep what it was given


def _distinct(destinations: Iterable[Destination]) -> tuple[Destination, ...]:
    """A tied tensor arrives twice in one place."""
    kept: dict[tuple[Any, ...], Destination] = {}
    for d in destinations:
        place = (storage_key(d.dest), d.dest.storage_offset(), tuple(d.dest.shape), d.dest.stride(), d.dest.dtype)
        kept.setdefault((place, d.size, d.stride, d.offset), d)
    return tuple(kept.values())


def _overlapping(found: dict[str, tuple[Destination, ...]]) -> dict[str, str]:
    """Tensors that share an element of a parameter: which of them would be right depends on who writes last."""
    by_storage: dict[int, list[tuple[int, int, str, torch.Tensor]]] = defaultdict(list)
    for name, destinations in found.items():
        for d in destinations:
            if d.dest.numel():
                start = int(d.dest.storage_offset())
                extent = 1 + sum((n - 1) * step for n, step in zip(d.dest.shape, d.dest.stride(), strict=True))
                by_storage[storage_key(d.dest)].append((start, start + extent, name, d.dest))
    result: dict[str, str] = {}
    for places in by_storage.values():
        if len({place[3].dtype for place in places}) > 1:
            result |= {place[2]: "its parameter is written as two dtypes" for place in places}
            continue
        places.sort(key=lambda place: place[:2])
        ends = [place[1] for place in places]
        if all(end <= later[0] for end, later in zip(ends, places[1:], strict=False)):
            continue
        hits = torch.zeros(max(ends), dtype=torch.int16)
        views = [(name, hits.as_strided(dest.shape, dest.stride(), start)) for start, _, name, dest in places]
        for _, view in views:
            view += 1
        result |= {name: "another tensor is written to the same place" for name, view in views if int(view.max()) > 1}
    return result


def _misplaced(
    model: torch.nn.Module,
    manifest: Manifest,
    found: dict[str, tuple[Destination, ...]],
    known: dict[str, str],
    patterns: Patterns,
) -> dict[str, str]:
    """Tensors whose patterns are not, or not only, where they were recorded."""
    live = {storage_key(t) for t in (*model.parameters(), *model.buffers())}
    result: dict[str, str] = {}
    for meta in manifest:
        if meta.name not in found or meta.name in known:
            continue
        pattern = patterns.of(meta)
        for d in found[meta.name]:
            if storage_key(d.dest) not in live:
                result[meta.name] = "the engine has put another parameter in the place of this one"
            elif not _same_bytes(d.dest, d.source(pattern)):
                result[meta.name] = "after the engine's own loading it is not, as sent, where it was recorded"
    return result


def _same_bytes(held: torch.Tensor, sent: torch.Tensor) -> bool:
    one, other = bytes_view(held.detach().contiguous()), bytes_view(sent.to(held.dtype).contiguous())
    return torch.equal(one, other)


def _of_broken_modules(
    model: torch.nn.Module, placement: Placement, found: dict[str, tuple[Destination, ...]], indirect: dict[str, str]
) -> dict[str, str]:
    """Tensors of modules that hold something which direct writes would not, or not wholly, renew."""
    owners: dict[int, list[torch.nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.numel():
                owners[storage_key(parameter)].append(module)
    live = {*owners, *(storage_key(d.dest) for ds in found.values() for d in ds)}
    padding: dict[int, list[torch.Tensor]] = defaultdict(list)
    for view, _ in placement.fills:
        padding[storage_key(view)].append(view)
    broken: dict[int, str] = {}
    for module in {id(m): m for ms in owners.values() for m in ms}.values():
        copy = next((name for name, t in _held_beside(module) if storage_key(t) not in live), None)
        if copy is not None:
            broken[id(module)] = f"its {type(module).__name__} also keeps {copy}, which a direct write does not renew"
    result: dict[str, str] = {}
    while True:
        written = defaultdict(list, {key: list(views) for key, views in padding.items()})
        for name, destinations in found.items():
            if name not in indirect and name not in result:
                for d in destinations:
                    written[storage_key(d.dest)].append(d.dest)
        for key, modules in owners.items():
            for module in modules:
                for parameter in module._parameters.values():
                    if parameter is None or id(module) in broken or storage_key(parameter) != key:
                        continue
                    if covered(parameter, written[key]) < parameter.numel():
                        broken[id(module)] = f"its {type(module).__name__} has elements without a proven destination"
        more = {
            name: broken[id(module)]
            for name, destinations in found.items()
            if name not in indirect and name not in result
            for d in destinations
            for module in owners.get(storage_key(d.dest), ())
            if id(module) in broken
        }
        if not more:
            return result
        result |= more


def _held_beside(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of more than one number, other than parameters, that a module or one of its helpers holds."""
    for key, value in vars(module).items():
        if key not in ("_parameters", "_modules"):
            for name, tensor in _reachable(value, key, 4):
                if tensor.numel() > 1 and (tensor.is_floating_point() or tensor.element_size() == 1):
                    yield name, tensor


def _reachable(value: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == 0 or isinstance(value, (str, int, float, type, torch.nn.Module)):
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _reachable(item, str(key), depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _reachable(item, name, depth - 1)
    elif isinstance(value, functools.partial):
        yield from _reachable([*value.args, *value.keywords.values()], name, depth)
    elif getattr(value, "__closure__", None):
        for cell in value.__closure__:
            try:
                yield from _reachable(cell.cell_contents, name, depth - 1)
            except ValueError:
                continue  # an empty cell
    elif hasattr(value, "__dict__"):
        yield from _reachable(dict(vars(value)), name, depth)
