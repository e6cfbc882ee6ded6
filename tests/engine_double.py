"""A double of vLLM's engines that keeps to vLLM's rules of sleep, and is stricter where vLLM would only go wrong.

It stands in for ``vllm.LLM`` (``llm in process``, ``llm in child process``) and ``vllm.AsyncLLM``, so that the adapters
of :mod:`twinkle_ray.vllm.engine`, their door and the operations of a rollout are the real ones. The model is a TinyLM,
what a request gets are its logits, and weights come through the real worker side into a plain module.

Rules, of which those with a star are vLLM's own:

* level 1 keeps weights on the host, level 2 discards them (*); what sleeps holds rubbish, and after level 2 goes on to
* ``sleep`` while weights sleep does nothing (*); the scheduler is paused from then on until all is awake (*)
* ``wake_up`` of a tag that does not sleep does nothing, not even for the other tags (*); of no tag at all is an error
* memory of a tag is given back when it sleeps and taken again when it wakes, from a device with a limit
* a request that is computed, or weights that are written, while memory for them is not there: the engine is dead (*)
* requests of an engine in process that a sleep ends are never heard of again (*)
* a request that waits for a paused scheduler would wait for ever (*), which is an error here
* the prefix cache is kept until somebody resets it
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
import torch

from tests.actors import Probed, TinyLM
from twinkle_ray.errors import ReplicaUnavailable
from twinkle_ray.mixins import RolloutActorMixin
from twinkle_ray.module_adapters import ModuleAdapters
from twinkle_ray.sinks import ModuleSink
from twinkle_ray.vllm.worker import WorkerExtension, attach
from twinkle_ray.worker import WorkerSide

TAGS = ("weights", "kv_cache")
KINDS = ("llm in process", "llm in child process", "async llm")


@ray.remote(num_cpus=0)
class Device:
    """Memory that several actors share, and what happened to it, in order."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.peak = limit, 0, 0
        self.events: list[str] = []

    def note(self, event: str, change: int = 0) -> None:
        if self.used + change > self.limit:
            raise MemoryError(f"{event}: {change} of {self.limit - self.used} that are free")
        self.used += change
        self.peak = max(self.peak, self.used)
        self.events.append(event)

    def seen(self) -> tuple[list[str], int, int]:
        """Events since the last call, the peak since then, and what is used now."""
        events, self.events = self.events, []
        peak, self.peak = self.peak, self.used
        return events, peak, self.used


class EngineDeadError(Exception):
    """As vLLM's."""


class FinishReason(Enum):
    ABORT = "abort"


class Side(WorkerSide):
    """The real one, which may not write while weights sleep."""

    core: Core

    def receive(self, *args: Any, **kwargs: Any) -> None:
        self.core.require("weights", "weights are received")
        super().receive(*args, **kwargs)


class Worker(WorkerExtension):
    """What vLLM's worker is: the model, and its memory."""

    def __init__(self, core: Core, model: torch.nn.Module) -> None:
        self.rank, self.core, self.model = 0, core, model
        adapters = ModuleAdapters(model)
        self._twinkle_ray_adapters = adapters
        side = Side(ModuleSink(model, adapters.holds_any), lambda: adapters)
        side.core = core
        attach(self, side)
        self.host: dict[str, torch.Tensor] | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def sleep(self, level: int) -> None:
        kept = dict(self.tensors()) if level == 1 else dict(self.model.named_buffers())
        self.host = {name: value.detach().clone() for name, value in kept.items()}
        self.spoil()

    def spoil(self) -> None:
        with torch.no_grad():
            for _, value in self.tensors():
                value.fill_(float("nan") if value.is_floating_point() else -77)

    def wake(self) -> None:
        assert self.host is not None
        with torch.no_grad():
            for name, value in self.tensors():
                if name in self.host:
                    value.copy_(self.host[name])
        self.host = None


class Core:
    """Engine core, scheduler and executor."""

    def __init__(self, model: torch.nn.Module, device: Any = None, *, weights: int = 10, kv_cache: int = 10) -> None:
        self.worker = Worker(self, model)
        self.sleeping_tags: set[str] = set()
        self.model_executor = self
        self.device, self.sizes = device, {"weights": weights, "kv_cache": kv_cache}
        self.paused = False
        self.lock: Any = threading.RLock()
        self.dead = ""
        self.cache: dict[Any, torch.Tensor] = {}
        self.faults: list[str] = []
        self.events: list[str] = []
        self.running: dict[str, list[Any]] = {}
        for tag in TAGS:
            self.note(f"start {tag}", self.sizes[tag])

    def note(self, event: str, change: int = 0) -> None:
        if event in self.faults:
            self.faults.remove(event)
            raise OSError(f"no more power at {event}")
        if self.device is not None:
            ray.get(self.device.note.remote(event, change), timeout=30)
        self.events.append(event)

    def require(self, tag: str, what: str) -> None:
        if tag in self.sleeping_tags:
            self.dead = f"{what} while {tag} sleeps"
        if self.dead:
            raise EngineDeadError(self.dead)

    def sleep(self, level: int = 1, mode: str = "abort") -> list[Any]:
        """Outputs of requests that were ended."""
        assert mode in ("abort", "wait", "keep"), mode
        with self.lock:
            ended = self.stop(mode)
            self.paused = True
            if level and "weights" not in self.sleeping_tags:
                tags = set(TAGS) - self.sleeping_tags
                self.note("sleep", -sum(self.sizes[tag] for tag in tags))
                self.worker.sleep(level)
                self.sleeping_tags |= tags
            return ended

    def wake_up(self, tags: list[str] | None = None) -> bool:
        if tags is not None and set(tags) - {*TAGS, "scheduling"}:
            raise ValueError(f"no such tag among {tags}")
        tags = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if self.sleeping_tags and (tags is None or (tags and set(tags) <= self.sleeping_tags)):
            for tag in [tag for tag in TAGS if tag in self.sleeping_tags and (tags is None or tag in tags)]:
                self.note(f"wake {tag}", self.sizes[tag])
                if tag == "weights":
                    self.worker.wake()
                self.sleeping_tags.discard(tag)
        self.paused = self.paused and bool(self.sleeping_tags)
        return not self.sleeping_tags

    def stop(self, mode: str) -> list[Any]:
        """What becomes of running requests."""
        ended = []
        while self.running and mode == "wait":
            ended += self.compute()
        if mode == "abort":
            with self.lock:
                ended = [SimpleNamespace(request_id=name, logits=None, reason="abort") for name in self.running]
                self.running.clear()
        return ended

    def compute(self) -> list[Any]:
        """One step of every running request; those that ended."""
        with self.lock:
            if self.paused:
                return []
            for tag in TAGS:
                self.require(tag, "a request is computed")
            ended = []
            for name, request in list(self.running.items()):
                time.sleep(0.002)
                request[1] -= 1
                if request[1] <= 0:
                    key = request[0]
                    if key not in self.cache:
                        self.cache[key] = self.forward(key[1])
                    del self.running[name]
                    ended.append(SimpleNamespace(request_id=name, logits=self.cache[key], reason="length"))
            return ended

    def forward(self, adapter: str | None) -> torch.Tensor:
        self.worker._twinkle_ray_adapters.choose(adapter and adapter.partition("@")[0])
        with torch.no_grad():
            found: torch.Tensor = self.worker.model.eval()(torch.arange(12).reshape(2, 6))
        return found

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.dead:
            raise EngineDeadError(self.dead)
        return [getattr(self.worker, method)(*args) if isinstance(method, str) else method(self.worker, *args)]

    def reset_prefix_cache(self) -> bool:
        self.note("reset")
        self.cache.clear()
        return True


class Processor:
    """vLLM's output processor, as far as it is looked at."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def process_outputs(self, ended: list[Any], *args: Any, **kwargs: Any) -> Any:
        states = [self.request_states.pop(one.request_id, None) for one in ended]
        made = [s.make_request_output(one) for s, one in zip(states, ended, strict=True) if s is not None]
        return SimpleNamespace(request_outputs=made)


def state() -> Any:
    def make_request_output(one: Any) -> Any:
        reason = getattr(one, "reason", "abort")
        return SimpleNamespace(finished=True, logits=getattr(one, "logits", None), reason=reason)

    return SimpleNamespace(make_request_output=make_request_output, detokenizer=object())


def config(lora: bool) -> Any:
    settings = SimpleNamespace(max_lora_rank=8, max_loras=2, max_cpu_loras=2, lora_dtype="auto")
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        data_parallel_size=1,
        world_size=1,
        worker_extension_cls="twinkle_ray.vllm.worker.WorkerExtension",
    )
    return SimpleNamespace(
        lora_config=settings if lora else None,
        parallel_config=parallel,
        model_config=SimpleNamespace(enable_sleep_mode=True),
    )


class Engine:
    """``LLMEngine``, whose core computes when it is stepped or, in a child, by itself."""

    def __init__(self, core: Core, *, child: bool, lora: bool) -> None:
        self.core, self.child = core, child
        if not child:  # nothing but the door keeps a step and a sleep apart
            core.lock = contextlib.nullcontext()
        self.engine_core = SimpleNamespace() if child else SimpleNamespace(engine_core=core)
        self.engine_core.abort_requests = lambda names: [core.running.pop(name, None) for name in names]
        self.vllm_config = config(lora)
        self.output_processor = Processor()
        self.ready: list[Any] = []
        self.vain = 0

    def add_request(self, request_id: str, prompt: str, steps: int, lora_request: Any = None) -> None:
        self.output_processor.request_states[request_id] = state()
        self.core.running[request_id] = [(prompt, lora_request and lora_request.lora_name), steps]

    def step(self) -> list[Any]:
        ended, self.ready = self.ready, []
        if not ended:
            self.vain = self.vain + 1 if self.core.paused else 0
            if self.vain > 100:
                raise TimeoutError("nobody would ever compute this request")
            ended = self.core.compute()
        return list(self.output_processor.process_outputs(ended).request_outputs)

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.request_states)

    def abort_request(self, names: list[str], internal: bool = False) -> None:
        for name in names:
            self.core.running.pop(name, None)
            self.output_processor.request_states.pop(name, None)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert self.child or mode != "wait", "vLLM refuses this in process"
        ended = self.core.sleep(level, mode)
        if self.child:  # else the callers of those that were ended hear nothing, and wait for ever
            self.ready += ended

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return self.core.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.core.paused or bool(self.core.sleeping_tags)

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return self.core.collective_rpc(method, args)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.core.reset_prefix_cache()


class LLM:
    """``vllm.LLM``."""

    def __init__(self, core: Core, *, child: bool, lora: bool) -> None:
        self.core = core
        self.llm_engine = Engine(core, child=child, lora=lora)
        self.numbers = itertools.count()

    def generate(self, prompt: str, steps: int = 1) -> Any:
        self.llm_engine.add_request(f"request-{next(self.numbers)}", prompt, steps)
        found: list[Any] = []
        while self.llm_engine.has_unfinished_requests():
            found += self.llm_engine.step()
        return found[-1]

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.llm_engine.sleep(level=level, mode=mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return self.llm_engine.wake_up(tags)


class AsyncLLM:
    """``vllm.AsyncLLM``."""

    def __init__(self, core: Core, *, lora: bool) -> None:
        self.core = core
        self.vllm_config = config(lora)
        self.output_processor = Processor()
        self.engine_core = SimpleNamespace()
        self.ended: dict[str, Any] = {}

    async def generate(self, prompt: str, steps: int, request_id: str, lora_request: Any = None) -> Any:
        self.output_processor.request_states[request_id] = state()
        self.core.running[request_id] = [(prompt, lora_request and lora_request.lora_name), steps]
        vain = 0
        while request_id not in self.ended:
            vain = vain + 1 if self.core.paused else 0
            if vain > 100:
                raise TimeoutError("nobody would ever compute this request")
            self.take(self.core.compute())
            await asyncio.sleep(0.002)
        (output,) = self.output_processor.process_outputs([self.ended.pop(request_id)]).request_outputs
        yield output

    async def encode(self, *args: Any) -> Any:
        raise NotImplementedError
        yield

    def take(self, ended: list[Any]) -> None:
        self.ended |= {one.request_id: one for one in ended}

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        while mode == "wait" and self.core.running:
            await asyncio.sleep(0.002)
        self.take(self.core.stop(mode))
        self.core.paused = True

    async def resume_generation(self) -> None:
        assert not self.core.sleeping_tags, "scheduling goes on while memory sleeps"
        self.core.paused = False

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.take(self.core.sleep(level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return self.core.wake_up(tags)

    async def is_sleeping(self) -> bool:
        return self.core.paused or bool(self.core.sleeping_tags)

    async def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return self.core.collective_rpc(method, args)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.core.reset_prefix_cache()


def pretend() -> None:
    """Let this process take the doubles for vLLM's classes."""
    lora = SimpleNamespace(LoRARequest=lambda **values: SimpleNamespace(**values))
    outputs = SimpleNamespace(FinishReason=FinishReason, EngineCoreOutput=lambda **values: SimpleNamespace(**values))
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.entrypoints": {},
        "vllm.entrypoints.llm": {"LLM": LLM},
        "vllm.v1": {},
        "vllm.v1.engine": vars(outputs),
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        # One that can put weights to sleep while the KV cache sleeps already.
        "vllm.v1.executor": {},
        "vllm.v1.executor.abstract": {"Executor": type("Executor", (), {"discard": None})},
        "vllm.lora": {},
        "vllm.lora.request": vars(lora),
    }
    for name, values in modules.items():
        made = ModuleType(name)
        vars(made).update(values)
        sys.modules[name] = made


class _Double(Probed, RolloutActorMixin):
    checkpoint_request_wait_s = 5.0
    llm: Any

    def _begin(self, seed: int, device: Any) -> Core:
        torch.set_num_threads(1)
        pretend()
        self.model = TinyLM(seed)
        self.core = Core(self.model, device)
        return self.core

    def truth(self) -> tuple[str, ...]:
        """What sleeps, by the engine's own book."""
        return tuple(sorted(self.core.sleeping_tags))

    def dead(self) -> str:
        return self.core.dead

    def fail_at(self, *events: str) -> None:
        """Each of these raises once, instead of happening."""
        self.core.faults = list(events)

    def events(self) -> list[str]:
        """Since the last call."""
        events, self.core.events = self.core.events, []
        return events

    def pid(self) -> int:
        return os.getpid()


class Double(_Double):
    """A rollout with a double of ``vllm.LLM``."""

    def __init__(self, seed: int = 1000, device: Any = None, *, child: bool = False, lora: bool = False) -> None:
        self.llm = LLM(self._begin(seed, device), child=child, lora=lora)

    def generate(self, prompt: str = "a", steps: int = 1) -> Any:
        """Its output, or why it was refused."""
        try:
            return self.llm.generate(prompt, steps)
        except ReplicaUnavailable as error:
            return str(error)

    def of_the_users_own(self, method: str, *args: Any) -> None:
        getattr(self.llm, method)(*args)


class AsyncDouble(_Double):
    """A rollout with a double of ``vllm.AsyncLLM``; its coroutines make it an async actor."""

    def __init__(self, seed: int = 1000, device: Any = None, *, lora: bool = False) -> None:
        self.llm = AsyncLLM(self._begin(seed, device), lora=lora)
        self.numbers = itertools.count()

    async def generate(self, prompt: str = "a", steps: int = 1) -> Any:
        try:
            return [o async for o in self.llm.generate(prompt, steps, f"request-{next(self.numbers)}")][-1]
        except ReplicaUnavailable as error:
            return str(error)

    async def of_the_users_own(self, method: str, *args: Any) -> None:
        await getattr(self.llm, method)(*args)


def start(kind: str, *args: Any, **kwargs: Any) -> Any:
    """An actor with an engine of this kind, and two threads."""
    options = {"num_cpus": 0.1, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    if kind == "async llm":
        return ray.remote(AsyncDouble).options(**options).remote(*args, **kwargs)
    child = kind == "llm in child process"
    return ray.remote(Double).options(max_concurrency=2, **options).remote(*args, child=child, **kwargs)
