"""Trainer and rollout on one NVIDIA GPU, by CUDA IPC: run by hand, prints one JSON line per result, exits non-zero on a
failure.

    python tests/gpu/one_gpu.py                        # needs one GPU, Ray; vLLM for the part named vllm
    python tests/gpu/one_gpu.py --device cpu --scale 16    # the same steps on a CPU through shared memory

Parts: ``module`` (a 7B-shaped model and a plain module of the same shapes: 20 syncs, then memory that was freed and
came again, then one rollout killed in mid-copy), ``vllm`` (a live engine of those shapes in a child process; then the
trainer's model goes to the CPU, which must give its memory back though the engine had it open), ``staged`` (a trainer
whose memory has no IPC handles, by expandable segments).

A raw copy of as many bytes on the same device, by the trainer alone and in the same run, is what the copy is compared
with: ``ratio`` is to be 1.25 at most, and ``beside_copy_ms``, which the driver's call takes more than that, 5 at most.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import ray
import torch

from tests.actors import at_launch, die
from tests.gpu.common import EngineRollout, RolloutBase, TrainerBase, attempt, cluster, get, killed, make, say, verdict
from twinkle_ray import CheckpointEngineManager, PeerLost
from twinkle_ray.shapes import config_of, shapes_of

MORE_MIB = 64


class OneTrainer(TrainerBase):
    def raw(self, nbytes: int) -> list[float]:
        """Seconds that a copy of so many bytes takes here, several times."""
        source, target = (torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        source.fill_(1)
        found = []
        for _ in range(6):
            if self.device == "cpu":
                start = time.perf_counter()
                target.copy_(source)
                found.append(time.perf_counter() - start)
                continue
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            target.copy_(source)
            after.record()
            torch.cuda.synchronize()
            found.append(before.elapsed_time(after) / 1e3)
        del source, target
        self.empty()
        return found[1:]

    def empty(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def renew(self, seed: int) -> None:
        """All memory goes, and is allocated again, most likely at the addresses that it had."""
        shapes = {name: tuple(value.shape) for name, value in self.model.named_parameters()}
        kept = type(self.model)
        self.model = None
        self.empty()
        self.model = kept(shapes, self.device)
        self.model.fill(seed)

    def counts(self) -> dict[str, int]:
        found = self._TrainActorMixin__twinkle_training.endpoint.group.counts
        return {name: getattr(found, name) for name in type(found).__slots__}


class OneRollout(RolloutBase):
    def die_late(self) -> None:
        at_launch(3, die)


def half(kind: Any, options: argparse.Namespace, *args: Any, **kwargs: Any) -> Any:
    return make(kind, options, *args, gpus=0.5, **kwargs)


def manage(options: argparse.Namespace, trainer: Any, rollout: Any, **more: Any) -> CheckpointEngineManager:
    mode = "auto" if options.device == "cuda" else "ipc"  # on a CPU it must be asked for
    return CheckpointEngineManager([trainer], [rollout], weight_sync_mode=mode, timeout_s=60, **more)


def figures(reports: list[Any], raw: list[float]) -> dict[str, Any]:
    copies = [report.replicas[0].seconds["wire"] for report in reports]
    calls = [report.seconds for report in reports]
    return {
        "mode": reports[-1].mode,
        "nbytes": reports[-1].nbytes,
        "tensors": reports[-1].tensors,
        "raw_ms": round(statistics.median(raw) * 1e3, 2),
        "copy_ms": round(statistics.median(copies) * 1e3, 2),
        "best_copy_ms": round(min(copies) * 1e3, 2),
        "ratio": round(statistics.median(copies) / statistics.median(raw), 3),
        "call_ms": round(statistics.median(calls) * 1e3, 2),
        "beside_copy_ms": round(statistics.median(c - w for c, w in zip(calls, copies, strict=True)) * 1e3, 2),
        "sender_ms": {k: round(v * 1e3, 2) for k, v in reports[-1].sender.items()},
        "replica_ms": {k: round(v * 1e3, 2) for k, v in reports[-1].replicas[0].seconds.items()},
    }


def steady(trainer: Any, rollout: Any, manager: CheckpointEngineManager, syncs: int) -> tuple[list[Any], float]:
    """Reports of syncs that are just like the one before, each checked; MiB that the device lost meanwhile."""
    reports = []
    before = 0
    for seed in range(1, syncs + 3):
        if seed == 3:
            get([trainer.counters.remote(), rollout.counters.remote()])
            before = get(trainer.memory.remote())
        get(trainer.step.remote(seed))
        get(trainer.empty.remote())  # the step has ended: it is not what is measured
        report = manager.sync_weights()
        ours, theirs = get([trainer.sums.remote(), rollout.sums.remote()])
        assert ours == theirs, f"sums differ after sync {seed}"
        if seed >= 3:
            assert set(report.phases) == {"transfer"}, report
            reports.append(report)
    return reports, (get(trainer.memory.remote()) - before) / 2**20


def part_module(options: argparse.Namespace) -> None:
    shapes = shapes_of(config_of("7b", options.scale))
    trainer, rollout = (
        half(OneTrainer, options, shapes, options.device),
        half(OneRollout, options, shapes, options.device),
    )
    with killed(trainer):
        with killed(rollout), manage(options, trainer, rollout) as manager:
            get([trainer.ping.remote(), rollout.ping.remote()], 90)
            idle = get(trainer.memory.remote())
            first = manager.sync_weights()
            raw = get(trainer.raw.remote(first.nbytes))
            reports, grown = steady(trainer, rollout, manager, 20)
            counts = get(trainer.counts.remote())
            say(
                "module",
                **figures(reports, raw),
                first_s=round(first.seconds, 3),
                sums_equal_after_each=True,
                taken_by_group_mib=round((get(trainer.memory.remote()) - idle) / 2**20, 1),
                grown_mib=round(grown, 1),
                counts=counts,
            )
            assert reports[-1].mode == "ipc"
            assert counts["staged"] == 0
            assert grown <= MORE_MIB
            for seed in (101, 102):
                get(trainer.renew.remote(seed))
                manager.sync_weights()
                assert get(trainer.sums.remote()) == get(rollout.sums.remote())
            say("memory_freed_and_allocated_again", equal=True)
            get(rollout.die_late.remote())
            manager.bucket_size = first.nbytes // 16
            start = time.monotonic()
            try:
                manager.sync_weights()
                raise AssertionError("nobody noticed")
            except PeerLost as error:
                lost = error
            assert lost.actors == ("rollout[0]",)
            say("rollout_killed_in_mid_copy", seconds=round(time.monotonic() - start, 2), error=str(lost)[:200])
        fresh = half(OneRollout, options, shapes, options.device)
        with killed(fresh), manage(options, trainer, fresh) as manager:
            get(trainer.step.remote(5))
            manager.sync_weights()
            assert get(trainer.sums.remote()) == get(fresh.sums.remote())
            say("another_rollout_after_that", equal=True)


def part_vllm(options: argparse.Namespace) -> None:
    config = config_of("7b", options.scale)
    shapes = shapes_of(config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        trainer = half(OneTrainer, options, shapes, options.device)
        rollout = half(EngineRollout, options, options.device, True)
        more = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 30} if options.device == "cuda" else {}
        with killed(trainer, rollout):
            get([trainer.ping.remote(), rollout.start.remote(folder, load_format="dummy", **more)], 150)
            get(rollout.expect.remote(shapes))
            with manage(options, trainer, rollout) as manager:
                first = manager.sync_weights()
                raw = get(trainer.raw.remote(first.nbytes))
                reports, grown = steady(trainer, rollout, manager, 10)
                last = [name for name in shapes if name.startswith("model.layers.1.")] + ["model.norm.weight"]
                ours, theirs = get([trainer.weights_digest.remote(last), rollout.weights_digest.remote(last)], 100)
                assert ours == theirs
                say(
                    "vllm",
                    child=True,
                    **figures(reports, raw),
                    first_s=round(first.seconds, 2),
                    path=reports[-1].replicas[0].path,
                    direct=round(reports[-1].replicas[0].direct_bytes / reports[-1].nbytes, 4),
                    sums_equal_after_each=True,
                    sha256_equal=len(ours),
                    grown_mib=round(grown, 1),
                )
                assert reports[-1].mode == "ipc"
                assert grown <= MORE_MIB
                before = get(trainer.memory.remote())
                manager.offload_trainers()
                freed = before - get(trainer.memory.remote())
                manager.reload_trainers()
                get(trainer.step.remote(50))
                again = manager.sync_weights()
                assert get(trainer.sums.remote()) == get(rollout.sums.remote())
                say("offloaded", freed_mib=round(freed / 2**20), mode=again.mode, phases=list(again.phases))
                assert options.device == "cpu" or freed >= 0.95 * first.nbytes
            # What of the copy's time is spent in launching it: here a quarter as many chunks are launched.
            with manage(options, trainer, rollout, bucket_size=2 << 30) as manager:
                reports, _ = steady(trainer, rollout, manager, 10)
                say("large_buckets", **figures(reports, raw))


def part_staged(options: argparse.Namespace) -> None:
    shapes = shapes_of(config_of("7b", options.scale * 4))
    expandable = {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    gpus = 0.5 if options.device == "cuda" else 0
    kind = ray.remote(num_gpus=gpus, num_cpus=1, runtime_env=expandable)(OneTrainer)
    trainer, rollout = kind.remote(shapes, options.device), half(OneRollout, options, shapes, options.device)
    with killed(trainer, rollout), manage(options, trainer, rollout, bucket_size=64 << 20) as manager:
        get([trainer.ping.remote(), rollout.ping.remote()], 90)
        manager.sync_weights()
        reports, grown = steady(trainer, rollout, manager, 3)
        counts = get(trainer.counts.remote())
        say("staged", **figures(reports, get(trainer.raw.remote(reports[0].nbytes))), counts=counts, grown_mib=grown)
        assert (counts["staged"] > 0) == (options.device == "cuda")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=["module", "vllm", "staged"])
    parser.set_defaults(gpus=1)
    options = parser.parse_args()
    patience = 1 if options.device == "cuda" else 4
    with cluster(options):
        for part, seconds in (("module", 60.0), ("vllm", 160.0), ("staged", 25.0)):
            if part in options.only:
                attempt(part, functools.partial(globals()[f"part_{part}"], options), seconds * patience)
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
