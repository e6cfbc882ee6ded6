"""The main job on two NVIDIA GPUs: run by hand, prints one JSON line per result, exits non-zero on a failure.

    python tests/gpu/two_gpus.py                       # needs two GPUs, cupy, Ray; vLLM for the part named vllm
    python tests/gpu/two_gpus.py --device cpu --scale 16   # the same steps on a CPU over Gloo, with small shapes

Parts: ``payload`` (the tensor list through engines driven by hand), ``module`` (a 7B-shaped model, 20 syncs),
``deaths`` (peers that never come, are killed before and in mid-transfer), ``vllm`` (a live engine of the 7B's shapes).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import ray
import torch

from tests.gpu.common import (
    Common,
    EngineRollout,
    RolloutBase,
    TrainerBase,
    attempt,
    cluster,
    get,
    killed,
    make,
    say,
    verdict,
)
from tests.payload import facts, payload
from twinkle_ray import CheckpointEngineManager, PeerLost, SyncAborted, SyncError, SyncTimeout
from twinkle_ray.checkpoint_engine import GlooCheckpointEngine, NCCLCheckpointEngine
from twinkle_ray.shapes import config_of, shapes_of


class HandBase(Common):
    def __init__(self, device: str, **kwargs: Any) -> None:
        self.device = device
        self.engine = (NCCLCheckpointEngine if device == "cuda" else GlooCheckpointEngine)(**kwargs)

    async def prepare(self, master: bool) -> Any:
        self.engine.is_master = master
        return self.engine.prepare()

    def init(self, **kwargs: Any) -> None:
        self.engine.init_process_group(**kwargs)

    async def send(self, bucket_size: int) -> None:
        await self.engine.send_weights((n, t.to(self.device)) for n, t in payload(bucket_size))

    async def send_slowly(self) -> None:
        def weights() -> Any:
            for i in range(2000):
                time.sleep(0.02)
                yield f"w{i}", torch.zeros(1 << 20, device=self.device)

        await self.engine.send_weights(weights())

    async def receive(self) -> Any:
        return [facts(name, tensor) async for name, tensor in self.engine.receive_weights()]

    async def ping(self) -> float:
        return time.time()

    async def finalize(self) -> None:
        self.engine.finalize()


def part_payload(options: argparse.Namespace) -> None:
    for bucket_size in (1 << 10, 64 << 10, 512 << 20):
        hands = [make(HandBase, options, options.device, bucket_size=bucket_size, timeout=60.0) for _ in range(2)]
        with killed(*hands):
            metadata = get([h.prepare.remote(i == 0) for i, h in enumerate(hands)], 90)[0]
            get([h.init.remote(rank=i, world_size=2, master_metadata=metadata) for i, h in enumerate(hands)])
            start = time.monotonic()
            sent = hands[0].send.remote(bucket_size)
            received = get(hands[1].receive.remote())
            get(sent)
            seconds = time.monotonic() - start
            expected = [facts(name, tensor) for name, tensor in payload(bucket_size)]
            assert received == expected, [a for a, b in zip(received, expected, strict=False) if a != b][:3]
            say("payload", bucket_size=bucket_size, tensors=len(expected), equal=True, seconds=round(seconds, 3))


def part_module(options: argparse.Namespace) -> None:
    shapes = shapes_of(config_of("7b", options.scale))
    trainer, rollout = (make(kind, options, shapes, options.device) for kind in (TrainerBase, RolloutBase))
    with (
        killed(trainer, rollout),
        CheckpointEngineManager([trainer], [rollout], weight_sync_mode=options.mode, timeout_s=60) as manager,
    ):
        get([trainer.ping.remote(), rollout.ping.remote()], 90)
        before = get([trainer.memory.remote(), rollout.memory.remote()])
        times: list[float] = []
        first = None
        for seed in range(1, 21):
            get(trainer.step.remote(seed))
            report = manager.sync_weights()
            ours, theirs = get([trainer.sums.remote(), rollout.sums.remote()])
            assert ours == theirs, f"sums differ after sync {seed}"
            if first is None:
                first = report
            else:
                times.append(report.seconds)
        after = get([trainer.memory.remote(), rollout.memory.remote()])
        start = time.monotonic()
        checked = manager.verify()
        say(
            "module",
            mode=report.mode,
            nbytes=report.nbytes,
            tensors=report.tensors,
            first_s=round(first.seconds, 3),
            median_ms=round(statistics.median(times) * 1e3, 2),
            best_ms=round(min(times) * 1e3, 2),
            gb_per_s=round(report.nbytes / statistics.median(times) / 1e9, 1),
            phases_ms={k: round(v * 1e3, 2) for k, v in report.phases.items()},
            replica_ms={k: round(v * 1e3, 2) for k, v in report.replicas[0].seconds.items()},
            sums_equal_after_each=True,
            sha256_equal=checked.compared,
            verify_s=round(time.monotonic() - start, 2),
            extra_mib=[round((b - a) / 2**20) for a, b in zip(before, after, strict=True)],
        )


def part_deaths(options: argparse.Namespace) -> None:
    hands = [make(HandBase, options, options.device, timeout=4.0) for _ in range(2)]
    with killed(*hands):
        metadata = get(hands[0].prepare.remote(True), 90)
        get(hands[1].ping.remote(), 90)
        start = time.monotonic()
        try:
            get(hands[0].init.remote(rank=0, world_size=2), 20)
            raise AssertionError("a group of two was made by one")
        except SyncTimeout as error:
            say(
                "never_comes",
                seconds=round(time.monotonic() - start, 2),
                deadline_s=4.0,
                error=str(error).splitlines()[-1],
            )
        get(hands[0].ping.remote(), 1)
        metadata = get(hands[0].prepare.remote(True))
        get([h.init.remote(rank=i, world_size=2, master_metadata=metadata) for i, h in enumerate(hands)], 20)
        say("new_generation_after_never_comes", ok=True)
    for victim in (1, 0):
        hands = [make(HandBase, options, options.device, timeout=60.0) for _ in range(2)]
        with killed(*hands):
            metadata = get(hands[0].prepare.remote(True), 90)
            get(hands[1].prepare.remote(False), 90)
            get([h.init.remote(rank=i, world_size=2, master_metadata=metadata) for i, h in enumerate(hands)])
            refs = [hands[0].send_slowly.remote(), hands[1].receive.remote()]
            time.sleep(2)
            start = time.monotonic()
            ray.kill(hands[victim])
            try:
                get(refs[1 - victim], 20)
                raise AssertionError("the survivor did not notice")
            except (PeerLost, SyncAborted) as error:
                took, why = time.monotonic() - start, str(error).splitlines()[-1]
            get(hands[1 - victim].ping.remote(), 2)
            say("killed_in_mid_transfer", victim=victim, seconds=round(took, 3), error=why)
            assert took < 2.5
    shapes = shapes_of(config_of("7b", options.scale))
    trainer, rollout = (make(kind, options, shapes, options.device) for kind in (TrainerBase, RolloutBase))
    with killed(trainer):
        manager = CheckpointEngineManager([trainer], [rollout], weight_sync_mode=options.mode, timeout_s=30)
        manager.sync_weights()
        when: list[float] = []

        def kill() -> None:
            time.sleep(0.3)
            when.append(time.monotonic())
            ray.kill(rollout)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            while True:
                manager.sync_weights()
        except SyncError as error:
            took = time.monotonic() - when[0]
            say("manager_rollout_killed", seconds=round(took, 3), type=type(error).__name__, actors=error.actors)
            named = error.actors
        thread.join()
        assert named == ("rollout[0]",)
        assert took < 4
        time.sleep(1.0)
        get(trainer.ping.remote(), 5)
        fresh = make(RolloutBase, options, shapes, options.device)
        with killed(fresh):
            get(fresh.ping.remote(), 90)
            again = CheckpointEngineManager([trainer], [fresh], weight_sync_mode=options.mode, timeout_s=30)
            start = time.monotonic()
            again.sync_weights()
            assert get(trainer.sums.remote()) == get(fresh.sums.remote())
            say("new_group_on_the_survivor", seconds=round(time.monotonic() - start, 2), equal=True)


def part_vllm(options: argparse.Namespace) -> None:
    config = config_of("7b", options.scale)
    shapes = shapes_of(config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for child in (False, True):
            trainer = make(TrainerBase, options, shapes, options.device)
            rollout = make(EngineRollout, options, options.device, child)
            more = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": None} if options.device == "cuda" else {}
            with killed(trainer, rollout):
                get([trainer.ping.remote(), rollout.start.remote(folder, load_format="dummy", **more)], 200)
                with CheckpointEngineManager(
                    [trainer], [rollout], weight_sync_mode=options.mode, timeout_s=60
                ) as manager:
                    before = get(rollout.generate.remote())
                    reports = [manager.sync_weights() for _ in range(11)]
                    after = get(rollout.generate.remote())
                    last = [n for n in shapes if n.startswith("model.layers.27.")] + ["model.norm.weight"]
                    get(trainer.step.remote(7))
                    reports.append(manager.sync_weights())
                    ours, theirs = get([trainer.weights_digest.remote(last), rollout.weights_digest.remote(last)], 100)
                    assert ours == theirs, {n: (ours[n], theirs.get(n)) for n in ours if ours[n] != theirs.get(n)}
                    times = [r.seconds for r in reports[1:]]
                    say(
                        "vllm",
                        child=child,
                        mode=reports[-1].mode,
                        path=reports[-1].replicas[0].path,
                        first_s=round(reports[0].seconds, 2),
                        median_ms=round(statistics.median(times) * 1e3, 1),
                        phases_ms={k: round(v * 1e3, 1) for k, v in reports[-1].phases.items()},
                        replica_ms={k: round(v * 1e3, 1) for k, v in reports[-1].replicas[0].seconds.items()},
                        compared=len(ours),
                        direct=round(reports[-1].replicas[0].direct_bytes / reports[-1].nbytes, 4),
                        generation_changed=before != after,
                    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--mode", default="auto", help="weight_sync_mode: auto reads over NVLink, nccl does not")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=["payload", "module", "deaths", "vllm"])
    options = parser.parse_args()
    with cluster(options):
        for part in options.only:
            attempt(part, functools.partial(globals()[f"part_{part}"], options))
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
