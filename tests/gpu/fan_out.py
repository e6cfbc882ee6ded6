"""One trainer and several engines, each on GPUs of its own: what two GPUs cannot show. Run by hand on four or eight.

    python tests/gpu/fan_out.py                                  # one trainer, and a rollout on each other GPU
    python tests/gpu/fan_out.py --device cpu --scale 16 --rollouts 2   # the same steps on a CPU

Prints one JSON line per result and exits non-zero on a failure. Parts:

``killed``  7B shapes into a live vLLM in each rollout's process. One rollout is killed in mid-sync: the others are
            released within 2 s of it, and the next sync, without it, is right (sums on the device)
``mixed``   a rollout of TP 2 beside one of TP 1, fed by one trainer: SHA-256 of one layer's tensors, the embedding and
            the head equal; seconds, and the share of a raw broadcast's rate
``experts`` 30B-A3B shapes into the rollouts: the same

How long a sync to several takes beside one to one, in the same run, is what the benchmark shows:

    python tests/benchmarks/bench_sync.py --device cuda --scale 1 --models 7b --rollouts engine --replicas 1 3
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray
import torch

from tests.actors import at_launch, die
from tests.gpu.common import EngineRollout, TrainerBase, attempt, cluster, get, killed, make, say, verdict
from twinkle_ray import CheckpointEngineManager, PeerLost
from twinkle_ray.bench import broadcast_raw, raw_in_worker
from twinkle_ray.shapes import config_of, shapes_of

_START_S = 400.0
_RELEASED_S = 2.0
_SYNCS = 10


class FanTrainer(TrainerBase):
    def raw(self, nbytes: int, rounds: int) -> list[float]:
        return broadcast_raw(self._TrainActorMixin__twinkle_training.endpoint, nbytes, rounds)


class FanRollout(EngineRollout):
    def raw(self, nbytes: int, rounds: int) -> list[list[float]]:
        found: list[list[float]] = self.llm.collective_rpc(raw_in_worker, args=(nbytes, rounds))
        return found

    def die_at_launch(self, number: int, file: str) -> None:
        def note_and_die() -> None:
            Path(file).write_text(str(time.time()))
            die()

        at_launch(number, note_and_die)


@dataclass(frozen=True, kw_only=True)
class Fan:
    options: argparse.Namespace
    trainer: Any
    rollouts: list[Any]
    names: list[str]

    def digests_equal(self) -> int:
        ours, *theirs = get([one.weights_digest.remote(self.names) for one in (self.trainer, *self.rollouts)], 120)
        assert all(their == ours for their in theirs), "SHA-256 differ"
        return len(ours)

    def timed(self, manager: CheckpointEngineManager) -> dict[str, Any]:
        """Steady syncs beside raw broadcasts in the same group."""
        reports = []
        for seed in range(2 + _SYNCS):
            get(self.trainer.step.remote(seed))
            get(self.trainer.counters.remote())  # the step has ended: it is not what is measured
            reports.append(manager.sync_weights())
        nbytes = reports[-1].nbytes
        sent, *received = get([one.raw.remote(nbytes, _SYNCS) for one in (self.trainer, *self.rollouts)], 120)
        raw = statistics.median(map(max, zip(sent, *(w for workers in received for w in workers), strict=True)))
        ours = statistics.median(report.seconds for report in reports[2:])
        return {
            "mode": reports[-1].mode,
            "tensors": reports[-1].tensors,
            "nbytes": nbytes,
            "first_s": round(reports[0].seconds, 2),
            "raw_ms": round(raw * 1e3, 2),
            "sync_ms": round(ours * 1e3, 2),
            "ratio": round(ours / raw, 3),
            "direct": [round(replica.direct_bytes / nbytes, 4) for replica in reports[-1].replicas],
        }


@contextmanager
def fan(options: argparse.Namespace, model: str, sizes: list[int], share: float) -> Iterator[Fan]:
    """A trainer, and an engine of each of these tensor-parallel sizes."""
    config = config_of(model, options.scale)
    shapes = shapes_of(config)
    names = [name for name in shapes if ".layers.1." in name or ".layers." not in name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        trainer = make(FanTrainer, options, shapes, options.device)
        rollouts, started = [], []
        for size in sizes:
            more: dict[str, Any] = {"load_format": "dummy", "tensor_parallel_size": size}
            if options.device == "cuda":
                more |= {"gpu_memory_utilization": share, "kv_cache_memory_bytes": 1 << 30}
            if size > 1:
                more["distributed_executor_backend"] = "mp"
            rollouts.append(make(FanRollout, options, options.device, gpus=size))
            started.append(rollouts[-1].start.remote(folder, **more))
        with killed(trainer, *rollouts):
            get([trainer.ping.remote(), *started], _START_S)
            get([rollout.expect.remote(shapes) for rollout in rollouts])
            yield Fan(options=options, trainer=trainer, rollouts=rollouts, names=names)


def part_killed(options: argparse.Namespace) -> None:
    with (
        fan(options, "7b", [1] * options.rollouts, 0.5) as one,
        tempfile.TemporaryDirectory() as folder,
        CheckpointEngineManager([one.trainer], one.rollouts, timeout_s=60) as manager,
    ):
        figures = one.timed(manager)
        sums = get([actor.sums.remote() for actor in (one.trainer, *one.rollouts)], 120)
        assert all(theirs == sums[0] for theirs in sums), "sums differ"
        say("seven", rollouts=options.rollouts, sums_equal=True, **figures)
        manager.bucket_size = figures["nbytes"] // 16
        manager.sync_weights()
        note = Path(folder) / "died"
        get(one.rollouts[-1].die_at_launch.remote(5, str(note)))
        get(one.trainer.step.remote(77))
        try:
            manager.sync_weights()
            raise AssertionError("nobody noticed")
        except PeerLost as error:
            lost = error
        noticed = time.time()
        answered = get([rollout.ping.remote() for rollout in one.rollouts[:-1]])
        died = float(note.read_text())
        seconds = {"noticed_s": noticed - died, "released_s": max(answered) - died}
        say("released", actors=lost.actors, **{name: round(value, 2) for name, value in seconds.items()})
        assert lost.actors == (f"rollout[{options.rollouts - 1}]",)
        assert seconds["released_s"] <= _RELEASED_S
        manager.remove_rollout(one.rollouts[-1])
        manager.sync_weights()
        left = get([actor.sums.remote() for actor in (one.trainer, *one.rollouts[:-1])], 120)
        assert all(theirs == left[0] for theirs in left), "sums differ"
        say("after", rollouts=len(left) - 1, sums_equal=True)


def part_mixed(options: argparse.Namespace) -> None:
    with (
        fan(options, "7b", [2, 1], 0.5) as one,
        CheckpointEngineManager([one.trainer], one.rollouts, timeout_s=60) as manager,
    ):
        figures = one.timed(manager)
        say("mixed", tp=[2, 1], sha256_equal=one.digests_equal(), **figures)


def part_experts(options: argparse.Namespace) -> None:
    with (
        fan(options, "30b-a3b", [1] * options.rollouts, 0.8) as one,
        CheckpointEngineManager([one.trainer], one.rollouts, timeout_s=120) as manager,
    ):
        figures = one.timed(manager)
        say("experts", rollouts=options.rollouts, sha256_equal=one.digests_equal(), **figures)


PARTS = {"killed": part_killed, "mixed": part_mixed, "experts": part_experts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--rollouts", type=int, help="default: as many as there are other GPUs")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    if options.rollouts is None:
        options.rollouts = torch.cuda.device_count() - 1
    if options.rollouts < 1:
        parser.error("one GPU for the trainer and one for each rollout")
    with cluster(options):
        gpus = ray.cluster_resources().get("GPU", 0) if options.device == "cuda" else 4
        for part in options.only:
            if part == "mixed" and gpus < 4:
                say(part, left_out=f"it takes 4 GPUs, of which there are {gpus:.0f}")
                continue
            attempt(part, functools.partial(PARTS[part], options), 540)
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
