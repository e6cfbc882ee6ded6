"""A proven placement is right or it is no placement. The engine is a model of our own with loaders like vLLM's."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.wire import deliver
from twinkle_ray.digest import DTYPES, bytes_view
from twinkle_ray.errors import SyncAborted
from twinkle_ray.manifest import Manifest, TensorMeta
from twinkle_ray.vllm.loading import EngineSink
from twinkle_ray.vllm.placement import Destination, Placement, record
from twinkle_ray.vllm.proof import Patterns, Proof, prove

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of vLLM as recording and loading ask for."""
    config, platforms = types.ModuleType("vllm.config"), types.ModuleType("vllm.platforms")
    config.set_current_vllm_config = lambda _: contextlib.nullcontext()  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False)  # type: ignore[attr-defined]
    for name, module in (("vllm", types.ModuleType("vllm")), ("vllm.config", config), ("vllm.platforms", platforms)):
        monkeypatch.setitem(sys.modules, name, module)


class Holds(nn.Module):
    """One module's parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 3.0, dtype=dtype), requires_grad=False))


class Engine(nn.Module):
    """Fused, padded, tied, transposed, summed and constant parameters; ``lie`` changes what the loader really does."""

    def __init__(self, lie: Callable[[Engine], None] | None = None) -> None:
        super().__init__()
        self.embed = Holds(weight=(8, 4))
        self.head = Holds()
        self.head.weight = self.embed.weight
        self.qkv = Holds(weight=(6, 4), bias=(6,))
        self.norm_a, self.norm_b = Holds(weight=(4,)), Holds(weight=(4,))
        self.turned = Holds(weight=(4, 6))
        self.summed = Holds(weight=(4, 4))
        self.short = Holds(weight=(4, 4), dtype=torch.bfloat16)
        self.experts = Holds(w13=(2, 6, 4))
        self.lie = lie

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            if name in ("q", "k", "v"):
                self.qkv.weight.data.narrow(0, "qkv".index(name) * 2, 2).copy_(value)
            elif name in ("q_bias", "k_bias", "v_bias"):
                self.qkv.bias.data.narrow(0, "qkv".index(name[0]) * 2, 2).copy_(value)
            elif name == "embed":
                self.embed.weight.data[:7].copy_(value)
                self.embed.weight.data[7:].fill_(0)
            elif name == "turned":
                self.turned.weight.data.copy_(value.t())
            elif name == "summed":
                self.summed.weight.data.copy_(value[0] + value[1])
            elif name.startswith("expert"):
                self.experts.w13.data[int(name[-1])].narrow(0, 0 if "gate" in name else 3, 3).copy_(value)
            else:
                self.get_submodule(name).weight.data.copy_(value)
        if self.lie is not None and not value.is_meta:
            self.lie(self)


SHAPES = {
    "embed": (7, 4),
    **dict.fromkeys("qkv", (2, 4)),
    **{f"{n}_bias": (2,) for n in "qkv"},
    "norm_a": (4,),
    "norm_b": (4,),
    "turned": (6, 4),
    "summed": (2, 4, 4),
    "short": (4, 4),
    **{f"expert_{part}_{i}": (3, 4) for i in range(2) for part in ("gate", "up")},
}
MANIFEST = Manifest(tuple(TensorMeta(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()))
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    model_config=SimpleNamespace(quantization=None),
)
COPIED = {"turned", "short"}


def proof_of(engine: Engine, change: Callable[[Placement], Placement] = lambda p: p) -> Proof:
    placement = change(record(engine, MANIFEST, CONFIG))
    assert not placement.unknown + placement.mismatched + placement.missing
    return prove(engine, MANIFEST, placement, engine.load_weights)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """With constants: norms of 1, biases of 0."""
    torch.manual_seed(seed)
    made = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return made | {n: torch.ones(4) for n in ("norm_a", "norm_b")} | {f"{n}_bias": torch.zeros(2) for n in "qkv"}


def sink_of(engine: nn.Module) -> EngineSink:
    runner = SimpleNamespace(get_model=lambda: engine)
    return EngineSink(SimpleNamespace(model_runner=runner, vllm_config=CONFIG, device="cpu"))


def sync(sink: EngineSink, tensors: dict[str, torch.Tensor], bucket_size: int = 128) -> Any:
    return deliver(sink, MANIFEST, tensors, bucket_size)


def loaded(tensors: dict[str, torch.Tensor], lie: Callable[[Engine], None] | None = None) -> dict[str, torch.Tensor]:
    engine = Engine(lie)
    engine.load_weights(list(tensors.items()))
    return {name: p.clone() for name, p in engine.named_parameters()}


def assert_holds(engine: Engine, wanted: dict[str, torch.Tensor]) -> None:
    for name, parameter in engine.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_patterns_are_finite_and_none_is_like_another(dtype: str) -> None:
    metas = [TensorMeta(name=f"t{i}", shape=(64,), dtype=dtype) for i in range(300)]
    metas += [TensorMeta(name=f"s{i}", shape=(1,), dtype=dtype) for i in range(2 if dtype == "bool" else 30)]
    made = {m.name: Patterns(Manifest(tuple(metas)), CPU).of(m) for m in metas[::50] + metas[-2:]}
    patterns = Patterns(Manifest(tuple(metas)), CPU)
    seen = [bytes(bytes_view(patterns.of(meta)).numpy().tobytes()) for meta in metas]
    assert len(set(seen)) == len(seen)
    for name, tensor in made.items():
        assert bytes(bytes_view(tensor).numpy().tobytes()) == seen[[m.name for m in metas].index(name)]
        assert tensor.dtype == DTYPES[dtype]
        if tensor.is_floating_point() and "float4" not in dtype:
            values = tensor.to(torch.float64)
            assert values.isfinite().all()
            if tensor.dtype.itemsize > 1 and tensor.numel() > 1:
                assert len(set(values.tolist())) > 50
                assert values.abs().min() >= 2**-7


def test_patterns_of_scalars_differ_after_a_cast_to_half_the_bits() -> None:
    metas = tuple(TensorMeta(name=str(i), shape=(), dtype="float32") for i in range(100))
    patterns = Patterns(Manifest(metas), CPU)
    assert len({patterns.of(meta).bfloat16().item() for meta in metas}) == 100


def test_a_pattern_longer_than_a_block_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_ray.vllm.proof._BLOCK", 1000)
    meta = TensorMeta(name="long", shape=(50, 100), dtype="float16")
    pattern = Patterns(Manifest((meta,)), CPU).of(meta)
    rows = {tuple(row.tolist()) for row in pattern}
    assert len(rows) == 50


def test_what_a_loader_copies_is_proven_and_what_it_computes_is_not() -> None:
    proof = proof_of(Engine())
    assert set(proof.direct) == set(SHAPES) - COPIED - {"summed"}
    assert set(proof.copied) == COPIED
    assert proof.indirect == {}
    for name, live in proof.direct.items():
        assert live.shape == SHAPES[name]


def test_a_tensor_in_another_dtype_is_copied() -> None:
    proof = proof_of(Engine())
    assert proof.copied["short"][0].dest.dtype == torch.bfloat16


def swapped(one: str, other: str) -> Callable[[Placement], Placement]:
    def change(placement: Placement) -> Placement:
        places = dict(placement.destinations)
        places[one], places[other] = places[other], places[one]
        return replace(placement, destinations=places)

    return change


@pytest.mark.parametrize(
    "pair", [("q", "k"), ("q_bias", "v_bias"), ("norm_a", "norm_b"), ("expert_gate_0", "expert_up_1")], ids="-".join
)
def test_two_swapped_destinations_are_caught_and_their_modules_with_them(pair: tuple[str, str]) -> None:
    proof = proof_of(Engine(), swapped(*pair))
    assert set(pair) <= set(proof.indirect)
    siblings = {"q": "qkv", "norm_a": "", "q_bias": "qkv", "expert_gate_0": ""}[pair[0]]
    for name in siblings:
        assert "without a proven destination" in proof.indirect.get(name, "") or name in pair
    assert "embed" in proof.direct


def test_a_region_read_off_wrongly_is_caught() -> None:
    def change(placement: Placement) -> Placement:
        (turned,) = placement.destinations["turned"]
        wrong = Destination(turned.dest, turned.size, (6, 1), 0, False)  # as the transpose of another shape
        return replace(placement, destinations={**placement.destinations, "turned": (wrong,)})

    assert set(proof_of(Engine(), change).indirect) == {"turned"}


def test_two_tensors_in_one_place_are_both_indirect() -> None:
    def change(placement: Placement) -> Placement:
        return replace(placement, destinations={**placement.destinations, "k": placement.destinations["q"]})

    proof = proof_of(Engine(), change)
    assert {"q", "k", "v"} <= set(proof.indirect)
    assert "same place" in proof.indirect["q"]


LIES: dict[str, tuple[Callable[[Engine], Any], set[str]]] = {
    "halves swapped after loading": (
        lambda e: e.experts.w13.data.copy_(e.experts.w13.data.roll(3, 1)),
        {f"expert_{part}_{i}" for i in range(2) for part in ("gate", "up")},
    ),
    "one element changed": (lambda e: e.qkv.weight.data[3, 1].neg_(), {"q", "k", "v", "q_bias", "k_bias", "v_bias"}),
    "put into a new parameter": (
        lambda e: setattr(e.norm_a, "weight", nn.Parameter(e.norm_a.weight.data.clone(), requires_grad=False)),
        {"norm_a"},
    ),
    "a packed copy beside": (lambda e: setattr(e.norm_b, "packed", e.norm_b.weight.data.clone()), {"norm_b"}),
    "a packed copy in a kernel": (
        lambda e: setattr(
            e.norm_b, "kernel", SimpleNamespace(run=lambda x, w=[e.norm_b.weight * 2]: x, kept=[e.norm_b.weight * 2])
        ),
        {"norm_b"},
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_happens_after_loading_is_seen(lie: str) -> None:
    change, wrong = LIES[lie]
    proof = proof_of(Engine(change))
    assert set(proof.indirect) == wrong
    assert set(proof.direct) == set(SHAPES) - COPIED - {"summed"} - wrong


def test_a_loader_that_raises_on_real_values_leaves_everything_to_itself() -> None:
    def refuse(engine: Engine) -> None:
        raise ValueError("these are no weights")

    proof = proof_of(Engine(refuse))
    assert (proof.direct, proof.copied) == ({}, {})
    assert "these are no weights" in proof.indirect["q"]


def test_a_sync_is_right_with_constants_too_and_reports_what_went_straight() -> None:
    engine = Engine()
    sink = sink_of(engine)
    places = {name: p.data_ptr() for name, p in engine.named_parameters()}
    for seed in range(3):
        tensors = checkpoint(seed)
        report = sync(sink, tensors)
        assert_holds(engine, loaded(tensors))
        assert report.direct_bytes == sum(m.nbytes for m in MANIFEST if m.name not in COPIED | {"summed"})
        assert ("proof" in report.seconds) == (seed == 0)
    assert {name: p.data_ptr() for name, p in engine.named_parameters()} == places


def test_padding_is_filled_again_after_everything_was_lost() -> None:
    engine = Engine()
    sink = sink_of(engine)
    sync(sink, checkpoint(0))
    for parameter in engine.parameters():
        parameter.data.fill_(float("nan"))  # as after sleep(level=2)
    sync(sink, checkpoint(1))
    assert_holds(engine, loaded(checkpoint(1)))


@pytest.mark.parametrize("lie", ["halves swapped after loading", "one element changed", "put into a new parameter"])
def test_a_sync_into_an_engine_that_rearranges_is_right(lie: str) -> None:
    def once(engine: Engine) -> None:
        # The loader of a test must see a whole checkpoint, so all that is indirect comes in one batch.
        LIES[lie][0](engine)

    engine = Engine(once)
    sink = sink_of(engine)
    for seed in range(2):
        tensors = checkpoint(seed)
        sync(sink, tensors, 1 << 20)
        assert_holds(engine, loaded(tensors, once))


def test_a_failure_between_proof_and_load_is_healed_by_the_next_sync() -> None:
    engine = Engine()
    sink = sink_of(engine)
    touched: list[bool] = []
    sink.begin(MANIFEST)
    sink.arm(lambda: touched.append(True))
    sink.abandon()
    assert touched
    with pytest.raises(AssertionError):
        assert_holds(engine, loaded(checkpoint(0)))
    report = sync(sink, checkpoint(0))
    assert "proof" not in report.seconds
    assert_holds(engine, loaded(checkpoint(0)))


def test_a_proof_that_is_given_up_ends_soon_and_is_made_again() -> None:
    engine = Engine()
    sink = sink_of(engine)
    calls: list[bool] = []

    def touch() -> None:
        calls.append(True)
        if len(calls) == 4:
            raise SyncAborted("given up")

    sink.begin(MANIFEST)
    with pytest.raises(SyncAborted):
        sink.arm(touch)
    sink.abandon()
    assert len(calls) == 4
    report = sync(sink, checkpoint(1))
    assert report.seconds["proof"] > 0
    assert_holds(engine, loaded(checkpoint(1)))


def test_nothing_is_written_before_it_is_said() -> None:
    engine = Engine()
    before = {name: p.clone() for name, p in engine.named_parameters()}
    sink = sink_of(engine)
    sink.begin(MANIFEST)

    def refuse() -> None:
        assert_holds(engine, before)
        raise SyncAborted("given up")

    with pytest.raises(SyncAborted):
        sink.arm(refuse)
    assert_holds(engine, before)


def test_parameters_that_moved_are_proven_anew() -> None:
    engine = Engine()
    sink = sink_of(engine)
    sync(sink, checkpoint(0))
    engine.norm_a.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
    report = sync(sink, checkpoint(1))
    assert "proof" in report.seconds
    assert_holds(engine, loaded(checkpoint(1)))


class Sums(nn.Module):
    """A loader that makes ``p`` of a and b, ``q`` of b and c, and keeps nothing from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.d = Holds(weight=(4,)), Holds(weight=(4,)), Holds(weight=(4,))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(weights)
        for name, one, other in (("p", "a", "b"), ("q", "b", "c")):
            if one in held and other in held:
                getattr(self, name).weight.data.copy_(held[one] + held[other])
        if "d" in held:
            self.d.weight.data.copy_(held["d"])


def test_what_a_loader_sums_is_given_to_it_in_one_call() -> None:
    manifest = Manifest(tuple(TensorMeta(name=name, shape=(4,), dtype="float32") for name in "adbc"))
    engine = Sums()
    assert record(engine, manifest, CONFIG).together == dict.fromkeys("abc", ("a", "b", "c"))
    sink = sink_of(engine)
    for seed in range(2):
        torch.manual_seed(seed)
        tensors = {name: torch.randn(4) for name in "adbc"}
        report = deliver(sink, manifest, tensors, 16)  # one tensor per chunk
        assert torch.equal(engine.p.weight, tensors["a"] + tensors["b"])
        assert torch.equal(engine.q.weight, tensors["b"] + tensors["c"])
        assert torch.equal(engine.d.weight, tensors["d"])
        assert report.direct_bytes == 16
