"""Where the bytes of each chunk go at one receiver: worked out once, then only executed.

The sink says of each tensor which ranges of its bytes have a place in live memory. A segment that lies within such a
range is received there; one that touches none belongs to other workers and goes into a scratch buffer that nobody
reads. A tensor of which a segment would do both, or of which the sink gives no ranges, is received whole: if the sink
knows to which live memory regions of it are to be copied, into a slot that it shares with the others of its chunk, else
(or if it spreads over chunks) into memory of its own, which the sink then loads.

In a scratch buffer the segments of one chunk lie side by side, since they are on their way at the same time and a
transport may pass on to the next rank what it finds in the buffer. The next chunk uses the same memory again: a
transport that passes on has its launches follow one another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from twinkle_ray.digest import torch_dtype
from twinkle_ray.manifest import Manifest
from twinkle_ray.plan import Chunk

ALIGNED = 16
"""Bytes: what transports move with their widest instructions."""

_START = attrgetter("start")
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``start`` to ``stop`` of a tensor, and the live memory that holds them: ``view``, 1-D of uint8."""

    start: int
    stop: int
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class Copy:
    """A region of a (contiguous) tensor, in elements, and the live memory of its shape to which it is copied."""

    dest: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Pieces:
    """Consecutive pieces of a buffer of ``nbytes`` bytes, for some segments of a chunk.

    Attributes:
        segments: per piece the index of its segment; -1 for a piece that only aligns the next one.
        sizes: bytes per piece.
    """

    segments: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, segment: int, size: int) -> None:
        self.segments.append(segment)
        self.sizes.append(size)
        self.nbytes += size

    def align(self) -> None:
        if padding := -self.nbytes % ALIGNED:
            self.add(-1, padding)

    def cut(self, buffer: torch.Tensor, views: list[torch.Tensor]) -> None:
        """Put the pieces of a buffer, 1-D of uint8 and at least so large, into the segments' views."""
        parts = buffer[: self.nbytes].split_with_sizes(self.sizes)
        for segment, part in zip(self.segments, parts, strict=True):
            if segment >= 0:
                views[segment] = part


@dataclass(slots=True)
class Step:
    """One chunk at this receiver.

    Attributes:
        views: per segment the live memory; nothing where that is not known before the chunk is received.
        live: whether there is any.
        scratch: of the segments that belong to other workers.
        slot: of the tensors that are copied when the chunk is complete.
        copies: ``(dest, dtype, size, stride, offset)`` of what is copied then; the offset in elements of the slot.
        staged: ``(segment, tensor, start, stop)`` of each segment of a tensor that is received into its own memory.
        begins_nbytes, ends_nbytes: of the tensors that are not received in place and whose first or last byte is in
            here, all of them.
        completes: tensors received into memory of their own whose last byte (or which, being of size zero, need none)
            is in here.
    """

    views: list[torch.Tensor] = field(default_factory=list)
    live: bool = False
    scratch: Pieces = field(default_factory=Pieces)
    slot: Pieces = field(default_factory=Pieces)
    copies: list[tuple[torch.Tensor, torch.dtype, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)
    staged: list[tuple[int, int, int, int]] = field(default_factory=list)
    begins_nbytes: int = 0
    ends_nbytes: int = 0
    completes: list[int] = field(default_factory=list)

    def scatter(self, slot: torch.Tensor) -> None:
        """Copy what has arrived in the slot to its places."""
        dests = [copy[0] for copy in self.copies]
        if not dests:
            return
        slot = slot.to(dests[0].device)  # in one piece, if the wire is elsewhere
        typed = {dtype: slot.view(dtype) for dtype in {copy[1] for copy in self.copies}}
        with torch.inference_mode():  # which alone may write to what was made in it
            sources = [typed[dtype].as_strided(size, stride, offset) for _, dtype, size, stride, offset in self.copies]
            torch._foreach_copy_(dests, sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A whole plan at this receiver. It holds live memory: whoever keeps it keeps that.

    Attributes:
        steps: one per chunk.
        staged: indices of the tensors that are received whole into memory of their own.
        copied: of those that are copied from a slot.
        largest: bytes of the largest staged tensor if it spreads over chunks, else 0.
        live: whether anything is received straight into live memory.
        scratch_nbytes: size of the scratch buffer; at most a bucket and what aligns its pieces.
    """

    steps: tuple[Step, ...]
    staged: frozenset[int]
    copied: frozenset[int]
    largest: int
    live: bool
    scratch_nbytes: int


def lay(
    manifest: Manifest,
    plan: Sequence[Chunk],
    ranges: Sequence[Sequence[Range] | None],
    copies: Mapping[int, Sequence[Copy]] | None = None,
) -> Landing:
    """Lay a plan out at one receiver.

    Args:
        ranges: per tensor of the manifest its live ranges, ascending and disjoint; empty: no byte of it is wanted here;
            ``None``: it is to be received whole.
        copies: by index of the tensor all that is to be done with one that is received whole; without an entry the sink
            loads it.
    """
    copies = copies or {}
    whole = _unfit(manifest, plan, ranges)
    spread = {
        last.tensor
        for chunk in plan
        if chunk.segments and (last := chunk.segments[-1]).stop < manifest.tensors[last.tensor].nbytes
    }
    copied = frozenset(index for index in whole if index in copies and index not in spread)
    staged = whole - copied
    steps = []
    for chunk in plan:
        step = Step(completes=[index for index in chunk.completes if index in staged])
        for at, segment in enumerate(chunk.segments):
            index, start, stop = segment.tensor, segment.start, segment.stop
            view = _NOTHING
            if index not in whole:
                if (held := _holding(ranges[index], start)) is None:
                    step.scratch.add(at, stop - start)
                    step.scratch.align()
                else:
                    step.live = True
                    view = held.view
                    if (start, stop) != (held.start, held.stop):
                        view = view[start - held.start : stop - held.start]
            else:
                nbytes = manifest.tensors[index].nbytes
                step.begins_nbytes += nbytes if start == 0 else 0
                step.ends_nbytes += nbytes if stop == nbytes else 0
                if index in staged:
                    step.staged.append((at, index, start, stop))
                else:
                    if start == 0:
                        step.slot.align()
                        dtype = torch_dtype(manifest.tensors[index].dtype)
                        first = step.slot.nbytes // dtype.itemsize
                        step.copies += [(c.dest, dtype, c.size, c.stride, first + c.offset) for c in copies[index]]
                    step.slot.add(at, stop - start)
            step.views.append(view)
        step.slot.align()  # any dtype can be viewed then
        steps.append(step)
    return Landing(
        steps=tuple(steps),
        staged=staged,
        copied=copied,
        largest=max((manifest.tensors[index].nbytes for index in staged & spread), default=0),
        live=any(step.live for step in steps),
        scratch_nbytes=max((step.scratch.nbytes for step in steps), default=0),
    )


def _holding(ranges: Sequence[Range] | None, byte: int) -> Range | None:
    """The range that has this byte."""
    if not ranges:
        return None
    held = ranges[0 if len(ranges) == 1 else max(0, bisect_right(ranges, byte, key=_START) - 1)]
    return held if held.start <= byte < held.stop else None


def _unfit(manifest: Manifest, plan: Sequence[Chunk], ranges: Sequence[Sequence[Range] | None]) -> frozenset[int]:
    """Tensors without ranges, or whose ranges begin or end inside of a segment."""
    missed: dict[int, set[int]] = {}
    for index, found in enumerate(ranges):
        if found and (len(found), found[0].start, found[-1].stop) != (1, 0, manifest.tensors[index].nbytes):
            missed[index] = {edge for held in found for edge in (held.start, held.stop)}
    for chunk in plan:
        for segment in chunk.segments:
            edges = missed.get(segment.tensor)
            if edges:
                edges.discard(segment.start)
                edges.discard(segment.stop)
    return frozenset(index for index, found in enumerate(ranges) if found is None or missed.get(index))
