"""The plan: every byte once, in order, in chunks that fit."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from twinkle_ray.errors import ConfigError
from twinkle_ray.manifest import ITEMSIZE, Manifest, TensorMeta
from twinkle_ray.plan import Chunk, Segment, plan_chunks


def manifest(*shapes: tuple[int, ...], dtype: str = "float32") -> Manifest:
    return Manifest(tuple(TensorMeta(name=f"w{i}", shape=shape, dtype=dtype) for i, shape in enumerate(shapes)))


def size(meta: TensorMeta) -> int:
    return math.prod(meta.shape)


def ranges(chunks: tuple[Chunk, ...]) -> list[list[tuple[int, int, int]]]:
    return [[(s.tensor, s.start, s.stop) for s in chunk.segments] for chunk in chunks]


def check(sent: Manifest, bucket: int) -> None:
    """What must hold for any plan, counted byte by byte and without the plan's own arithmetic."""
    chunks = plan_chunks(sent, bucket)
    assert chunks == plan_chunks(Manifest.from_json(sent.as_json()), bucket)
    wire = [(s.tensor, byte) for chunk in chunks for s in chunk.segments for byte in range(s.start, s.stop)]
    assert wire == [(index, byte) for index, meta in enumerate(sent) for byte in range(meta.nbytes)]
    assert [index for chunk in chunks for index in chunk.completes] == list(range(len(sent)))
    arrived = set()
    for chunk in chunks:
        assert chunk.segments or chunk.completes
        assert 0 <= chunk.nbytes <= bucket
        assert all(s.nbytes > 0 and s.source == 0 and s.destinations is None for s in chunk.segments)
        arrived |= {(s.tensor, byte) for s in chunk.segments for byte in range(s.start, s.stop)}
        for index in chunk.completes:
            assert all((index, byte) in arrived for byte in range(sent.tensors[index].nbytes))
    edges = {(s.tensor, s.stop) for chunk in chunks for s in chunk.segments}
    assert {(i, at * ITEMSIZE[meta.dtype]) for i, meta in enumerate(sent) for at in meta.cuts} <= edges
    for chunk in chunks:
        for one, other in pairwise(chunk.segments):
            # not cut within a chunk but where the manifest says so
            if one.tensor == other.tensor:
                meta = sent.tensors[one.tensor]
                assert one.stop in [at * ITEMSIZE[meta.dtype] for at in meta.cuts]
    for chunk, after in pairwise(chunks):
        # no tensor that fits into a bucket is spread over two
        if chunk.segments and after.segments and chunk.segments[-1].tensor == after.segments[0].tensor:
            assert sent.tensors[chunk.segments[-1].tensor].nbytes > bucket


def test_any_manifest_any_bucket():
    rng = random.Random(1)
    for _ in range(600):
        shapes = [
            tuple(rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(0, 6))
        ]
        dtype = rng.choice(["bool", "bfloat16", "float32", "complex128"])
        sent = manifest(*shapes, dtype=dtype)
        cuts = [
            sorted(rng.sample(range(1, n), rng.randint(0, min(3, n - 1)))) if n > 1 else [] for n in map(size, sent)
        ]
        check(sent.with_cuts(cuts if rng.random() < 0.7 else ()), rng.choice([1, 3, 7, 16, 64, 100, 1000, 1 << 20]))


@pytest.mark.parametrize(
    ("shapes", "bucket", "expected"),
    [
        ([(4,), (4,)], 32, [[(0, 0, 16), (1, 0, 16)]]),
        ([(4,), (4,)], 31, [[(0, 0, 16)], [(1, 0, 16)]]),
        ([(8,)], 32, [[(0, 0, 32)]]),  # exactly the bucket
        ([(9,)], 32, [[(0, 0, 32)], [(0, 32, 36)]]),  # one element more
        ([(5, 3)], 30, [[(0, 0, 24)], [(0, 24, 48)], [(0, 48, 60)]]),  # two rows of 12 each
        ([(2, 10)], 32, [[(0, 0, 32)], [(0, 32, 64)], [(0, 64, 80)]]),  # no row fits
        ([(1,), (9,), (1,)], 32, [[(0, 0, 4)], [(1, 0, 32)], [(1, 32, 36), (2, 0, 4)]]),
        ([()], 2, [[(0, 0, 2)], [(0, 2, 4)]]),
    ],
)
def test_cuts(shapes, bucket, expected):
    assert ranges(plan_chunks(manifest(*shapes), bucket)) == expected


@pytest.mark.parametrize(
    ("shape", "at", "bucket", "expected"),
    [
        ((4, 2), [4], 32, [[(0, 0, 16), (0, 16, 32)]]),  # one chunk all the same
        ((4, 2), [2, 4, 6], 16, [[(0, 0, 8), (0, 8, 16)], [(0, 16, 24), (0, 24, 32)]]),  # a cut where a bucket ends
        ((4, 2), [2], 16, [[(0, 0, 8), (0, 8, 16)], [(0, 16, 32)]]),
        ((4, 2), [4], 24, [[(0, 0, 16), (0, 16, 24)], [(0, 24, 32)]]),
        ((2, 4), [3], 20, [[(0, 0, 12), (0, 12, 16)], [(0, 16, 32)]]),  # within a row
    ],
)
def test_cuts_of_the_manifest(shape, at, bucket, expected):
    assert ranges(plan_chunks(manifest(shape).with_cuts([at]), bucket)) == expected


def test_empty_tensors_complete_where_they_stand():
    chunks = plan_chunks(manifest((0,), (2,), (0, 5), (8,), (3, 0)), 32)
    assert [chunk.completes for chunk in chunks] == [(0, 1, 2), (3, 4)]
    assert [chunk.completes for chunk in plan_chunks(manifest((0,), (0,)), 32)] == [(0, 1)]
    assert plan_chunks(manifest((0,)), 32)[0].nbytes == 0


def test_nothing_to_send():
    assert plan_chunks(Manifest(()), 1) == ()


@pytest.mark.parametrize("bucket", [0, -1])
def test_a_bucket_that_holds_nothing(bucket):
    with pytest.raises(ConfigError, match="bucket_size"):
        plan_chunks(manifest((1,)), bucket)


def test_large_tensors_are_counted_in_whole_numbers():
    sent = manifest((1 << 20, 1 << 12), (3,), dtype="bfloat16")  # 8 GiB
    chunks = plan_chunks(sent, 512 << 20)
    assert len(chunks) == 17
    assert {chunk.nbytes for chunk in chunks[:16]} == {512 << 20}
    assert chunks[16].segments == (Segment(tensor=1, start=0, stop=6),)
