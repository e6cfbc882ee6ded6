"""A trainer with LoRA adapters, rollouts with the base model. Oracle: PEFT's merge in fp32 on a copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ray
import torch

from tests.actors import Rollout, RolloutBase, TrainerBase, digests
from tests.ray.test_drivers import seeds_sync
from twinkle_ray import CheckpointEngineManager

pytestmark = pytest.mark.usefixtures("ray_cluster")
pytest.importorskip("peft")


class AdaptedTrainer(TrainerBase):
    """TinyLM under an adapter that was trained before the first sync, as after a resume."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        super().__init__(0, tied=tied, dtype=dtype)
        from peft import LoraConfig, get_peft_model

        self.frozen = digests(self.model)
        config = {"r": 4, "lora_alpha": 16, "target_modules": ["q", "v", "o"], "use_rslora": True, **config}
        self.model = get_peft_model(self.model, LoraConfig(**config))
        self.step(1)
        self.start = self.values()

    def step(self, seed: int) -> None:
        """Move what an optimizer would."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape).to(parameter))

    def values(self) -> dict[str, tuple[int, torch.Tensor]]:
        return {name: (tensor.data_ptr(), tensor.cpu().clone()) for name, tensor in self.model.state_dict().items()}

    def merged(self) -> dict[str, str]:
        """In fp32, then one cast to the dtype of the base."""
        own = {name: tensor.dtype for name, tensor in copy.deepcopy(self.model).unload().state_dict().items()}
        whole = copy.deepcopy(self.model).float().merge_and_unload()
        for name, tensor in whole.state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to(own[name])
        return digests(whole)

    def drifted(self) -> list[str]:
        """What no step touches, and yet is another storage or value than at the start."""
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return [
            name
            for name, (address, tensor) in self.values().items()
            if address != self.start[name][0] or not (name in trained or torch.equal(tensor, self.start[name][1]))
        ]

    def originals(self) -> dict[str, str]:
        return self.frozen


Adapted = ray.remote(num_cpus=0.1)(AdaptedTrainer)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=60)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_dora": True, "dtype": torch.bfloat16},
        {"target_modules": ["q", "embed"], "tied": True},
        {"modules_to_save": ["lm_head"], "bias": "all"},
    ],
    ids=["plain", "dora in bf16", "on a tied embedding", "with a saved head"],
)
def test_rollouts_hold_what_pefts_merge_makes_after_every_sync(actors: Any, config: dict[str, Any]) -> None:
    dtype = config.get("dtype", torch.float32)
    trainer = actors(Adapted, **config)
    rollouts = [actors(Rollout, seed, dtype=dtype) for seed in (5, 6)]
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=60)
    seen = set()
    for step in range(3):
        manager.sync_weights()
        # PEFT's merge would put it into both halves of a tied pair; the forward pass has it in one
        want = get(trainer.call.remote(one_half) if config.get("tied") else trainer.merged.remote())
        for rollout in rollouts:
            assert get(rollout.digests.remote()) == want
        manager.verify()
        seen.add(want["blocks.0.q.weight"])
        assert get(trainer.drifted.remote()) == []
        get(trainer.step.remote(10 + step))
    assert len(seen) == 3


def one_half(trainer: AdaptedTrainer) -> dict[str, str]:
    model = copy.deepcopy(trainer.model)
    inner = model.base_model.model
    inner.lm_head.weight = torch.nn.Parameter(inner.lm_head.weight.detach().clone())
    return digests(model.merge_and_unload())


class Dying(RolloutBase):
    def start_checkpoint(self, key: str, op: str, request: dict[str, Any], wait_s: float = 0.0) -> Any:
        raise OSError("no memory")


def test_a_sync_that_fails_leaves_the_trainer_unmerged(actors: Any) -> None:
    trainer = actors(Adapted, dtype=torch.bfloat16)
    broken = CheckpointEngineManager([trainer], [actors(ray.remote(num_cpus=0)(Dying))], timeout_s=30)
    with pytest.raises(Exception, match="no memory"):
        broken.sync_weights()
    assert get(trainer.drifted.remote()) == []
    rollout = actors(Rollout, 5, dtype=torch.bfloat16)
    CheckpointEngineManager([trainer], [rollout], timeout_s=60).sync_weights()
    assert get(rollout.digests.remote()) == get(trainer.merged.remote())


def test_the_seeds_driver_gets_merged_or_plain_as_it_says(actors: Any) -> None:
    trainer, rollout = actors(Adapted), actors(Rollout, 5)
    for merge in (True, False, False, True):
        seeds_sync([trainer], [rollout], merge=merge)
        want = get((trainer.merged if merge else trainer.originals).remote())
        assert get(rollout.digests.remote()) == want
        assert get(trainer.drifted.remote()) == []
    # it left the trainer plain, which is no matter to a manager that asks for merged
    CheckpointEngineManager([trainer], [rollout], timeout_s=60).sync_weights()
    assert get(rollout.digests.remote()) == get(trainer.merged.remote())
