"""The bytes of tensors: as a view for the wire, and as digests by which two processes prove that they hold the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from twinkle_ray.errors import ConfigError, UnsupportedModel, VerifyError
from twinkle_ray.manifest import ITEMSIZE

if TYPE_CHECKING:
    from twinkle_ray.sinks import Piece

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
"""The dtypes of the wire that this torch has, by the name that a manifest uses."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

HASH_PIECE = 32 << 20
"""Bytes that are brought to the CPU at a time for hashing."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a manifest calls ``name``.

    Raises:
        UnsupportedModel: this torch does not have it.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedModel(f"torch {torch.__version__} has no dtype {name}; install a newer one") from None


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements in row-major order: contiguous, no lazy conjugate or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a 1-D uint8 tensor of its ``nbytes``, sharing storage, without autograd.

    Any strided dtype, 0-dim and size zero included. A conjugated or negated view has no bytes of its own: for such a
    tensor the result is a copy, right to read from and useless to write to.

    Raises:
        ConfigError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not contiguous")
    if tensor.numel() == 0:  # its strides may be such that no other dtype can be viewed
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().view(-1).view(torch.uint8)


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the tensor's elements as row-major bytes, whatever its strides or device.

    A device tensor comes to the CPU :data:`HASH_PIECE` bytes at a time; one that is not contiguous is copied whole
    on its own device first.
    """
    digest = hashlib.sha256()
    memory = bytes_view(tensor.detach().contiguous())
    for start in range(0, memory.numel(), HASH_PIECE):
        digest.update(memory[start : start + HASH_PIECE].cpu().numpy().data)
    return digest.hexdigest()


def assemble(pieces_of_workers: Iterable[Iterable[Piece]]) -> tuple[dict[str, str], list[str]]:
    """Digests of whole tensors from what several workers hold of them.

    Elements that more than one worker holds must be equal, byte for byte.

    Returns:
        SHA-256 (hex) per tensor, and the names of those of which some elements are held by nobody.

    Raises:
        VerifyError: two workers disagree about a tensor, or a piece does not fit into its tensor; ``tensor`` says
            which.
    """
    by_name: dict[str, list[Piece]] = {}
    for pieces in pieces_of_workers:
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
    digests: dict[str, str] = {}
    unverifiable: list[str] = []
    for name, held in by_name.items():
        if len({(piece.shape, piece.dtype) for piece in held}) > 1:
            raise VerifyError(f"{name}: workers hold it in different shapes or dtypes", tensor=name)
        whole = {piece.sha256 for piece in held if piece.sha256 is not None}
        slices = [piece for piece in held if piece.sha256 is None]
        put_together = _join(slices) if slices else None
        if put_together is not None:
            whole.add(put_together)
        if len(whole) > 1:
            raise VerifyError(f"{name}: workers hold different values", tensor=name)
        if whole:
            digests[name] = whole.pop()
        else:
            unverifiable.append(name)
    return digests, unverifiable


def _join(slices: Sequence[Piece]) -> str | None:
    """Digest of one tensor from its slices, ``None`` if they leave elements out."""
    first = slices[0]
    itemsize = ITEMSIZE[first.dtype]
    numel = math.prod(first.shape)
    memory = torch.zeros(numel * itemsize, dtype=torch.uint8)
    covered = torch.zeros(numel, dtype=torch.bool)
    for piece in slices:
        try:
            data = torch.frombuffer(bytearray(piece.data or b"\0"), dtype=torch.uint8)[: len(piece.data or b"")]
            values = data.view(*piece.size, itemsize)
            place = memory.as_strided(
                values.shape, (*(step * itemsize for step in piece.stride), 1), piece.offset * itemsize
            )
            mask = covered.as_strided(piece.size, piece.stride, piece.offset)
            differs = bool((mask.unsqueeze(-1) & (place != values)).any())
            place.copy_(values)
            mask.fill_(True)
        except RuntimeError as error:
            # torch checks sizes and bounds of such views; numpy would read past the end
            raise VerifyError(f"{piece.name}: a piece does not fit into it: {error}", tensor=piece.name) from error
        if differs:
            raise VerifyError(f"{piece.name}: workers hold different values", tensor=piece.name)
    return hashlib.sha256(memory.numpy().data).hexdigest() if bool(covered.all()) else None
