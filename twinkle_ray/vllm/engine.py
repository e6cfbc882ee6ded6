"""vLLM engines as a rollout's target: one interface over three process models.

    llm in process        vllm.LLM whose engine core runs in the actor: its worker too, or worker processes (TP > 1)
    llm in child process  vllm.LLM whose engine core is a child (vLLM's default)
    async llm             vllm.AsyncLLM, whose engine core always is a child

All methods are coroutines; those of :class:`LLMEngine` complete without suspending, so that code which advances a
coroutine by hand can drive them. Each call into a child is bounded in time: vLLM itself waits for an answer for ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from twinkle_ray.errors import (
    PeerLost,
    ReplicaUnavailable,
    SyncError,
    SyncTimeout,
    TwinkleRayError,
    UnsupportedActor,
    UnsupportedModel,
    from_plain,
)
from twinkle_ray.residency import TAGS, left_asleep, why_refused
from twinkle_ray.types import Deadline
from twinkle_ray.vllm.adapters import lora_facts
from twinkle_ray.vllm.caches import shorten_resets
from twinkle_ray.vllm.door import Door, still_running
from twinkle_ray.vllm.line import METHODS, Line
from twinkle_ray.vllm.plugin import EXTENSION
from twinkle_ray.vllm.served import ServedAdapters
from twinkle_ray.vllm.worker import WorkerExtension, answer

IN_FLIGHT = ("wait", "abort", "keep")
"""What may become of running requests when an engine pauses."""

LEAST_VLLM = "0.25"
"""The oldest vLLM that was tried. Whether one is too old is asked of what it has, not of its number."""

_ADAPTER = "_twinkle_ray_engine"
_GRACE_S = 5.0
_SLEEP_S = 300.0


def adapt(
    candidate: Any, *, advance: Callable[[float], None] | None = None, wait_s: float = 60.0
) -> LLMEngine | AsyncEngine | None:
    """The adapter of a vLLM engine; always the same one for one engine. ``None`` for anything else.

    Args:
        candidate: perhaps a ``vllm.LLM`` or a ``vllm.AsyncLLM``. vLLM is not imported for the question.
        advance: see :class:`~twinkle_ray.vllm.door.Door`; unused for ``AsyncLLM``.
        wait_s: how long a request waits for an update to end before it is refused.

    Raises:
        UnsupportedModel: the engine is pipeline- or data-parallel.
        UnsupportedActor: this vLLM is too old: it lacks a method that a sync needs.
    """
    kinds: tuple[tuple[str, str, type[LLMEngine] | type[AsyncEngine]], ...] = (
        ("vllm.entrypoints.llm", "LLM", LLMEngine),
        ("vllm.v1.engine.async_llm", "AsyncLLM", AsyncEngine),
    )
    for module, name, adapter in kinds:
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and isinstance(candidate, cls):
            engine: LLMEngine | AsyncEngine | None = vars(candidate).get(_ADAPTER)
            if engine is None:
                engine = adapter(candidate, wait_s=wait_s)
                setattr(candidate, _ADAPTER, engine)
            if isinstance(engine, LLMEngine) and advance is not None:
                engine.door.advance = advance
            return engine
    return None


class _Adapters:
    """What both kinds of engine do with adapters. A change of what is held belongs between ``pause`` and ``resume``,
    unless it only adds a name; :meth:`learn_adapters` follows it before ``resume``, and no cache need be dropped. Pause
    with ``wait`` or ``abort``: a request kept frozen would go on with a version that is gone, which ends vLLM's engine.
    """

    served: ServedAdapters
    losses: int
    healed: int
    _vllm_config: Any

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """See :meth:`LLMEngine.call`."""
        raise NotImplementedError

    def lora_facts(self) -> dict[str, Any]:
        """See :func:`twinkle_ray.vllm.adapters.lora_facts`."""
        return lora_facts(self._vllm_config)

    @property
    def sleep_mode(self) -> bool:
        """See :class:`~twinkle_ray.serving.Target`."""
        # Which vLLM's CPU build refuses.
        return bool(getattr(getattr(self._vllm_config, "model_config", None), "enable_sleep_mode", False))

    @property
    def tags(self) -> tuple[str, ...]:
        """See :class:`~twinkle_ray.serving.Target`."""
        raise NotImplementedError

    def _unfit(self) -> ReplicaUnavailable | None:
        return why_refused(self.tags, lost=self.losses != self.healed)

    def lora_request(self, name: str) -> Any:
        """The ``LoRARequest`` for the present version of an adapter; ``generate`` with an older one gets this too.

        Raises:
            ConfigError: this engine holds no adapter of that name.
        """
        return self.served.request(name)

    @property
    def default_adapter(self) -> str | None:
        """Name of the adapter that serves requests which name none; ``None``: the base."""
        return self.served.default

    def set_default_adapter(self, name: str | None) -> None:
        """Serve requests that name no adapter with this one, in whichever version is present; ``None``: with the base.

        Raises:
            ConfigError: this engine holds no adapter of that name.
        """
        if name is not None:
            self.served.request(name)
        self.served.default = name

    async def learn_adapters(
        self, *, timeout_s: float, answers: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, int]:
        """Ask the workers what they hold: version by name.

        Args:
            answers: what each of them has said already (:meth:`twinkle_ray.vllm.adapters.Adapters.entries`).

        Raises:
            SyncError: they do not hold the same.
        """
        self.served.take(answers if answers is not None else await self.call("adapters.entries", timeout_s=timeout_s))
        return {name: version for name, (version, _) in self.served.held.items()}

    def next_adapter_number(self) -> int:
        """A number for the next version that the workers are to hold, fresh in all of them."""
        self.served.last += 1
        return self.served.last

    async def attach_adapter(self, name: str, path: str, *, version: int = 0, timeout_s: float) -> None:
        """Hold the adapter of a directory; see :meth:`twinkle_ray.vllm.adapters.Adapters.attach`. Where it fails in one
        of several workers, a new name is held by none, and one that was held cannot be asked for until they agree.
        """
        await self.learn_adapters(timeout_s=timeout_s)
        number, before = self.next_adapter_number(), name in self.served.held
        try:
            await self.call("adapters.attach", name, path, version, number, timeout_s=timeout_s)
            await self.learn_adapters(timeout_s=timeout_s)
        except BaseException:
            if not before:
                await self.call("adapters.remove", name, timeout_s=timeout_s)
            with contextlib.suppress(SyncError):
                await self.learn_adapters(timeout_s=timeout_s)
            raise

    async def remove_adapter(self, name: str, *, timeout_s: float) -> bool:
        """Let go of an adapter; if it is the default, requests are served with the base from then on. Whether there was
        one."""
        removed = await self.call("adapters.remove", name, timeout_s=timeout_s)
        if self.served.default == name:
            self.served.default = None
        await self.learn_adapters(timeout_s=timeout_s)
        return any(removed)


class LLMEngine(_Adapters):
    """A ``vllm.LLM``.

    Attributes:
        kind: ``llm in process`` or ``llm in child process``.
        loop: always ``None``.
        waits: always ``True``.
        workers: processes that own parameters.
        door: what keeps ``self.llm.generate`` out meanwhile.
        losses: how often it was put to a sleep that discards its weights.
        healed: how many of these losses a sync has made good since.
        version: of the weights. Every output of a request carries the present one as ``weights_version``.
    """

    loop: asyncio.AbstractEventLoop | None = None
    waits = True

    def __init__(self, llm: Any, *, wait_s: float = 60.0) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        _require(self._engine, "engine_core", "collective_rpc", "sleep", "wake_up", "reset_prefix_cache")
        self._vllm_config = self._engine.vllm_config
        self.workers = _workers(self._vllm_config)
        self.served = ServedAdapters(lora_facts(self._vllm_config))
        self._in_process = hasattr(self._engine.engine_core, "engine_core")
        self.kind = "llm in process" if self._in_process else "llm in child process"
        self._extended = _is_extended(self._engine.vllm_config)
        self.losses = self.healed = 0
        self._asleep: set[str] = set()
        self._sleep_known = False
        self._sleep_failed = False
        self._core_paused = False
        self._core_sleep: Callable[..., Any] = self._engine.sleep
        self._core_wake: Callable[..., Any] = self._engine.wake_up
        self.door = Door(
            self._engine,
            abort=self._abort,
            own_core=self._in_process,
            wait_s=wait_s,
            fill=self.served.filler(self._engine.add_request),
            unfit=self._unfit,
        )
        self.door.install()
        self._engine.sleep = self._note_sleep
        self._engine.wake_up = self._note_wake
        self.version = 0
        _stamp(self._engine.output_processor, lambda: self.version)
        self._sends = threading.RLock()
        self._asker: _Asker | None = None
        self._line: Line | None = None
        self._lineless = False
        if self._in_process:
            shorten_resets()
        else:
            self._guard_socket()

    def detach(self) -> None:
        """Take every trace of this adapter off the engine."""
        self.door.remove()
        if self._asker is not None:
            self._asker.close()
        if self._line is not None:
            self._line.close()
        for holder, name in (
            (self._engine, "sleep"),
            (self._engine, "wake_up"),
            (self._engine.engine_core, "_send_input"),
            (self._engine.output_processor, "process_outputs"),
            (self._llm, _ADAPTER),
        ):
            vars(holder).pop(name, None)

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of ``WorkerSide`` in every worker; the results in rank order.

        Raises:
            SyncTimeout: no answer within ``timeout_s``.
            UnsupportedActor: the engine's workers carry no extension of ours and are out of reach.
            TwinkleRayError: what a worker raised.
        """
        if self._in_process:
            target: Any = "twinkle_call" if self._extended else answer
            # The pipe to worker processes is not for two threads, and a step in another one uses it.
            with self.door.lock:
                answers = self._engine.collective_rpc(target, timeout=timeout_s, args=(method, *args))
            return _results(answers)
        _require_extension(self._extended)
        if method in METHODS and (line := self._direct_line()) is not None:
            try:
                return _results(line.call(method, *args, timeout_s=timeout_s + _GRACE_S))
            except (SyncTimeout, PeerLost):
                line.close()
                self._line = None
                raise
        return _results(
            self._ask(
                f"{method} in the workers",
                timeout_s + _GRACE_S,
                lambda: self._engine.collective_rpc("twinkle_call", timeout=timeout_s, args=(method, *args)),
            )
        )

    def _direct_line(self) -> Line | None:
        """The line to a child engine's workers; ``None`` if they are not all on this machine."""
        if self._line is None and not self._lineless:
            try:
                self._line = self._ask("line", _GRACE_S, self._make_line)
            except SyncTimeout:  # which is an OSError
                raise
            except OSError:
                self._lineless = True
        return self._line

    def _make_line(self) -> Line:
        on = getattr(getattr(self._vllm_config, "device_config", None), "device_type", "cpu")
        return Line(self._engine.collective_rpc("twinkle_line"), brisk=on != "cpu")

    def require_alive(self) -> None:
        """Raises PeerLost: the process in which the engine computes is gone."""
        _require_alive(self._engine.engine_core)

    async def pause(self, in_flight: str, deadline: Deadline) -> None:
        """Let no request read the weights from here on.

        Args:
            in_flight: ``wait`` for running requests, ``abort`` them (finish reason ``abort``), or ``keep`` them frozen.
            deadline: by when they must have ended.

        Raises:
            SyncTimeout: they had not; the engine serves again.
        """
        mode = _mode(in_flight)
        try:
            self.door.close()
            if self._in_process:
                if mode == "wait":
                    self.door.drain(deadline)
                else:
                    self.door.freeze(abort=mode == "abort")
            elif not self._core_paused and not self.door.idle and not await self.asleep():
                # An idle child computes nothing as long as the door is closed, and two calls to it are saved.
                self._core_paused = True
                try:
                    self._ask("pause", deadline.remaining(), lambda: self._core_sleep(level=0, mode=mode))
                except SyncTimeout as error:
                    raise still_running(deadline) from error
                if mode == "keep":
                    self.door.freeze(abort=False)
        except BaseException:
            await self.resume()
            raise

    async def resume(self) -> None:
        """Serve again. Safe in any state."""
        if self._core_paused:
            self._core_paused = False
            self._ask("resume", _GRACE_S, lambda: self._core_wake(["scheduling"]))
        self.door.open()

    async def refuse(self, error: ReplicaUnavailable) -> None:
        """Stay paused; running, waiting and new requests get this error."""
        self.door.refuse(error)

    async def drop_caches(self) -> None:
        """Drop what was computed with the old weights. Nothing, if no request ran since the last time: vLLM walks all
        blocks of its cache to drop them.

        Raises:
            SyncError: the prefix cache could not be reset.
        """
        if not self.door.used:
            return
        engine = self._engine
        for kwargs in _reset_attempts(engine.reset_prefix_cache):
            done = self._ask("reset_prefix_cache", _GRACE_S * 2, functools.partial(engine.reset_prefix_cache, **kwargs))
            if done is not False:
                break
        else:
            raise SyncError("vLLM could not reset its prefix cache: requests still hold its blocks", phase="transfer")
        if encodes(self._vllm_config) and hasattr(engine, "reset_encoder_cache"):
            self._ask("reset_encoder_cache", _GRACE_S * 2, engine.reset_encoder_cache)
        self.door.used = not self.door.idle  # a frozen request goes on later

    async def asleep(self) -> tuple[str, ...]:
        """Memory tags that sleep, sorted. A child engine is asked once, and if it slept before it was adapted, all are
        assumed to; from then on each call that changes it comes by here."""
        if self._sleep_failed:  # vLLM has paused before it failed
            self._ask("resume", _GRACE_S, lambda: self._core_wake(["scheduling"]))
            self._sleep_failed = False
        if not self._in_process and not self._sleep_known and not self._core_paused:
            if self._ask("is_sleeping", _GRACE_S, self._engine.is_sleeping):
                self._asleep |= set(TAGS)
            self._sleep_known = True
        return self.tags

    @property
    def tags(self) -> tuple[str, ...]:
        """See :class:`~twinkle_ray.serving.Target`."""
        if self._in_process:
            executor = self._engine.engine_core.engine_core.model_executor
            return tuple(sorted(getattr(executor, "sleeping_tags", self._asleep)))
        return tuple(sorted(self._asleep))

    async def sleep(self, level: int) -> None:
        """``LLM.sleep``, of the weights too where only the KV cache sleeps."""
        if await self.asleep() and not _sleeps_in_parts():
            await self.wake_up(None)
        self._ask("sleep", _SLEEP_S, lambda: self._llm.sleep(level=level))

    async def wake_up(self, tags: list[str] | None) -> None:
        """``LLM.wake_up``."""
        self._ask("wake_up", _SLEEP_S, lambda: self._llm.wake_up(tags=tags))

    def _ask(self, what: str, timeout_s: float, question: Callable[[], Any]) -> Any:
        """Ask the engine core. A child is asked in a thread of its own, which is left behind if no answer comes."""
        if self._in_process:
            with self.door.lock:
                return question()
        asker, self._asker = self._asker or _Asker(), None
        answered, result, error = asker.ask(question, timeout_s)
        if not answered:
            raise SyncTimeout(f"vLLM's engine core did not answer within {timeout_s:.1f} s ({what})", phase="transfer")
        self._asker = asker
        if error is not None:
            raise error
        return result

    def _guard_socket(self) -> None:
        """One thread at a time on the socket to the child: a generate in another thread sends on it too."""
        core = self._engine.engine_core
        original = getattr(core, "_send_input", None)
        if original is None:
            return

        def send(*args: Any, **kwargs: Any) -> Any:
            with self._sends:
                return original(*args, **kwargs)

        core._send_input = send

    def _abort(self) -> list[Any]:
        """End all running requests; their last outputs, if they can be had at once."""
        processor = self._engine.output_processor
        running = dict(processor.request_states)
        if not self._in_process:
            # The child reports each aborted request, which wakes a caller that waits for outputs.
            self._ask("abort", _GRACE_S, lambda: self._core_sleep(level=0, mode="abort"))
            self._core_paused = True
            self._engine.abort_request(list(running), internal=True)
            return []
        if not running:
            return []
        v1 = importlib.import_module("vllm.v1.engine")
        texts = [name for name, state in running.items() if state.detokenizer is not None]
        self._engine.engine_core.abort_requests(list(running))
        self._engine.abort_request([name for name in running if name not in texts], internal=True)
        ended = [
            v1.EngineCoreOutput(request_id=name, new_token_ids=[], finish_reason=v1.FinishReason.ABORT)
            for name in texts
        ]
        return list(processor.process_outputs(ended).request_outputs)

    def _note_sleep(self, *args: Any, **kwargs: Any) -> Any:
        level = kwargs.get("level", args[0] if args else 1)
        mode = kwargs.get("mode", args[1] if len(args) > 1 else "abort")
        try:
            with self.door.lock if self._in_process else contextlib.nullcontext():  # not beside a step
                if self._in_process and level and mode == "abort":
                    self.door.abort()  # vLLM would forget them, and their callers wait for ever
                result = self._core_sleep(*args, **kwargs)
        except BaseException:
            self._sleep_failed, self._sleep_known = True, False
            raise
        finally:  # one that failed may have come far enough
            self.losses += level >= 2
        if level:
            self._asleep |= set(TAGS)
        return result

    def _note_wake(self, *args: Any, **kwargs: Any) -> Any:
        result = self._core_wake(*args, **kwargs)
        tags = kwargs.get("tags", args[0] if args else None)
        self._asleep = left_asleep(self._asleep, tags, result)
        return result


class _Asker:
    """A thread that asks questions, one at a time. Kept, because to make one for each takes 0.2 ms."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="twinkle_ray-ask", daemon=True).start()

    def ask(self, question: Callable[[], Any], timeout_s: float) -> tuple[bool, Any, BaseException | None]:
        """Whether there was an answer in time, and the answer or the error. Without one the thread is of no more use,
        and ends when its question does."""
        answer = _Answer()
        self._questions.put((question, answer))
        if answer.there.wait(timeout_s):
            return True, answer.result, answer.error
        self.close()
        return False, None, None

    def close(self) -> None:
        """End the thread after its present question."""
        self._questions.put(None)

    def _run(self) -> None:
        while (item := self._questions.get()) is not None:
            question, answer = item
            try:
                answer.result = question()
            except BaseException as error:
                answer.error = error
            answer.there.set()
            del item, question, answer  # else they live until the next question


class _Answer:
    def __init__(self) -> None:
        self.there = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class AsyncEngine(_Adapters):
    """A ``vllm.AsyncLLM``. Its methods run on its own event loop.

    Attributes:
        kind: ``async llm``.
        loop: the loop on which the engine runs; ``None`` if it has none yet.
        workers: processes that own parameters.
        losses, healed: see :class:`LLMEngine`.
        version: see :class:`LLMEngine`.
    """

    kind = "async llm"

    def __init__(self, llm: Any, *, wait_s: float = 60.0) -> None:
        self._llm = llm
        _require(llm, "collective_rpc", "sleep", "wake_up", "reset_prefix_cache", "pause_generation")
        self._vllm_config = llm.vllm_config
        self.workers = _workers(self._vllm_config)
        self.served = ServedAdapters(lora_facts(self._vllm_config))
        self.loop = _loop_of(llm)
        self.wait_s = wait_s
        self._extended = _is_extended(llm.vllm_config)
        self._closed = False
        self._error: ReplicaUnavailable | None = None
        self._core_paused = False
        self.losses = self.healed = 0
        self._asleep: set[str] = set()
        self._sleep_known = False
        self._sleep_failed = False
        self._line: Line | None = None
        self._lineless = False
        self.version = 0
        _stamp(llm.output_processor, lambda: self.version)
        # For calls over the line, one at a time, beside the loop.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="twinkle_ray-line")
        self._sleep: Callable[..., Any] = llm.sleep
        self._wake: Callable[..., Any] = llm.wake_up
        for name in ("generate", "encode"):
            setattr(llm, name, self._guarded(getattr(llm, name)))
        llm.sleep, llm.wake_up = self._note_sleep, self._note_wake

    def detach(self) -> None:
        """Take every trace of this adapter off the engine."""
        self._closed, self._error = False, None
        for name in ("generate", "encode", "sleep", "wake_up", _ADAPTER):
            vars(self._llm).pop(name, None)
        vars(self._llm.output_processor).pop("process_outputs", None)
        if self._line is not None:
            self._line.close()
        self._thread.shutdown(wait=False)

    @property
    def waits(self) -> bool:
        """See :class:`~twinkle_ray.serving.Target`."""
        return self._line is not None

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """See :meth:`LLMEngine.call`."""
        _require_extension(self._extended)
        if method in METHODS and (line := await self._direct_line()) is not None:
            asked = functools.partial(line.call, method, *args, timeout_s=timeout_s + _GRACE_S)
            try:
                return _results(await asyncio.get_running_loop().run_in_executor(self._thread, asked))
            except (SyncTimeout, PeerLost):
                line.close()
                self._line = None
                raise
        rpc = self._llm.collective_rpc("twinkle_call", timeout=timeout_s, args=(method, *args))
        return _results(await _bounded(rpc, timeout_s + _GRACE_S, f"{method} in the workers"))

    async def _direct_line(self) -> Line | None:
        """See :meth:`LLMEngine._direct_line`."""
        if self._line is None and not self._lineless:
            addresses = await _bounded(self._llm.collective_rpc("twinkle_line"), _GRACE_S, "line")
            made = asyncio.get_running_loop().run_in_executor(self._thread, Line, addresses)
            try:
                self._line = await _bounded(made, _GRACE_S, "line")
            except SyncTimeout:
                raise
            except OSError:
                self._lineless = True
        return self._line

    def require_alive(self) -> None:
        """See :meth:`LLMEngine.require_alive`."""
        _require_alive(self._llm.engine_core)

    async def pause(self, in_flight: str, deadline: Deadline) -> None:
        """See :meth:`LLMEngine.pause`."""
        mode = _mode(in_flight)
        self._closed, self._error = True, None
        try:
            if self._core_paused or await self.asleep():
                return
            self._core_paused = True
            try:
                await _bounded(self._pause_generation(mode), deadline.remaining(), "pause")
            except SyncTimeout as error:
                raise still_running(deadline) from error
        except BaseException:
            await self.resume()
            raise

    async def resume(self) -> None:
        """Serve again. Safe in any state."""
        if self._core_paused:
            self._core_paused = False
            if not self.tags:  # else vLLM goes on itself, when the last of them wakes
                await _bounded(self._llm.resume_generation(), _GRACE_S, "resume")
        self._closed, self._error = False, None

    async def refuse(self, error: ReplicaUnavailable) -> None:
        """See :meth:`LLMEngine.refuse`."""
        self._closed, self._error, self._core_paused = True, error, True
        await _bounded(self._pause_generation("abort"), _GRACE_S * 2, "abort")

    async def drop_caches(self) -> None:
        """See :meth:`LLMEngine.drop_caches`."""
        llm = self._llm
        for kwargs in _reset_attempts(llm.reset_prefix_cache):
            if await _bounded(llm.reset_prefix_cache(**kwargs), _GRACE_S * 2, "reset_prefix_cache") is not False:
                break
        else:
            raise SyncError("vLLM could not reset its prefix cache: requests still hold its blocks", phase="transfer")
        if encodes(self._vllm_config) and hasattr(llm, "reset_encoder_cache"):
            await _bounded(llm.reset_encoder_cache(), _GRACE_S * 2, "reset_encoder_cache")

    async def asleep(self) -> tuple[str, ...]:
        """See :meth:`LLMEngine.asleep`."""
        if self._sleep_failed:  # see LLMEngine.asleep
            await _bounded(self._wake(["scheduling"]), _GRACE_S, "resume")
            self._sleep_failed = False
        if not self._sleep_known and not self._core_paused:
            if await _bounded(self._llm.is_sleeping(), _GRACE_S, "is_sleeping"):
                self._asleep |= set(TAGS)
            self._sleep_known = True
        return self.tags

    @property
    def tags(self) -> tuple[str, ...]:
        """See :class:`~twinkle_ray.serving.Target`."""
        return tuple(sorted(self._asleep))

    async def sleep(self, level: int) -> None:
        """``AsyncLLM.sleep``, of the weights too where only the KV cache sleeps."""
        if await self.asleep() and not _sleeps_in_parts():
            await self.wake_up(None)
        await _bounded(self._llm.sleep(level), _SLEEP_S, "sleep")

    async def wake_up(self, tags: list[str] | None) -> None:
        """``AsyncLLM.wake_up``."""
        await _bounded(self._llm.wake_up(tags), _SLEEP_S, "wake_up")

    def _pause_generation(self, mode: str) -> Any:
        accepted = inspect.signature(self._llm.pause_generation).parameters
        if "mode" in accepted:
            return self._llm.pause_generation(mode=mode, clear_cache=False)
        if mode == "keep":
            raise UnsupportedActor('this vLLM cannot freeze requests (in_flight="keep"); upgrade it or use "wait"')
        return self._llm.pause_generation(wait_for_inflight_requests=mode == "wait", clear_cache=False)

    def _guarded(self, original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        fill = self.served.filler(original)

        async def guarded(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            await self._wait_open()
            args = fill(args, kwargs)
            # Closed at once when the caller leaves, so that vLLM aborts the request.
            async with contextlib.aclosing(original(*args, **kwargs)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    if self._error is not None and output.finished:
                        raise ReplicaUnavailable(self._error.message)
                    yield output

        return guarded

    async def _wait_open(self) -> None:
        deadline = Deadline.after(self.wait_s)
        while (why := self._unfit()) is not None or self._closed:
            if why is not None:
                raise why
            if self._error is not None:
                raise ReplicaUnavailable(self._error.message)
            if deadline.expired:
                raise ReplicaUnavailable(
                    f"this rollout has been updating its weights for {self.wait_s:.0f} s; try again later"
                )
            await asyncio.sleep(0.01)

    async def _note_sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        try:
            result = await self._sleep(level, *args, **kwargs)
        except BaseException:
            self._sleep_failed, self._sleep_known = True, False
            raise
        finally:  # one that failed may have come far enough
            self.losses += level >= 2
        if level:
            self._asleep |= set(TAGS)
        return result

    async def _note_wake(self, tags: list[str] | None = None) -> Any:
        result = await self._wake(tags)
        self._asleep = left_asleep(self._asleep, tags, result)
        return result


def _stamp(processor: Any, version: Callable[[], int]) -> None:
    """Let every output carry the version of the weights that computed its last token.

    Outputs are stamped where they are made of what the engine core has computed: a caller may read them much later. No
    request is computed with two versions, unless it was kept frozen between them.
    """
    process = processor.process_outputs

    def processed(core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for one in core_outputs:
            state = processor.request_states.get(one.request_id)
            if state is not None and "make_request_output" not in vars(state):
                state.make_request_output = stamped(state.make_request_output)
        return process(core_outputs, *args, **kwargs)

    def stamped(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            output = make(*args, **kwargs)
            if output is not None:
                output.weights_version = version()
            return output

        return made

    processor.process_outputs = processed


def _require(engine: Any, *hooks: str) -> None:
    lacking = next((hook for hook in hooks if not hasattr(engine, hook)), None)
    if lacking is not None:
        version = getattr(sys.modules.get("vllm"), "__version__", "of an unknown version")
        raise UnsupportedActor(
            f"this vLLM ({version}) is too old for a sync: its {type(engine).__name__} has no {lacking}; install "
            f"vllm>={LEAST_VLLM}"
        )


def _require_alive(core: Any) -> None:
    """A worker may outlive its engine core by a moment, and take a sync that nobody will serve.

    Raises:
        PeerLost: a process of the engine core is gone.
    """
    manager = getattr(getattr(core, "resources", None), "engine_manager", None)
    if any(not process.is_alive() for process in getattr(manager, "processes", ())):
        raise PeerLost("the process of this vLLM engine is dead; make the engine anew", phase="transfer")


def _workers(vllm_config: Any) -> int:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if int(getattr(parallel, name)) > 1:
            raise UnsupportedModel(f"an engine with {name} > 1 cannot be synced; use tensor_parallel_size")
    return int(parallel.world_size)


def _is_extended(vllm_config: Any) -> bool:
    """Whether the engine's workers carry our extension, itself or a subclass of it."""
    name = str(vllm_config.parallel_config.worker_extension_cls or "")
    if name in ("", EXTENSION):
        return bool(name)
    module, _, cls = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, WorkerExtension)


def _require_extension(extended: bool) -> None:
    if not extended:
        raise UnsupportedActor(
            "this vLLM engine's workers run in other processes and carry no twinkle_ray extension; make the engine "
            f'with worker_extension_cls="{EXTENSION}" (or a subclass), or inside an actor with RolloutActorMixin'
        )


def _results(answers: list[Any]) -> list[Any]:
    for status, value in answers:
        if status != "ok":
            raise _in_worker(from_plain(value))
    return [value for _, value in answers]


def _in_worker(error: Exception) -> TwinkleRayError:
    """A call's error, typed: one that is not ours says what it was, and where."""
    if isinstance(error, TwinkleRayError):
        return error
    return SyncError(
        f"{type(error).__name__} in a vLLM worker: {error}",
        cause_type=type(error).__name__,
        cause_traceback=str(getattr(error, "twinkle_traceback", "")),
    )


def _mode(in_flight: str) -> str:
    if in_flight not in IN_FLIGHT:
        raise UnsupportedActor(f"in_flight must be one of {', '.join(IN_FLIGHT)}, not {in_flight!r}")
    return in_flight


def encodes(vllm_config: Any) -> bool:
    """Whether requests may bring what vLLM encodes with the weights and keeps: images and the like, and queries of
    models that pool. Of one that generates and reads text alone it keeps nothing, and to ask a child engine to drop
    that takes a millisecond."""
    model = getattr(vllm_config, "model_config", None)
    if getattr(model, "runner_type", None) != "generate":
        return True
    return any(getattr(model, name, True) for name in ("is_multimodal_model", "is_encoder_decoder"))


def _reset_attempts(reset: Callable[..., Any]) -> list[dict[str, bool]]:
    """Arguments to try in turn: frozen requests hold blocks, and are computed anew after the second attempt."""
    accepts = "reset_running_requests" in inspect.signature(reset).parameters
    return [{}, {"reset_running_requests": True}] if accepts else [{}]


async def _bounded(awaitable: Any, timeout_s: float, what: str) -> Any:
    try:
        return await asyncio.wait_for(awaitable, max(timeout_s, 0.001))
    except TimeoutError as error:
        raise SyncTimeout(f"vLLM did not answer within {timeout_s:.1f} s ({what})", phase="transfer") from error


def _sleeps_in_parts() -> bool:
    """Whether this vLLM puts weights to sleep while the KV cache sleeps already. An older one takes the call and does
    nothing."""
    executor = getattr(sys.modules.get("vllm.v1.executor.abstract"), "Executor", None)
    return hasattr(executor, "discard")


def _loop_of(llm: Any) -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        handler = getattr(llm, "output_handler", None)
        return handler.get_loop() if handler is not None else None
