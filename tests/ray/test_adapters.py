"""Adapters sent alone to plain-module rollouts. Oracle: the trainer's own forward pass under PEFT, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.actors import Probed, Rollout, TinyLM, Trainer, at_launch, die, digests, group_class, no_power, placed
from tests.ray.conftest import stage_on
from tests.ray.test_lora import Adapted, AdaptedTrainer, get
from twinkle_ray import (
    CheckpointEngineManager,
    ConfigError,
    ManifestMismatch,
    PeerLost,
    SyncError,
    TwinkleRayError,
    UnsupportedModel,
)
from twinkle_ray.types import Contents

pytestmark = pytest.mark.usefixtures("ray_cluster")
pytest.importorskip("peft")


class TenantsTrainer(AdaptedTrainer):
    """Three adapters on one base; the first is active, as PEFT leaves it."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        from peft import LoraConfig

        for name, rank in (("tenant2", 2), ("tenant3", 8)):
            self.model.add_adapter(name, LoraConfig(r=rank, lora_alpha=3, target_modules=["v", "lm_head"]))
        self.move(2)

    def move(self, seed: int, *names: str) -> None:
        """Change the adapters of these names, or all, whatever is active."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                if "lora_" in key and (not names or any(f".{name}." in f"{key}." for name in names)):
                    parameter.add_(torch.randn(parameter.shape).to(parameter))

    def logits_of(self, name: str) -> torch.Tensor:
        active = self.model.active_adapter
        self.model.set_adapter(name)
        found = self.logits()
        self.model.set_adapter(active)
        return found


Tenants = ray.remote(num_cpus=0.1)(TenantsTrainer)


@pytest.fixture
def actors(reused: Any) -> Any:
    return reused


def logits_of(rollout: Probed, name: str) -> torch.Tensor:
    """With an adapter that is not the default one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in rollout.model.modules() if isinstance(module, BaseTunerLayer)]
    before = [(layer.active_adapters, layer.disable_adapters) for layer in layers]
    for layer in layers:
        layer.set_adapter(name)
        layer.enable_adapters(True)
    found = rollout.logits()
    for layer, (active, off) in zip(layers, before, strict=True):
        layer.set_adapter(active)
        layer.enable_adapters(not off)
    return found


def base(rollout: Probed) -> dict[str, str]:
    """Digests of the base under whatever PEFT has put into the module, by PEFT's own names."""
    held = digests(rollout.model)
    return {name.replace(".base_layer.", "."): value for name, value in held.items() if "lora_" not in name}


def plain(rollout: Probed) -> bool:
    """Whether no module of PEFT's is in there."""
    return all(not type(module).__module__.startswith("peft") for module in rollout.model.modules())


def count_bytes(actor: Any) -> None:
    """Count what this process hands to its groups."""
    cls = group_class()
    actor.moved = 0
    launch = getattr(cls.broadcast_many, "counts", cls.broadcast_many)

    def counted(group: Any, views: Any, *args: Any, **kwargs: Any) -> Any:
        actor.moved += sum(view.nbytes for view in views)
        return launch(group, views, *args, **kwargs)

    counted.counts = launch  # type: ignore[attr-defined]
    cls.broadcast_many = counted


def moved(actor: Any) -> int:
    """Since the last question."""
    count, actor.moved = actor.moved, 0
    return int(count)


def status(rollout: Any) -> Any:
    return get(rollout.checkpoint_status.remote())


def right(trainer: Any, rollouts: list[Any], merge: bool) -> None:
    """Whether rollouts are what the trainer is, in the form that was asked for."""
    want, frozen = get(trainer.logits.remote()), get(trainer.originals.remote())
    for rollout in rollouts:
        if merge:
            assert get(rollout.call.remote(plain))
            assert get(rollout.digests.remote()) == get(trainer.merged.remote())
            assert status(rollout).adapters == {}
        else:
            assert torch.equal(get(rollout.logits.remote()), want)
            assert get(rollout.call.remote(base)) == frozen
            found = status(rollout)
            assert found.adapters == {"default": found.version}
            assert found.default_adapter == "default"
    assert get(trainer.drifted.remote()) == []


@pytest.mark.parametrize("sequence", ["FF", "TF", "FT", "TFT", "FTFF"])
def test_after_each_call_rollouts_compute_what_the_trainer_computes(actors: Any, sequence: str) -> None:
    trainer = actors(Adapted)  # its adapter was trained before: a resume
    rollouts = [actors(Rollout, seed) for seed in (5, 6)]
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=60)
    held = ""
    for step, letter in enumerate(sequence):
        report = manager.sync_weights(merge_and_sync=letter == "T")
        assert report.version == step + 1
        assert report.adapter == (None if letter == "T" else "default")
        assert report.base == ("merged" if letter == "T" else "" if held == "F" else "plain")
        right(trainer, rollouts, letter == "T")
        assert manager.verify().compared > 0
        assert manager.base_sync_done
        held = letter
        get(trainer.step.remote(10 + step))


KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["q", "embed"]},
    "tied embedding": {"target_modules": ["q", "embed"], "tied": True},
    "saved head": {"modules_to_save": ["lm_head"]},
    "patterns": {"rank_pattern": {"q": 2}, "alpha_pattern": {"v": 7}, "use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "bias of B": {"lora_bias": True, "target_modules": ["q"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_adapter(actors: Any, kind: str) -> None:
    config = KINDS[kind]
    trainer = actors(Adapted, **config)
    if "a" in str(config.get("init_lora_weights", "")):  # which takes something out of the base
        get(trainer.call.remote(take_base_for_original))
    shape = {"dtype": config.get("dtype", torch.float32), "tied": config.get("tied", False)}
    rollout = actors(Rollout, 5, **shape)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
    for step in range(2):
        manager.sync_weights(False)
        assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))
        if kind != "saved head":  # of which the base has a copy beside
            assert get(rollout.call.remote(base)) == get(trainer.originals.remote())
        get(trainer.step.remote(step))


def take_base_for_original(trainer: Any) -> None:
    held = digests(trainer.model.base_model.model)
    trainer.frozen = {n.replace(".base_layer.", "."): value for n, value in held.items() if "lora_" not in n}


@pytest.mark.parametrize("bucket_size", [64, 1 << 20])
def test_only_the_adapters_bytes_move(actors: Any, bucket_size: int) -> None:
    trainer, rollout = actors(Adapted), actors(Rollout, 5)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60, bucket_size=bucket_size)
    get(trainer.call.remote(count_bytes))
    manager.sync_weights(False)
    assert get(trainer.call.remote(moved)) > 10_000
    size = sum(t.nbytes for n, (_, t) in get(trainer.values.remote()).items() if "lora_" in n)
    for step in range(3):
        get(trainer.step.remote(step))
        report = manager.sync_weights(False)
        assert list(report.phases) == ["transfer"]  # one round of calls
        assert size <= get(trainer.call.remote(moved)) <= 1.01 * size
        assert report.nbytes == size
        right(trainer, [rollout], merge=False)


@pytest.fixture(scope="module")
def shared(ray_cluster: str, request: pytest.FixtureRequest) -> Any:
    stage = stage_on(str(request.config.getoption("--device")), request)
    trainer, rollout = stage(Tenants), stage(Rollout, 5)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights(False)
        yield trainer, rollout, manager
    for actor in (trainer, rollout):
        ray.kill(actor)


class TestTenants:
    def test_each_has_its_own_answers_and_a_sync_of_one_touches_no_other(self, actors: Any, tmp_path: Path) -> None:
        trainer, rollout = actors(Tenants), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
        get(trainer.call.remote(lambda one: one.model.save_pretrained(tmp_path, selected_adapters=["tenant3"])))

        assert manager.sync_weights(adapter="tenant2").base == "plain"
        assert torch.equal(get(rollout.logits.remote()), get(trainer.call.remote(without)))  # no default yet
        manager.sync_weights(False)
        manager.attach_adapter("from disk", tmp_path / "tenant3")
        assert status(rollout).adapters == {"tenant2": 1, "default": 2, "from disk": 0}

        def answers() -> dict[str, torch.Tensor]:
            of = {name: get(rollout.call.remote(ask(name))) for name in ("tenant2", "from disk")}
            return {**of, "default": get(rollout.logits.remote())}

        before = answers()
        assert torch.equal(before["default"], get(trainer.logits.remote()))
        assert torch.equal(before["tenant2"], get(trainer.logits_of.remote("tenant2")))
        assert torch.equal(before["from disk"], get(trainer.logits_of.remote("tenant3")))

        get(trainer.move.remote(7))
        report = manager.sync_weights(adapter="tenant2")
        assert report.base == ""
        assert list(report.phases) == ["transfer"]
        after = answers()
        assert torch.equal(after["tenant2"], get(trainer.logits_of.remote("tenant2")))
        assert not torch.equal(after["tenant2"], before["tenant2"])
        assert torch.equal(after["default"], before["default"])
        assert torch.equal(after["from disk"], before["from disk"])
        assert status(rollout).adapters == {"tenant2": 3, "default": 2, "from disk": 0}
        manager.sync_weights(False)
        assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))

        with pytest.raises(ConfigError, match=r"rollout\[0\] holds 'tenant2', 'from disk', which belongs to the plain"):
            manager.sync_weights()
        assert status(rollout).version == 4
        for name in ("tenant2", "from disk"):
            manager.detach_adapter(name)
        manager.sync_weights()
        assert get(rollout.call.remote(plain))

    def test_the_adapter_that_is_active_now_becomes_the_default(self, actors: Any) -> None:
        trainer, rollout = actors(Tenants), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
        manager.sync_weights(False)
        manager.sync_weights(False)
        get(trainer.call.remote(lambda one: one.model.set_adapter("tenant3")))
        report = manager.sync_weights(False)
        assert report.adapter == "tenant3"
        assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))
        assert status(rollout).adapters == {"tenant3": 3}  # the older default is gone

    def test_after_a_merged_base_a_tenant_brings_the_plain_one_back(self, actors: Any) -> None:
        trainer, rollout = actors(Tenants), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
        manager.sync_weights()
        assert manager.sync_weights(adapter="tenant2").base == "plain"
        assert torch.equal(get(rollout.call.remote(ask("tenant2"))), get(trainer.logits_of.remote("tenant2")))

    @pytest.mark.parametrize(
        ("act", "text"),
        [
            (lambda m, p: m.sync_weights(adapter="nobody"), r"no LoRA adapter 'nobody'; it has 'default', 'tenant2'"),
            (lambda m, p: m.attach_adapter("x", p / "none"), r"rollout\[0\]: no adapter can be read from"),
            (lambda m, p: m.attach_adapter("default", p / "none"), "holds an adapter 'default' from the trainer"),
            (lambda m, p: m.detach_adapter("x"), "holds no adapter 'x'; it holds default"),
            (lambda m, p: m.detach_adapter("default"), "serves all requests"),
            (lambda m, p: m.sync_weights(False, in_flight="keep"), "'keep' is not for adapters"),
            (lambda m, p: m.sync_weights(in_flight="keep"), "'keep' is not for adapters"),
        ],
    )
    def test_what_is_refused_changes_nothing(self, shared: Any, tmp_path: Path, act: Any, text: str) -> None:
        trainer, rollout, manager = shared
        before = status(rollout)
        with pytest.raises(ConfigError, match=text):
            act(manager, tmp_path)
        assert status(rollout) == before
        assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))
        get(trainer.checkpoint_status.remote())  # anyone may ask
        assert manager.verify().compared > 0


def without(trainer: Any) -> torch.Tensor:
    with trainer.model.disable_adapter():
        found: torch.Tensor = trainer.logits()
    return found


def ask(name: str) -> Callable[[Probed], torch.Tensor]:
    return lambda rollout: logits_of(rollout, name)


class TestWhatIsHeldIsAsked:
    """Not remembered by a driver, which comes and goes."""

    def test_another_manager_goes_on_where_the_first_one_was(self, actors: Any) -> None:
        trainer, rollout = actors(Adapted), actors(Rollout, 5)
        sent = []
        for merge in (False, False, True, False):
            with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
                sent.append(manager.sync_weights(merge).base)
            right(trainer, [rollout], merge)
            get(trainer.step.remote(len(sent)))
        assert sent == ["plain", "", "merged", "plain"]

    def test_another_trainer_sends_its_own_base(self, actors: Any) -> None:
        rollout = actors(Rollout, 5)
        for seed in range(2):
            trainer = actors(Adapted)
            get(trainer.step.remote(seed))
            with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
                assert manager.sync_weights(False).base == "plain"
            right(trainer, [rollout], merge=False)

    @pytest.mark.parametrize("how", ["in place", "replaced", "data"])
    def test_a_base_that_changed_is_sent_again(self, actors: Any, how: str) -> None:
        trainer, rollout = actors(Adapted), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
        for _ in range(2):
            manager.sync_weights(False)
        get(trainer.call.remote(lambda one: change_base(one, how)))
        report = manager.sync_weights(False)
        assert report.base == "plain"
        assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))
        assert manager.sync_weights(False).base == ""

    def test_a_newcomer_gets_base_and_adapter(self, actors: Any) -> None:
        trainer, rollouts = actors(Adapted), [actors(Rollout, seed) for seed in (5, 6)]
        CheckpointEngineManager([trainer], rollouts[:1], timeout_s=60).sync_weights(False)
        report = CheckpointEngineManager([trainer], rollouts, timeout_s=60).sync_weights(False)
        assert report.base == "plain"
        for rollout in rollouts:
            assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))

    def test_a_rollout_whose_model_was_made_anew_is_empty(self, actors: Any) -> None:
        trainer, rollout = actors(Adapted), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
        for _ in range(2):
            manager.sync_weights(False)
        get(rollout.call.remote(lambda one: setattr(one, "model", placed(TinyLM(8)))))
        assert manager.sync_weights(False).base == "plain"
        right(trainer, [rollout], merge=False)

    def test_a_trainer_that_gets_its_adapter_between_two_merged_syncs(self, actors: Any) -> None:
        trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
        for _ in range(2):
            assert manager.sync_weights().base == "plain"
        get(trainer.call.remote(give_adapter))
        assert manager.sync_weights().base == "merged"
        with pytest.raises(ConfigError, match="merged into it"):
            manager.attach_adapter("x", "nowhere")
        assert manager.sync_weights(False).base == "plain"
        assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))
        for _ in range(2):
            assert manager.sync_weights().base == "merged"
        get(trainer.call.remote(lambda one: setattr(one, "model", one.model.unload())))
        assert manager.sync_weights().base == "plain"
        with pytest.raises(ConfigError, match="no adapter can be read"):
            manager.attach_adapter("x", "nowhere")

    def test_a_base_that_was_only_verified_is_told_to_rollouts_when_it_is_sent(self, actors: Any) -> None:
        trainer, rollouts = actors(Adapted), [actors(Rollout, 5), actors(Rollout, 6, dtype=torch.bfloat16)]
        CheckpointEngineManager([trainer], rollouts, timeout_s=60).sync_weights(False)
        manager = CheckpointEngineManager([trainer], rollouts[1:], timeout_s=60)
        assert manager.sync_weights(False).base == ""
        assert manager.verify().compared > 0  # of one rollout alone the wire has another dtype
        assert manager.sync_weights().base == "merged"
        assert manager.verify().compared > 0


def change_base(trainer: Any, how: str) -> None:
    weight = trainer.model.base_model.model.norm.weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(2)
        elif how == "data":
            weight.data = weight.data * 2
        else:
            trainer.model.base_model.model.norm.weight = torch.nn.Parameter(weight * 2, requires_grad=False)


def give_adapter(trainer: Any) -> None:
    import peft

    torch.manual_seed(3)
    trainer.model = peft.get_peft_model(trainer.model, peft.LoraConfig(target_modules=["q"], init_lora_weights=False))


class TestFailures:
    """An adapter that does not come whole does not come at all."""

    @pytest.mark.parametrize("at", [0, 3, 11])
    def test_in_the_middle_of_the_adapter_the_old_one_stays(self, actors: Any, at: int) -> None:
        trainer, rollout = actors(Adapted), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30, bucket_size=64)
        manager.sync_weights(False)
        old, before = get(rollout.logits.remote()), status(rollout)
        get(trainer.step.remote(1))
        get(trainer.call.remote(lambda one: at_launch(at, no_power)))
        with pytest.raises(SyncError, match=r"trainer\[0\].*no more power"):
            manager.sync_weights(False)
        assert torch.equal(get(rollout.logits.remote()), old)
        after = status(rollout)
        assert after.contents is Contents.WHOLE
        assert (after.version, after.adapters) == (before.version, before.adapters)
        report = manager.sync_weights(False)
        assert report.base == ""  # the base is still there
        right(trainer, [rollout], merge=False)

    def test_in_the_middle_of_a_base_that_comes_with_it(self, actors: Any) -> None:
        trainer, rollout = actors(Adapted), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30, bucket_size=4096)
        manager.sync_weights()
        get(trainer.call.remote(lambda one: at_launch(3, no_power)))
        with pytest.raises(SyncError, match="no more power"):
            manager.sync_weights(False)
        assert status(rollout).contents is Contents.MIXED
        assert manager.sync_weights(False).base == "plain"
        right(trainer, [rollout], merge=False)

    def test_a_trainer_that_is_killed_in_the_middle(self, actors: Any) -> None:
        trainer, rollout = actors(Adapted), actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30, bucket_size=64)
        manager.sync_weights(False)
        old = get(rollout.logits.remote())
        get(trainer.step.remote(1))
        get(trainer.call.remote(lambda one: at_launch(3, die)))
        start = time.monotonic()
        with pytest.raises(PeerLost, match=r"trainer\[0\]"):
            manager.sync_weights(False)
        assert time.monotonic() - start < 10
        assert torch.equal(get(rollout.logits.remote()), old)
        other = actors(Adapted)
        CheckpointEngineManager([other], [rollout], timeout_s=30).sync_weights(False)
        right(other, [rollout], merge=False)

    def test_a_rollout_that_cannot_register_it_refuses_or_keeps_what_it_has(self, actors: Any) -> None:
        trainer, rollouts = actors(Adapted), [actors(Rollout, seed) for seed in (5, 6)]
        manager = CheckpointEngineManager([trainer], rollouts, timeout_s=30)
        manager.sync_weights(False)
        get(trainer.step.remote(1))
        get(rollouts[1].call.remote(lambda one: fail_to_register()))
        with pytest.raises(SyncError, match=r"rollout\[1\].*PEFT could not put adapter 'default'.*no memory") as caught:
            manager.sync_weights(False)
        assert caught.value.versions == {"rollout[0]": 2, "rollout[1]": 1}
        assert status(rollouts[1]).contents is Contents.MIXED  # PEFT may have written half of it
        manager.sync_weights(False)
        right(trainer, rollouts, merge=False)


def fail_to_register() -> None:
    import peft

    usual = peft.set_peft_model_state_dict

    def failing(*args: Any, **kwargs: Any) -> Any:
        peft.set_peft_model_state_dict = usual
        raise MemoryError("no memory")

    peft.set_peft_model_state_dict = failing


class TestBadInput:
    """One sentence each, before any byte."""

    @pytest.mark.parametrize(
        ("config", "change", "kind", "text"),
        [
            (None, None, ConfigError, "has no LoRA adapter that could be sent alone; use merge_and_sync=True"),
            ({"bias": "lora_only"}, None, UnsupportedModel, "bias='lora_only': it trains biases of the base itself"),
            ({}, "scale", UnsupportedModel, r"blocks\.0\.q: the scale of adapter default is 3\.0, while .* says 8\.0"),
            ({}, "second", ConfigError, r"default, other are active at once; name it with"),
            ({}, "off", ConfigError, "none is active"),
            ({}, "merged", UnsupportedModel, "call unmerge_adapter"),
        ],
    )
    def test_adapters(self, actors: Any, config: Any, change: str | None, kind: Any, text: str) -> None:
        trainer = actors(Trainer, 1) if config is None else actors(Adapted, **config)
        rollout = actors(Rollout, 5)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30)
        held = get(rollout.digests.remote())
        if change is not None:
            get(trainer.call.remote(lambda one: CHANGES[change](one)))
        with pytest.raises(TwinkleRayError, match=text) as caught:
            manager.sync_weights(False)
        assert isinstance(caught.value, kind)
        assert get(rollout.digests.remote()) == held


@pytest.mark.parametrize("merge", [True, False])
def test_trainers_that_have_not_the_same_adapters_active_are_refused_by_name(actors: Any, merge: bool) -> None:
    """The ranks of a sharded model would gather different tensors, and wait for each other for ever."""
    trainers, rollout = [actors(Tenants), actors(Tenants)], actors(Rollout, 5)
    held = get(rollout.digests.remote())
    get(trainers[1].call.remote(lambda one: one.model.set_adapter("tenant3")))
    with CheckpointEngineManager(trainers, [rollout], timeout_s=30) as manager:
        with pytest.raises(ManifestMismatch, match=r"trainer\[1\] has the adapters .* of which 'tenant3' are active"):
            manager.sync_weights(merge)
        assert get(rollout.digests.remote()) == held
        get(trainers[1].call.remote(lambda one: one.model.set_adapter("default")))
        manager.sync_weights(merge)
    torch.testing.assert_close(get(rollout.logits.remote()), get(trainers[0].logits.remote()))


def add_and_activate(trainer: Any) -> None:
    from peft import LoraConfig

    trainer.model.add_adapter("other", LoraConfig(target_modules=["q"]))
    trainer.model.base_model.set_adapter(["default", "other"])


def other_rank(trainer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    trainer.model = get_peft_model(trainer.model.unload(), LoraConfig(r=2, target_modules=["q", "v"]))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "scale": lambda trainer: trainer.model.base_model.model.blocks[0]["q"].scaling.update(default=3.0),
    "second": add_and_activate,
    "off": lambda trainer: trainer.model.base_model.disable_adapter_layers(),
    "merged": lambda trainer: trainer.model.merge_adapter(),
}


def test_an_adapter_of_another_rank_is_agreed_anew(actors: Any) -> None:
    trainer, rollout = actors(Adapted), actors(Rollout, 5)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30)
    for _ in range(2):
        manager.sync_weights(False)
    get(trainer.call.remote(other_rank))
    get(trainer.step.remote(4))
    report = manager.sync_weights(False)
    assert "refused" in report.phases
    assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))


def seeds_syncs(trainer: Any, rollout: Any, sequence: str) -> Any:
    """The seeds' manager, call by call, over several syncs: with its flags and its order."""
    base_sync_done = False
    for letter in sequence:
        merge = letter == "T"
        metadata = get(trainer.prepare_checkpoint_engine.remote(True))
        get(rollout.prepare_checkpoint_engine.remote(False))
        get(
            [
                trainer.init_checkpoint_process_group.remote(rank=0, world_size=2, master_metadata=metadata),
                rollout.init_checkpoint_process_group.remote(rank=1, world_size=2, master_metadata=metadata),
            ]
        )
        adapter_only = base_sync_done and not merge
        config = get(trainer.get_peft_config_dict.remote()) if adapter_only else None
        if not adapter_only and merge:
            get(trainer.merge_lora.remote())
        get(
            [
                trainer.send_checkpoint_weights.remote(adapter_only=adapter_only),
                rollout.receive_checkpoint_weights.remote(base_sync_done=base_sync_done, peft_config=config),
            ]
        )
        if not adapter_only and merge:
            get(trainer.unmerge_lora.remote())
        get([trainer.finalize_checkpoint_engine.remote(), rollout.finalize_checkpoint_engine.remote()])
        base_sync_done = True
        yield letter


def test_the_seeds_driver_gets_the_adapter_counted_once(actors: Any) -> None:
    trainer, rollout = actors(Adapted), actors(Rollout, 5)
    for step, letter in enumerate(seeds_syncs(trainer, rollout, "TFFTF")):
        right(trainer, [rollout], merge=letter == "T")
        get(trainer.step.remote(step))
    config = get(trainer.get_peft_config_dict.remote())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 16, True)


@pytest.mark.parametrize("syncs", [pytest.param(1000, marks=pytest.mark.soak), 100])
def test_merged_syncs_leave_the_trainers_storages_alone(actors: Any, syncs: int) -> None:
    trainer, rollout = actors(Adapted, dtype=torch.bfloat16), actors(Rollout, 5, dtype=torch.bfloat16)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
    for step in range(syncs):
        manager.sync_weights()
        trainer.step.remote(step)  # Ray keeps the order of calls
    manager.bucket_size = 4096
    get(trainer.call.remote(lambda one: at_launch(1, no_power)))
    with pytest.raises(SyncError, match="no more power"):
        manager.sync_weights()
    assert get(trainer.drifted.remote()) == []
    manager.sync_weights()
    assert get(rollout.digests.remote()) == get(trainer.merged.remote())
