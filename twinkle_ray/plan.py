"""From a manifest to the fixed sequence of chunks that crosses the wire. Pure; the one place that knows its order.

Both ends compute the plan from the same manifest and bucket size, so no per-chunk message is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_ray.errors import ConfigError
from twinkle_ray.manifest import ITEMSIZE, Manifest

DEFAULT_BUCKET_SIZE = 512 << 20
"""Bytes of one chunk at most. 512 MiB is the first seed's example; above 256 MiB the wire's rate is flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A byte range of one tensor that travels in one piece.

    Attributes:
        tensor: index into the manifest.
        start, stop: byte range within the tensor's contiguous bytes.
        source: rank that holds the bytes.
        destinations: ranks that want them; ``None`` for all other ranks.
    """

    tensor: int
    start: int
    stop: int
    source: int = 0
    destinations: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Segments that are launched together.

    Attributes:
        segments: in wire order; none is empty.
        completes: indices of the tensors whose last byte (or which, being of size zero, need none) is in here.
    """

    segments: tuple[Segment, ...]
    completes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


def plan_chunks(manifest: Manifest, bucket_size: int) -> tuple[Chunk, ...]:
    """Cut a manifest into chunks of at most ``bucket_size`` bytes.

    Segments end where the manifest cuts a tensor. Besides, a tensor is cut only if it alone exceeds the bucket, and
    then between rows (of its first dimension) if a row fits into one; any other lies within one chunk. Tensors complete
    in manifest order; those of size zero complete where they stand.

    Raises:
        ConfigError: ``bucket_size`` is not positive.
    """
    if bucket_size <= 0:
        raise ConfigError(f"bucket_size is {bucket_size}, but it must be a positive number of bytes")
    chunks: list[Chunk] = []
    segments: list[Segment] = []
    completes: list[int] = []
    used = 0

    def flush() -> None:
        nonlocal used
        if segments or completes:
            chunks.append(Chunk(segments=tuple(segments), completes=tuple(completes)))
        segments.clear()
        completes.clear()
        used = 0

    for index, meta in enumerate(manifest):
        nbytes = meta.nbytes
        if used and used + nbytes > bucket_size:
            flush()
        row = _row(meta.shape, nbytes, bucket_size) if nbytes > bucket_size else 1
        start = 0
        for end in (*(at * ITEMSIZE[meta.dtype] for at in meta.cuts), nbytes):
            while start < end:
                stop = min((start + bucket_size - used) // row * row, end)
                if stop <= start:  # not even a row has room; in an empty bucket one always has
                    flush()
                    continue
                segments.append(Segment(tensor=index, start=start, stop=stop))
                used += stop - start
                start = stop
        completes.append(index)
    flush()
    return tuple(chunks)


def _row(shape: tuple[int, ...], nbytes: int, bucket_size: int) -> int:
    """Bytes between which a tensor is cut: a row, or a single one where no row fits into a bucket."""
    row = nbytes // shape[0] if shape and shape[0] else nbytes
    return row if row <= bucket_size else 1
