"""Merged adapters. Oracle: PEFT's own merge on a deep copy in fp32, PEFT's own forward, and PEFT's own checkpoint.

Where the trainer is fp32 the result must be PEFT's bit for bit: the formula is PEFT's. So it must be on bfloat16
storages, against an fp32 copy that is cast once at the end.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from packaging.version import Version
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from twinkle_ray.digest import DTYPES
from twinkle_ray.errors import ConfigError, ManifestMismatch, UnsupportedModel
from twinkle_ray.lora import adapter_config, adapter_names, adapter_tensors
from twinkle_ray.manifest import Manifest
from twinkle_ray.sources import WeightSource

peft = pytest.importorskip("peft")
peft_version = Version(peft.__version__)
warnings.filterwarnings("ignore", module="peft")


class Experts(nn.Module):
    """Two stacks of matrices, as transformers holds the experts of a layer."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.is_transposed = turned
        self.up = nn.Parameter(torch.randn(3, 10, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_transposed:
            return torch.einsum("bd,edh,eho->bo", x, self.down, self.up)
        return torch.einsum("bd,ehd,eoh->bo", x, self.up, self.down)


class Net(nn.Module):
    """One of each kind of layer that LoRA knows, of which no shape is square."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.q = nn.Linear(8, 6)
        self.v = nn.Linear(6, 8, bias=False)
        self.gpt = Conv1D(5, 8)
        self.line = nn.Conv1d(3, 4, 3)
        self.pixel = nn.Conv2d(3, 4, 1)
        self.image = nn.Conv2d(3, 4, (3, 2), bias=False)
        self.experts = Experts(turned)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11)
        self.register_buffer("steps", torch.tensor(3))


LAYERS = ["embed", "q", "v", "gpt", "line", "pixel", "image"]


def lora(**config: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": LAYERS, **config})


def train(model: nn.Module, seed: int = 1) -> None:
    """A step that moves everything an optimizer would; B is no longer zero."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float32).to(parameter.dtype), alpha=0.3)


def made(config: Any = None, net: nn.Module | None = None, dtype: torch.dtype | None = None, **kinds: Any) -> Any:
    net = net or Net()
    if dtype is not None:
        net = net.to(dtype)
    model = peft.get_peft_model(net, config or lora(**kinds))
    train(model)
    return model


def taken(source: WeightSource, wire: Manifest | None = None) -> dict[str, torch.Tensor]:
    """By every name."""
    wire = wire or source.manifest()
    sent: dict[str, torch.Tensor] = {}
    with source.tensors(wire) as stream:
        for meta, tensor in zip(wire, stream, strict=True):
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert tensor.dtype == DTYPES[meta.dtype]
            sent.update(dict.fromkeys(meta.names, tensor))
    return sent


def oracle(model: Any) -> dict[str, torch.Tensor]:
    """PEFT's merge in fp32 on a deep copy."""
    whole = copy.deepcopy(model).float()
    return {name: tensor.detach() for name, tensor in whole.merge_and_unload().state_dict().items()}


def fail_after(tensors: int, source: WeightSource, wire: Manifest) -> None:
    with source.tensors(wire) as stream:
        for _ in range(tensors):
            next(stream)
        raise OSError("wire")


def storages(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, torch.Tensor]], but: tuple[str, ...] = ()) -> None:
    now = model.state_dict()
    assert now.keys() == before.keys()
    for name, (address, tensor) in before.items():
        assert now[name].data_ptr() == address, name
        if not any(part in name for part in but):
            assert torch.equal(now[name], tensor), name


def assert_same(sent: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(sent) == list(want) or sorted(sent) == sorted(want)
    for name, tensor in want.items():
        assert sent[name].shape == tensor.shape, name
        assert torch.equal(sent[name], tensor.to(sent[name].dtype)), (name, (sent[name] - tensor).abs().max())


KINDS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["q", "v"]},
    "every layer": {},
    "rslora": {"use_rslora": True},
    "rank and alpha patterns": {"rank_pattern": {"q": 2, "embed": 3}, "alpha_pattern": {"q": 1, "image": 64}},
    "dora": {"use_dora": True},
    "dora and rslora": {"use_dora": True, "use_rslora": True, "alpha_pattern": {"v": 3}},
    "lora bias": {"target_modules": ["q", "line"], "lora_bias": True},
    "trained biases": {"bias": "all"},
    "biases of its layers": {"bias": "lora_only"},
    "modules to save": {"target_modules": ["q"], "modules_to_save": ["head", "norm"]},
    "experts": {"target_modules": [], "target_parameters": ["experts.up", "experts.down"]},
    "experts and linear": {"target_modules": ["q"], "target_parameters": ["experts.down", "v.weight"]},
    "pissa": {"target_modules": ["q", "v", "gpt"], "init_lora_weights": "pissa"},
    "olora": {"target_modules": ["q", "v"], "init_lora_weights": "olora"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dropout": {"lora_dropout": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_what_pefts_merge_makes(kind, dtype):
    plain_names = list(Net().state_dict())
    model = made(dtype=dtype, **KINDS[kind])
    before = storages(model)
    source = WeightSource(model)
    sent = taken(source)
    assert list(sent) == plain_names
    assert_same(sent, oracle(model))
    assert_untouched(model, before)
    frozen = WeightSource(model, merge=False)
    assert frozen.manifest() == source.manifest()
    assert_same(taken(frozen), dict(copy.deepcopy(model).unload().state_dict()) | unsaved(model))
    assert_untouched(model, before)
    changed = {name for name in sent if not torch.equal(sent[name], taken(frozen)[name])}
    assert changed, "the adapter changes nothing, so this test shows nothing"


def unsaved(model: nn.Module) -> dict[str, torch.Tensor]:
    """Original modules that ``unload()`` replaces by their copies, though it is to leave the base."""
    return {
        name.removeprefix("base_model.model.").replace("original_module.", ""): tensor
        for name, tensor in model.state_dict().items()
        if "original_module" in name
    }


@pytest.mark.parametrize("turned", [False, True])
def test_experts_either_way_round(turned):
    model = made(net=Net(turned), target_modules=[], target_parameters=["experts.up", "experts.down"])
    assert_same(taken(WeightSource(model)), oracle(model))


@pytest.mark.parametrize("agreed", ["float16", "float64", "bfloat16"])
def test_one_cast_to_the_dtype_of_the_wire(agreed):
    model = made(dtype=torch.bfloat16)
    source = WeightSource(model)
    manifest = source.manifest()
    wire = manifest.with_dtypes(agreed if m.dtype == "bfloat16" else m.dtype for m in manifest)
    sent = taken(source, wire)
    assert sent["q.weight"].dtype == getattr(torch, agreed)
    assert_same(sent, oracle(model))


@pytest.mark.parametrize("dora", [False, True])
def test_the_forward_pass_is_that_of_what_is_sent(dora):
    """Not bit for bit: the forward pass adds the two products, the merge the two weights."""
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 6), nn.Linear(6, 4, bias=False))
    model = made(net=copy.deepcopy(net), target_modules=["0", "1", "2"], use_dora=dora)
    net.load_state_dict(taken(WeightSource(model)))
    x = torch.arange(9)
    torch.testing.assert_close(net(x), model.base_model.model(x), atol=1e-5, rtol=1e-5)


class TestSeveralAdapters:
    def two(self, **second: Any) -> Any:
        model = made(target_modules=["q", "v", "embed"])
        model.add_adapter("other", lora(r=2, target_modules=["q", "gpt"], **second))
        for name in ("other", "default"):
            model.set_adapter(name)
            train(model, seed=7)
        return model

    def test_the_active_one_counts_and_a_change_is_seen_at_once(self):
        model = self.two()
        source = WeightSource(model)
        agreed = source.manifest()
        results = []
        for active in (["default"], ["other"], ["default", "other"], ["other", "default"]):
            model.base_model.set_adapter(active)
            assert source.manifest() is agreed
            sent = taken(source, agreed)
            assert_same(sent, oracle(model))
            results.append(sent["q.weight"])
        assert not torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])

    @pytest.mark.parametrize("order", [["default", "other"], ["other", "default"]])
    def test_dora_beside_plain(self, order):
        """To one unit in the last place: PEFT subtracts the plain one again to come to the base that DoRA's norm needs,
        and adds it once more; the base here never had it. Before 0.21 its merge did not, unlike its forward pass."""
        model = self.two(use_dora=True)
        model.base_model.set_adapter(order)
        sent = taken(WeightSource(model))
        x = torch.randn(5, 8)
        torch.testing.assert_close(
            nn.functional.linear(x, sent["q.weight"], sent["q.bias"]), model.base_model.model.q(x), atol=1e-5, rtol=1e-5
        )
        for name, tensor in oracle(model).items() if peft_version >= Version("0.21") else ():
            torch.testing.assert_close(sent[name], tensor, atol=2e-7, rtol=1e-6)

    def test_also_when_what_can_wait_is_compared_later(self):
        model = self.two()
        source = WeightSource(model)
        agreed = source.manifest()
        model.set_adapter("other")
        with source.tensors(agreed, agreed.digest, recheck=True) as stream:
            sent = {name: tensor for meta, tensor in zip(agreed, stream, strict=True) for name in meta.names}
            stream.recheck()
        assert not stream.outdated
        assert_same(sent, oracle(model))

    def test_scale(self):
        model = self.two()
        source = WeightSource(model)
        taken(source)
        for layer in model.modules():
            if hasattr(layer, "scale_layer"):
                layer.scale_layer(0.5)
        assert_same(taken(source), oracle(model))

    def test_disabled_is_the_base(self):
        model = self.two()
        source = WeightSource(model)
        with model.disable_adapter():
            assert_same(taken(source), taken(WeightSource(model, merge=False)))
        assert_same(taken(source), oracle(model))

    def test_a_deleted_adapter(self):
        model = self.two()
        source = WeightSource(model)
        taken(source)
        model.delete_adapter("default")
        model.set_adapter("other")
        assert_same(taken(source), oracle(model))

    def test_modules_to_save_of_the_active_one(self):
        model = made(target_modules=["q"], modules_to_save=["head"])
        model.add_adapter("other", lora(target_modules=["q"], modules_to_save=["head"]))
        model.set_adapter("other")
        train(model, seed=3)
        source = WeightSource(model)
        for name in ("other", "default", "other"):
            model.set_adapter(name)
            sent = taken(source)
            assert torch.equal(sent["head.weight"], model.base_model.model.head.modules_to_save[name].weight)
        with model.disable_adapter():
            assert torch.equal(taken(source)["head.weight"], model.base_model.model.head.original_module.weight)


class TestMergedInPlace:
    def test_it_is_not_added_twice(self):
        model = made()
        source = WeightSource(model)
        want = taken(source)
        model.merge_adapter()
        assert_same(taken(source), want)
        assert_same(taken(source), oracle(model))
        model.unmerge_adapter()
        for name, tensor in taken(source).items():
            torch.testing.assert_close(tensor, want[name])  # peft's un-merge is no inverse

    def test_the_frozen_base_is_gone(self):
        model = made(target_modules=["q"])
        model.merge_adapter()
        with pytest.raises(UnsupportedModel, match=r"q\.weight: merge_adapter\(\) has put default"):
            WeightSource(model, merge=False).manifest()
        source = WeightSource(model)
        manifest = source.manifest()
        source.merge = False
        with pytest.raises(UnsupportedModel, match=r"unmerge_adapter\(\)"):
            source.tensors(manifest)

    def test_one_merged_and_another_active(self):
        model = made(target_modules=["q"])
        model.add_adapter("other", lora(target_modules=["q"]))
        model.base_model.set_adapter(["default", "other"])
        model.merge_adapter(["default"])
        with pytest.raises(UnsupportedModel, match=r"q\.weight: .*default.*other is active"):
            WeightSource(model).manifest()

    def test_disabled(self):
        model = made(target_modules=["q"])
        model.merge_adapter()
        model.base_model.disable_adapter_layers()
        with pytest.raises(UnsupportedModel, match="are disabled"):
            WeightSource(model).manifest()


class TestTied:
    def net(self) -> nn.Module:
        net = Net()
        net.head = nn.Linear(8, 11, bias=False)
        net.head.weight = net.embed.weight
        return net

    @pytest.mark.parametrize("adapted", ["embed", "head"])
    def test_an_adapter_on_one_of_the_pair_makes_two_tensors_of_it(self, adapted):
        model = made(net=self.net(), target_modules=[adapted])
        source = WeightSource(model)
        manifest = source.manifest()
        assert all(not meta.aliases for meta in manifest)
        sent = taken(source, manifest)
        base = model.base_model.model.embed.weight
        other = {"embed": "head", "head": "embed"}[adapted]
        layer = getattr(model.base_model.model, adapted)
        assert torch.equal(sent[f"{other}.weight"], base)
        assert torch.equal(sent[f"{adapted}.weight"], base + layer.get_delta_weight("default"))
        assert not torch.equal(sent["embed.weight"], sent["head.weight"])
        source.merge = False  # the frozen pair is one again, as a tied engine wants it
        assert ("embed.weight", "head.weight") in [meta.names for meta in source.manifest()]
        assert torch.equal(taken(source)["head.weight"], base)
        assert torch.equal(taken(source)["embed.weight"], base)

    def test_without_an_adapter_on_it_the_pair_is_sent_once(self):
        source = WeightSource(made(net=self.net(), target_modules=["q"]))
        assert ("embed.weight", "head.weight") in [meta.names for meta in source.manifest()]

    def test_one_of_the_pair_is_saved(self):
        model = made(net=self.net(), target_modules=["q"], modules_to_save=["head"])
        source = WeightSource(model)
        sent = taken(source)
        assert torch.equal(sent["head.weight"], model.base_model.model.head.modules_to_save.default.weight)
        assert torch.equal(sent["embed.weight"], model.base_model.model.embed.weight)
        assert not torch.equal(sent["embed.weight"], sent["head.weight"])

    def test_a_module_in_two_places(self):
        net = nn.Module()
        net.a = nn.Linear(4, 4)
        made(net=net, target_modules=["a"])
        net.b = net.a
        sent = taken(WeightSource(net))
        assert list(sent) == ["a.weight", "b.weight", "a.bias", "b.bias"]
        assert sent["a.weight"] is sent["b.weight"]  # computed and sent once
        assert torch.equal(sent["a.weight"], net.a.base_layer.weight + net.a.get_delta_weight("default"))

    def test_a_module_in_two_places_of_which_peft_adapts_the_first(self):
        net = nn.Module()
        net.a = nn.Linear(4, 4)
        net.b = net.a
        made(net=net, target_modules=["a", "b"])
        sent = taken(WeightSource(net))
        assert torch.equal(sent["b.weight"], net.b.weight)
        assert torch.equal(sent["a.weight"], net.a.base_layer.weight + net.a.get_delta_weight("default"))


class TestTheTrainerIsUntouched:
    def test_by_fifty_streams_with_a_step_between(self):
        model = made(dtype=torch.bfloat16, modules_to_save=["head"], lora_dropout=0.1)
        source = WeightSource(model)
        agreed = source.manifest()
        before = storages(model)
        trained = ("lora_", "modules_to_save")
        for step in range(50):
            source.merge = step % 5 != 4
            with source.tensors(agreed, agreed.digest, recheck=True) as stream:
                last = dict(zip([meta.name for meta in agreed], stream, strict=True))
                stream.recheck()
            assert not stream.outdated
            if step == 24:
                train(model, seed=9)
        assert_untouched(model, before, but=trained)
        source.merge = True
        assert source.manifest() is agreed
        assert_same(taken(source, agreed), oracle(model))
        assert last["q.weight"].data_ptr() == model.base_model.model.q.base_layer.weight.data_ptr()  # frozen: no copy

    def test_by_one_that_fails_midway(self):
        model = made(dtype=torch.bfloat16)
        source = WeightSource(model)
        manifest = source.manifest()
        before = storages(model)
        for after in range(0, len(manifest), 3):
            with pytest.raises(OSError, match="wire"):
                fail_after(after, source, manifest)
        assert_untouched(model, before)
        assert not any(getattr(layer, "merged_adapters", None) for layer in model.modules())
        assert_same(taken(source, manifest), oracle(model))

    def test_a_consumer_that_keeps_and_writes_what_it_was_given(self):
        model = made(target_modules=["q", "gpt", "image", "embed"], use_dora=True)
        before = storages(model)
        source = WeightSource(model)
        manifest = source.manifest()
        with source.tensors(manifest) as stream:
            for tensor in stream:
                if stream.staged:
                    tensor.zero_()
        assert_untouched(model, before)
        assert_same(taken(source, manifest), oracle(model))

    def test_a_loaded_adapter_counts_in_the_first_stream(self, tmp_path):
        trained = made(use_rslora=True, modules_to_save=["head"])
        trained.save_pretrained(tmp_path)
        resumed = peft.PeftModel.from_pretrained(Net(), tmp_path, is_trainable=True)
        assert_same(taken(WeightSource(resumed)), oracle(trained))
        assert_same(taken(WeightSource(peft.PeftModel.from_pretrained(Net(), tmp_path))), oracle(trained))


class TestTree:
    def test_an_adapter_put_on_later_and_taken_off(self):
        net = Net()
        source = WeightSource(net)
        agreed = source.manifest()
        model = peft.inject_adapter_in_model(lora(), net)
        train(model)
        assert [meta.names for meta in source.manifest()] == [meta.names for meta in agreed]
        sent = taken(source)
        assert not torch.equal(sent["q.weight"], net.q.base_layer.weight)
        assert torch.equal(sent["q.weight"], net.q.base_layer.weight + net.q.get_delta_weight("default"))

    def test_wrappers_outside_and_inside(self):
        model = made(target_modules=["q", "v"])
        want = oracle(model)
        inner = model.base_model.model
        inner.q = checkpoint_wrapper(inner.q)
        inner.v.base_layer = checkpoint_wrapper(inner.v.base_layer)
        assert_same(taken(WeightSource(torch.compile(model, backend="eager"))), want)

    def test_a_part_of_the_tree(self):
        model = made(target_modules=["q"])
        want = oracle(model)
        for part in (model.base_model, model.base_model.model):
            assert_same(taken(WeightSource(part)), want)
        sent = taken(WeightSource(model.base_model.model.q))
        assert_same(sent, {"weight": want["q.weight"], "bias": want["q.bias"]})

    def test_a_value_head_around_it(self):
        outer = nn.Module()
        outer.pretrained_model = made(target_modules=["q"])
        outer.v_head = nn.Linear(2, 1)
        names = [meta.name for meta in WeightSource(outer).manifest()]
        assert names == [f"pretrained_model.{name}" for name in Net().state_dict()] + ["v_head.weight", "v_head.bias"]

    def test_a_transformers_model(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
        base = GPT2LMHeadModel(config)
        names = list(base.state_dict())
        model = peft.get_peft_model(base, lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
        train(model)
        sent = taken(WeightSource(model))
        assert sorted(sent) == sorted(names)
        assert_same(sent, oracle(model))

    def test_a_change_of_dtype_is_noticed(self):
        model = made(target_modules=["q"])
        source = WeightSource(model)
        agreed = source.manifest()
        model.base_model.model.q.base_layer.bfloat16()
        with pytest.raises(ManifestMismatch):
            source.tensors(agreed, agreed.digest)
        assert_same(taken(source), oracle(model))

    def test_peft_is_not_imported_for_it(self):
        code = (
            "import sys, torch, twinkle_ray.lora; from twinkle_ray.sources import WeightSource;"
            "WeightSource(torch.nn.Linear(2, 2)).manifest();"
            "print(twinkle_ray.lora.has_adapters(torch.nn.Linear(2, 2)), 'peft' in sys.modules)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
        assert run.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    "chosen",
    [
        "torch.set_float32_matmul_precision('medium'); torch.backends.cudnn.allow_tf32 = False",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'; torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ],
)
def test_lower_precision_is_off_for_the_product_and_then_as_the_trainer_chose(chosen):
    """The settings alone, which need no GPU. In a process of its own, since they cannot be taken back."""
    code = (
        f"import torch; from torch import backends as b; from twinkle_ray.lora import _full_precision; {chosen}\n"
        "for kind, places in (('cuda', (b.cuda.matmul, b.cudnn.conv)), ('cpu', (b.mkldnn.matmul, b.mkldnn.conv))):\n"
        "    now = lambda: [place.fp32_precision for place in places]\n"
        "    before = now()\n"
        "    with _full_precision(torch.device(kind)): within = now()\n"
        "    print(within == ['ieee', 'ieee'], now() == before)"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert run.stdout.split() == ["True"] * 4


def test_autocast_does_not_reach_the_product():
    model = made(target_modules=["q", "image"])
    want = oracle(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(taken(WeightSource(model)), want)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "match"),
        [
            (lambda: peft.IA3Config(target_modules=["q"], feedforward_modules=[]), "type IA3"),
            (lambda: peft.AdaLoraConfig(target_modules=["q"], total_step=10), "type ADALORA"),
            (lambda: peft.LoHaConfig(target_modules=["q"]), "type LOHA"),
            (lambda: peft.VeraConfig(target_modules=["q"]), "type VERA"),
            (lambda: peft.OFTConfig(target_modules=["q"], r=2, oft_block_size=0), "type OFT"),
        ],
    )
    def test_other_tuners(self, config, match):
        model = peft.get_peft_model(Net(), config())
        with pytest.raises(UnsupportedModel, match=match):
            WeightSource(model).manifest()
        with pytest.raises(UnsupportedModel, match=r"^q has an adapter of PEFT's"):
            WeightSource(model.base_model.model).manifest()

    def test_prompt_learning(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16))
        for config in (
            peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        ):
            with pytest.raises(UnsupportedModel, match=r"type (PREFIX|PROMPT)_TUNING"):
                WeightSource(peft.get_peft_model(copy.deepcopy(base), config)).manifest()

    def test_mixed_models(self):
        model = peft.get_peft_model(Net(), lora(target_modules=["q"]), mixed=True)
        with pytest.raises(UnsupportedModel, match="PeftMixedModel"):
            WeightSource(model).manifest()

    def test_trainable_tokens(self):
        model = made(target_modules=["q"], trainable_token_indices={"embed": [1, 2]})
        with pytest.raises(UnsupportedModel, match=r"^embed is a TrainableTokensWrapper"):
            WeightSource(model).manifest()

    def test_attention(self):
        net = nn.Module()
        net.mha = nn.MultiheadAttention(8, 2)
        with pytest.raises(UnsupportedModel, match=r"^mha has an adapter of PEFT's lora\.layer\.MultiheadAttention"):
            WeightSource(made(net=net, target_modules=["mha"])).manifest()

    def test_convolution_in_groups(self):
        net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
        with pytest.raises(UnsupportedModel, match=r"^0\.weight: .*groups"):
            WeightSource(made(net=net, target_modules=["0"])).manifest()

    def test_a_bias_with_nowhere_to_go(self):
        with pytest.raises(UnsupportedModel, match=r"^v\.weight: .*bias"):
            WeightSource(made(target_modules=["v"], lora_bias=True)).manifest()

    @pytest.mark.skipif(peft_version < Version("0.18"), reason="PEFT has activated LoRA since 0.18")
    def test_activated_lora(self):
        model = made(target_modules=["q"], alora_invocation_tokens=[1, 2])
        with pytest.raises(UnsupportedModel, match=r"^q\.weight: .*ALoraLinear"):
            WeightSource(model).manifest()

    def test_a_quantised_layer_class(self):
        """bitsandbytes is not here; its layers are LoraLayer's other children, known by where they are defined."""
        from peft.tuners.lora.layer import Linear

        linear4bit = type("Linear4bit", (Linear,), {"__module__": "peft.tuners.lora.bnb"})
        model = made(target_modules=["q"])
        model.base_model.model.q.__class__ = linear4bit
        with pytest.raises(UnsupportedModel, match=r"^q has an adapter of PEFT's lora\.bnb\.Linear4bit"):
            WeightSource(model).manifest()

    def test_a_quantised_base(self):
        model = made(target_modules=["q"])
        q = model.base_model.model.q.base_layer
        q.weight = nn.Parameter(q.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        with pytest.raises(UnsupportedModel, match=r"^q\.weight: .*float8_e4m3fn, which is quantised"):
            WeightSource(model).manifest()

    def test_a_parametrised_base(self):
        model = made(target_modules=["q"])
        nn.utils.parametrizations.weight_norm(model.base_model.model.q.base_layer)
        with pytest.raises(UnsupportedModel, match=r"^q\.weight: an adapter changes it"):
            WeightSource(model).manifest()


class TestExport:
    @pytest.mark.parametrize("kind", KINDS)
    def test_tensors_are_those_of_pefts_checkpoint(self, kind):
        model = made(**KINDS[kind])
        want = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        have = dict(adapter_tensors(model))
        if peft_version < Version("0.21") and kind == "biases of its layers":  # trained, and left out of its checkpoint
            want |= {name: dict(model.named_parameters())[name] for name in have if name.endswith("base_layer.bias")}
        assert sorted(have) == sorted(want)
        assert all(torch.equal(have[name], want[name]) for name in want)
        assert all(have[name].data_ptr() == want[name].data_ptr() for name in want)

    def test_of_two_adapters_by_name(self):
        model = made(target_modules=["q"])
        model.add_adapter("other", lora(r=2, target_modules=["v"]))
        assert adapter_names(model) == ["default", "other"]
        assert {name: tuple(tensor.shape) for name, tensor in adapter_tensors(model, "other")} == {
            "base_model.model.v.lora_A.weight": (2, 6),
            "base_model.model.v.lora_B.weight": (8, 2),
        }
        assert adapter_config(model, "other")["r"] == 2
        for function in (adapter_config, adapter_tensors):
            with pytest.raises(ConfigError, match="no adapter 'third'; it has default, other"):
                function(model, "third")
            with pytest.raises(ConfigError, match="it has none"):
                function(Net(), "third")

    def test_wrapped_or_injected_the_names_are_the_same(self):
        model = made(target_modules=["q"])
        names = [name for name, _ in adapter_tensors(model)]
        assert [name for name, _ in adapter_tensors(model.base_model.model)] == names
        assert [name for name, _ in adapter_tensors(torch.compile(model, backend="eager"))] == names

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_configuration_survives_json(self, kind, tmp_path):
        model = made(**KINDS[kind])
        model.save_pretrained(tmp_path)
        live = model.peft_config["default"]
        before = copy.deepcopy(live.to_dict())
        config = adapter_config(model)
        assert json.loads(json.dumps(config)) == config
        assert live.to_dict() == before
        saved = json.loads((tmp_path / "adapter_config.json").read_text())
        for key in ("r", "lora_alpha", "peft_type", "use_rslora", "use_dora", "bias", "rank_pattern", "alpha_pattern"):
            assert config[key] == saved[key], key
        assert config["target_modules"] == sorted(live.target_modules)


# two trainer ranks under FSDP2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(6, 4)
        self.q = nn.Linear(4, 5)
        self.v = nn.Linear(5, 3, bias=False)
        self.head = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(3)


def sharded(rank: int, world: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for config in (
        lora(r=3, target_modules=["embed", "q", "v"], modules_to_save=["head"]),
        lora(r=2, target_modules=["q", "v"], use_dora=True),
    ):
        model = made(config, net=Block())
        want = oracle(model)
        inner = model.base_model.model
        fully_shard(inner.q, mesh=mesh)
        fully_shard(inner.v.lora_A["default"], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert type(inner.q.lora_A["default"].weight).__name__ == "DTensor"
        source = WeightSource(model)
        manifest = source.manifest()
        assert [meta.name for meta in manifest] == list(Block().state_dict())
        digests: list[str] = [""] * world
        dist.all_gather_object(digests, manifest.digest)
        assert len(set(digests)) == 1

        def everything(source: WeightSource, wire: Manifest, want: dict[str, torch.Tensor]) -> None:
            if rank:
                source.gather_only(wire)
            else:
                assert_same(taken(source, wire), want)
            dist.barrier()

        everything(source, manifest, want)
        half = manifest.with_dtypes("bfloat16" if m.dtype == "float32" else m.dtype for m in manifest)
        everything(source, half, want)
        # the sender fails before its first tensor, amid, and between the gathers of one and the next
        for after in (0, 2, 5):
            if rank:
                source.gather_only(manifest)
            else:
                with pytest.raises(OSError, match="wire"):
                    fail_after(after, source, manifest)
            dist.barrier()
        everything(source, manifest, want)
        source.merge = False
        frozen = Block().state_dict()
        everything(source, manifest, frozen)
        source.merge = True
        with torch.no_grad():  # a step on the shards
            inner.q.lora_B["default"].weight.mul_(2)
        if not config.use_dora:
            base = Block().q.weight.detach()
            want["q.weight"] = base + (want["q.weight"] - base) * 2
            if rank:
                source.gather_only(manifest)
            else:
                torch.testing.assert_close(taken(source, manifest)["q.weight"], want["q.weight"])
            dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(200)
def test_two_sharded_ranks(tmp_path):
    mp.spawn(sharded, args=(2, str(tmp_path / "store")), nprocs=2)
