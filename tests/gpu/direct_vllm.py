"""Weights that go straight into a live vLLM on two NVIDIA GPUs: memory, exactness, failures, kinds of engines.

    python tests/gpu/direct_vllm.py                         # needs two GPUs, cupy, Ray, vLLM
    python tests/gpu/direct_vllm.py --device cpu --scale 16    # the same steps on a CPU over Gloo, with small shapes

Prints one JSON line per result and exits non-zero on a failure. What only a GPU has is ``null`` on a CPU. Parts:

``memory``        the 7B's shapes: from the second sync on, no allocator call and no growth in trainer and worker
``sums``          the same engine: sums of every tensor, computed on both devices, are equal after a sync
``torn``          the trainer writes slowly on a side stream and a sync follows at once: one whole version arrives
``exception``     an exception amid a transfer, on either side, is named and healed by the next sync
``disk``          tokens of an engine that got a checkpoint by a sync are those of one that loaded it from disk
``sleep``         a vLLM that slept takes the next sync in, straight
``fp8``           a quantised vLLM holds what it would have loaded from disk
``ray_executor``  a vLLM whose worker is a Ray actor of its own
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
from tests.vllm import models
from twinkle_ray import CheckpointEngineManager, ReplicaUnavailable, SyncError
from twinkle_ray.mixins import TrainActorMixin
from twinkle_ray.plan import DEFAULT_BUCKET_SIZE
from twinkle_ray.shapes import Shaped, Shapes, config_of, shapes_of
from twinkle_ray.types import Contents, SyncReport

ON_MODULES = ("torn", "exception")
ON_THE_7B = ("memory", "sums", "torn", "exception")
MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
ON_SMALL = {"disk": MODELS, "sleep": ("qwen3",), "fp8": ("llama",), "ray_executor": ("qwen2",)}
PARTS = tuple(dict.fromkeys((*ON_THE_7B, *ON_MODULES, *ON_SMALL)))

# What the kernels of GPUs take.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 128}
SHARE = 0.1
"""Of the second GPU, for each of the small engines."""

_MIB = 1 << 20
_SLACK = 64 * _MIB
_SPIN = 60_000_000  # cycles: about 30 ms
_START_S = 120.0


class Trainer(TrainerBase):
    written: torch.cuda.Event | None = None
    late = 0

    def write(self, version: int) -> None:
        """Fill all tensors with one word, on a CUDA device slowly, on a side stream, and without waiting for it."""
        words = [parameter.view(torch.int16) for parameter in self.model.parameters()]
        if self.device == "cpu":
            for one in words:
                one.fill_(version)
            return
        half = len(words) // 2
        with torch.cuda.stream(torch.cuda.Stream()):
            for one in words[:half]:
                one.fill_(version)
            torch.cuda._sleep(_SPIN)
            for one in words[half:]:
                one.fill_(version)
            self.written = torch.cuda.Event()
            self.written.record()

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.late += self.written is not None and not self.written.query()
        return super().send_checkpoint_weights(*args, **kwargs)

    def sent_while_writing(self) -> int | None:
        """How many sends began before the write ahead of them had ended."""
        return None if self.written is None else self.late


class CheckpointTrainer(TrainActorMixin, Common):
    """Holds a checkpoint as Hugging Face does, or tensor by tensor as its file names them."""

    def __init__(self, device: str) -> None:
        self.device = device

    def load(self, folder: str, by_file: bool = False) -> Shapes:
        import transformers

        if by_file:
            tensors = models.tensors(Path(folder))
            self.model = Shaped({name: tuple(tensor.shape) for name, tensor in tensors.items()}, self.device)
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])
        else:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            self.model = loaded.to(self.device)
        return {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}


class SmallRollout(EngineRollout):
    def write(self, folders: list[str], kind: str) -> None:
        """Make checkpoints, one per seed."""
        more = EXPERTS if kind == "qwen3_moe" else {}
        for seed, folder in enumerate(folders):
            models.make(Path(folder), kind, seed, torch.bfloat16, **SIZES, **more)

    def reference(self, folder: str, **more: Any) -> list[list[int]]:
        """Tokens of an engine that loads the checkpoint itself and goes again."""
        self.start(folder, **more)
        tokens = self.generate()
        del self.llm
        gc.collect()
        return tokens


def within(options: argparse.Namespace, seconds: float) -> float:
    """Seconds for a part; a CPU with few cores gets more."""
    return seconds if options.device == "cuda" else 4 * seconds


def share(report: SyncReport) -> float:
    return report.replicas[0].direct_bytes / report.replicas[0].nbytes


def require_equal_sums(trainer: Any, rollout: Any) -> dict[str, int]:
    ours, theirs = get([trainer.sums.remote(), rollout.sums.remote()])
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:5]
    wrong = [name for name in ours if ours[name] != theirs[name]]
    assert not wrong, f"{len(wrong)} of {len(ours)} tensors differ, the first of them {wrong[0]}"
    return theirs


# --- checks of one trainer and one rollout ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    """``into`` says what the rollout is; ``serves``, whether it generates."""

    options: argparse.Namespace
    trainer: Any
    rollout: Any
    manager: CheckpointEngineManager
    into: str
    tensors: int
    serves: bool

    @property
    def cuda(self) -> bool:
        return bool(self.options.device == "cuda")

    def sync(self, seed: int) -> SyncReport:
        """After a step of the trainer that is not waited for."""
        get(self.trainer.step.remote(seed))
        return self.manager.sync_weights()

    def counters(self) -> list[dict[str, int] | None]:
        return get([self.trainer.counters.remote(), self.rollout.counters.remote()])


def check_memory(bench: Bench) -> None:
    for seed in (6, 7):  # which have streams of their own, and the first of those takes 70 MiB of the device
        get(bench.trainer.step.remote(seed))
    first = bench.counters()
    for seed in (1, 2):
        bench.sync(seed)
    second, control = bench.counters(), bench.counters()
    pairs = []
    for seed in (3, 4, 5):
        get(bench.trainer.step.remote(seed))
        before = bench.counters()
        report = bench.manager.sync_weights()
        pairs.append((before, bench.counters()))
    assert share(report) == 1, report
    found = {}
    for at, name in enumerate(("trainer", "worker")):
        sides = [(before[at], after[at]) for before, after in pairs]
        found[name] = spent(first[at], second[at], control[at], sides) if bench.cuda else None
    say("memory", into=bench.into, direct=share(report), syncs=len(pairs), **found)
    for name, values in found.items():
        if values is not None:
            assert values["calls"] == 0, f"{name}: {values['calls']} allocations in {len(pairs)} syncs"
            assert values["extra_peak_mib"] * _MIB <= _SLACK, f"{name}: a peak of {values['extra_peak_mib']} MiB"
            assert values["driver_since_2nd_mib"] * _MIB <= _SLACK, f"{name}: grew by {values['driver_since_2nd_mib']}"
            if report.mode == "ipc":  # NCCL's communicator takes what it takes
                grown = values["driver_since_start_mib"]
                assert grown * _MIB <= _SLACK, f"{name}: {grown} MiB since before the first sync"


def spent(
    first: dict[str, int],
    second: dict[str, int],
    control: dict[str, int],
    pairs: list[tuple[dict[str, int], dict[str, int]]],
) -> dict[str, float]:
    """From one process's counters: before the first sync, after the second (twice), around each later one."""
    reading = control["calls"] - second["calls"]
    last = pairs[-1][1]
    return {
        "calls": sum(after["calls"] - before["calls"] - reading for before, after in pairs),
        "calls_of_reading": reading,
        "extra_peak_mib": round(max(after["peak"] - before["current"] for before, after in pairs) / _MIB, 3),
        "reserved_growth_mib": round((last["reserved"] - second["reserved"]) / _MIB, 1),
        "driver_since_2nd_mib": round((last["driver"] - second["driver"]) / _MIB, 1),
        "driver_since_start_mib": round((last["driver"] - first["driver"]) / _MIB, 1),
        "driver_mib": round(last["driver"] / _MIB),
    }


def check_sums(bench: Bench) -> None:
    old = get(bench.rollout.sums.remote())
    report = bench.sync(11)
    new = require_equal_sums(bench.trainer, bench.rollout)
    assert len(new) == report.tensors == bench.tensors
    changed = sum(old[name] != new[name] for name in new)
    assert changed == len(new), f"only {changed} of {len(new)} sums changed"
    assert share(report) == 1, report
    say("sums", into=bench.into, tensors=len(new), equal=True, changed=changed, direct=share(report))


def check_torn(bench: Bench) -> None:
    rounds = {True: (40, 200), False: (5, 20)}[bench.cuda][not bench.serves]
    times = []
    start = time.monotonic()
    for version in range(1, rounds + 1):
        get(bench.trainer.write.remote(version))
        report = bench.manager.sync_weights()
        held = get(bench.rollout.extremes.remote())
        assert held == (version, version), f"words of version {held[0]} to {held[1]} instead of {version}"
        times.append(report.seconds)
    late = get(bench.trainer.sent_while_writing.remote())
    say(
        "torn",
        into=bench.into,
        rounds=rounds,
        nbytes=report.nbytes,
        whole=True,
        sent_while_writing=late,
        median_ms=round(statistics.median(times) * 1e3, 1),
        seconds=round(time.monotonic() - start, 1),
    )
    assert late is None or late >= rounds // 2, f"only {late} of {rounds} writes were still running: nothing was tried"


def check_exception(bench: Bench) -> None:
    bench.sync(100)
    for seed, (who, site, at) in enumerate(faults(bench), 101):
        what = {"into": bench.into, "in": who, "site": site, "at": at}
        if site == "launch" and not bench.cuda and bench.options.mode != "ipc":
            say("exception", **what, named=None)
            continue
        old = require_equal_sums(bench.trainer, bench.rollout)
        get(bench.trainer.step.remote(seed))
        if who == "trainer[0]":
            get(bench.trainer.sabotage.remote(at))
        else:
            get(bench.rollout.sabotage.remote(site, at))
        start = time.monotonic()
        error = failure(bench.manager)
        took = time.monotonic() - start
        state = settled(bench.rollout)
        if state is not Contents.MIXED:
            assert get(bench.rollout.sums.remote()) == old, f"{state}, but it holds other weights than before"
        refuses = refused(bench.rollout) if bench.serves else None
        assert refuses in (None, state is Contents.MIXED), f"it holds {state}; refuses to generate: {refuses}"
        start = time.monotonic()
        bench.manager.sync_weights()
        healed = time.monotonic() - start
        require_equal_sums(bench.trainer, bench.rollout)
        say(
            "exception",
            **what,
            named=error.actors,
            error=str(error)[:160],
            seconds=round(took, 2),
            contents=state.value,
            refuses=refuses,
            healed_s=round(healed, 2),
        )
        assert error.actors == (who,), error
        # Ahead of the sender's first chunk nothing may be touched.
        assert (who, at) != ("trainer[0]", 1) or state is not Contents.MIXED


def faults(bench: Bench) -> list[tuple[str, str, int]]:
    """Whose call of what fails, and which one: early or in the middle."""
    rollout, trainer, middle = "rollout[0]", "trainer[0]", bench.tensors // 2
    finer = bench.cuda or bench.options.mode == "ipc"
    launch, chunk = ("launch", middle) if finer else ("chunk", 8), ("launch", 3) if finer else ("chunk", 1)
    if bench.into == "vLLM in a child process":
        return [(rollout, "landing", 1), (rollout, *launch)]
    if bench.serves:
        return [(rollout, "landing", 1), (rollout, *chunk), (trainer, "tensor", 1), (trainer, "tensor", middle)]
    on_rollout = [("landing", 1), ("chunk", 1), ("chunk", 8), ("launch", 3), ("launch", middle)]
    return [*((rollout, *one) for one in on_rollout), (trainer, "tensor", 1), (trainer, "tensor", middle)]


def failure(manager: CheckpointEngineManager) -> SyncError:
    try:
        manager.sync_weights()
    except SyncError as error:
        return error
    raise AssertionError("the sync did not fail")


def settled(rollout: Any) -> Contents:
    """What a rollout holds once nothing writes into it any more."""
    until = time.monotonic() + 5
    while (status := get(rollout.checkpoint_status.remote(), 10)).updating:
        assert time.monotonic() < until, status
        time.sleep(0.02)
    return status.contents


def refused(rollout: Any) -> bool:
    try:
        get(rollout.generate.remote(), 30)
    except ReplicaUnavailable:
        return True
    return False


def on_modules(options: argparse.Namespace, parts: list[str]) -> None:
    """1 GB in 64 tensors, from a module into a module."""
    shapes = {f"w{i}": (4096 // options.scale, 2048 // options.scale) for i in range(64)}
    size = 64 * 4096 * 2048 * 2 // options.scale**2
    trainer, rollout = (make(kind, options, shapes, options.device) for kind in (Trainer, RolloutBase))
    with (
        killed(trainer, rollout),
        CheckpointEngineManager(
            [trainer], [rollout], weight_sync_mode=options.mode, bucket_size=size // 16, timeout_s=30
        ) as manager,
    ):
        get([trainer.ping.remote(), rollout.ping.remote()], _START_S)
        bench = Bench(
            options=options,
            trainer=trainer,
            rollout=rollout,
            manager=manager,
            into="module",
            tensors=len(shapes),
            serves=False,
        )
        for part in parts:
            attempt(part, functools.partial(CHECKS[part], bench), within(options, 60), into="module")


def on_the_7b(options: argparse.Namespace, parts: list[str], child: bool) -> None:
    config = config_of("7b", options.scale)
    shapes = shapes_of(config)
    memory = {"gpu_memory_utilization": 0.3} if options.device == "cuda" else {}
    into = "vLLM in a child process" if child else "vLLM in the actor's process"
    trainer, rollout = (
        make(Trainer, options, shapes, options.device),
        make(EngineRollout, options, options.device, child),
    )
    with tempfile.TemporaryDirectory() as folder, killed(trainer, rollout):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        started = rollout.start.remote(folder, load_format="dummy", **memory)
        version = get([trainer.ping.remote(), started, rollout.expect.remote(shapes)], _START_S)[1]
        say("engine", into=into, vllm=version, tensors=len(shapes))
        bucket_size = DEFAULT_BUCKET_SIZE // options.scale**2
        with CheckpointEngineManager(
            [trainer], [rollout], weight_sync_mode=options.mode, bucket_size=bucket_size, timeout_s=30
        ) as manager:
            bench = Bench(
                options=options,
                trainer=trainer,
                rollout=rollout,
                manager=manager,
                into=into,
                tensors=len(shapes),
                serves=True,
            )
            for part in parts:
                attempt(part, functools.partial(CHECKS[part], bench), within(options, 60), into=into)


CHECKS: dict[str, Callable[[Bench], None]] = {
    "memory": check_memory,
    "sums": check_sums,
    "torn": check_torn,
    "exception": check_exception,
}


# --- small engines with real checkpoints --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Small:
    """One engine that is starting: the actor, the checkpoints (by seed) that it makes, and what it was told to do."""

    options: argparse.Namespace
    part: str
    model: str
    actor: Any
    folders: list[str]
    written: Any
    reference: Any
    started: Any
    room: Any

    def __enter__(self) -> Small:
        return self

    def __exit__(self, *error: object) -> None:
        ray.kill(self.actor)
        if self.room is not None:
            remove_placement_group(self.room)

    def up(self) -> str:
        """Which vLLM it is, once it is there."""
        get(self.written, _START_S)
        return str(get(self.started, _START_S))

    def said(self, **values: Any) -> None:
        say(self.part, model=self.model, **values)


def begin(options: argparse.Namespace, part: str, model: str, root: Path) -> Small:
    """Start an engine with dummy weights; does not wait for it."""
    folders = [str(root / f"{part}-{model}-{seed}") for seed in (0, 1)]
    cuda = options.device == "cuda"
    room = None
    if part == "ray_executor":
        # The worker takes the GPU; its share must be in a placement group, of which vLLM would ask for a whole one.
        room = placement_group([{"CPU": 1}, {"GPU": SHARE} if cuda else {"CPU": 1}])
        where = PlacementGroupSchedulingStrategy(room, 0, placement_group_capture_child_tasks=True)
        kind = ray.remote(num_gpus=0, num_cpus=1, scheduling_strategy=where)(SmallRollout)
        actor = kind.remote(options.device, VLLM_RAY_PER_WORKER_GPUS=str(SHARE))
    else:
        actor = make(SmallRollout, options, options.device, gpus=SHARE)
    more: dict[str, Any] = {
        "disk": {},
        "fp8": {"quantization": "fp8"},
        "sleep": {"enable_sleep_mode": cuda},  # the CPU build takes the calls, but does not sleep
        "ray_executor": {"distributed_executor_backend": "ray"},
    }[part]
    return Small(
        options=options,
        part=part,
        model=model,
        actor=actor,
        folders=folders,
        written=actor.write.remote(folders, model),
        reference=actor.reference.remote(folders[0], **more) if part in ("disk", "fp8") else [],
        started=actor.start.remote(folders[0], load_format="dummy", **more),
        room=room,
    )


def from_disk(small: Small, trainer: Any, by_file: bool = False) -> SyncReport:
    """Another checkpoint first, so that the second sync has to change everything; then tokens as from disk."""
    expected = get(small.reference, _START_S)
    version = small.up()
    dummy = get(small.actor.generate.remote())
    with CheckpointEngineManager(
        [trainer], [small.actor], weight_sync_mode=small.options.mode, timeout_s=30
    ) as manager:
        get(trainer.load.remote(small.folders[1], by_file), 90)
        manager.sync_weights()
        other = get(small.actor.generate.remote())
        get(trainer.load.remote(small.folders[0], by_file), 90)
        report = manager.sync_weights()
        tokens = get(small.actor.generate.remote())
    small.said(
        vllm=version,
        sent="by the file's names" if by_file else "as Hugging Face holds it",
        tensors=report.tensors,
        tokens_equal=tokens == expected,
        path=report.replicas[0].path,
        direct=round(share(report), 4),
    )
    assert other not in (expected, dummy), "the first sync changed no token"
    assert tokens == expected, f"{tokens} by sync, {expected} from disk"
    return report


def check_disk(small: Small, trainer: Any) -> None:
    report = from_disk(small, trainer)
    if small.model != "qwen3_moe":
        assert share(report) == 1, report
        return
    # Hugging Face stacks experts, and each stack goes to many places: copied there. By the file's names each has one.
    by_file = from_disk(small, trainer, by_file=True)
    if small.options.device == "cuda":
        assert share(by_file) == 1, by_file
        assert report.replicas[0].path == "in place", report


def check_fp8(small: Small, trainer: Any) -> None:
    report = from_disk(small, trainer)
    assert share(report) < 1, f"quantised matrices cannot be direct: {report}"


def check_sleep(small: Small, trainer: Any) -> None:
    version = small.up()
    with CheckpointEngineManager(
        [trainer], [small.actor], weight_sync_mode=small.options.mode, timeout_s=30
    ) as manager:

        def sync(seed: int) -> tuple[list[list[int]], float]:
            get(small.actor.expect.remote(get(trainer.load.remote(small.folders[seed]), 90)))
            report = manager.sync_weights()
            require_equal_sums(trainer, small.actor)
            return get(small.actor.generate.remote()), share(report)

        fresh: dict[int, list[list[int]]] = {}
        for seed in (1, 0):
            fresh[seed], direct = sync(seed)
        found: dict[str, Any] = {"vllm": version, "direct": direct}
        for level, seed in ((1, 1), (2, 0)):
            manager.sleep_level = level
            before = get(small.actor.memory.remote())
            if small.options.device == "cuda":
                manager.sleep_rollout()
            freed = round((before - get(small.actor.memory.remote())) / _MIB)
            manager.wake_up_rollout()
            tokens, direct = sync(seed)
            found[f"level_{level}"] = {
                "freed_mib": freed if small.options.device == "cuda" else None,
                "direct": direct,
                "tokens_as_without_sleep": tokens == fresh[seed],
            }
        small.said(**found)
    assert fresh[0] != fresh[1]
    assert found["direct"] == 1
    for after in (found["level_1"], found["level_2"]):
        assert after["direct"] == 1
        assert after["tokens_as_without_sleep"]


def check_ray_executor(small: Small, trainer: Any) -> None:
    version = small.up()
    with CheckpointEngineManager(
        [trainer], [small.actor], weight_sync_mode=small.options.mode, timeout_s=30
    ) as manager:
        answers = []
        for seed in (1, 0, 1):
            get(small.actor.expect.remote(get(trainer.load.remote(small.folders[seed]), 90)))
            report = manager.sync_weights()
            tensors = len(require_equal_sums(trainer, small.actor))
            answers.append(get(small.actor.generate.remote()))
    kind = get(small.actor.checkpoint_status.remote()).kind
    small.said(
        vllm=version, kind=kind, mode=report.mode, tensors=tensors, path=report.replicas[0].path, direct=share(report)
    )
    assert answers[0] == answers[2] != answers[1]


def on_small(options: argparse.Namespace, parts: list[str]) -> None:
    checks = {"disk": check_disk, "sleep": check_sleep, "fp8": check_fp8, "ray_executor": check_ray_executor}
    wanted = [(part, model) for part in parts for model in ON_SMALL[part]]
    trainer = make(CheckpointTrainer, options, options.device)
    with tempfile.TemporaryDirectory() as root, killed(trainer):
        get(trainer.ping.remote(), _START_S)  # before the others: it takes a whole GPU, and they share one
        # All of them at once where there is room: an engine's start takes longer than its checks.
        ahead = {one: begin(options, *one, Path(root)) for one in wanted if options.device == "cuda"}

        def work(part: str, model: str) -> None:
            with ahead.pop((part, model), None) or begin(options, part, model, Path(root)) as small:
                if options.device == "cpu" and (why := refusal(small)):
                    small.said(refused=why)
                else:
                    checks[part](small, trainer)

        for part, model in wanted:
            attempt(part, functools.partial(work, part, model), within(options, 90), model=model)


def refusal(small: Small) -> str:
    """Why vLLM's CPU build cannot make such an engine, if it cannot."""
    if small.part not in ("fp8", "ray_executor"):
        return ""
    try:
        small.up()
        get(small.reference, _START_S)
    except ray.exceptions.RayTaskError as error:
        return f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())}"[:300]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--mode", default="auto", help="weight_sync_mode: auto reads over NVLink, nccl does not")
    parser.add_argument("--scale", type=int, default=1, help="divides widths; 1: full size")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    options = parser.parse_args()

    def wanted(parts: Any) -> list[str]:
        return [part for part in parts if part in options.only]

    with cluster(options):
        if parts := wanted(ON_MODULES):
            attempt("modules", functools.partial(on_modules, options, parts), within(options, 90))
        for child in (False, True):
            if parts := wanted(ON_THE_7B):
                work = functools.partial(on_the_7b, options, parts, child)
                attempt("engine", work, within(options, 150), child=child)
        if parts := wanted(ON_SMALL):
            attempt("small", functools.partial(on_small, options, parts), within(options, 200))
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
