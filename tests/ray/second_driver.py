"""A driver of its own for test_drivers.py: joins the cluster, syncs its own pair ten times, prints one JSON line."""

from __future__ import annotations

import json
import sys

import ray

from tests.actors import Rollout, Trainer
from twinkle_ray import CheckpointEngineManager

address, seed, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
trainer, rollout = Trainer.options(**options).remote(seed), Rollout.options(**options).remote(seed + 100)
with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
    for step in range(10):
        ray.get(trainer.step.remote(seed * 1000 + step), timeout=30)
        manager.sync_weights()
    held = ray.get([trainer.digests.remote(), rollout.digests.remote()], timeout=30)
print(json.dumps({"equal": held[0] == held[1], "digest": held[0]["big"]}))
