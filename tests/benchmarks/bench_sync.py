"""One sync against the limit of its wire, both measured in one run.

    python tests/benchmarks/bench_sync.py                              # CPU: Gloo, small widths, real layer counts
    python tests/benchmarks/bench_sync.py --device cuda --scale 1      # two NVIDIA GPUs, full size

*raw* is one broadcast of the same number of bytes through the very group that the sync uses, between plain buffers,
until its last member has them. *sync* is ``manager.sync_weights()`` from call to return, the median after the second
one, each after a training step and a generation, which fills the prefix cache; *again* is the same, one sync right
after the other. With ``--rank`` it is a LoRA adapter of that rank alone, ``sync_weights(False)``, and *raw* and *MB*
are the adapter's. Rollouts are a plain module, vLLM in the actor's process (``engine``) or in a child process
(``child``), with dummy weights: nothing is read from a disk but a configuration. ``--scale`` divides widths, vocabulary
and heads, never the number of tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ray
import torch

from tests.shapes import MODELS, Shaped, Shapes, config_of, lora, shapes_of
from twinkle_ray import CheckpointEngineManager
from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin
from twinkle_ray.types import Deadline


def broadcast_raw(endpoint: Any, nbytes: int, rounds: int) -> list[float]:
    """Seconds of each plain broadcast in one member of the group; all members call it at the same time."""
    group, deadline = endpoint.group, Deadline.after(120.0)
    # Zeros would be one page of the kernel's, which the CPU has in its cache.
    buffer = torch.ones(min(nbytes, 1 << 30), dtype=torch.uint8, device=endpoint.device)
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
    from twinkle_ray.vllm.worker import side

    return broadcast_raw(side(vars(worker).get("worker") or worker).endpoint, nbytes, rounds)


class Trainer(TrainActorMixin):
    def __init__(self, shapes: Shapes, device: str, rank: int) -> None:
        self.model: torch.nn.Module = Shaped(shapes, device)
        if rank:
            self.model = self.model.adapt(rank)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad or not hasattr(self.model, "peft_config"):
                    parameter.add_(0.001)
        if parameter.is_cuda:
            torch.cuda.synchronize()  # the step is not what is measured

    def raw(self, nbytes: int, rounds: int) -> list[float]:
        return broadcast_raw(self._TrainActorMixin__twinkle_training.endpoint, nbytes, rounds)  # type: ignore[attr-defined]


class ModuleRollout(RolloutActorMixin):
    def __init__(self, shapes: Shapes, device: str, folder: str, child: bool, share: float, rank: int) -> None:
        self.model: torch.nn.Module = Shaped(shapes, device)
        if rank:  # a plain module can only hold an adapter on layers that PEFT knows
            self.model = self.model.adapt(rank).unload()

    def generate(self) -> None:
        """A module has nothing to generate with."""

    def blocks(self) -> None:
        """It has no cache either."""

    def raw(self, nbytes: int, rounds: int) -> list[list[float]]:
        return [broadcast_raw(self._RolloutActorMixin__twinkle_serving.target._side.endpoint, nbytes, rounds)]  # type: ignore[attr-defined]


class EngineRollout(RolloutActorMixin):
    def __init__(self, shapes: Shapes, device: str, folder: str, child: bool, share: float, rank: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(child)),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        import vllm

        more: dict[str, Any] = (
            {"gpu_memory_utilization": share} if device == "cuda" else {"kv_cache_memory_bytes": 64 << 20}
        )
        if rank:
            more |= self.lora_arguments(lora(rank))
        self.llm = vllm.LLM(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            worker_extension_cls="twinkle_ray.vllm.worker.WorkerExtension",  # also where nothing is installed by pip
            **more,
        )
        self.sampling = vllm.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)

    def generate(self) -> None:
        """Fills the prefix cache, so that each sync has something to drop."""
        prompts = [{"prompt_token_ids": [1, 5, 9, 2, 7] * 20}]
        self.llm.generate(prompts, self.sampling, use_tqdm=False)

    def blocks(self) -> int:
        """Blocks of the KV cache, which vLLM walks one by one to drop it."""
        return self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks

    def raw(self, nbytes: int, rounds: int) -> list[list[float]]:
        return self.llm.collective_rpc(raw_in_worker, args=(nbytes, rounds))


def measure(model: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    config = config_of(model, options.scale)
    shapes = shapes_of(config)
    resources = {"num_gpus": 1 if options.device == "cuda" else 0, "num_cpus": 0}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        rollout_kind = ModuleRollout if kind == "module" else EngineRollout
        trainer = ray.remote(**resources)(Trainer).remote(shapes, options.device, options.rank)
        rollout = ray.remote(**resources)(rollout_kind).remote(
            shapes, options.device, folder, kind == "child", options.share, options.rank
        )
        try:
            with CheckpointEngineManager([trainer], [rollout], timeout_s=300) as manager:
                ray.get([trainer.checkpoint_status.remote(), rollout.checkpoint_status.remote()], timeout=600)
                reports = []
                for _ in range(2 + options.rounds):
                    ray.get([trainer.step.remote(), rollout.generate.remote()], timeout=300)
                    reports.append(manager.sync_weights(not options.rank))
                again = [manager.sync_weights(not options.rank).seconds for _ in range(options.rounds)]
                nbytes = reports[-1].nbytes
                rounds = options.rounds
                raws = [trainer.raw.remote(nbytes, rounds), rollout.raw.remote(nbytes, rounds)]
                sent, received = ray.get(raws, timeout=300)
                blocks = ray.get(rollout.blocks.remote(), timeout=60)
                compared = manager.verify().compared if options.verify else None
        finally:
            ray.kill(trainer)
            ray.kill(rollout)
    raw = statistics.median(max(times) for times in zip(sent, *received, strict=True))
    steady = [report.seconds for report in reports[2:]]
    ours = statistics.median(steady)
    last, first = reports[-1].replicas[0], reports[0]
    return {
        "model": model,
        "rollout": kind,
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
        "proof s": round(first.replicas[0].seconds.get("proof", 0.0), 2),
        "phases ms": _ms(reports[-1].phases),
        "replica ms": _ms(last.seconds),
        "sender ms": _ms(reports[-1].sender),
        "KV blocks": blocks,
        "compared": compared,
    }


def _ms(seconds: dict[str, float]) -> str:
    return " ".join(f"{name} {value * 1e3:.1f}" for name, value in seconds.items())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(device: str) -> str:
    versions = [f"python {platform.python_version()}", f"torch {torch.__version__}", f"ray {ray.__version__}"]
    where = torch.cuda.get_device_name(0) if device == "cuda" else f"{os.cpu_count()} CPU cores"
    return f"{where}; {', '.join(versions)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=["0.6b", "7b"], choices=list(MODELS))
    parser.add_argument("--rollouts", nargs="+", default=["module", "engine"], choices=["module", "engine", "child"])
    parser.add_argument("--scale", type=int, default=7, help="divides widths; 1: full size")
    parser.add_argument("--rounds", type=int, default=10, help="measured syncs, after two that are not")
    parser.add_argument("--share", type=float, default=0.5, help="of a GPU's memory that an engine may take")
    parser.add_argument("--rank", type=int, default=0, help="send a LoRA adapter of this rank alone")
    parser.add_argument("--verify", action="store_true", help="compare SHA-256 sums in the end (7B: a minute)")
    parser.add_argument("--out", type=Path, help="also write the table here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp") as folder:
        gpus = 2 if options.device == "cuda" else 0
        ray.init(num_gpus=gpus, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        rows: list[dict[str, Any]] = []
        for model in options.models:
            for kind in options.rollouts:
                rows.append(measure(model, kind, options))
                print(json.dumps(rows[-1]), flush=True)
        ray.shutdown()
    text = f"{machine(options.device)}; scale 1/{options.scale}; median of {options.rounds}\n\n{table(rows)}\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
