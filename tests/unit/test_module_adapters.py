"""Adapters on a plain module through PEFT: what is put in comes out again, and what has no place is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.actors import TinyLM, digests
from twinkle_ray.adapter import Adapter
from twinkle_ray.errors import ConfigError, ManifestMismatch, SyncError, UnsupportedModel
from twinkle_ray.module_adapters import ModuleAdapters

peft = pytest.importorskip("peft")


def trained(seed: int = 1, **config: Any) -> Any:
    config = {"r": 4, "target_modules": ["q", "lm_head"], "init_lora_weights": False, **config}
    torch.manual_seed(seed)
    return peft.get_peft_model(TinyLM(0), peft.LoraConfig(**config)).eval()


def put(held: ModuleAdapters, name: str, model: Any, version: int = 1) -> None:
    one = Adapter.of(model, "default")
    held.check(one.config, {meta.name: meta for meta in one.manifest})
    held.register(name, version, one.config, dict(one.pairs()))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(8))
    return found


def test_the_module_is_itself_again_when_the_last_adapter_is_gone() -> None:
    module = TinyLM(0).eval()
    parts, before, plain = list(module.modules()), digests(module), logits(module)
    trainable = [p.requires_grad for p in module.parameters()]
    held = ModuleAdapters(module)
    one, other = trained(1), trained(2, r=2, target_modules=["v"])
    put(held, "one", one)
    assert torch.equal(logits(module), plain)  # held, but nothing is chosen
    held.choose("one")
    assert torch.equal(logits(module), logits(one))
    put(held, "other", other)
    assert torch.equal(logits(module), logits(one))
    held.choose("other")
    assert torch.equal(logits(module), logits(other))
    assert held.remove("other")
    assert held.default is None
    assert torch.equal(logits(module), plain)
    assert held.remove("one")
    assert not held.remove("one")
    assert not held.holds_any()
    assert list(module.modules()) == parts
    assert digests(module) == before
    assert [p.requires_grad for p in module.parameters()] == trainable
    assert not hasattr(module, "peft_config")


def test_a_new_version_takes_the_place_of_the_old_one_also_with_another_rank() -> None:
    module = TinyLM(0).eval()
    held = ModuleAdapters(module)
    for version, model in enumerate((trained(1), trained(2), trained(3, r=8, target_modules=["k"])), start=1):
        put(held, "one", model, version)
        held.choose("one")
        assert torch.equal(logits(module), logits(model))
        assert held.entries() == {"held": {"one": [version, version]}, "last": version}


def test_a_directory_as_peft_writes_it(tmp_path: Path) -> None:
    model = trained(1)
    model.save_pretrained(tmp_path)
    module = TinyLM(0).eval()
    held = ModuleAdapters(module)
    held.attach("disk", str(tmp_path))
    held.choose("disk")
    assert torch.equal(logits(module), logits(model))
    with pytest.raises(ConfigError, match="no adapter can be read from"):
        held.attach("none", str(tmp_path / "none"))
    assert held.entries()["held"].keys() == {"disk"}


def test_one_whose_start_changed_the_base_is_refused_from_a_directory(tmp_path: Path) -> None:
    trained(1, init_lora_weights="pissa").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="pissa, which changes the base weights"):
        ModuleAdapters(TinyLM(0)).attach("disk", str(tmp_path))


def test_what_has_no_place_is_named_and_nothing_changes() -> None:
    module = TinyLM(0)
    del module.blocks[1]
    held = ModuleAdapters(module)
    with pytest.raises(ManifestMismatch, match=r"the module has no blocks\.1\.q"):
        put(held, "one", trained(1))
    with pytest.raises(ManifestMismatch, match="it has no tensor"):
        held.check({"r": 1}, {})
    with pytest.raises(UnsupportedModel, match="type IA3"):
        held.check({"peft_type": "IA3"}, {})
    with pytest.raises(ConfigError, match="holds no adapter 'one'"):
        held.choose("one")
    assert not held.holds_any()


def test_one_that_cannot_be_put_in_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TinyLM(0)
    before = digests(module)
    held = ModuleAdapters(module)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(peft, "set_peft_model_state_dict", fail)
    with pytest.raises(SyncError, match="could not put adapter 'one' into this rollout's module: MemoryError"):
        put(held, "one", trained(1))
    assert not held.holds_any()
    assert digests(module) == before


def test_a19_a_directory_without_a_layer_of_its_own_configuration_is_refused(tmp_path: Path) -> None:
    trained(1).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "blocks.1.q" not in name}
    assert len(kept) == len(tensors) - 2
    safetensors.torch.save_file(kept, tmp_path / "adapter_model.safetensors")
    module = TinyLM(0).eval()
    held, before = ModuleAdapters(module), digests(module)
    with pytest.raises(SyncError, match=r"nothing came for blocks\.1\.q\.lora_A"):
        held.attach("one", str(tmp_path))
    assert not held.holds_any()
    assert digests(module) == before


def test_the_default_stays_the_default_when_it_is_put_in_anew() -> None:
    module = TinyLM(0).eval()
    held = ModuleAdapters(module)
    put(held, "one", trained(1))
    held.choose("one")
    wider = trained(2, r=8)
    put(held, "one", wider, 2)
    assert held.default == "one"
    assert torch.equal(logits(module), logits(wider))


def test_one_without_modules_to_save_follows_one_that_has_some() -> None:
    module = TinyLM(0).eval()
    held = ModuleAdapters(module)
    one = trained(1, target_modules=["q"], modules_to_save=["lm_head"])
    with torch.no_grad():
        one.base_model.model.lm_head.modules_to_save["default"].weight.mul_(3)
    other = trained(2, target_modules=["q"])
    put(held, "one", one)
    held.choose("one")
    put(held, "other", other)
    assert torch.equal(logits(module), logits(one))
    held.choose("other")
    assert torch.equal(logits(module), logits(other))
    assert held.remove("one")
    assert torch.equal(logits(module), logits(other))
    held.choose("other")
    assert torch.equal(logits(module), logits(other))


def test_one_that_fits_only_in_part_is_taken_out_again() -> None:
    module = TinyLM(0)
    module.blocks[1]["q"] = torch.nn.Sequential()  # PEFT has no layer for it, and meets it after the first block's
    parts = list(module.modules())
    held = ModuleAdapters(module)
    with pytest.raises(SyncError, match="could not put adapter 'one'"):
        put(held, "one", trained(1, target_modules=["q"]))
    assert not held.holds_any()
    assert list(module.modules()) == parts


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_a19_half_of_a_pair_is_refused_and_the_adapter_before_it_stays(half: str) -> None:
    module = TinyLM(0).eval()
    held = ModuleAdapters(module)
    one = trained(1)
    put(held, "one", one)
    held.choose("one")
    other = Adapter.of(trained(2), "default")
    tensors = {name: tensor for name, tensor in other.pairs() if not (half in name and "blocks.1.q" in name)}
    assert len(tensors) == len(dict(other.pairs())) - 1
    with pytest.raises(ManifestMismatch, match=rf"blocks\.1\.q.* without {half}"):
        held.check(other.config, tensors)
    assert torch.equal(logits(module), logits(one))


def test_a19_a_layer_for_which_nothing_comes_is_refused() -> None:
    module = TinyLM(0).eval()
    before = digests(module)
    held = ModuleAdapters(module)
    one = Adapter.of(trained(1), "default")
    tensors = {name: tensor for name, tensor in one.pairs() if "blocks.1.q" not in name}
    with pytest.raises(SyncError, match=r"nothing came for blocks\.1\.q\.lora_A"):
        held.register("one", 1, one.config, tensors)
    assert not held.holds_any()
    assert digests(module) == before


@pytest.mark.parametrize(("also", "used"), [(False, True), (True, False)])
@pytest.mark.parametrize("config", [{}, {"modules_to_save": ["lm_head"], "target_modules": ["q"]}, {"use_dora": True}])
def test_a_directory_that_does_not_fit_leaves_the_one_before_it(
    tmp_path: Path, also: bool, used: bool, config: dict[str, Any]
) -> None:
    module = TinyLM(0).eval()
    held = ModuleAdapters(module)
    good, bad, other = trained(1, **config), tmp_path / "bad", trained(3, target_modules=["q"])
    good.save_pretrained(tmp_path / "good")
    trained(2, r=2).save_pretrained(bad)
    file = bad / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    wide = next(name for name in tensors if "lora_A" in name)
    safetensors.torch.save_file(tensors | {wide: torch.zeros(2, 99)}, file)
    if also:
        put(held, "other", other)
    held.attach("disk", str(tmp_path / "good"), version=4)
    before = held.entries()["held"]
    if used or also:
        held.choose("disk" if used else "other")
    with pytest.raises(SyncError, match="could not put adapter 'disk'"):
        held.attach("disk", str(bad), version=5)
    assert held.entries()["held"] == before
    assert held.default == ("disk" if used else "other" if also else None)
    if used or also:
        assert torch.equal(logits(module), logits(good if used else other))
    held.choose("disk")
    assert torch.equal(logits(module), logits(good))
    held.attach("disk", str(tmp_path / "good"), version=6)
    assert held.remove("disk")
