"""What the scripts for two GPUs share: actors, sums computed on the device, and parts that fail alone and in time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin
from twinkle_ray.shapes import Shaped, Shapes

ROOT = Path(__file__).resolve().parents[2]
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    # Named, since nothing of ours need be installed by pip.
    "worker_extension_cls": "twinkle_ray.vllm.worker.WorkerExtension",
}
PROMPTS = ([1, 5, 9, 2, 7], [11, 3], [100, 42, 17, 8, 250, 31, 77])

_BLOCK = 1 << 24
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Named = Iterable[tuple[str, torch.Tensor]]


# --- what is computed where the tensors are ----------------------------------------------------------------------


def sums(tensors: Named) -> dict[str, int]:
    """A 64-bit sum of the bits of every 16-bit tensor, weighted by position, on its device."""
    result = {}
    for name, value in tensors:
        bits = value.detach().contiguous().view(torch.int16).reshape(-1)
        parts = []
        for at in range(0, bits.numel(), _BLOCK):
            block = bits[at : at + _BLOCK].to(torch.int64)
            parts.append((block * (torch.arange(at, at + block.numel(), device=bits.device) % 8191 + 1)).sum())
        result[name] = int(torch.stack(parts).sum().item())
    return result


def extremes(tensors: Named) -> tuple[int, int]:
    """The least and the greatest of all tensors' 16-bit words; equal where all were filled with one."""
    found = [torch.stack(torch.aminmax(value.detach().contiguous().view(torch.int16))) for _, value in tensors]
    both = torch.stack(found)
    return int(both[:, 0].min().item()), int(both[:, 1].max().item())


def checkpoint_views(model: torch.nn.Module, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """A vLLM model's own parameters under a checkpoint's names, fused ones cut by the checkpoint's numbers of rows."""
    for name, value in model.named_parameters():
        fused = next((part for part in name.split(".") if part in _FUSED), None)
        names = [name.replace(fused, part) for part in _FUSED[fused]] if fused else [name]
        at = 0
        for one in names:
            yield one, value[at : at + shapes[one][0]]
            at += shapes[one][0]
        assert at == value.shape[0] or "embed_tokens" in name or "lm_head" in name, f"{name} has {value.shape[0]} rows"


def counters() -> dict[str, int] | None:
    """Of torch's allocator and of the driver, on the current device; ``None`` without one. Forgets the last peak."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    now = {
        "calls": stats.get("allocation.all.allocated", 0),
        "current": stats.get("allocated_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "driver": total - free,
    }
    torch.cuda.reset_peak_memory_stats()
    return now


SABOTAGE = "sabotage"


class _Communicator:
    """cupy's, of which one broadcast raises between the start and the end of a group launch."""

    def __init__(self, real: Any, at: int) -> None:
        self._real, self._left = real, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def bcast(self, *args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError(SABOTAGE)
        self._real.bcast(*args)


class _Reader:
    """Memory of which one tensor's copy raises, amid those that are launched together."""

    def __init__(self, real: Any, at: int) -> None:
        self._real, self._left = real, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def copy(self, into: Any, of: Any) -> None:
        before, self._left = self._left, self._left - len(into)
        if before > 0 >= self._left:
            self._real.copy(into[: before - 1], of[: before - 1])
            raise RuntimeError(SABOTAGE)
        self._real.copy(into, of)


def sabotage(side: Any, site: str, at: int) -> None:
    """Let the ``at``-th call from now on raise, once, in a receiver that is in a group.

    ``landing``: of the sink; ``chunk``: of the group's ``broadcast_many``, with half of the chunk launched; ``launch``:
    of NCCL's broadcast within one group launch, or of the copy of a tensor within a chunk where memory is read.
    """
    group = side.endpoint.group
    if site == "launch":
        if group.name == "TWINKLE_IPC":
            group._memory = _Reader(group._memory, at)
        else:
            group._comm = _Communicator(group._comm, at)
        return
    holder, name = (side.sink, "landing") if site == "landing" else (group, "broadcast_many")
    original = getattr(holder, name)
    left = at

    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            vars(holder).pop(name)
            if site == "chunk":
                original(args[0][: len(args[0]) // 2], *args[1:], **kwargs)
            raise RuntimeError(SABOTAGE)
        return original(*args, **kwargs)

    setattr(holder, name, once)


# --- in vLLM's workers, by collective_rpc ------------------------------------------------------------------------


def _core(worker: Any) -> Any:
    return vars(worker).get("worker") or worker


def worker_sums(worker: Any, shapes: Shapes) -> dict[str, int]:
    return sums(checkpoint_views(_core(worker).model_runner.get_model(), shapes))


def worker_extremes(worker: Any, shapes: Shapes) -> tuple[int, int]:
    return extremes(checkpoint_views(_core(worker).model_runner.get_model(), shapes))


def worker_counters(worker: Any) -> dict[str, int] | None:
    return counters()


def worker_sabotage(worker: Any, site: str, at: int) -> None:
    from twinkle_ray.vllm.worker import side

    sabotage(side(_core(worker)), site, at)


# --- actors ------------------------------------------------------------------------------------------------------


class Common:
    """An actor that holds ``self.model``."""

    device = "cuda"
    model: torch.nn.Module

    def ping(self) -> float:
        return time.time()

    def sums(self) -> dict[str, int]:
        return sums(self.model.named_parameters())

    def extremes(self) -> tuple[int, int]:
        return extremes(self.model.named_parameters())

    def counters(self) -> dict[str, int] | None:
        return counters()

    def memory(self) -> int:
        if self.device == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free


class TrainerBase(TrainActorMixin, Common):
    def __init__(self, shapes: Shapes, device: str) -> None:
        self.device = device
        self.model = Shaped(shapes, device)
        self.model.fill(0)

    def step(self, seed: int) -> None:
        if self.device == "cpu":
            self.model.fill(seed)
            return
        # On a side stream and not waited for: the sync must see the whole step all the same.
        with torch.cuda.stream(torch.cuda.Stream()):
            self.model.fill(seed)

    def sabotage(self, at: int) -> None:
        """Let the source of the next send raise instead of yielding its ``at``-th tensor."""
        source = self._TrainActorMixin__twinkle_training.source()
        original = source.tensors

        def tensors(*args: Any, **kwargs: Any) -> Any:
            del source.tensors
            stream = original(*args, **kwargs)
            stream._source = _Broken(stream._source, at)
            return stream

        source.tensors = tensors


class _Broken(Sequence[torch.Tensor]):
    """Tensors of which the ``at``-th cannot be had."""

    def __init__(self, tensors: Sequence[torch.Tensor], at: int) -> None:
        self._tensors, self._at = tensors, at

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, place: Any) -> Any:
        if (place.stop if isinstance(place, slice) else place + 1) >= self._at:
            if self._at > 1:
                time.sleep(0.3)  # what went before it is not only launched, but has arrived
            raise RuntimeError(SABOTAGE)
        return self._tensors[place]


class RolloutBase(RolloutActorMixin, Common):
    def __init__(self, shapes: Shapes, device: str) -> None:
        self.device = device
        self.model = Shaped(shapes, device)
        self.model.fill(999)

    def sabotage(self, site: str, at: int) -> None:
        sabotage(self._RolloutActorMixin__twinkle_serving.target._side, site, at)


class EngineRollout(RolloutActorMixin, Common):
    """A live vLLM, in this process or in a child of it. ``sums`` and the like are computed in its worker."""

    def __init__(self, device: str, child: bool = False, **environment: str) -> None:
        self.device = device
        self.shapes: Shapes = {}
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(child)),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for the functions that are given to workers
            "VLLM_LOGGING_LEVEL": "ERROR",
            **environment,
        }
        if device == "cpu":
            # Nothing is compiled, and the import of what would do it takes long.
            os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}

    def start(self, folder: str, **more: Any) -> str:
        """Make the engine; which vLLM it is."""
        import vllm

        memory = {"gpu_memory_utilization": 0.05} if self.device == "cuda" else {}
        self.llm = vllm.LLM(folder, **{**ENGINE, **memory, "kv_cache_memory_bytes": 64 << 20, **more})
        return str(vllm.__version__)

    def expect(self, shapes: Shapes) -> None:
        """The checkpoint's tensors, of which ``sums`` and ``extremes`` are made."""
        self.shapes = shapes

    def generate(self) -> list[list[int]]:
        import vllm

        sampling = vllm.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, sampling, use_tqdm=False)]

    def sums(self) -> dict[str, int]:
        return self._in_worker(worker_sums, self.shapes)

    def extremes(self) -> tuple[int, int]:
        return tuple(self._in_worker(worker_extremes, self.shapes))

    def counters(self) -> dict[str, int] | None:
        return self._in_worker(worker_counters)

    def sabotage(self, site: str, at: int) -> None:
        self._in_worker(worker_sabotage, site, at)

    def _in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.llm.collective_rpc(function, args=args)[0]


# --- the driver --------------------------------------------------------------------------------------------------

_failed: list[str] = []
_until = [float("inf")]
"""When the parts that are running must have ended, the outermost first."""


def say(part: str, **values: Any) -> None:
    print(json.dumps({"part": part, **values}), flush=True)


def make(kind: Any, options: argparse.Namespace, *args: Any, gpus: float = 1, **kwargs: Any) -> Any:
    gpus = gpus if options.device == "cuda" else 0
    return ray.remote(num_gpus=gpus, num_cpus=1)(kind).remote(*args, **kwargs)


def get(ref: Any, timeout: float = 60) -> Any:
    return ray.get(ref, timeout=max(0.1, min(timeout, _until[-1] - time.monotonic())))


@contextlib.contextmanager
def killed(*actors: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for actor in actors:
            ray.kill(actor)
        time.sleep(1.0)


def attempt(part: str, work: Callable[[], None], seconds: float = float("inf"), **what: Any) -> bool:
    """Do a part whose failure is reported and ends it alone; whether it ended well. Each ``get`` in it ends within
    ``seconds`` of its start."""
    start = time.monotonic()
    _until.append(min(_until[-1], start + seconds))
    try:
        if _until[-1] <= start:
            raise TimeoutError("no time was left for it")
        work()
        return True
    except BaseException as error:
        traceback.print_exc()
        print(getattr(error, "cause_traceback", ""), file=sys.stderr)
        _failed.append(part)
        say(part, **what, failed=f"{type(error).__name__}: {str(error)[-600:]}")
        return False
    finally:
        _until.pop()
        say(part, **what, total_s=round(time.monotonic() - start, 1))


@contextlib.contextmanager
def cluster(options: argparse.Namespace) -> Iterator[None]:
    """Ray for the length of the block. All processes that it starts find this checkout."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls that a failed sync leaves behind
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp") as folder:
        ray.init(
            num_cpus=16,
            num_gpus=torch.cuda.device_count() if options.device == "cuda" else 0,
            include_dashboard=False,
            _temp_dir=folder,
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


def verdict() -> int:
    """The exit status; says which parts failed."""
    say("end", failed=list(dict.fromkeys(_failed)))
    return 1 if _failed else 0
