"""The manifest: unique names, stable digest, and a wire form from which nothing but WireError can come."""

from __future__ import annotations

import copy
import json
import pickle
import random

import pytest
import torch

from twinkle_ray.errors import ConfigError, WireError
from twinkle_ray.manifest import CASTABLE, ITEMSIZE, Manifest, TensorMeta, agree_cuts, agree_dtypes

SOME = Manifest(
    (
        TensorMeta(name="embed.weight", shape=(7, 3), dtype="bfloat16", aliases=("head.weight",)),
        TensorMeta(name="scale", shape=(), dtype="float32"),
        TensorMeta(name="empty", shape=(0, 4), dtype="int64", kind="buffer"),
        TensorMeta(name="größe.权重", shape=(2, 2, 2), dtype="float8_e4m3fn"),
    )
)


def test_sizes_are_torchs():
    for name, size in ITEMSIZE.items():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize == size
    assert set(ITEMSIZE) >= CASTABLE
    assert [meta.nbytes for meta in SOME] == [42, 4, 0, 8]
    assert SOME.nbytes == 54


def test_json_round_trip():
    again = Manifest.from_json(json.loads(json.dumps(SOME.as_json())))
    assert again == SOME
    assert again.digest == SOME.digest
    assert pickle.loads(pickle.dumps(SOME)) == SOME


def test_a07_every_dtype_crosses_json_and_msgspec_as_plain_data():
    msgspec = pytest.importorskip("msgspec")  # with which vLLM calls its workers
    metas = [TensorMeta(name=f"w.{name}", shape=(2, 3), dtype=name) for name in ITEMSIZE]
    assert {"float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn"} <= set(ITEMSIZE)
    manifest = Manifest(tuple(metas)).with_cuts([(2,)] * len(metas))
    header = manifest.as_json()
    for again in (
        json.loads(json.dumps(header)),
        msgspec.msgpack.decode(msgspec.msgpack.encode(header)),
        msgspec.json.decode(msgspec.json.encode(header)),
    ):
        assert again == header
        assert Manifest.from_json(again) == manifest


def test_the_digest_is_written_down():
    # a changed digest means that processes of two versions of this package no longer understand each other
    one = Manifest((TensorMeta(name="w", shape=(2, 3), dtype="float32"),))
    assert one.as_json() == [["w", [2, 3], "float32", "parameter", []]]
    assert one.digest == "1e0f991888d19c8d"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "v"},
        {"shape": (3, 2)},
        {"shape": (2, 3, 1)},
        {"dtype": "int32"},
        {"kind": "buffer"},
        {"aliases": ("u",)},
    ],
)
def test_every_field_counts_in_the_digest(change):
    fields = {"name": "w", "shape": (2, 3), "dtype": "float32"}
    assert Manifest((TensorMeta(**fields),)).digest != Manifest((TensorMeta(**fields | change),)).digest


def test_order_counts_in_the_digest():
    assert Manifest(SOME.tensors[::-1]).digest != SOME.digest


@pytest.mark.parametrize("aliases", [("a",), ("b", "b"), ("b",)])
def test_names_are_unique(aliases):
    metas = (
        TensorMeta(name="a", shape=(), dtype="bool", aliases=aliases),
        TensorMeta(name="b", shape=(), dtype="bool"),
    )
    with pytest.raises(ConfigError, match="two tensors are named"):
        Manifest(metas)
    with pytest.raises(WireError):
        Manifest.from_json([meta.as_json() for meta in metas])


CUT = SOME.with_cuts([(3, 6), (), (), (4,)])


def test_cuts_travel_and_count_in_the_digest():
    assert [meta.cuts for meta in CUT] == [(3, 6), (), (), (4,)]
    again = Manifest.from_json(json.loads(json.dumps(CUT.as_json())))
    assert again == CUT
    assert len({SOME.digest, CUT.digest, SOME.with_cuts([(3,), (), (), (4,)]).digest}) == 3
    assert CUT.with_cuts(()).digest == SOME.digest
    assert CUT.with_dtypes(["float32", "float32", "int64", "float8_e4m3fn"]).tensors[0].cuts == (3, 6)
    with pytest.raises(ValueError, match="shorter"):
        SOME.with_cuts([(3,)])


@pytest.mark.parametrize("cuts", [[0], [4], [2, 2], [3, 1], [-1], [1.0], [True], "1", None, {}])
def test_cuts_that_are_none(cuts):
    with pytest.raises(WireError, match="cuts"):
        TensorMeta.from_json(["w", [2, 2], "float32", "parameter", [], cuts])


def test_the_wire_is_cut_wherever_a_receiver_wants_it():
    assert agree_cuts(SOME, []) == agree_cuts(SOME, [(), ()]) == agree_cuts(SOME, [((), (), (), ())]) == ()
    wanted = [((3, 9), (), (), (4,)), (), ((3, 6), (), (), ()), ((0, 21), (1,), (0,), (8,))]
    assert agree_cuts(SOME, wanted) == ((3, 6, 9), (), (), (4,))


def test_other_dtypes():
    dtypes = ["float32", "float32", "int64", "float8_e4m3fn"]
    changed = SOME.with_dtypes(dtypes)
    assert [meta.dtype for meta in changed] == dtypes
    assert [meta.names for meta in changed] == [meta.names for meta in SOME]
    with pytest.raises(ValueError, match="shorter"):
        SOME.with_dtypes(dtypes[:3])


@pytest.mark.parametrize(
    ("sent", "wanted", "wire"),
    [
        ("float32", ["bfloat16", "bfloat16"], "bfloat16"),
        ("float32", ["bfloat16", None], "bfloat16"),
        ("float32", ["bfloat16", "float16"], "float32"),
        ("float32", [None], "float32"),
        ("float32", [], "float32"),
        ("bfloat16", ["float32"], "float32"),
        ("int64", ["int32"], "int64"),
        ("float32", ["int32"], "float32"),
        ("float8_e4m3fn", ["bfloat16"], "float8_e4m3fn"),
        ("bfloat16", ["float8_e4m3fn"], "bfloat16"),
    ],
)
def test_agreed_dtype(sent, wanted, wire):
    manifest = Manifest((TensorMeta(name="w", shape=(2,), dtype=sent),))
    assert agree_dtypes(manifest, [[dtype] for dtype in wanted]) == (wire,)


@pytest.mark.parametrize(
    "header",
    [
        None,
        {},
        "w",
        ["w", [1], "float32", "parameter"],
        ["", [1], "float32", "parameter", []],
        [1, [1], "float32", "parameter", []],
        ["w", [-1], "float32", "parameter", []],
        ["w", [1.0], "float32", "parameter", []],
        ["w", [True], "float32", "parameter", []],
        ["w", [1 << 62], "float32", "parameter", []],
        ["w", [1 << 31, 1 << 31], "float32", "parameter", []],
        ["w", [0, 1 << 61], "float32", "parameter", []],
        ["w", [1] * 65, "float32", "parameter", []],
        ["w", [1], "float7", "parameter", []],
        ["w", [1], [], "parameter", []],
        ["w", [1], {"a": 1}, "parameter", []],
        ["w", [1], "float32", [], []],
        ["w", [1], "float32", "weight", []],
        ["w", [1], "float32", "parameter", [""]],
        ["w", [1], "float32", "parameter", [None]],
        ["w", [1], "float32", "parameter", "a"],
    ],
)
def test_headers_that_are_refused(header):
    with pytest.raises(WireError):
        Manifest.from_json([header])


def test_ten_thousand_mutated_headers_give_wire_errors_only():
    rng = random.Random(0)
    junk = [
        None,
        True,
        False,
        -1,
        0,
        1,
        1.5,
        1 << 70,
        "",
        "w",
        "float32",
        "\ud800",
        [],
        [[]],
        {},
        {"a": []},
        [None] * 9,
    ]
    outcomes = {"refused": 0, "read": 0}
    for _ in range(10_000):
        value = copy.deepcopy(SOME.as_json())
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, 3)):
                _mutate(rng, value, junk)
        else:
            text = bytearray(json.dumps(value).encode())
            for _ in range(rng.randint(1, 3)):
                text[rng.randrange(len(text))] = rng.choice(b'[]{}",0123456789-.eEtrufalsn\\x')
            try:
                value = json.loads(text)
            except ValueError:
                continue
        try:
            manifest = Manifest.from_json(value)
        except WireError:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        # what is read is whole: it can be written, sized and allocated
        assert Manifest.from_json(manifest.as_json()) == manifest
        for meta in manifest:
            assert meta.nbytes == torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta").nbytes
    assert min(outcomes.values()) > 500, outcomes


def _mutate(rng: random.Random, value: list, junk: list) -> None:
    while value and isinstance(rng.choice(value), list) and rng.random() < 0.8:
        inner = rng.choice([item for item in value if isinstance(item, list)])
        value = inner
    match rng.randrange(4):
        case 0 if value:
            value[rng.randrange(len(value))] = copy.deepcopy(rng.choice(junk))
        case 1 if value:
            del value[rng.randrange(len(value))]
        case 2 if value:
            value.append(copy.deepcopy(rng.choice(value)))
        case _:
            value.insert(rng.randint(0, len(value)), copy.deepcopy(rng.choice(junk)))
