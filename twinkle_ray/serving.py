"""The rollout actor's side of a sync: what its engine holds, and the operations that change it.

An operation is a coroutine. Where the engine is an ``AsyncLLM`` it runs as a task of the engine's loop; elsewhere it
is advanced a step at a time by whoever polls it, so that an actor with one thread still answers in between. Both ways
run the same code, and the actor's methods themselves never wait on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from twinkle_ray.backends import generation
from twinkle_ray.digest import assemble
from twinkle_ray.errors import (
    ConfigError,
    NotAgreed,
    PeerLost,
    ReplicaUnavailable,
    SyncAborted,
    SyncError,
    SyncTimeout,
    UnsupportedActor,
    first_cause,
)
from twinkle_ray.module_adapters import ModuleAdapters
from twinkle_ray.residency import no_sleep_mode, require_tags
from twinkle_ray.sinks import ModuleSink, Piece
from twinkle_ray.types import MERGED, PLAIN, UNVERIFIABLE, Contents, Deadline, OpState, OpStatus, RolloutStatus
from twinkle_ray.worker import WorkerSide, unpack_status

_SLICE_S = 0.2
_GRACE_S = 2.0
_LOOP_SLICE_S = 0.05
"""The same on an event loop, where an abort is heard between two slices."""
_CONFIGS_KEPT = 64
_HARMLESS = ("prepare", "facts", "agree", "check_adapter", "digest", "residency")
"""Operations that change nothing; a new one need not wait for their end."""

_making = threading.Lock()


def making() -> threading.Lock:
    """The lock under which an actor makes its :class:`Serving`, so that its threads all find the same one.

    A function, because Ray pickles a mixin's methods by value and a lock cannot be pickled.
    """
    return _making


class Target(Protocol):
    """What holds the weights: a torch module, or a vLLM engine (see :mod:`twinkle_ray.vllm.engine`).

    The methods are coroutines so that one operation serves engines of both kinds; those of a synchronous engine
    complete without suspending.
    """

    kind: str
    loop: asyncio.AbstractEventLoop | None
    version: int
    """Of the weights, as requests are told."""

    @property
    def waits(self) -> bool:
        """Whether ``poll`` in the workers may wait for its slice without holding anybody else up."""
        ...

    @property
    def workers(self) -> int: ...

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of :class:`WorkerSide` in every worker process; the results in rank order."""
        ...

    def require_alive(self) -> None:
        """Raises PeerLost: what serves is gone, though its workers may not know yet."""
        ...

    async def pause(self, in_flight: str, deadline: Deadline) -> None:
        """Let no request read the weights: ``wait`` for running ones, ``abort`` or ``keep`` them frozen."""
        ...

    async def resume(self) -> None:
        """Serve again."""
        ...

    async def refuse(self, error: ReplicaUnavailable) -> None:
        """Stay paused; requests get this error."""
        ...

    async def drop_caches(self) -> None:
        """Drop what was computed with the old weights (prefix cache and the like); raises if it cannot."""
        ...

    @property
    def losses(self) -> int:
        """How often it was put to a sleep that discards its weights."""
        ...

    healed: int
    """How many of these losses a sync has made good. It refuses requests while there are more."""

    @property
    def sleep_mode(self) -> bool:
        """Whether it can sleep."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """Memory tags that sleep, as far as is known without asking. It refuses requests while there are any."""
        ...

    async def asleep(self) -> tuple[str, ...]:
        """Memory tags that sleep."""
        ...

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self, tags: list[str] | None) -> None: ...

    @property
    def default_adapter(self) -> str | None:
        """Name of the adapter that serves requests which name none."""
        ...

    def lora_facts(self) -> dict[str, Any]:
        """What a vLLM engine can hold; empty for a module."""
        ...

    def next_adapter_number(self) -> int:
        """A number for the next version of an adapter, fresh in all workers."""
        ...

    def set_default_adapter(self, name: str | None) -> None:
        """Serve requests that name no adapter with this one; ``None``: with the base."""
        ...

    async def learn_adapters(
        self, *, timeout_s: float, answers: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, int]:
        """Which adapters the workers hold, which are asked unless they have answered: version by name. Raises SyncError
        if they do not agree."""
        ...


class ModuleTarget:
    """A plain torch module in the actor's own process. It has no requests, so there is nothing to pause."""

    kind = "module"
    loop: asyncio.AbstractEventLoop | None = None
    losses = healed = 0
    version = 0
    waits = True
    workers = 1
    sleep_mode = False
    tags: tuple[str, ...] = ()

    def __init__(self, module: torch.nn.Module) -> None:
        adapters = self._adapters = ModuleAdapters(module)
        self._side = WorkerSide(ModuleSink(module, adapters.holds_any), lambda: adapters)

    @property
    def default_adapter(self) -> str | None:
        return self._adapters.default

    def lora_facts(self) -> dict[str, Any]:
        return {}

    def next_adapter_number(self) -> int:
        return self._adapters.last + 1

    def set_default_adapter(self, name: str | None) -> None:
        self._adapters.choose(name)

    async def learn_adapters(
        self, *, timeout_s: float, answers: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, int]:
        return {name: version for name, (version, _) in self._adapters.entries()["held"].items()}

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        owner, _, name = method.rpartition(".")
        return [getattr(self._adapters if owner == "adapters" else self._side, name)(*args)]

    def require_alive(self) -> None:
        pass

    async def pause(self, in_flight: str, deadline: Deadline) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def refuse(self, error: ReplicaUnavailable) -> None:
        pass

    async def drop_caches(self) -> None:
        pass

    async def asleep(self) -> tuple[str, ...]:
        return ()

    async def sleep(self, level: int) -> None:
        raise ConfigError(no_sleep_mode(self.kind))

    async def wake_up(self, tags: list[str] | None) -> None:
        pass


class _Step:
    """Awaiting it hands control back to whoever advances a synchronous operation."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class _Running:
    """One operation of a rollout."""

    def __init__(self, op: str, key: str, group: str) -> None:
        self.op = op
        self.key = key
        self.group = group
        self.step = 0
        self.steps = 0
        self.touched = False
        self.seconds: dict[str, float] = {}
        self.state = OpState.RUNNING
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.abort_reason: str | None = None

    def end(self, *, result: Any = None, error: BaseException | None = None) -> None:
        self.result, self.error = result, error
        self.state = OpState.DONE if error is None else OpState.FAILED
        self.ended.set()

    def status(self) -> OpStatus:
        return OpStatus(
            op=self.op,
            state=self.state,
            step=self.step,
            steps=self.steps,
            touched=self.touched,
            seconds=dict(self.seconds),
            result=self.result,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class _Coming:
    """An adapter that a sync brings."""

    name: str
    config: dict[str, Any]
    default: bool
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class _Settled:
    """What a sync has brought: kind and id of a base, if any, and an adapter, if any."""

    base: str | None
    base_id: str
    adapter: _Coming | None


class Serving:
    """State and operations of one rollout actor.

    Args:
        target: what holds its weights.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.version = 0
        self.contents = Contents.NONE
        self._group = ""
        self._devices: tuple[tuple[str, str], ...] = ()
        self._nodes: tuple[str, ...] = ()
        self._links: tuple[tuple[str, ...], ...] = ()
        self._asleep: tuple[str, ...] = ()
        self._base = ""
        self._base_id = ""
        self._adapters: dict[str, int] = {}
        self._attached: set[str] = set()  # of those, what came from directories
        self._configs: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._losses = target.losses
        self._withheld = ""  # why nobody is served though no weights are torn
        self._numbers = itertools.count(1)
        self._running: _Running | None = None
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._lock = threading.Lock()
        self._slice_s = 0.0

    # --- what the actor's methods call -------------------------------------------------------------------------

    def start(self, key: str, op: str, request: dict[str, Any]) -> None:
        """Start an operation. One that still runs is given up first: its driver is gone.

        Args:
            key: the caller's name for it, by which it is polled. Unique.
            op: ``prepare | facts | hold | connect | agree | check_adapter | receive | receive_announced | attach |
                detach | digest | leave | let_go | residency | sleep | wake_up``.

        Raises:
            SyncError: the one that runs does not end, and two must not change the weights at once.
        """
        body: Callable[..., Coroutine[Any, Any, Any]] = getattr(self, f"_{op}")
        before = self._running
        if before is not None and not before.ended.is_set():
            self.abort(f"a new {op} was asked for")
            if self.target.loop is None and before.op not in _HARMLESS and not before.ended.is_set():
                raise _still_running(before, op)
        group = generation(str(request["rendezvous"]["group"])) if op == "connect" else self._group
        running = _Running(op, key, group)
        coroutine = body(running, **request)
        loop = self.target.loop
        with self._lock:
            self._running = running
            self._coroutine = coroutine if loop is None else None
        if loop is None:
            self._advance(0.0)
        elif _on_loop(loop):
            loop.create_task(self._as_task(running, coroutine, before))
        else:
            asyncio.run_coroutine_threadsafe(self._as_task(running, coroutine, before), loop)

    def poll(self, key: str, wait_s: float) -> OpStatus:
        """Status of the operation, after at most ``wait_s`` seconds (at once on the engine's own event loop).

        Raises:
            SyncAborted: another operation has taken its place.
        """
        running = self._running
        if running is None or running.key != key:
            raise SyncAborted(f"operation {key} is not the one that runs here; another driver replaced it")
        if self.target.loop is None:
            until = time.monotonic() + wait_s
            self._advance(wait_s)
            while not running.ended.is_set() and time.monotonic() < until:
                self._advance(until - time.monotonic())
        elif not _on_loop(self.target.loop):
            running.ended.wait(wait_s)
        return running.status()

    def run(self, op: str, request: dict[str, Any], timeout_s: float) -> Any:
        """Start an operation, wait for its end, and return its result or raise its error.

        Raises:
            UnsupportedActor: called on the engine's own event loop, where waiting would be for ever.
        """
        if self.target.loop is not None and _on_loop(self.target.loop):
            raise UnsupportedActor(
                f"{op} would block this async actor's event loop; use CheckpointEngineManager (manager.sync_weights(), "
                "manager.verify() ...), which does not wait there, or call it from another thread"
            )
        key = f"{op}-{next(self._numbers)}"
        self.start(key, op, request)
        deadline = Deadline.after(timeout_s + _GRACE_S)
        while (status := self.poll(key, _SLICE_S)).state is OpState.RUNNING:
            if deadline.expired:
                self.abort(f"{op} did not end within {timeout_s:.1f} s")
                raise SyncTimeout(f"{op} did not end within {timeout_s:.1f} s", phase=op)
        if status.error is not None:
            raise status.error
        return status.result

    def abort(self, reason: str, group: str | None = None) -> None:
        """Let the running operation end: a synchronous engine's here, within seconds; a task sees it at its next step.

        Args:
            group: only if it works in this group; another driver's operation may have taken its place.
        """
        running = self._running
        if running is not None and not running.ended.is_set() and group in (None, "", running.group):
            running.abort_reason = reason
            self._finish_aborted()

    def status(self) -> RolloutStatus:
        self._see_losses()
        running = self._running
        active = running is not None and not running.ended.is_set()
        return RolloutStatus(
            kind=self.target.kind,
            version=self.version,
            contents=self.contents,
            updating=bool(active and running and running.op.startswith("receive")),
            asleep=self.target.tags,
            sleep_mode=self.target.sleep_mode,
            group=self._group,
            workers=self.target.workers,
            step=running.step if active and running else 0,
            steps=running.steps if active and running else 0,
            devices=self._devices,
            nodes=self._nodes,
            links=self._links,
            pid=os.getpid(),
            base=self._base,
            base_id=self._base_id,
            adapters=dict(self._adapters),
            default_adapter=self.target.default_adapter,
            lora=self.target.lora_facts(),
        )

    # --- running a coroutine -----------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Drive the running operation for up to ``seconds``; the engine's door calls this while a request waits."""
        if self.target.loop is None:
            self._advance(seconds)

    def _advance(self, slice_s: float) -> None:
        if not self._lock.acquire(timeout=max(slice_s, 0.001)):
            return  # another thread of the actor is driving it
        try:
            running, coroutine = self._running, self._coroutine
            if running is None or coroutine is None or running.ended.is_set():
                return
            self._slice_s = min(max(slice_s, 0.0), _SLICE_S)
            try:
                coroutine.send(None)
            except StopIteration as stop:
                running.end(result=stop.value)
            except BaseException as error:
                running.end(error=error)
            if running.ended.is_set():
                self._coroutine = None
        finally:
            self._lock.release()

    async def _as_task(self, running: _Running, coroutine: Coroutine[Any, Any, Any], before: _Running | None) -> None:
        try:
            if before is not None and before.op not in _HARMLESS:
                deadline = Deadline.after(_GRACE_S)
                while not before.ended.is_set():
                    if deadline.expired:
                        raise _still_running(before, running.op)
                    await asyncio.sleep(0.005)
            running.end(result=await coroutine)
        except BaseException as error:
            coroutine.close()
            running.end(error=error)

    def _finish_aborted(self) -> None:
        if self.target.loop is not None:
            return
        deadline = Deadline.after(_GRACE_S)
        while self._running is not None and not self._running.ended.is_set() and not deadline.expired:
            self._advance(0.05)

    async def _nap(self, naps: int) -> None:
        if self.target.loop is None:
            await _Step()
        else:
            await asyncio.sleep(min(0.02, 0.001 * (1 + naps)))

    async def _in_workers(
        self,
        running: _Running,
        deadline: Deadline,
        method: str,
        *args: Any,
        meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[OpStatus]:
        """Start a method in all workers, do something ``meanwhile``, and follow the method to its end; on the first
        failure give the others up too."""
        try:
            await self.target.call(method, *args, timeout_s=deadline.remaining() + 10.0)
            if meanwhile is not None:
                await meanwhile()
            return await self._follow(running, deadline)
        except (Exception, asyncio.CancelledError) as error:
            try:
                await self.target.call("abort", f"{type(error).__name__}: {error}", timeout_s=10.0)
                # Only now they write no more, so only now they can say whether they did.
                await self._statuses(running, 0.0)
            except Exception as late:
                running.touched = True
                error.add_note(f"while the workers were given up: {type(late).__name__}: {late}")
            raise

    async def _follow(self, running: _Running, deadline: Deadline) -> list[OpStatus]:
        naps = 0
        while True:
            slice_s = self._slice_s if self.target.loop is None else _LOOP_SLICE_S
            if not self.target.waits:
                slice_s = 0.0
            statuses = await self._statuses(running, slice_s)
            errors = [s.error for s in statuses if s.error is not None]
            if errors:
                raise first_cause(errors)
            if all(s.state is OpState.DONE for s in statuses):
                return statuses
            _require_wanted(running)
            if deadline.at + _GRACE_S < time.monotonic():
                raise SyncTimeout(f"{running.op} did not end within {deadline.seconds:.1f} s", phase=running.op)
            await self._nap(naps)
            naps += not slice_s

    async def _statuses(self, running: _Running, slice_s: float) -> list[OpStatus]:
        packed = await self.target.call("poll", slice_s, timeout_s=slice_s + 10.0)
        statuses = [unpack_status(p) for p in packed]
        running.step = min(s.step for s in statuses)
        running.steps = max(s.steps for s in statuses)
        running.touched |= any(s.touched for s in statuses)
        return statuses

    async def _pause(self, running: _Running, in_flight: str, deadline: Deadline) -> None:
        """Pause the engine. On an event loop an abort is heard while requests drain."""
        if self.target.loop is None:
            await self.target.pause(in_flight, deadline)
        else:
            pausing = asyncio.ensure_future(self.target.pause(in_flight, deadline))
            while not (await asyncio.wait([pausing], timeout=0.05))[0] and running.abort_reason is None:
                pass
            if not pausing.done():
                pausing.cancel()
                await asyncio.wait([pausing])
            else:
                pausing.result()
        _require_wanted(running)

    # --- the operations ----------------------------------------------------------------------------------------

    async def _prepare(self, running: _Running) -> RolloutStatus:
        facts = await self.target.call("describe", timeout_s=30.0)
        self._devices = tuple((str(f["device_type"]), str(f["device_id"])) for f in facts)
        self._nodes = tuple(str(f.get("node", "")) for f in facts)
        self._links = tuple(tuple(map(str, f.get("links", ()))) for f in facts)
        groups = {str(f["group"]) for f in facts}
        self._group = groups.pop() if len(groups) == 1 else ""  # a worker may have lost it between two syncs
        self._asleep = tuple(await self.target.asleep())
        if self._adapters:
            answers = await self.target.call("adapters.entries", timeout_s=30.0)
            try:
                self._adapters = await self.target.learn_adapters(timeout_s=30.0, answers=answers)
            except SyncError:  # as one worker's failure has left them; a sync brings them together
                self.contents = Contents.MIXED
                apart = _disputed(answers)
                self._adapters = {n: int(v) for n, (v, _) in answers[0]["held"].items() if n not in apart}
        return self.status()

    async def _facts(self, running: _Running, backend: str | None) -> list[dict[str, Any]]:
        return await self.target.call("facts", backend, timeout_s=60.0)

    async def _hold(self, running: _Running, reason: str) -> None:
        """Serve nobody until a sync has succeeded. Nothing, if one whole version is held."""
        if self.contents is not Contents.WHOLE:
            self._withheld = reason
            await self.target.refuse(ReplicaUnavailable(reason))

    async def _connect(
        self,
        running: _Running,
        first_rank: int,
        world_size: int,
        rendezvous: dict[str, Any],
        timeout_s: float,
        seats: list[dict[str, Any]] | None = None,
    ) -> None:
        deadline = Deadline.after(timeout_s)
        self._group = ""
        more = () if seats is None else (seats,)
        await self._in_workers(running, deadline, "connect", first_rank, world_size, rendezvous, timeout_s, *more)
        self._group = generation(str(rendezvous["group"]))

    async def _agree(self, running: _Running, manifest: list[Any]) -> list[dict[str, Any]]:
        return await self.target.call("agree", manifest, timeout_s=120.0)

    async def _check_adapter(self, running: _Running, name: str, config: dict[str, Any], manifest: list[Any]) -> None:
        """Whether an adapter can come, before any byte of it does."""
        if name in self._from_directories():
            raise ConfigError(
                f"adapter {name!r} was attached from a directory; detach it, or give one of them another name"
            )
        await self.target.call("check_adapter", config, manifest, timeout_s=30.0)

    async def _receive(
        self,
        running: _Running,
        version: int,
        bucket_size: int,
        timeout_s: float,
        base: dict[str, Any] | None,
        adapter: dict[str, Any] | None = None,
        in_flight: str = "wait",
        group: str | None = None,
        after: int | None = None,
    ) -> dict[str, Any]:
        """One sync of what was agreed.

        Args:
            base: the ``digest`` of its manifest, its ``kind``, its ``base_id``, and the ``manifest`` to remember unless
                it was given with an earlier sync; ``None``: the plain base of ``adapter`` is held already.
            adapter: its ``name``, ``digest`` and ``wire`` (its manifest's digest), the ``base_id`` that it belongs to,
                whether it becomes the ``default``, and ``config`` and ``manifest`` unless they were given before.
            group: in which it comes; ``None``: in whichever this rollout is.
            after: the version that must be held now; ``None``: any.

        Raises:
            NotAgreed: this rollout's group, version, base, adapters or sleep is not what the driver takes it for.
        """
        if group is not None and group != self._group:
            reason = (
                "this rollout is not in the group of this sync: it lost it, what holds its weights was replaced, or "
                "another sync has taken it into a group of its own; one manager at a time may use it"
            )
            # The others wait there already. Whatever was replaced may still be a member.
            await self.target.call("end_group", group, reason, timeout_s=10.0)
            raise NotAgreed(reason, phase="transfer")
        self._see_losses()
        self._asleep = tuple(await self.target.asleep())
        if after not in (None, self.version):
            await self._give_up(f"this rollout holds version {self.version} of its weights, not {after}")
        if "weights" in self._asleep:
            await self._give_up(f"this rollout is asleep ({', '.join(self._asleep)})")
        if base is None and adapter is not None and self._plain_base() != adapter["base_id"]:
            await self._give_up("this rollout does not hold the plain base that the adapter belongs to")
        if base is not None and base["kind"] == MERGED and (others := self._others()):
            await self._give_up(f"this rollout holds adapters beside the default one ({', '.join(others)})")
        if in_flight == "keep" and (adapter is not None or (base is not None and self.target.default_adapter)):
            await self._give_up("a request kept frozen would go on with an adapter that is gone")
        if base is not None and base["manifest"] is not None:
            await self.target.call("remember", base["manifest"], timeout_s=60.0)
        one = None
        if adapter is not None:
            if adapter["manifest"] is not None:
                await self.target.call("remember_adapter", adapter["manifest"], timeout_s=60.0)
                self._configs[adapter["digest"]] = adapter["config"]
                while len(self._configs) > _CONFIGS_KEPT:
                    self._configs.popitem(last=False)
            if adapter["digest"] not in self._configs:
                await self._give_up(f"adapter {adapter['name']!r} was not agreed with this rollout")
            if adapter["name"] in self._from_directories():  # since it was agreed
                await self._give_up(f"adapter {adapter['name']!r} was attached from a directory")
            self._configs.move_to_end(adapter["digest"])
            config = self._configs[adapter["digest"]]
            one = _Coming(adapter["name"], config, default=adapter["default"], digest=adapter["digest"])
        wire = base and base["digest"], bucket_size
        settled = _Settled(base["kind"] if base else None, base["base_id"] if base else "", one)
        return await self._update(
            running,
            version,
            in_flight,
            timeout_s,
            lambda left: ("receive", *wire, left, adapter and adapter["wire"]),
            lambda _: settled,
            drops=base is not None,
        )

    def _see_losses(self) -> None:
        """Whether the engine was put to a sleep that discards its weights, by whomever."""
        losses = self.target.losses
        if losses != self._losses:
            self._losses = losses
            self.contents = Contents.NONE
            self._base = self._base_id = ""

    def _plain_base(self) -> str | None:
        """``base_id`` of the plain base that is held whole; ``None``: no such one is."""
        return self._base_id if self.contents is Contents.WHOLE and self._base == PLAIN else None

    def _from_directories(self) -> list[str]:
        """Adapters that were attached, and are still there."""
        return [name for name in self._adapters if name in self._attached]

    def _others(self) -> list[str]:
        """Adapters beside the default one."""
        return [name for name in self._adapters if name != self.target.default_adapter]

    async def _give_up(self, reason: str) -> None:
        """Refuse before anything was begun. The others wait in the group already, so it is given up with them."""
        self._group = ""
        await self.target.call("abort", reason, timeout_s=10.0)
        raise NotAgreed(reason, phase="transfer")

    async def _receive_announced(self, running: _Running, timeout_s: float, in_flight: str = "wait") -> dict[str, Any]:
        self._see_losses()

        def settled(result: dict[str, Any]) -> _Settled:
            base, adapter = result["base"], result["adapter"]
            coming = _Coming(adapter["name"], adapter["config"], default=True) if adapter else None
            return _Settled(base["kind"] if base else None, base["base_id"] if base else "", coming)

        return await self._update(
            running,
            self.version + 1,
            in_flight,
            timeout_s,
            lambda left: ("receive_announced", left, self._plain_base(), self._others(), self._from_directories()),
            settled,
            drops=True,
        )

    async def _update(
        self,
        running: _Running,
        version: int,
        in_flight: str,
        timeout_s: float,
        request: Callable[[float], tuple[Any, ...]],
        settled: Callable[[dict[str, Any]], _Settled],
        *,
        drops: bool,
    ) -> dict[str, Any]:
        """Pause, receive and drop caches, commit, resume. Whatever happens the engine ends up serving one whole
        version, or refusing; it is never left paused by accident.

        The caches are dropped while the bytes are on the wire: nothing is computed between pause and resume, so
        nothing of the old weights can enter them again.

        Args:
            settled: from the first worker's result what came.
            drops: whether caches must be dropped. What was computed with an adapter is found by its version only.
        """
        deadline = Deadline.after(timeout_s)
        start = time.perf_counter()

        async def drop_caches() -> None:
            start = time.perf_counter()
            await self.target.drop_caches()
            running.seconds["reset"] = time.perf_counter() - start

        try:
            await self._pause(running, in_flight, deadline)
            running.seconds["pause"] = time.perf_counter() - start
            method, *args = request(deadline.remaining())
            statuses = await self._in_workers(
                running, deadline, method, *args, meanwhile=drop_caches if drops else None
            )
            came = settled(statuses[0].result)
            await self._settle(running, came, version, deadline)
            self.target.require_alive()
        except (Exception, asyncio.CancelledError) as error:
            self._group = ""
            try:
                await self._after_failure(running, error)
            except Exception as late:
                error.add_note(f"while the engine was set right: {type(late).__name__}: {late}")
            try:
                self.target.require_alive()
            except PeerLost as lost:  # which explains whatever its workers say as they end
                raise lost from error
            raise
        self.version = self.target.version = version
        self.contents = Contents.WHOLE
        self._withheld = ""
        if came.base:
            self._base, self._base_id = came.base, came.base_id
            self.target.healed = self._losses
        await self.target.resume()
        reports = [s.result for s in statuses]
        parts = {name for r in reports for name in r["seconds"]}
        return {
            "version": version,
            "path": "; ".join(sorted({r["path"] for r in reports})),
            "tensors": reports[0]["tensors"],
            "nbytes": reports[0]["nbytes"],
            "direct_bytes": min(r["direct_bytes"] for r in reports),
            "seconds": {
                **running.seconds,
                **{part: max(r["seconds"].get(part, 0.0) for r in reports) for part in sorted(parts)},
            },
        }

    async def _settle(self, running: _Running, came: _Settled, version: int, deadline: Deadline) -> None:
        """Bring the adapters to what was received: the new one in, the default that it or a new base replaces out."""
        left = deadline.remaining() + _GRACE_S
        before, default = dict(self._adapters), self.target.default_adapter
        coming = came.adapter
        replaced = default is not None and (came.base == MERGED or coming is None or coming.default)
        keeps = coming is not None and coming.name == default
        remove = [default] if default is not None and replaced and not keeps else []
        if self.contents is not Contents.WHOLE and self.target.workers > 1:
            # What one worker alone holds since a failure must go, or they would never agree again.
            apart = _disputed(await self.target.call("adapters.entries", timeout_s=30.0))
            remove += [name for name in apart if name not in remove]
        if not (remove or coming or (before and came.base)):
            return
        start = time.perf_counter()
        register = None
        if coming is not None:
            number = self.target.next_adapter_number()
            register = {
                "name": coming.name,
                "version": version,
                "config": coming.config,
                "number": number,
                "digest": coming.digest,
            }
        if remove:
            self.target.set_default_adapter(None)
        try:
            answers = await self.target.call("settle_adapters", bool(came.base), remove, register, timeout_s=left)
            back = sorted({name for answer in answers for name in answer["held"]}) if came.base == MERGED else []
            if back:  # vLLM had dropped them, so nobody knew of them when this base was sent
                answers = await self.target.call("settle_adapters", False, back, None, timeout_s=left)
            self._adapters = await self.target.learn_adapters(timeout_s=10.0, answers=answers)
            if coming is not None:
                self._attached.discard(coming.name)
                if coming.default:
                    self.target.set_default_adapter(coming.name)
        except (Exception, asyncio.CancelledError):
            held = None  # unknown: they cannot be asked, or do not agree
            with contextlib.suppress(Exception):
                held = self._adapters = await self.target.learn_adapters(timeout_s=10.0)
            running.touched |= held != before
            if held == before:
                self.target.set_default_adapter(default)
            raise
        running.seconds["adapter"] = time.perf_counter() - start

    async def _attach(self, running: _Running, name: str, path: str, version: int = 0) -> dict[str, int]:
        """Hold the adapter of a directory on this node beside the others; all that are held then."""
        if self._base == MERGED:
            raise ConfigError(
                f"adapter {name!r} cannot be attached: this rollout's base has the trainer's adapter merged into it; "
                "sync_weights(merge_and_sync=False) brings the plain base back"
            )
        if name in self._adapters and name not in self._from_directories():
            raise ConfigError(f"this rollout holds an adapter {name!r} from the trainer; attach under another name")
        await self._with_adapters(
            running,
            "adapters.attach",
            lambda: (name, path, version, self.target.next_adapter_number()),
            undo=None if name in self._adapters else name,
        )
        self._attached.add(name)
        return dict(self._adapters)

    async def _detach(self, running: _Running, name: str) -> dict[str, int]:
        """Let an adapter go that was attached from a directory or came for a tenant; what is held then."""
        if name not in self._adapters:
            raise ConfigError(f"this rollout holds no adapter {name!r}; it holds {_listed(self._adapters)}")
        if name == self.target.default_adapter:
            raise ConfigError(
                f"adapter {name!r} is the one that serves all requests; sync_weights() merged, or with another "
                "adapter, replaces it"
            )
        await self._with_adapters(running, "adapters.remove", lambda: (name,))
        self._attached.discard(name)
        return dict(self._adapters)

    async def _with_adapters(
        self, running: _Running, method: str, args: Callable[[], tuple[Any, ...]], *, undo: str | None = None
    ) -> None:
        """Change the adapters while no request runs.

        Args:
            undo: an adapter of which after a failure no worker shall be left with a part.
        """
        self._see_losses()
        if self.contents is Contents.MIXED:
            raise ReplicaUnavailable("this rollout holds a mixture of weights; sync before its adapters are changed")
        self._asleep = tuple(await self.target.asleep())
        if "weights" in self._asleep:  # the memory that holds adapters is not there
            raise ReplicaUnavailable(
                f"this rollout is asleep ({', '.join(self._asleep)}); wake at least its weights before its adapters "
                "are changed, with manager.wake_up_rollout(['weights'])"
            )
        before = dict(self._adapters)
        try:
            await self._pause(running, "wait", Deadline.after(60.0))
            await self.target.learn_adapters(timeout_s=30.0)
            await self.target.call(method, *args(), timeout_s=60.0)
            self._adapters = await self.target.learn_adapters(timeout_s=30.0)
        except (Exception, asyncio.CancelledError) as error:
            try:
                if undo is not None:
                    await self.target.call("adapters.remove", undo, timeout_s=30.0)
                self._adapters = await self.target.learn_adapters(timeout_s=30.0)
            except Exception:  # they cannot be asked, or do not agree
                running.touched = True
            running.touched |= any(self._adapters.get(name) != version for name, version in before.items())
            await self._after_failure(running, error)
            raise
        if self._withheld:  # an adapter is no reason to serve
            await self.target.refuse(ReplicaUnavailable(self._withheld))
        else:
            await self.target.resume()

    async def _after_failure(self, running: _Running, error: BaseException) -> None:
        if running.touched:
            self.contents = Contents.MIXED
        if self.contents is Contents.MIXED:
            await self.target.refuse(
                ReplicaUnavailable(
                    f"this rollout holds a mixture of weights after a failed sync ({type(error).__name__}); "
                    "sync again before it generates"
                )
            )
        elif self._withheld:
            await self.target.refuse(ReplicaUnavailable(self._withheld))
        else:
            await self.target.resume()

    async def _digest(self, running: _Running, names: list[str] | None = None) -> dict[str, tuple[str, str]]:
        """``{name: (dtype held, sha256)}``; :data:`UNVERIFIABLE` where it cannot be read back."""
        answers = await self.target.call("pieces", names, timeout_s=600.0)
        pieces = [[_piece(p) for p in answer["pieces"]] for answer in answers]
        digests, partial = assemble(pieces)
        dtypes = {piece.name: piece.dtype for worker in pieces for piece in worker}
        result = {name: (dtypes[name], digest) for name, digest in digests.items()}
        for name in [*partial, *(name for answer in answers for name in answer["unverifiable"])]:
            result.setdefault(name, ("", UNVERIFIABLE))
        return result

    async def _leave(self, running: _Running) -> None:
        self._group = ""
        await self.target.call("leave", timeout_s=30.0)

    async def _let_go(self, running: _Running) -> None:
        await self.target.call("let_go", timeout_s=30.0)

    async def _residency(self, running: _Running) -> tuple[tuple[str, ...], str]:
        """The memory tags that sleep, asked of the engine, and why it cannot sleep, if it cannot."""
        return tuple(await self.target.asleep()), "" if self.target.sleep_mode else no_sleep_mode(self.target.kind)

    async def _sleep(
        self, running: _Running, level: int, in_flight: str = "wait", parts: bool = False, timeout_s: float = 300.0
    ) -> tuple[str, ...]:
        """Put the engine to sleep; the tags that sleep then. Nothing, if it sleeps already.

        Args:
            in_flight: what becomes of running requests: ``wait`` for them, or ``abort`` them.
            parts: whether it is enough that something sleeps.

        Raises:
            ConfigError: it cannot sleep.
            SyncTimeout: requests did not end in time; the engine serves on.
        """
        if not self.target.sleep_mode:
            raise ConfigError(no_sleep_mode(self.target.kind))
        asleep = tuple(await self.target.asleep())
        if not (asleep if parts else "weights" in asleep):
            # A door that refuses has nothing behind it that runs, and must go on refusing.
            serves = self.contents is not Contents.MIXED and not self._withheld
            if serves:
                await self._pause(running, in_flight, Deadline.after(timeout_s))
            try:
                await self.target.sleep(level)
            finally:
                self._see_losses()
                try:
                    asleep = self._asleep = tuple(await self.target.asleep())
                finally:
                    if serves:  # though not what sleeps: the engine's door sees to that
                        await self.target.resume()
        return asleep

    async def _wake_up(self, running: _Running, tags: list[str] | None) -> tuple[str, ...]:
        """Wake what sleeps, all of it or these tags; the tags that sleep on.

        Raises:
            ConfigError: there is no such tag.
        """
        require_tags(tags)
        asleep = await self.target.asleep()
        wanted = [tag for tag in asleep if tags is None or tag in tags]
        if "weights" in asleep and "weights" not in wanted and wanted and self.target.losses != self.target.healed:
            # An old vLLM would copy saved buffers into weights that are not there.
            raise ConfigError("this rollout slept at level 2; wake its weights before, or with, its KV cache")
        try:
            # One by one, so that vLLM's book is right after a failure; and it wakes none of several if one is awake.
            for tag in sorted(wanted, reverse=True):
                await self.target.wake_up([tag])
        finally:
            self._asleep = tuple(await self.target.asleep())
        return self._asleep


def _require_wanted(running: _Running) -> None:
    if running.abort_reason is not None:
        raise SyncAborted(running.abort_reason, phase=running.op)


def _still_running(before: _Running, op: str) -> SyncError:
    return SyncError(
        f"{op} cannot begin: an earlier {before.op} of this rollout was given up, but has not ended yet; try again",
        phase=op,
    )


def _disputed(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of adapters that not all workers hold alike, by what each of them says (``adapters.entries``)."""
    held = [answer["held"] for answer in answers]
    return sorted({name for one in held for name in one if any(other.get(name) != one[name] for other in held)})


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _piece(value: dict[str, Any]) -> Piece:
    return Piece(**{**value, **{k: tuple(value[k]) for k in ("shape", "size", "stride")}})


def _on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def target_for(candidate: Any, advance: Callable[[float], None], wait_s: float = 60.0) -> Target:
    """The target for what ``checkpoint_target()`` returned.

    Args:
        candidate: a vLLM engine or a torch module.
        advance: drives the running operation; called by requests that wait at a synchronous engine's door, so that an
            actor whose only thread waits there still gets its update done.
        wait_s: how long a request waits for an update to end before it is refused.

    Raises:
        UnsupportedActor: it is neither a vLLM engine nor a torch module.
    """
    if isinstance(candidate, torch.nn.Module):
        return ModuleTarget(candidate)
    from twinkle_ray.vllm.engine import adapt

    target: Target | None = adapt(candidate, advance=advance, wait_s=wait_s)
    if target is not None:
        return target
    raise UnsupportedActor(
        f"checkpoint_target() returned a {type(candidate).__name__}; it must be a vllm.LLM, a vllm.AsyncLLM or a "
        "torch.nn.Module (set self.llm or self.model, or override checkpoint_target())"
    )
