"""From a manifest to the fixed sequence of chunks that crosses the wire. Pure; the one place that knows its order.

Both ends compute the plan from the same manifest and bucket size, so no per-chunk message is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_ray.errors import ConfigError
from twinkle_ray.manifest import Manifest

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

    A tensor is cut only if it alone exceeds the bucket, and then between rows (of its first dimension) if a row
    fits into one. Tensors complete in manifest order; those of size zero complete where they stand.

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
        step = nbytes if nbytes <= bucket_size else _cut(meta.shape, nbytes, bucket_size)
        start = 0
        while start < nbytes:
            stop = min(start + step, nbytes)
            if used and used + stop - start > bucket_size:
                flush()
            segments.append(Segment(tensor=index, start=start, stop=stop))
            used += stop - start
            start = stop
        completes.append(index)
    flush()
    return tuple(chunks)


def _cut(shape: tuple[int, ...], nbytes: int, bucket_size: int) -> int:
    row = nbytes // shape[0] if shape and shape[0] else nbytes
    return bucket_size // row * row if 0 < row <= bucket_size else bucket_size
