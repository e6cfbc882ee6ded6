"""Digests of bytes. Oracle: hashlib over numpy's bytes, or over bytes written down here."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from twinkle_ray import digest
from twinkle_ray.digest import DTYPES, assemble, bytes_view, has_own_bytes, tensor_sha256, torch_dtype
from twinkle_ray.errors import ConfigError, UnsupportedModel, VerifyError
from twinkle_ray.manifest import ITEMSIZE
from twinkle_ray.sinks import Piece


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def noise(dtype: str, *shape: int) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor of random bytes, and its bytes as numpy holds them: (*shape, itemsize) uint8."""
    raw = np.random.default_rng(7).integers(0, 2 if dtype == "bool" else 256, (*shape, ITEMSIZE[dtype]), dtype=np.uint8)
    if raw.size == 0:
        return torch.empty(shape, dtype=DTYPES[dtype]), raw
    return torch.from_numpy(raw.reshape(-1).copy()).view(DTYPES[dtype]).reshape(shape), raw


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (0, 4), (2, 0)])
def test_the_bytes_of_every_dtype(dtype, shape):
    tensor, raw = noise(dtype, *shape)
    assert bytes_view(tensor).numpy().tobytes() == raw.tobytes()
    assert tensor_sha256(tensor) == sha(raw.tobytes())


def test_an_empty_tensor_with_numpys_strides():
    tensor = torch.from_numpy(np.empty((0, 4), dtype=np.float32))
    assert bytes_view(tensor).shape == (0,)
    assert tensor_sha256(tensor) == sha(b"")


def test_a_view_shares_memory_and_needs_no_grad():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    bytes_view(weight)[:] = 255
    assert weight.isnan().all()


def test_strided_tensors_hash_as_their_elements():
    tensor, raw = noise("float32", 4, 6)
    assert tensor_sha256(tensor.t()) == sha(np.ascontiguousarray(raw.transpose(1, 0, 2)).tobytes())
    assert tensor_sha256(tensor[:, 1:3]) == sha(raw[:, 1:3].tobytes())
    with pytest.raises(ConfigError, match="not contiguous"):
        bytes_view(tensor.t())


def test_lazy_conjugates_and_negations_are_resolved():
    values = np.array([1 + 2j, 3 - 4j], dtype=np.complex64)
    conjugate = torch.from_numpy(values.copy()).conj()
    assert not has_own_bytes(conjugate)
    assert tensor_sha256(conjugate) == sha(values.conj().tobytes())
    assert not has_own_bytes(conjugate.imag)
    assert tensor_sha256(conjugate.imag) == sha(np.ascontiguousarray(values.conj().imag).tobytes())


def test_hashing_in_pieces_is_hashing_the_whole(monkeypatch):
    monkeypatch.setattr(digest, "HASH_PIECE", 7)
    tensor, raw = noise("int32", 5, 5)
    assert tensor_sha256(tensor) == sha(raw.tobytes())


def test_an_unknown_dtype_is_named():
    with pytest.raises(UnsupportedModel, match="no dtype float7"):
        torch_dtype("float7")


def whole(name: str, raw: np.ndarray, dtype: str = "uint8") -> Piece:
    shape = raw.shape if dtype == "uint8" else raw.shape[:-1]
    return Piece(
        name=name, shape=shape, dtype=dtype, size=shape, stride=(1,) * len(shape), offset=0, sha256=sha(raw.tobytes())
    )


def cut(name: str, raw: np.ndarray, dtype: str, *slices: slice) -> Piece:
    """The piece ``raw[slices]`` of ``raw``: (*shape, itemsize)."""
    shape = raw.shape[:-1]
    starts = [s.indices(n)[0] for s, n in zip(slices, shape, strict=True)]
    stride = tuple(int(np.prod(shape[i + 1 :], dtype=int)) for i in range(len(shape)))
    part = raw[slices]
    return Piece(
        name=name,
        shape=shape,
        dtype=dtype,
        size=part.shape[:-1],
        stride=stride,
        offset=sum(a * b for a, b in zip(starts, stride, strict=True)),
        data=part.tobytes(),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "complex64", "bool"])
def test_row_and_column_slices_make_the_whole(dtype):
    _, raw = noise(dtype, 6, 4)
    rows = [[cut("w", raw, dtype, slice(i, i + 3), slice(None))] for i in (0, 3)]
    columns = [[cut("v", raw, dtype, slice(None), slice(i, i + 1))] for i in range(4)]
    assert assemble([*rows, *columns]) == ({"w": sha(raw.tobytes()), "v": sha(raw.tobytes())}, [])


def test_overlapping_slices_that_agree_and_a_whole_one():
    _, raw = noise("float16", 5, 2)
    pieces = [
        [cut("w", raw, "float16", slice(0, 4), slice(None))],
        [cut("w", raw, "float16", slice(2, 5), slice(None)), whole("w", raw, "float16")],
    ]
    assert assemble(pieces) == ({"w": sha(raw.tobytes())}, [])


def test_random_cuts_in_any_order():
    rng = random.Random(3)
    for _ in range(50):
        _, raw = noise("int16", rng.randint(1, 6), rng.randint(1, 6))
        edges = sorted({0, raw.shape[0], *(rng.randint(0, raw.shape[0]) for _ in range(2))})
        pieces = [cut("w", raw, "int16", slice(a, b), slice(None)) for a, b in pairwise(edges) if a < b]
        rng.shuffle(pieces)
        assert assemble([pieces]) == ({"w": sha(raw.tobytes())}, [])
        missing = pieces.pop()
        assert assemble([[*pieces, missing]])[0]
        if pieces:
            assert assemble([pieces]) == ({}, ["w"])


def test_a_scalar_and_an_empty_tensor():
    _, scalar = noise("float32")
    _, empty = noise("float32", 0, 3)
    pieces = [cut("s", scalar, "float32"), cut("e", empty, "float32", slice(None), slice(None))]
    assert assemble([pieces]) == ({"s": sha(scalar.tobytes()), "e": sha(b"")}, [])


def test_nothing_is_held():
    assert assemble([]) == ({}, [])
    assert assemble([[], []]) == ({}, [])


@pytest.mark.parametrize("how", ["wholes", "overlap", "whole and slices", "dtype"])
def test_workers_that_disagree(how):
    _, raw = noise("float32", 4, 2)
    other = raw.copy()
    other[1, 1, 2] ^= 1
    everything, upper = (slice(None), slice(None)), (slice(0, 2), slice(None))
    pieces = {
        "wholes": [[whole("w", raw, "float32")], [whole("w", other, "float32")]],
        "overlap": [[cut("w", raw, "float32", *everything)], [cut("w", other, "float32", *upper)]],
        "whole and slices": [[whole("w", raw, "float32")], [cut("w", other, "float32", *everything)]],
        "dtype": [[whole("w", raw, "float32")], [whole("w", raw, "int32")]],
    }[how]
    with pytest.raises(VerifyError, match=r"^w: workers hold") as caught:
        assemble(pieces)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    ("size", "stride", "offset", "data"),
    [
        ((4, 2), (2, 1), 1, bytes(8)),  # past the end
        ((4, 2), (2, 1), -1, bytes(8)),
        ((4, 2), (-2, 1), 0, bytes(8)),
        ((4, 2), (2, 1), 0, bytes(7)),  # too little data
        ((4, 2), (0, 1), 0, bytes(8)),  # writes one element twice
        ((4, 2), (2,), 0, bytes(8)),
        ((4, 2), (2, 1), 0, None),
    ],
)
def test_a_piece_that_does_not_fit(size, stride, offset, data):
    piece = Piece(name="w", shape=(4, 2), dtype="uint8", size=size, stride=stride, offset=offset, data=data)
    with pytest.raises(VerifyError, match="does not fit"):
        assemble([[piece]])
