"""Rollouts that come and go while a job runs: one is added, one dies, one is sent away, and the training goes on.

    ray job submit --working-dir . -- python examples/rlhf_elastic.py

The task is that of ``rlhf_grpo.py``. A rollout that has joined refuses to generate until a sync has filled it; one
that is dead is noticed by the next sync, which drops it and brings the others to the new version
(``on_dead_rollout="drop"``); one that was removed goes on serving what it holds, for whoever still asks.
"""

from __future__ import annotations

import argparse
import random
import sys
from statistics import fmean
from typing import Any

import ray
from rlhf_grpo import (
    START_TIMEOUT_S,
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

from twinkle_ray import CheckpointEngineManager, ReplicaUnavailable


def collect(rollouts: dict[str, Any], prompts: list[str]) -> list[dict[str, Any]]:
    """Let the rollouts share the prompts; what a dead one was given goes to the others."""
    samples: list[dict[str, Any]] = []
    living = dict(rollouts)
    while prompts:
        shares = {name: prompts[i :: len(living)] for i, name in enumerate(living)}
        refs = {name: living[name].generate.remote(share) for name, share in shares.items() if share}
        prompts = []
        for name, ref in refs.items():
            try:
                samples += ray.get(ref, timeout=STEP_TIMEOUT_S)
            except ray.exceptions.RayActorError:
                print(f"{name} is dead; others take its prompts", flush=True)
                del living[name]
                prompts += shares[name]
    return samples


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train while rollouts come and go; returns the figures of each step."""
    if args.steps < 5:
        raise SystemExit("--steps must be at least 5, one for each thing that happens")
    joins, dies, leaves = (round(args.steps * part) for part in (0.2, 0.5, 0.8))
    checkpoint = ray.put(make_checkpoint(args.seed))
    trainer = actor(Trainer, args.device).remote(checkpoint, args.device)
    first, second, third = (actor(Rollout, args.device).remote(checkpoint, args.device, i) for i in range(3))
    about = describe(trainer, [first, second])  # and not the third, which comes up meanwhile
    rollouts = {"rollout[0]": first, "rollout[1]": second}
    rng = random.Random(args.seed)
    steps = []
    with CheckpointEngineManager([trainer], [first, second], on_dead_rollout="drop") as manager:
        print(manager.sync_weights(), flush=True)
        for step in range(1, args.steps + 1):
            happened = []
            if step == dies:
                ray.kill(second)
                happened.append("rollout[1] was killed")
            samples = collect(rollouts, make_prompts(rng))
            rewards = [reward(sample["prompt"], sample["text"]) for sample in samples]
            _, gap = ray.get(trainer.step.remote(samples, group_advantages(rewards)), timeout=STEP_TIMEOUT_S)

            if step == joins:
                ray.get(third.describe.remote(), timeout=START_TIMEOUT_S)
                name = manager.add_rollout(third)
                try:
                    ray.get(third.generate.remote(["digit 00>"]), timeout=STEP_TIMEOUT_S)
                except ReplicaUnavailable as error:
                    happened.append(f"{name} joined: {error.cause}")
                rollouts[name] = third
            if step == leaves:
                manager.remove_rollout("rollout[0]")
                happened.append("rollout[0] was removed")
                del rollouts["rollout[0]"]
            report = manager.sync_weights()
            for name in report.dropped:
                happened.append(f"{name} was dropped")
                del rollouts[name]
            for what in happened:
                print(f"  {what}", flush=True)
            steps.append(
                {
                    "step": step,
                    "reward": fmean(rewards),
                    "logprob_gap": gap,
                    "samples": len(samples),
                    "happened": happened,
                    "versions": {replica.name: replica.version for replica in report.replicas},
                    "sync_seconds": report.seconds,
                }
            )
            print(f"step {step}/{args.steps}: reward {fmean(rewards):.2f}; {report}", flush=True)
        last = ray.get(first.weights_version.remote(), timeout=STEP_TIMEOUT_S)
    return {**about, "steps": steps, "removed_holds": last}


if __name__ == "__main__":
    sys.exit(job(__doc__, run, steps=15))
