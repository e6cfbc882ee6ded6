"""In-band headers, for a sender whose tensors are not known beforehand.

An engine driven by hand gets a generator of unknown length. Each bucket is preceded on the group itself by a 16-byte
prefix (magic, sequence number, length) and a JSON header of that length; there is no side channel that could lose a
message, and nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.digest import bytes_view
from twinkle_ray.errors import ConfigError, WireError
from twinkle_ray.manifest import ITEMSIZE, Manifest, TensorMeta
from twinkle_ray.plan import Segment, plan_chunks
from twinkle_ray.types import Deadline

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"TWKL"
_MAX_HEADER = 1 << 30


def send_frame(group: SyncGroup, seq: int, content: dict[str, Any], deadline: Deadline) -> None:
    """Broadcast one JSON object from this rank."""
    body = json.dumps(content, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, seq, len(body))
    for part in (prefix, body):
        group.broadcast_many([_to_wire(group, part)], src=group.rank)
        group.synchronize(deadline)


def receive_frame(group: SyncGroup, seq: int, deadline: Deadline, source: int = 0) -> dict[str, Any]:
    """Receive what :func:`send_frame` sends.

    Raises:
        WireError: the bytes are no frame, or not the frame with this sequence number.
    """
    magic, got, length = _PREFIX.unpack(_from_wire(group, _PREFIX.size, deadline, source))
    if magic != _MAGIC:
        raise WireError(f"bucket {seq}: the header's first bytes are not those of a twinkle_ray header")
    if got != seq:
        raise WireError(f"bucket {seq}: the sender is at bucket {got}; the two ends have lost step")
    if length > _MAX_HEADER:
        raise WireError(f"bucket {seq}: a header of {length} bytes is longer than any sender makes")
    return parse_frame(_from_wire(group, length, deadline, source), seq)


def parse_frame(body: bytes, seq: int) -> dict[str, Any]:
    """JSON object of a frame's body, or WireError."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError(f"bucket {seq}: the header is not JSON") from None
    if not isinstance(content, dict):
        raise WireError(f"bucket {seq}: the header is not a JSON object")
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one header announces.

    Attributes:
        tensors: metas of the tensors that have bytes in this bucket (or none at all, being of size zero).
        segments: byte ranges in wire order; ``tensor`` indexes ``tensors``.
        first_part: whether the first tensor begins here rather than continuing from the bucket before.
        completes: how many of ``tensors``, from the first, are complete after this bucket.
        last: no bucket follows.
    """

    tensors: tuple[TensorMeta, ...]
    segments: tuple[Segment, ...]
    first_part: bool
    completes: int
    last: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "tensors": [meta.as_json() for meta in self.tensors],
            "segments": [[s.tensor, s.start, s.stop] for s in self.segments],
            "first_part": self.first_part,
            "completes": self.completes,
            "last": self.last,
        }

    @staticmethod
    def from_json(value: dict[str, Any], seq: int) -> Bucket:
        """Rebuild from :meth:`as_json`.

        Raises:
            WireError: a field is missing, of another type, or outside its tensor.
        """
        tensors, segments = value.get("tensors"), value.get("segments")
        first_part, completes, last = value.get("first_part"), value.get("completes"), value.get("last")
        if not isinstance(tensors, list) or not isinstance(segments, list):
            raise WireError(f"bucket {seq}: the header lists no tensors or no segments")
        if not isinstance(first_part, bool) or not isinstance(last, bool):
            raise WireError(f"bucket {seq}: the header's flags are not booleans")
        metas = tuple(TensorMeta.from_json(item) for item in tensors)
        if not _is_int(completes) or not 0 <= completes <= len(metas):
            raise WireError(f"bucket {seq}: it completes {completes!r} of {len(metas)} tensors")
        parts = []
        for item in segments:
            if not isinstance(item, list) or len(item) != 3 or not all(_is_int(n) for n in item):
                raise WireError(f"bucket {seq}: a segment is not three integers")
            index, start, stop = item
            if not 0 <= index < len(metas) or not 0 <= start < stop <= metas[index].nbytes:
                raise WireError(f"bucket {seq}: a segment lies outside its tensor")
            parts.append(Segment(tensor=index, start=start, stop=stop))
        return Bucket(tensors=metas, segments=tuple(parts), first_part=first_part, completes=completes, last=last)


def _is_int(value: object) -> TypeIs[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Header of one tensor of a generator.

    Raises:
        ConfigError: not a dense tensor with a dtype that can be sent, or not a (name, tensor) pair.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE or tensor.layout is not torch.strided or tensor.is_meta:
        raise ConfigError(f"{name!r} cannot be sent: it is a {tensor.layout} tensor of {dtype} on {tensor.device}")
    return TensorMeta(name=name, shape=tuple(tensor.shape), dtype=dtype)


def send_stream(
    group: SyncGroup,
    weights: Iterable[tuple[str, torch.Tensor]],
    bucket_size: int,
    deadline: Deadline,
) -> int:
    """Broadcast ``(name, tensor)`` pairs in buckets of at most ``bucket_size`` bytes.

    Returns:
        Bytes of tensors sent.

    Raises:
        ConfigError: two tensors have one name, or one cannot be sent.
    """
    seen: set[str] = set()
    total = seq = 0
    batch: list[tuple[TensorMeta, torch.Tensor]] = []
    used = 0

    def emit(last: bool) -> None:
        nonlocal seq, batch, used
        seq = _send_batch(group, batch, bucket_size, seq, last, deadline)
        batch, used = [], 0

    for name, tensor in weights:
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        meta = meta_of(name, tensor)
        if name in seen:
            raise ConfigError(f"two tensors are named {name!r}; names must be unique within one sync")
        seen.add(name)
        if batch and used + meta.nbytes > bucket_size:
            emit(last=False)
        batch.append((meta, tensor.resolve_conj().resolve_neg().contiguous()))
        used += meta.nbytes
        total += meta.nbytes
    emit(last=True)
    return total


def _send_batch(
    group: SyncGroup,
    batch: list[tuple[TensorMeta, torch.Tensor]],
    bucket_size: int,
    seq: int,
    last: bool,
    deadline: Deadline,
) -> int:
    metas = [meta for meta, _ in batch]
    chunks = plan_chunks(Manifest(tuple(metas)), bucket_size)
    if not chunks:
        send_frame(
            group, seq, Bucket(tensors=(), segments=(), first_part=True, completes=0, last=last).as_json(), deadline
        )
        return seq + 1
    for number, chunk in enumerate(chunks):
        touched = sorted({s.tensor for s in chunk.segments} | set(chunk.completes))
        base = touched[0]
        bucket = Bucket(
            tensors=tuple(metas[i] for i in touched),
            segments=tuple(Segment(tensor=s.tensor - base, start=s.start, stop=s.stop) for s in chunk.segments),
            first_part=not chunk.segments or chunk.segments[0].start == 0 or chunk.segments[0].tensor != base,
            completes=len(chunk.completes),
            last=last and number == len(chunks) - 1,
        )
        send_frame(group, seq, bucket.as_json(), deadline)
        views = []
        for s in chunk.segments:
            tensor = batch[s.tensor][1]
            if tensor.device.type != group.device_type:
                tensor = tensor.to(group.device_type)
            views.append(bytes_view(tensor)[s.start : s.stop])
        group.broadcast_many(views, src=group.rank)
        group.synchronize(deadline)
        seq += 1
    return seq


def receive_stream(
    group: SyncGroup, device: torch.device, deadline: Deadline, source: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` pairs as :func:`send_stream` sends them, in order, bucket after bucket.

    Each tensor owns its storage; nothing of ours is written to it again.

    Raises:
        WireError: the headers do not fit together.
    """
    seq = 0
    pending: tuple[TensorMeta, torch.Tensor] | None = None
    while True:
        bucket = Bucket.from_json(receive_frame(group, seq, deadline, source), seq)
        buffers: list[torch.Tensor] = []
        for index, meta in enumerate(bucket.tensors):
            if index == 0 and not bucket.first_part:
                if pending is None or pending[0] != meta:
                    raise WireError(f"bucket {seq}: it continues {meta.name!r}, which no bucket before has begun")
                buffers.append(pending[1])
            else:
                buffers.append(torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=device))
        views = [bytes_view(buffers[s.tensor])[s.start : s.stop] for s in bucket.segments]
        group.broadcast_many(views, src=source)
        group.synchronize(deadline)
        complete = list(zip(bucket.tensors, buffers, strict=True))
        pending = complete[bucket.completes] if bucket.completes < len(complete) else None
        if bucket.completes < len(complete) - 1 or (bucket.last and pending is not None):
            raise WireError(f"bucket {seq}: tensors are left incomplete")
        for meta, tensor in complete[: bucket.completes]:
            yield meta.name, tensor
        if bucket.last:
            return
        seq += 1


def _to_wire(group: SyncGroup, data: bytes) -> torch.Tensor:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor if group.device_type == "cpu" else tensor.to(group.device_type)


def _from_wire(group: SyncGroup, nbytes: int, deadline: Deadline, source: int) -> bytes:
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=group.device_type)
    group.broadcast_many([tensor], src=source)
    group.synchronize(deadline)
    return bytes(tensor.cpu().numpy().tobytes())
