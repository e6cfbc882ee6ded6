"""One sync against the limit of its wire, both measured in one run, with weights that mean nothing.

*raw* is one broadcast of the same number of bytes through the group that the sync uses (where it uses none, since the
rollout reads the trainer's memory, through the one that it would use), between plain buffers, until its last member has
them. *sync* is ``manager.sync_weights()`` from call to return, the median after the second
one, each after a training step and a generation, which fills the prefix cache; *again* is the same, one sync right
after the other. With a LoRA rank it is an adapter alone, ``sync_weights(False)``, and *raw* and *MB* are the adapter's.
Rollouts are a plain module, vLLM in the actor's process (``engine``) or in a child process (``child``), with dummy
weights: nothing is read from a disk but a configuration.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from twinkle_ray.backends import ray_resources
from twinkle_ray.manager import CheckpointEngineManager
from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin
from twinkle_ray.routes import BY_DEVICE, IPC
from twinkle_ray.shapes import Shaped, Shapes, config_of, lora, shapes_of
from twinkle_ray.types import Deadline

UNMEASURED = 2
"""Syncs before those that count: the first proves where weights may be written, the second is the first without."""

_START_S = 600.0
_CALL_S = 300.0
_RAW_S = 120.0
_RAW_BUFFER = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a measurement depends on beside the model and the kind of rollout.

    Attributes:
        device: torch's name of a kind of device.
        scale: divides widths, vocabulary and heads, never the number of tensors.
        rounds: syncs that count.
        share: of a device's memory that an engine may take.
        rank: of a LoRA adapter that is sent alone; 0: the model is.
        replicas: rollouts, each on a device of its own.
        mode: ``weight_sync_mode`` of the manager.
        verify: compare SHA-256 sums in the end.
    """

    device: str = "cpu"
    scale: int = 7
    rounds: int = 10
    share: float = 0.5
    rank: int = 0
    replicas: int = 1
    mode: str = "auto"
    verify: bool = False

    @staticmethod
    def of(namespace: Any, replicas: int) -> Options:
        """From the options of a command line, for one of its numbers of replicas."""
        return Options(**{name: getattr(namespace, name) for name in Options.__slots__} | {"replicas": replicas})


def broadcast_raw(endpoint: Any, nbytes: int, rounds: int) -> list[float]:
    """Seconds of each plain broadcast in one member of the group; all members call it at the same time."""
    group, deadline = endpoint.group, Deadline.after(_RAW_S)
    # Zeros would be one page of the kernel's, which the CPU has in its cache.
    buffer = torch.ones(min(nbytes, _RAW_BUFFER), dtype=torch.uint8, device=endpoint.device)
    views = [buffer] * (nbytes // buffer.numel()) + [buffer[: nbytes % buffer.numel()]]
    taken = []
    for _ in range(rounds):
        group.rally()
        group.synchronize(deadline)
        start = time.perf_counter()
        group.broadcast_many(views)
        group.synchronize(deadline)
        taken.append(time.perf_counter() - start)
    return taken


def raw_in_worker(worker: Any, nbytes: int, rounds: int) -> list[float]:
    """:func:`broadcast_raw` in a vLLM worker."""
    from twinkle_ray.vllm.worker import side

    return broadcast_raw(side(vars(worker).get("worker") or worker).endpoint, nbytes, rounds)


class Trainer(TrainActorMixin):
    """Holds parameters of the given shapes."""

    def __init__(self, shapes: Shapes, device: str, rank: int) -> None:
        self.model: torch.nn.Module = Shaped(shapes, device)
        if rank:
            self.model = self.model.adapt(rank)

    def machine(self) -> str:
        """What it runs on, and versions."""
        device = next(self.model.parameters()).device
        versions = [f"python {platform.python_version()}", f"torch {torch.__version__}", f"ray {ray.__version__}"]
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        return f"{named(device) if named else f'{os.cpu_count()} CPU cores'}; {', '.join(versions)}"

    def step(self) -> None:
        """Change every parameter that is trained."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad or not hasattr(self.model, "peft_config"):
                    parameter.add_(0.001)
        torch.get_device_module(parameter.device).synchronize()  # the step is not what is measured

    def raw(self, nbytes: int, rounds: int) -> list[float]:
        """:func:`broadcast_raw`."""
        return broadcast_raw(self._TrainActorMixin__twinkle_training.endpoint, nbytes, rounds)  # type: ignore[attr-defined]


class ModuleRollout(RolloutActorMixin):
    """Holds a plain module of the given shapes."""

    def __init__(self, config: dict[str, Any], options: Options, child: bool) -> None:
        self.model: torch.nn.Module = Shaped(shapes_of(config), options.device)
        if options.rank:  # a plain module can only hold an adapter on layers that PEFT knows
            self.model = self.model.adapt(options.rank).unload()

    def generate(self) -> None:
        """A module has nothing to generate with."""

    def blocks(self) -> int | None:
        """It has no cache either."""
        return None

    def raw(self, nbytes: int, rounds: int) -> list[list[float]]:
        """:func:`broadcast_raw` of each worker, here one."""
        return [broadcast_raw(self._RolloutActorMixin__twinkle_serving.target._side.endpoint, nbytes, rounds)]  # type: ignore[attr-defined]


class EngineRollout(RolloutActorMixin):
    """Holds a vLLM engine with dummy weights."""

    def __init__(self, config: dict[str, Any], options: Options, child: bool) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(child)),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        import vllm

        more: dict[str, Any] = (
            {"gpu_memory_utilization": options.share}
            if ray_resources(options.device)
            else {"kv_cache_memory_bytes": 64 << 20}
        )
        if options.rank:
            more |= self.lora_arguments(lora(options.rank))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            self.llm = vllm.LLM(
                folder,
                load_format="dummy",
                dtype="bfloat16",
                enforce_eager=True,
                max_model_len=256,
                max_num_seqs=4,
                skip_tokenizer_init=True,
                # Named here too, for where the package is only on the path and vLLM finds no plugin.
                worker_extension_cls="twinkle_ray.vllm.worker.WorkerExtension",
                **more,
            )
        self.sampling = vllm.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)

    def generate(self) -> None:
        """Fills the prefix cache, so that each sync has something to drop."""
        prompts = [{"prompt_token_ids": [1, 5, 9, 2, 7] * 20}]
        self.llm.generate(prompts, self.sampling, use_tqdm=False)

    def blocks(self) -> int | None:
        """Blocks of the KV cache, which vLLM walks one by one to drop it."""
        return int(self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)

    def raw(self, nbytes: int, rounds: int) -> list[list[float]]:
        """:func:`broadcast_raw` of each worker."""
        taken: list[list[float]] = self.llm.collective_rpc(raw_in_worker, args=(nbytes, rounds))
        return taken


def steps(rounds: int) -> int:
    """How often :func:`measure` calls ``step``."""
    return 3 + UNMEASURED + rounds


def measure(
    model: str, kind: str, options: Options, *, step: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """One row of a table. Ray runs already, and has one of the devices more than there are replicas.

    Args:
        model: of :data:`twinkle_ray.shapes.MODELS`.
        kind: of rollout: ``module``, ``engine`` or ``child``.
        step: told what has just ended.

    Raises:
        ray.exceptions.GetTimeoutError: the actors do not start, or hang.
        TwinkleRayError: a sync failed.
    """
    config = config_of(model, options.scale)
    resources = ray_resources(options.device)
    actor: Any = functools.partial(ray.remote, num_cpus=0, num_gpus=resources.pop("GPU", 0), resources=resources)
    rollout_kind: type[Any] = ModuleRollout if kind == "module" else EngineRollout
    trainer = actor()(Trainer).remote(shapes_of(config), options.device, options.rank)
    rollouts = [actor()(rollout_kind).remote(config, options, kind == "child") for _ in range(options.replicas)]
    try:
        with CheckpointEngineManager([trainer], rollouts, weight_sync_mode=options.mode, timeout_s=_CALL_S) as manager:
            ray.get([one.checkpoint_status.remote() for one in (trainer, *rollouts)], timeout=_START_S)
            machine = ray.get(trainer.machine.remote(), timeout=_CALL_S)
            step("actors are up")
            reports = []
            for number in range(UNMEASURED + options.rounds):
                ray.get([trainer.step.remote(), *(one.generate.remote() for one in rollouts)], timeout=_CALL_S)
                reports.append(manager.sync_weights(not options.rank))
                step(f"sync {number + 1}")
            again = [manager.sync_weights(not options.rank).seconds for _ in range(options.rounds)]
            step("syncs in a row")
            nbytes = reports[-1].nbytes
            blocks = ray.get(rollouts[0].blocks.remote(), timeout=_CALL_S)
            compared = manager.verify().compared if options.verify else None
        wire = BY_DEVICE[options.device] if IPC in reports[-1].mode else reports[-1].mode
        with CheckpointEngineManager([trainer], rollouts, weight_sync_mode=wire, timeout_s=_CALL_S) as manager:
            manager.sync_weights(not options.rank)
            raws = [one.raw.remote(nbytes, options.rounds) for one in (trainer, *rollouts)]
            sent, *received = ray.get(raws, timeout=_CALL_S)
            step("raw broadcasts")
    finally:
        for one in (trainer, *rollouts):
            ray.kill(one)
    everybodys = zip(sent, *itertools.chain.from_iterable(received), strict=True)
    raw = statistics.median(max(times) for times in everybodys)
    steady = [report.seconds for report in reports[UNMEASURED:]]
    ours = statistics.median(steady)
    last, first = min(reports[-1].replicas, key=lambda replica: replica.direct_bytes), reports[0]
    return {
        "model": model,
        "rollout": kind,
        "replicas": options.replicas,
        "mode": reports[-1].mode,
        "tensors": reports[-1].tensors,
        "MB": round(nbytes / 1e6, 1),
        "raw ms": round(raw * 1e3, 2),
        "sync ms": round(ours * 1e3, 2),
        "worst ms": round(max(steady) * 1e3, 2),
        "sync/raw": round(ours / raw, 3),
        "again ms": round(statistics.median(again) * 1e3, 2),
        "again/raw": round(statistics.median(again) / raw, 3),
        "direct": f"{last.direct_bytes / nbytes:.1%}",
        "path": last.path,
        "first s": round(first.seconds, 2),
        "proof s": round(max(replica.seconds.get("proof", 0.0) for replica in first.replicas), 2),
        "phases ms": _ms(reports[-1].phases),
        "replica ms": _ms(last.seconds),
        "sender ms": _ms(reports[-1].sender),
        "KV blocks": blocks,
        "compared": compared,
        "GB/s": round(nbytes / ours / 1e9, 2),
        "machine": machine,
    }


def _ms(seconds: dict[str, float]) -> str:
    return " ".join(f"{name} {value * 1e3:.1f}" for name, value in seconds.items())
