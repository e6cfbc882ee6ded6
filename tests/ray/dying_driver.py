"""A driver that syncs named actors of a running cluster until it is killed: ``python -m tests.ray.dying_driver ADDRESS
NAMESPACE TRAINER ROLLOUT``. Prints a line after each sync and one before."""

from __future__ import annotations

import logging
import sys

import ray

from twinkle_ray import CheckpointEngineManager


def main(address: str, namespace: str, trainer: str, rollout: str) -> None:
    ray.init(address, namespace=namespace, logging_level=logging.ERROR, log_to_driver=False)
    manager = CheckpointEngineManager([ray.get_actor(trainer)], [ray.get_actor(rollout)], bucket_size=1024)
    while True:
        print("syncing", flush=True)
        manager.sync_weights()
        print("synced", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
