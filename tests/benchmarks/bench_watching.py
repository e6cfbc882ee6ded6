"""What it costs a sync to be watched: the caller's time, and that of the background thread.

    python tests/benchmarks/bench_watching.py

*caller* is all that one ``sync_weights`` does for metrics and status; *thread* is what the background thread does for
one sync and all gauges, at most twice a second; *record* is one status record written into Ray's store.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray

from twinkle_ray.status import Store
from twinkle_ray.types import OpState, OpStatus, ReplicaReport, SyncReport
from twinkle_ray.watching import Watch

ROUNDS = 2000


def report(version: int, names: list[str]) -> SyncReport:
    seconds = {"pause": 1e-4, "wait": 1e-3, "wire": 0.041, "load": 1e-4, "reset": 1e-4}
    sizes = {"tensors": 339, "nbytes": 15 << 30}
    return SyncReport(
        version=version,
        mode="nccl",
        **sizes,
        seconds=0.0465,
        phases={"transfer": 0.046},
        sender={"fence": 1e-5, "gather": 1e-3, "wire": 0.041},
        base="plain",
        replicas=tuple(
            ReplicaReport(name=n, version=version, path="in place", **sizes, direct_bytes=15 << 30, seconds=seconds)
            for n in names
        ),
    )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp") as temp_dir:
        ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.WARNING, _temp_dir=temp_dir)
        for count in (1, 8, 64):
            names = [f"rollout[{i}]" for i in range(count)]
            watch, polled = Watch(), OpStatus(op="receive", state=OpState.RUNNING, step=3, steps=9)
            caller, thread, record = [], [], []
            with watch._lock:  # this is the thread now
                for version in range(1, ROUNDS + 1):
                    made = report(version, names)
                    start = time.perf_counter()
                    with watch.sync(names) as sync:
                        sync.phases["transfer"] = 0.0
                        watch.sending(version)
                        for name in names:
                            watch.polled(name, polled)
                        sync.report = made
                    caller.append(time.perf_counter() - start)
                    start = time.perf_counter()
                    watch._record()
                    thread.append(time.perf_counter() - start)
                store = Store()
                for _ in range(100):
                    start = time.perf_counter()
                    store.write(watch._status(None))
                    record.append(time.perf_counter() - start)
            watch.close()
            took = ", ".join(
                f"{name} {statistics.median(values) * 1e6:.0f} us"
                for name, values in (("caller", caller), ("thread", thread), ("record", record))
            )
            print(f"{count} rollouts: {took} (medians)")
        ray.shutdown()


if __name__ == "__main__":
    main()
