"""Two raylets as two nodes of a cluster of its own, for ``test_nodes.py``: ``python -m tests.ray.two_nodes FOLDER``.

Syncs across them, kills one raylet with all that runs on it, and prints what became of it as one JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

from tests.actors import Rollout, Trainer
from twinkle_ray import CheckpointEngineManager, SyncError


def main(folder: str) -> None:
    # Ray writes the head's address into its usual folder, whether there is one or not.
    os.environ["RAY_TMPDIR"] = folder
    os.makedirs(get_default_ray_temp_dir(), exist_ok=True)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"first": 10}, "temp_dir": folder, "include_dashboard": False},
    )
    other = cluster.add_node(num_cpus=2, resources={"second": 10})
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
    cluster.wait_for_nodes(timeout=60)
    try:
        print(json.dumps(run(cluster, other)), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(cluster: Cluster, other: Any) -> dict[str, Any]:
    def get(refs: Any) -> Any:
        return ray.get(refs, timeout=60)

    trainer = Trainer.options(resources={"first": 1}).remote(1)
    rollouts = [Rollout.options(resources={node: 1}).remote(seed) for node, seed in (("first", 5), ("second", 6))]

    def equal(*held: Any) -> bool:
        want = get(trainer.digests.remote())
        return all(digests == want for digests in get([rollout.digests.remote() for rollout in held]))

    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=30, on_dead_rollout="error")
    found: dict[str, Any] = {"nodes": len({node["NodeID"] for node in ray.nodes() if node["Alive"]}), "across": []}
    for step in range(3):
        get(trainer.step.remote(step))
        manager.sync_weights()
        found["across"].append(equal(*rollouts))
    pid = get(rollouts[1].pid.remote())
    cluster.remove_node(other, allow_graceful=False)
    os.kill(pid, signal.SIGKILL)  # a worker would outlive its raylet by seconds; a machine does not
    get(trainer.step.remote(7))
    start = time.monotonic()
    try:
        manager.sync_weights()
    except SyncError as error:
        found["error"] = [type(error).__name__, list(error.actors), str(error), time.monotonic() - start]
    start = time.monotonic()
    get(rollouts[0].ping.remote())
    found["ping"] = time.monotonic() - start
    manager.remove_rollout("rollout[1]")
    manager.sync_weights()
    found["afterwards"] = equal(rollouts[0])
    replacement = Rollout.options(resources={"first": 1}).remote(8)
    found["name"] = manager.add_rollout(replacement)
    manager.sync_weights()
    found["replaced"] = equal(rollouts[0], replacement)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
