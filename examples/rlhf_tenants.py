"""Several tenants on one base: each trains an adapter of its own, and one rollout serves them all at once.

    ray job submit --working-dir . -- python examples/rlhf_tenants.py

Two tenants want another kind of character each. Their adapters live in one PEFT model and in one engine; a request
says by name whose it is, and a sync of one tenant leaves the others' requests as they are. A third tenant brings an
adapter that was trained elsewhere, as a directory, and takes it along again.

On several nodes ``--shared`` is a folder that all of them see: a directory is read on the rollout's node.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import torch
from peft import LoraConfig, get_peft_model
from rlhf_grpo import (
    ADAPTED,
    NEW_TOKENS,
    STEP_TIMEOUT_S,
    Rollout,
    Trainer,
    actor,
    describe,
    group_advantages,
    job,
    make_prompts,
)
from tiny import make_checkpoint

from twinkle_ray import CheckpointEngineManager, ConfigError

LORA = LoraConfig(r=8, lora_alpha=16, target_modules=ADAPTED)
LEARNING_RATE = 5e-3
TENANTS = {"digits": string.digits, "capitals": string.ascii_uppercase}


class Tenants(Trainer):
    """Trains several adapters of one base, one at a time."""

    def __init__(self, checkpoint: dict[str, bytes], device: str) -> None:
        super().__init__(checkpoint, device)
        first, *others = TENANTS
        self.model = get_peft_model(self.model, LORA, adapter_name=first)
        for name in others:
            self.model.add_adapter(name, LORA)
        self.optimizers = {}
        for name in TENANTS:
            own = [parameter for key, parameter in self.model.named_parameters() if f".{name}." in key]
            self.optimizers[name] = torch.optim.AdamW(own, lr=LEARNING_RATE, weight_decay=0.0)

    def step_of(self, tenant: str, samples: list[dict[str, Any]], advantages: list[float]) -> tuple[float, float]:
        """Take one step of a tenant's adapter; returns what :meth:`step` does."""
        self.model.set_adapter(tenant)
        self.optimizer = self.optimizers[tenant]
        return self.step(samples, advantages)

    def save(self, tenant: str, folder: str) -> str:
        """Write a tenant's adapter as PEFT does; returns the directory."""
        self.model.save_pretrained(folder, selected_adapters=[tenant])
        return str(Path(folder, tenant))


def score(tenant: str, sample: dict[str, Any]) -> float:
    """Return the fraction of the characters that this tenant wants."""
    return sum(character in TENANTS[tenant] for character in sample["text"]) / NEW_TOKENS


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train the tenants in turn, then serve a guest; returns the figures of each step."""
    checkpoint = ray.put(make_checkpoint(args.seed))
    trainer = actor(Tenants, args.device).remote(checkpoint, args.device)
    adapters = len(TENANTS) + 1  # and the guest's
    rollout = actor(Rollout, args.device).remote(checkpoint, args.device, args.seed, LORA.to_dict(), adapters)
    about = describe(trainer, [rollout])
    rng = random.Random(args.seed)
    steps = []

    def ask(tenant: str) -> list[dict[str, Any]]:
        return ray.get(rollout.generate.remote(make_prompts(rng), tenant), timeout=STEP_TIMEOUT_S)

    with CheckpointEngineManager([trainer], [rollout], adapters=True) as manager:
        for tenant in TENANTS:
            print(manager.sync_weights(adapter=tenant), flush=True)
        for step in range(1, args.steps + 1):
            for tenant in TENANTS:
                samples = ask(tenant)
                rewards = [score(tenant, sample) for sample in samples]
                advantages = group_advantages(rewards)
                _, gap = ray.get(trainer.step_of.remote(tenant, samples, advantages), timeout=STEP_TIMEOUT_S)
                report = manager.sync_weights(adapter=tenant)
                steps.append(
                    {
                        "step": step,
                        "tenant": tenant,
                        "reward": fmean(rewards),
                        "logprob_gap": gap,
                        "base": report.base,
                        "adapter": report.adapter,
                        "sync_nbytes": report.nbytes,
                    }
                )
                print(f"step {step}/{args.steps}, {tenant}: reward {fmean(rewards):.2f}; {report}", flush=True)

        with tempfile.TemporaryDirectory(dir=args.shared) as folder:
            directory = ray.get(trainer.save.remote("digits", folder), timeout=STEP_TIMEOUT_S)
            manager.attach_adapter("guest", directory)
        guest = fmean(score("digits", sample) for sample in ask("guest"))
        manager.detach_adapter("guest")
        try:
            ask("guest")
        except ConfigError as error:
            refused = str(error.cause)  # without the actor's traceback
        print(f"the guest's adapter scored {guest:.2f} and is gone: {refused}", flush=True)
    return {**about, "steps": steps, "guest": {"reward": guest, "refused": refused}}


if __name__ == "__main__":
    shared = {"metavar": "DIR", "help": "a folder that all nodes see (default: a temporary one of this machine)"}
    sys.exit(job(__doc__, run, steps=12, shared=shared))
