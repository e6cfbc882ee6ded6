"""Drivers for test_metrics.py and test_status.py. They print JSON lines and read commands.

``python -m tests.ray.watched head TEMP_DIR`` starts a cluster with metrics and a dashboard, and syncs on it. ``... slow
ADDRESS`` is in the middle of a slow sync.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import ray

from tests.actors import Rollout, RolloutBase, Trainer, TrainerBase, at_launch, no_power
from twinkle_ray import CheckpointEngineManager, SyncError


class NamedBase(TrainerBase):
    def __repr__(self) -> str:
        return "as the user says"


class SlowBase(RolloutBase):
    """Everything is loaded, chunk by chunk, and slowly."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        from twinkle_ray.sinks import ModuleSink

        ready = ModuleSink.ready

        def slow(sink: ModuleSink, tensors: Any) -> None:
            time.sleep(4.0)
            ready(sink, tensors)

        ModuleSink.ready = slow  # type: ignore[method-assign]
        ModuleSink._ranges = lambda *_: None  # type: ignore[method-assign]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def hear(command: str) -> None:
    line = sys.stdin.readline().strip()
    if line != command:
        raise SystemExit(f"heard {line!r} instead of {command!r}")


def head(temp_dir: str) -> None:
    context = ray.init(
        num_cpus=4,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=0,
        logging_config=ray.LoggingConfig(encoding="JSON", log_level="INFO"),
        _temp_dir=temp_dir,
    )
    node = context.address_info
    trainer, rollouts = Trainer.remote(1), [Rollout.remote(2), Rollout.remote(3)]
    named = ray.remote(num_cpus=0.1)(NamedBase).remote(4)
    ray.get(named.ping.remote(), timeout=60)
    with CheckpointEngineManager([trainer], rollouts, timeout_s=60, bucket_size=4096) as manager:
        reports = []
        for step in range(2):
            ray.get(trainer.step.remote(step), timeout=30)
            reports.append(asdict(manager.sync_weights()))
        ray.get(rollouts[1].call.remote(lambda _: at_launch(1, no_power)), timeout=30)
        failure: dict[str, Any] = {}
        try:
            manager.sync_weights()
        except SyncError as error:
            failure = {"phase": error.phase, "actors": error.actors, "type": type(error).__name__}
            failure["versions"] = error.versions
        say(
            dashboard=f"http://{context.dashboard_url}",
            metrics=f"http://127.0.0.1:{node['metrics_export_port']}/metrics",
            reports=reports,
            failure=failure,
        )
        hear("recover")
        reports.append(asdict(manager.sync_weights()))
        manager.remove_rollout(rollouts[1])
        say(report=reports[-1])
        hear("close")
    say(closed=True)
    sys.stdin.read()


def slow(address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    trainer, rollout = Trainer.remote(1), ray.remote(num_cpus=0.1)(SlowBase).remote(2)
    manager = CheckpointEngineManager([trainer], [rollout], bucket_size=500, timeout_s=120)
    syncing = threading.Thread(target=manager.sync_weights, daemon=True)
    syncing.start()
    while not ray.get(rollout.checkpoint_status.remote(), timeout=60).step:
        time.sleep(0.05)
    say(job=ray.get_runtime_context().get_job_id(), syncing=syncing.is_alive())
    sys.stdin.read()


if __name__ == "__main__":
    {"head": head, "slow": slow}[sys.argv[1]](sys.argv[2])
