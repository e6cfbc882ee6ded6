"""RLHF of a LoRA adapter: the base stays, and after every optimizer step only the adapter goes to the rollouts.

    ray job submit --working-dir . -- python examples/rlhf_lora.py

The task is that of ``rlhf_grpo.py``. The first sync brings the plain base and the adapter, each later one the adapter
alone. It goes into vLLM's memory by name and version, without a file, and serves every request from then on.
"""

from __future__ import annotations

import argparse
import random
import sys
from statistics import fmean
from typing import Any

import ray
import torch
from peft import LoraConfig, get_peft_model
from rlhf_grpo import (
    ADAPTED,
    STEP_TIMEOUT_S,
    Rollout,
    Trainer,
    actor,
    describe,
    group_advantages,
    job,
    make_prompts,
    reward,
)
from tiny import make_checkpoint

from twinkle_ray import CheckpointEngineManager

LORA = LoraConfig(r=8, lora_alpha=16, target_modules=ADAPTED)
LEARNING_RATE = 5e-3


class LoraTrainer(Trainer):
    """Trains an adapter on a base that is frozen."""

    def __init__(self, checkpoint: dict[str, bytes], device: str) -> None:
        super().__init__(checkpoint, device)
        self.model = get_peft_model(self.model, LORA)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps; returns the figures of each."""
    checkpoint = ray.put(make_checkpoint(args.seed))
    trainer = actor(LoraTrainer, args.device).remote(checkpoint, args.device)
    rollouts = [
        actor(Rollout, args.device).remote(checkpoint, args.device, i, LORA.to_dict()) for i in range(args.rollouts)
    ]
    about = describe(trainer, rollouts)
    rng = random.Random(args.seed)
    steps = []
    with CheckpointEngineManager([trainer], rollouts, adapters=True) as manager:
        report = manager.sync_weights(merge_and_sync=False)
        print(report, flush=True)
        first = {"base": report.base, "sync_nbytes": report.nbytes}
        for step in range(1, args.steps + 1):
            prompts = make_prompts(rng)
            shares = [rollout.generate.remote(prompts[i :: args.rollouts]) for i, rollout in enumerate(rollouts)]
            samples = [sample for share in ray.get(shares, timeout=STEP_TIMEOUT_S) for sample in share]
            rewards = [reward(sample["prompt"], sample["text"]) for sample in samples]
            _, gap = ray.get(trainer.step.remote(samples, group_advantages(rewards)), timeout=STEP_TIMEOUT_S)
            report = manager.sync_weights(merge_and_sync=False)
            steps.append(
                {
                    "step": step,
                    "reward": fmean(rewards),
                    "logprob_gap": gap,
                    "base": report.base,
                    "adapter": report.adapter,
                    "sync_seconds": report.seconds,
                    "sync_nbytes": report.nbytes,
                    "version": report.version,
                }
            )
            print(f"step {step}/{args.steps}: reward {fmean(rewards):.2f}; {report}", flush=True)
    return {**about, "first": first, "steps": steps}


if __name__ == "__main__":
    rollouts = {"type": int, "choices": range(1, 5), "default": 2, "help": "vLLM actors (default: %(default)s)"}
    sys.exit(job(__doc__, run, steps=30, rollouts=rollouts))
