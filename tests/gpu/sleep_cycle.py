"""Trainer and vLLM in turn on one NVIDIA GPU: rounds of sleep, train step, wake weights, sync, wake KV cache, generate.

    python tests/gpu/sleep_cycle.py                    # needs one GPU, Ray, vLLM; about two minutes
    python tests/gpu/sleep_cycle.py --device cpu --rounds 4    # the same steps on a CPU, whose vLLM cannot sleep

Prints one JSON line per result and exits non-zero on a failure. What only a GPU has is ``null`` on a CPU. Parts, each
with an engine in the actor's process and with one in a child process:

``cycle``     after each round the tokens are those of an engine that loaded the same weights from disk; device memory
              is back at the same figure each round, awake and asleep, within 64 MiB
``refused``   a request while anything sleeps is refused, and the engine lives on
``offload``   ``sync_and_wake(offload=True)``, and naive mode with the train group that it makes of the trainer
``discarded`` a sleep at level 2: nothing is served before a sync has brought the weights back
"""

from __future__ import annotations

import argparse
import functools
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
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray
import torch

from tests.gpu.common import attempt, cluster, get, killed, say, verdict
from tests.gpu.direct_vllm import CheckpointTrainer, SmallRollout
from twinkle_ray import CheckpointEngineManager, Placement, ReplicaUnavailable

MODEL = "qwen3"
PARTS = ("cycle", "refused", "offload", "discarded")
_MIB = 1 << 20
_SLACK = 64 * _MIB
_KV_CACHE = 2048 * _MIB
_STEP = 512 * _MIB
_START_S = 240.0

Tokens = list[list[int]]


class Trainer(CheckpointTrainer):
    """Its train step is to load another checkpoint, and to use and leave memory as a backward pass does."""

    def train(self, folder: str) -> None:
        self.load(folder)
        if self.device != "cpu":
            torch.empty(_STEP, dtype=torch.uint8, device=self.device)

    def home(self) -> str:
        """The device of its model."""
        return str(next(self.model.parameters()).device.type)


class Sleeper(SmallRollout):
    def tokens_or_refusal(self) -> Any:
        try:
            return self.generate()
        except ReplicaUnavailable as error:
            return str(error)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Both actors on one device, checkpoints by seed, and the tokens of engines that loaded them."""

    options: argparse.Namespace
    child: bool
    trainer: Any
    rollout: Any
    folders: list[str]
    expected: list[Tokens]

    @property
    def cuda(self) -> bool:
        return self.options.device == "cuda"

    def manager(self, **how: Any) -> CheckpointEngineManager:
        level = 1 if self.cuda else 0
        return CheckpointEngineManager(
            [self.trainer], [self.rollout], **{"is_colocated": True, "sleep_level": level, "timeout_s": 30, **how}
        )

    def memory(self) -> int:
        return get(self.trainer.memory.remote())

    def train(self, seed: int) -> None:
        get(self.trainer.train.remote(self.folders[seed]))

    def tokens(self) -> Any:
        return get(self.rollout.tokens_or_refusal.remote())

    def said(self, part: str, **values: Any) -> None:
        say(part, child=self.child, **values)


def spread(figures: list[int]) -> int:
    """Of all but the first, which loads kernels."""
    return max(figures[1:]) - min(figures[1:])


def check_cycle(bench: Bench) -> None:
    asleep, awake, cycles = [], [], []
    with bench.manager() as manager:
        for number in range(bench.options.rounds):
            seed = number % 2
            manager.sleep_rollout()
            asleep.append(bench.memory())
            bench.train(seed)
            start = time.perf_counter()
            if number % 4 < 2:
                manager.wake_up_rollout(["weights"])
                report = manager.sync_weights()
                manager.wake_up_rollout(["kv_cache"])
            else:
                report = manager.sync_and_wake()
            cycles.append(time.perf_counter() - start)
            assert bench.tokens() == bench.expected[seed], f"round {number}"
            awake.append(bench.memory())
    bench.said(
        "cycle",
        rounds=bench.options.rounds,
        tokens_equal=True,
        mode=report.mode,
        phases_ms={name: round(seconds * 1e3, 1) for name, seconds in report.phases.items()},
        median_cycle_ms=round(statistics.median(cycles[1:]) * 1e3, 1),
        freed_mib=round((awake[-1] - asleep[-1]) / _MIB) if bench.cuda else None,
        spread_asleep_mib=round(spread(asleep) / _MIB, 1) if bench.cuda else None,
        spread_awake_mib=round(spread(awake) / _MIB, 1) if bench.cuda else None,
    )
    if bench.cuda:
        assert spread(asleep) <= _SLACK, asleep
        assert spread(awake) <= _SLACK, awake
        assert awake[-1] - asleep[-1] >= _KV_CACHE, "the KV cache was not given back"


def check_refused(bench: Bench) -> None:
    with bench.manager() as manager:
        manager.sync_and_wake()
        expected = bench.tokens()
        refusals = []
        for awake in (None, "weights", "kv_cache"):
            manager.sleep_rollout()
            if awake is not None:
                manager.wake_up_rollout([awake])
            refusals.append(bench.tokens())
            manager.wake_up_rollout()
            assert bench.tokens() == expected
    bench.said("refused", refusals=refusals if bench.cuda else None)
    if bench.cuda:
        assert all(isinstance(why, str) and "asleep" in why for why in refusals), refusals


def check_offload(bench: Bench) -> None:
    with bench.manager() as manager:
        manager.sleep_rollout()
        bench.train(1)
        manager.sync_and_wake(offload=True)
        assert bench.tokens() == bench.expected[1]
        homes = [get(bench.trainer.home.remote())]
        manager.sleep_rollout()
        manager.reload_trainers()
        homes.append(get(bench.trainer.home.remote()))
    with bench.manager(weight_sync_mode="naive") as manager:
        for seed in (0, 1):
            bench.train(seed)
            report = manager.sync_and_wake()
            assert bench.tokens() == bench.expected[seed]
        homes.append(get(bench.trainer.home.remote()))
    bench.said("offload", homes=homes, naive_mode=report.mode, naive_ms=round(report.seconds * 1e3, 1))
    assert homes == ["cpu", bench.options.device, bench.options.device]


def check_discarded(bench: Bench) -> None:
    if not bench.cuda:
        bench.said("discarded", refusal=None)
        return
    with bench.manager(is_colocated=False, sleep_level=2) as manager:
        before = bench.memory()
        manager.sleep_rollout()
        freed = before - bench.memory()
        manager.wake_up_rollout()
        refusal = bench.tokens()
        bench.train(0)
        manager.sync_weights()
        assert bench.tokens() == bench.expected[0]
    bench.said("discarded", freed_mib=round(freed / _MIB), refusal=refusal)
    assert isinstance(refusal, str)
    assert "discarded" in refusal


CHECKS = {"cycle": check_cycle, "refused": check_refused, "offload": check_offload, "discarded": check_discarded}


@contextmanager
def bench_for(options: argparse.Namespace, child: bool, root: Path) -> Iterator[Bench]:
    cuda = options.device == "cuda"
    folders = [str(root / f"{MODEL}-{int(child)}-{seed}") for seed in (0, 1)]
    with Placement(1, resource="GPU" if cuda else None, cpus=2.0) as place:
        rollout = ray.remote(Sleeper).options(**place.rollout(0)).remote(options.device, child)
        get(rollout.write.remote(folders, MODEL), _START_S)
        expected = [get(rollout.reference.remote(folder), _START_S) for folder in folders]
        more = {"enable_sleep_mode": True} if cuda else {}
        memory = _KV_CACHE if cuda else 64 * _MIB
        get(rollout.start.remote(folders[0], load_format="dummy", kv_cache_memory_bytes=memory, **more), _START_S)
        trainer = ray.remote(Trainer).options(**place.trainer(0)).remote(options.device)
        get(trainer.train.remote(folders[0]), _START_S)
        assert expected[0] != expected[1]
        with killed(trainer, rollout):
            yield Bench(
                options=options, child=child, trainer=trainer, rollout=rollout, folders=folders, expected=expected
            )


def on_engine(options: argparse.Namespace, child: bool) -> None:
    with tempfile.TemporaryDirectory() as root, bench_for(options, child, Path(root)) as bench:
        for part in options.only:
            attempt(part, functools.partial(CHECKS[part], bench), 60 if bench.cuda else 240, child=child)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--engines", nargs="+", default=["process", "child"], choices=["process", "child"])
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    with cluster(options):
        for engine in options.engines:
            seconds = 300.0 if options.device == "cuda" else 500.0
            attempt("engine", functools.partial(on_engine, options, engine == "child"), seconds, engine=engine)
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
