"""What is sent: names, shapes, dtypes and kinds in order, with a hash and a JSON wire form.

A manifest is agreed before any byte of weights moves. It never carries code: it is read from JSON with every field
checked, so that bytes from a socket can at worst raise :class:`~twinkle_ray.errors.WireError`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from twinkle_ray.errors import ConfigError, WireError

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element by the dtype's name in torch (``str(dtype)`` without ``torch.``)."""

CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Dtypes between which one cast is allowed on the way. Integers, bool, fp8 and complex travel as they are."""

KINDS = ("parameter", "buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """One tensor on the wire: contiguous, row-major, ``nbytes`` bytes.

    Attributes:
        name: the trainer's name for it, without wrapper segments.
        shape: elements per dimension; ``()`` for a scalar.
        dtype: torch's name of the dtype that is sent, a key of :data:`ITEMSIZE`.
        kind: ``parameter`` or ``buffer``.
        aliases: further names of the same storage (tied weights); sent once, filled under every name.
        cuts: where the wire cuts it besides, in elements from its start, ascending: a receiver that holds a part of it
            can then take that part, and nothing else, straight into its parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = "parameter"
    aliases: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the first one first."""
        return (self.name, *self.aliases)

    def as_json(self) -> list[Any]:
        """``[name, shape, dtype, kind, aliases]``, and ``cuts`` if there are any: plain JSON values."""
        fields = [self.name, list(self.shape), self.dtype, self.kind, list(self.aliases)]
        return [*fields, list(self.cuts)] if self.cuts else fields

    @staticmethod
    def from_json(value: object) -> TensorMeta:
        """Rebuild from :meth:`as_json`.

        Raises:
            WireError: the value is not such a list, or a field has another type or range than it must have.
        """
        if not isinstance(value, list) or len(value) not in (5, 6):
            raise WireError("a tensor header is not a list of 5 or 6 fields")
        name, shape, dtype, kind, aliases, cuts = value if len(value) == 6 else [*value, []]
        if not isinstance(name, str) or not name:
            raise WireError("a tensor header has no name")
        if not isinstance(shape, list) or len(shape) > 64 or not all(_is_size(n) for n in shape):
            raise WireError(f"tensor {name[:80]!r}: its shape is not a list of sizes")
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise WireError(f"tensor {name[:80]!r}: unknown dtype {str(dtype)[:40]!r}")
        if kind not in KINDS:
            raise WireError(f"tensor {name[:80]!r}: unknown kind {str(kind)[:40]!r}")
        if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
            raise WireError(f"tensor {name[:80]!r}: its aliases are not a list of names")
        # an empty tensor too: torch computes its strides from the other sizes
        if math.prod(max(n, 1) for n in shape) * ITEMSIZE[dtype] >= 1 << 62:
            raise WireError(f"tensor {name[:80]!r}: larger than any machine holds")
        if not isinstance(cuts, list) or not all(_is_size(n) for n in cuts):
            raise WireError(f"tensor {name[:80]!r}: its cuts are not a list of sizes")
        if cuts and not all(one < other for one, other in pairwise([0, *cuts, math.prod(shape)])):
            raise WireError(f"tensor {name[:80]!r}: its cuts do not ascend within it")
        return TensorMeta(
            name=name, shape=tuple(shape), dtype=dtype, kind=kind, aliases=tuple(aliases), cuts=tuple(cuts)
        )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one sync in the order in which they are sent.

    Raises:
        ConfigError: two tensors (aliases counted) have one name.
    """

    tensors: tuple[TensorMeta, ...]
    digest: str = field(init=False)
    """64-bit hash of names, shapes, dtypes, kinds, cuts and order, as 16 hex digits. Equal manifests, equal digests."""
    nbytes: int = field(init=False)
    """Bytes of all tensors."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for meta in self.tensors:
            for name in meta.names:
                if name in seen:
                    raise ConfigError(f"two tensors are named {name!r}; names must be unique within one sync")
                seen.add(name)
        text = json.dumps(self.as_json(), separators=(",", ":"), ensure_ascii=True)
        object.__setattr__(self, "digest", hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
        object.__setattr__(self, "nbytes", sum(meta.nbytes for meta in self.tensors))

    def __iter__(self) -> Iterator[TensorMeta]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def with_dtypes(self, dtypes: Iterable[str]) -> Manifest:
        """The same tensors with other wire dtypes, in order."""
        return Manifest(tuple(replace(meta, dtype=dtype) for meta, dtype in zip(self.tensors, dtypes, strict=True)))

    def with_cuts(self, cuts: Sequence[Sequence[int]]) -> Manifest:
        """The same tensors cut there, as :func:`agree_cuts` returns it: in order, or ``()`` for no cuts at all."""
        if not cuts and not any(meta.cuts for meta in self.tensors):
            return self
        pairs = zip(self.tensors, cuts or [()] * len(self.tensors), strict=True)
        return Manifest(tuple(replace(meta, cuts=tuple(at)) for meta, at in pairs))

    def as_json(self) -> list[Any]:
        return [meta.as_json() for meta in self.tensors]

    @staticmethod
    def from_json(value: object) -> Manifest:
        """Rebuild from :meth:`as_json`.

        Raises:
            WireError: not a list of valid tensor headers with unique names.
        """
        if not isinstance(value, list):
            raise WireError("a manifest is not a list")
        try:
            return Manifest(tuple(TensorMeta.from_json(item) for item in value))
        except ConfigError as error:
            raise WireError(str(error)) from None


def agree_dtypes(sent: Manifest, wanted: Iterable[Iterable[str | None]]) -> tuple[str, ...]:
    """One wire dtype per tensor: the receivers' if all of them hold the same one, else the sender's.

    Args:
        sent: the trainer's manifest in the trainer's own dtypes.
        wanted: per receiver, one dtype per tensor in the manifest's order; ``None`` where it does not mind.

    Returns:
        Dtype names in the manifest's order. Only a dtype of :data:`CASTABLE` is ever replaced, and only by another.
    """
    columns = [list(column) for column in wanted]
    result = []
    for index, meta in enumerate(sent):
        held = {column[index] for column in columns} - {None}
        dtype = next(iter(held)) if len(held) == 1 else None
        castable = dtype is not None and meta.dtype in CASTABLE and dtype in CASTABLE
        result.append(dtype if dtype is not None and castable else meta.dtype)
    return tuple(result)


def agree_cuts(sent: Manifest, wanted: Iterable[Sequence[Sequence[int]]]) -> tuple[tuple[int, ...], ...]:
    """Where the wire cuts each tensor: wherever a receiver wants it.

    Args:
        sent: the trainer's manifest.
        wanted: per receiver, ascending offsets in elements for each tensor in the manifest's order; ``()`` for one that
            wants no cuts at all.

    Returns:
        Ascending offsets in elements, inside of each tensor, in the manifest's order; ``()`` if nobody wants any.
    """
    columns = [column for column in wanted if column]
    if not columns:
        return ()
    result = []
    for meta, *asked in zip(sent, *columns, strict=True):
        numel = math.prod(meta.shape)
        result.append(tuple(sorted({at for cuts in asked for at in cuts if 0 < at < numel})))
    return tuple(result) if any(result) else ()
