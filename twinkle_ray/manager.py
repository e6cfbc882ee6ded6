"""The driver of syncs: one sync from first to last, with deadlines, release of everyone on a failure, and a report."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import ray

from twinkle_ray import classic, topology
from twinkle_ray.checking import CheckReport
from twinkle_ray.colocated import TrainGroup
from twinkle_ray.dry_run import dry_run
from twinkle_ray.errors import (
    ConfigError,
    ManifestMismatch,
    NotAgreed,
    ReplicaUnavailable,
    SyncError,
    SyncTimeout,
    VerifyError,
    mismatch,
)
from twinkle_ray.manifest import Manifest, agree_cuts, agree_dtypes
from twinkle_ray.naming import named
from twinkle_ray.plan import DEFAULT_BUCKET_SIZE
from twinkle_ray.replica import BACKENDS, Replica, Trainer, actor_key, find, has_method, replicas_of, trainers_of
from twinkle_ray.residency import require_tags
from twinkle_ray.rounds import Call, Op, Round
from twinkle_ray.routes import Routes, Spot, routes
from twinkle_ray.sending import Sending, Wanted, decide, disagreements, idle_lora, require_lora
from twinkle_ray.sleepers import Asleep, Sleepers
from twinkle_ray.topology import Topology
from twinkle_ray.types import (
    MERGED,
    PLAIN,
    UNVERIFIABLE,
    Contents,
    Deadline,
    ReplicaReport,
    RolloutStatus,
    SyncReport,
    TrainerStatus,
    VerifyReport,
)
from twinkle_ray.watching import Watch

logger = logging.getLogger("twinkle_ray")

_T = TypeVar("_T")

MODES = ("auto", *BACKENDS, "naive")
IN_FLIGHT = ("wait", "abort", "keep")
ON_DEAD = ("error", "drop")
_CLEANUP_S = 5.0
_RELEASE_S = 5.0
"""Seconds that trainers may take to give memory back before rollouts are woken by hand, and rollouts to close trainers'
memory before those offload. Either goes on without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The group that stands: who is in it, by which name."""

    name: str
    routes: Routes
    topology: Topology
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    """What was agreed with the members of one group: the trainer's manifest by digest, and the wire's; and whether the
    rollouts were told the wire's, which comes to them with the first sync of it."""

    digest: str
    wire: Manifest
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _AgreedAdapter:
    """One adapter, agreed likewise; ``manifest`` in JSON form."""

    name: str
    config: dict[str, Any]
    manifest: list[Any]
    digest: str
    wire: str


class CheckpointEngineManager:
    """Brings rollouts to the trainer's weights.

    Args:
        train_actors: handles of actors with :class:`~twinkle_ray.mixins.TrainActorMixin`; the first one sends.
        rollout_replicas: handles of actors with :class:`~twinkle_ray.mixins.RolloutActorMixin`, or objects with
            ``.primary`` (such a handle), ``.sleep(level=)`` and ``.wake_up(tags=)``.
        weight_sync_mode: ``auto`` (by the actors' devices; CUDA IPC where a rollout shares one with a trainer, and
            where one trainer and the only worker elsewhere have two GPUs that NVLink joins), ``nccl``, ``hccl``,
            ``gloo``, ``ipc`` (as ``auto``, but some devices must be shared or joined, however many rollouts then read
            from the first trainer, and the CPUs of a node count as one device), or ``naive`` (the ``train_group``
            moves the weights itself).
        is_colocated: trainers and rollouts share devices (or a node's CPUs), whose memory the weights do not leave;
            each sync puts the rollouts to sleep first and wakes their weights.
        sleep_level: how deep they sleep: 1, the weights go to host memory; 2, they are discarded, and the rollout
            serves nobody before a sync has brought them back (capped to 1 if colocated); 0, they stay awake, for
            engines without a sleep mode.
        train_group: for ``naive``: has ``merge_lora``, ``unmerge_lora``, ``offload_to_cpu``, ``reload_to_gpu`` and
            ``update_weights(adapter_only=)``. ``None``: a :class:`~twinkle_ray.colocated.TrainGroup` of the trainers.
        bucket_size: bytes of one chunk on the wire at most.
        timeout_s: seconds that one sync may take.
        adapters: whether LoRA adapters will be sent alone (``merge_and_sync=False``, or by name). If it is said, vLLM's
            settings are checked here, which waits for the rollouts: LoRA off where adapters are to come is an error, on
            where they are not a warning. ``None``: checked at each sync for what it asks.
        on_dead_rollout: what becomes of a sync in which a rollout turns out to be dead: ``error``, or ``drop`` it and
            go on with the others.

    Attributes:
        train_actors, rollout_actors: the handles.
        is_colocated, sleep_level: as given, the level capped.

    Raises:
        ConfigError: no trainers or rollouts, an actor twice, an unknown mode, a size or time that is not positive; with
            ``adapters=True`` a rollout whose vLLM has LoRA off.
        UnsupportedActor: an actor without the checkpoint-engine methods.
    """

    def __init__(
        self,
        train_actors: Sequence[Any],
        rollout_replicas: Sequence[Any],
        *,
        weight_sync_mode: str = "auto",
        is_colocated: bool = False,
        sleep_level: int = 1,
        train_group: Any = None,
        bucket_size: int = DEFAULT_BUCKET_SIZE,
        timeout_s: float = 300.0,
        adapters: bool | None = None,
        on_dead_rollout: str = "error",
    ) -> None:
        if weight_sync_mode not in MODES:
            raise ConfigError(f"weight_sync_mode is {weight_sync_mode!r}; it must be one of {', '.join(MODES)}")
        if not isinstance(bucket_size, int) or bucket_size <= 0:
            raise ConfigError(f"bucket_size is {bucket_size!r}, but it must be a positive number of bytes")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s is {timeout_s!r}, but it must be a positive number of seconds, not endless")
        if on_dead_rollout not in ON_DEAD:
            raise ConfigError(f"on_dead_rollout is {on_dead_rollout!r}; it must be one of {', '.join(ON_DEAD)}")
        if sleep_level < 0:
            raise ConfigError(f"sleep_level is {sleep_level}, but it must be 0, 1 or 2")
        self._trainers: tuple[Trainer, ...] = trainers_of(train_actors)
        self._replicas: tuple[Replica, ...] = replicas_of(rollout_replicas)
        self._ever = len(self._replicas)
        self._on_dead = on_dead_rollout
        if is_colocated and sleep_level >= 2:
            logger.warning(
                "sleep_level=%d is capped to 1 in colocated mode: level 2 discards the weights, and an engine outside "
                "this process cannot safely be left without them while the trainer takes the memory",
                sleep_level,
            )
            sleep_level = 1
        self.is_colocated = is_colocated
        self.sleep_level = sleep_level
        self.bucket_size = bucket_size
        self.timeout_s = timeout_s
        self._naive = weight_sync_mode == "naive"
        if self._naive and train_group is None:
            if not self._has_mixins():
                raise ConfigError(
                    "weight_sync_mode='naive' needs a train_group, the object that moves the weights itself; of actors "
                    "with twinkle_ray.mixins one is made"
                )
            train_group = TrainGroup(lambda: self.train_actors, timeout_s=timeout_s)
        self._mode = "auto" if self._naive else weight_sync_mode
        self._train_group = train_group
        self._held = ""  # kind of the base, by our own count for actors that cannot be asked
        self._plain_version = 0  # likewise
        self._adapters: dict[str, _AgreedAdapter] = {}
        self._last: Sending | None = None
        self._base_ids: dict[str, str] = {}
        self._default: str | None = None
        self._warned = False
        self._sleepers = Sleepers()
        self._group: _Group | None = None
        self._agreed: _Agreed | None = None
        self._version = 0
        self._closed = False
        self._busy = threading.Lock()
        self._watch = Watch()
        self._watch.members([r.name for r in self._replicas])
        if adapters is not None and self._has_mixins():
            self._check_lora(adapters)

    # --- attributes of the seeds -------------------------------------------------------------------------------

    @property
    def train_actors(self) -> list[Any]:
        return [trainer.handle for trainer in self._trainers]

    @property
    def rollout_actors(self) -> list[Any]:
        return [replica.handle for replica in self._replicas]

    @property
    def base_sync_done(self) -> bool:
        """Whether every rollout holds one whole version now; asked of them, within a second. Of actors that cannot be
        asked: whether a sync has succeeded through this manager."""
        if not self._has_mixins():
            return bool(self._held)
        statuses = self._ask_rollouts("checkpoint_status").values()
        return all(status is not None and status.contents is Contents.WHOLE for status in statuses)

    # --- syncing -----------------------------------------------------------------------------------------------

    def sync_weights(
        self, merge_and_sync: bool = True, *, adapter: str | None = None, in_flight: str = "wait"
    ) -> SyncReport:
        """Bring every rollout to the trainer's present weights.

        Args:
            merge_and_sync: send the base with the active LoRA adapters merged; no adapter serves requests then.
                ``False``: send only the active adapter, which serves all requests from then on; and before it the plain
                base, if a rollout does not hold the trainer's present one.
            adapter: send this adapter of the trainer alone, likewise, for requests that ask for it by name
                (``rollout.lora_request(adapter)``); other adapters, and what serves the other requests, stay as they
                are, unless the plain base has to be sent again in place of a merged one.
            in_flight: what happens to requests that run: ``wait`` for them, ``abort`` them, or ``keep`` them frozen
                and let them go on with the new weights.

        Raises:
            ConfigError: no such adapter, or one that these rollouts cannot be given; no byte was sent.
            UnsupportedModel: likewise, for what cannot be sent or served exactly.
            ManifestMismatch: names, shapes or dtypes do not fit; no byte was sent.
            ReplicaUnavailable: a rollout's engine is asleep; no byte was sent.
            SyncError: the sync failed; says in which phase and because of whom. All members are released, and the
                next call starts with a new group.

        In colocated mode the rollouts' KV caches sleep afterwards, and they refuse requests until
        ``wake_up_rollout(["kv_cache"])``; :meth:`sync_and_wake` does that too.
        """
        with self._alone():
            return self._sync(merge_and_sync, adapter, in_flight, whole=False, offload=False)

    def sync_and_wake(
        self,
        merge_and_sync: bool = True,
        *,
        adapter: str | None = None,
        in_flight: str = "wait",
        offload: bool = False,
    ) -> SyncReport:
        """:meth:`sync_weights`, after which every rollout is awake and serves.

        The order keeps the peak of memory low: the trainers' caches are let go before weights wake, and KV caches wake
        last, when the trainers' weights have been read (and offloaded).

        Args:
            merge_and_sync, adapter, in_flight: as :meth:`sync_weights`'.
            offload: move the trainers' models to the CPU before KV caches wake; :meth:`reload_trainers` brings them
                back.

        Raises:
            SyncError: as :meth:`sync_weights`'; or a rollout did not wake. What sleeps then sleeps on, as ``asleep`` on
                the error says, and the call can be made again.
        """
        with self._alone():
            return self._sync(merge_and_sync, adapter, in_flight, whole=True, offload=offload)

    def _sync(
        self, merge_and_sync: bool, adapter: str | None, in_flight: str, *, whole: bool, offload: bool
    ) -> SyncReport:
        """
        Args:
            whole: whether everything is to be awake afterwards.
        """
        if in_flight not in IN_FLIGHT:
            raise ConfigError(f"in_flight is {in_flight!r}; it must be one of {', '.join(IN_FLIGHT)}")
        if self.is_colocated and self.sleep_level and in_flight == "keep":
            raise ConfigError(
                "in_flight='keep' is not for colocated mode: the KV caches of frozen requests are dropped when the "
                "rollouts sleep; use 'wait' or 'abort'"
            )
        if adapter is not None and (self._naive or not self._has_mixins()):
            raise ConfigError(
                f"adapter={adapter!r} needs actors with twinkle_ray.mixins and another mode than 'naive'; these can be "
                "sent the active adapter only, with merge_and_sync=False"
            )
        start = time.perf_counter()
        deadline = Deadline.after(self.timeout_s)
        dropped: list[str] = []
        with self._watch.sync([r.name for r in self._replicas]) as sync:
            phases = sync.phases
            if self.is_colocated or whole:
                with _timed(phases, "sleep"):
                    self._make_ready(in_flight, deadline, dropped)
            if self._naive:
                report = self._sync_naive(merge_and_sync, in_flight, phases, start, deadline, offload=offload)
            elif self._has_mixins():
                wanted = Wanted(merge=merge_and_sync and adapter is None, adapter=adapter)
                report = self._sync_group(wanted, in_flight, phases, start, deadline)
            else:
                report = self._sync_classic(merge_and_sync, phases, start)
            if whole:
                try:
                    if offload and not self._naive:
                        with _timed(phases, "offload"):
                            self._call_trainers("offload_to_cpu", deadline)
                    with _timed(phases, "wake_up"):
                        self._or_drop(lambda: self._sleepers.wake_up(self._replicas, None, deadline), dropped, deadline)
                except SyncError as error:
                    text = f"{error}; the weights themselves are synced, as version {report.version}"
                    error.args = (text, *error.args[1:])
                    error.versions = dict.fromkeys((r.name for r in self._replicas), report.version)
                    raise
                report = replace(report, seconds=time.perf_counter() - start)
            sync.report = report = replace(report, dropped=(*dropped, *report.dropped))
        self._watch.log.info("%s", report)
        return report

    async def sync_and_wake_async(
        self,
        merge_and_sync: bool = True,
        *,
        adapter: str | None = None,
        in_flight: str = "wait",
        offload: bool = False,
    ) -> SyncReport:
        """:meth:`sync_and_wake` for drivers with an event loop, which stays free meanwhile."""
        return await asyncio.to_thread(
            self.sync_and_wake, merge_and_sync, adapter=adapter, in_flight=in_flight, offload=offload
        )

    async def sync_weights_async(
        self, merge_and_sync: bool = True, *, adapter: str | None = None, in_flight: str = "wait"
    ) -> SyncReport:
        """:meth:`sync_weights` for drivers with an event loop, which stays free meanwhile."""
        return await asyncio.to_thread(self.sync_weights, merge_and_sync, adapter=adapter, in_flight=in_flight)

    # --- who takes part ----------------------------------------------------------------------------------------

    def add_rollout(self, rollout: Any) -> str:
        """Let one more rollout take part from the next sync on. Unless it holds a whole version it refuses to generate
        until that sync has brought base and adapter.

        Args:
            rollout: as those that the manager was made with.

        Returns:
            Its name, ``rollout[i]``; the number is nobody else's, now or later.

        Raises:
            ConfigError: it is there already.
            UnsupportedActor: it lacks the checkpoint-engine methods.
            SyncError: it is dead, or does not answer in time.
        """
        with self._alone():
            (replica,) = replicas_of([rollout], self._replicas, self._ever)
            if replica.has_mixin:
                reason = "this rollout has just joined and no sync has brought its weights yet; sync first"
                op = Op(handle=replica.handle, op="hold", request={"reason": reason})
                self._round("prepare", Deadline.after(self.timeout_s)).run({replica.name: op})
            self._ever += 1
            self._replicas = (*self._replicas, replica)
            self._watch.members([r.name for r in self._replicas])
            self._last = None  # so that everyone is asked
            return replica.name

    def remove_rollout(self, rollout: Any) -> None:
        """Let a rollout take part no more. It leaves the group, if it lives, and goes on serving what it holds.

        Args:
            rollout: its name, or what was given for it.

        Raises:
            ConfigError: it is not one of this manager's, or the last one.
        """
        with self._alone():
            replica = find(self._replicas, rollout)
            if len(self._replicas) == 1:
                raise ConfigError(f"{replica.name} is the last rollout; add another one before it is removed")
            self._drop([replica.name])
            if replica.has_mixin:
                self._best_effort([], [(replica, "leave", {})])

    def replace_trainers(self, train_actors: Sequence[Any]) -> None:
        """Let other trainer actors send from now on. The old ones leave the group, if they live.

        Raises:
            ConfigError: no trainers, or one twice.
            UnsupportedActor: one lacks the checkpoint-engine methods.
        """
        with self._alone():
            trainers = trainers_of(train_actors)
            before, self._trainers = self._trainers, trainers
            kept = {actor_key(trainer.handle) for trainer in trainers}
            self._forget()
            gone = [t for t in before if t.has_mixin and actor_key(t.handle) not in kept]
            self._best_effort([t.handle.finalize_checkpoint_engine.remote(True) for t in gone], [])

    def _drop(self, names: Sequence[str]) -> None:
        self._replicas = tuple(replica for replica in self._replicas if replica.name not in names)
        for name in names:
            self._sleepers.forget(name)
        self._watch.members([r.name for r in self._replicas])
        self._forget()

    def _dead_rollouts(self) -> list[str]:
        """The rollouts whose actors are dead for good, as Ray says within a second."""
        refs = {r.name: r.handle.checkpoint_status.remote() for r in self._replicas}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=1.0)
        dead = []
        for name, ref in refs.items():
            try:
                if ref in ready:
                    ray.get(ref, timeout=1.0)
            except ray.exceptions.ActorDiedError:
                dead.append(name)
            except Exception:
                logger.debug("%s lives, but its status could not be had", name, exc_info=True)
        return dead

    # --- adapters beside those of the trainer ------------------------------------------------------------------

    def attach_adapter(self, name: str, path: str) -> None:
        """Let every rollout hold the LoRA adapter that PEFT's ``save_pretrained`` wrote into a directory, beside all
        others, for requests that ask for it by name. Attached again, it is read again.

        Args:
            name: under which it is asked for.
            path: the directory, the same on each rollout's node.

        Raises:
            ConfigError: nothing can be read there, the name is an adapter of the trainer, or the base is a merged one.
            UnsupportedModel, ManifestMismatch: a rollout cannot serve it.
            SyncError: a rollout failed; those that succeeded hold it.
        """
        self._change_adapters("attach", {"name": name, "path": str(path)})

    def detach_adapter(self, name: str) -> None:
        """Let every rollout let go of an adapter that was attached, or that came with ``sync_weights(adapter=name)``.

        Raises:
            ConfigError: a rollout holds no such adapter, or it is the one that serves all requests.
        """
        self._change_adapters("detach", {"name": name})

    def _change_adapters(self, op: str, request: dict[str, Any]) -> None:
        with self._alone():
            if not self._has_mixins():
                raise ConfigError(f"{op}_adapter() needs rollouts with twinkle_ray.mixins.RolloutActorMixin")
            members: dict[str, Call | Op] = {
                r.name: Op(handle=r.handle, op=op, request=request) for r in self._replicas
            }
            Round(op, Deadline.after(self.timeout_s)).run_each(members)

    def check(self, merge_and_sync: bool = True, *, adapter: str | None = None) -> CheckReport:
        """A dry run of :meth:`sync_weights`: everything is compared, no weights move, and nothing is changed.

        Names, shapes and dtypes of every tensor, adapters and what vLLM can serve, the backend in every process,
        versions, memory for staging, and whether everybody answers and is awake.

        Raises:
            CheckFailed: a sync would fail; ``problems`` has one sentence for each reason, all at once.
        """
        with self._alone():
            if not self._has_mixins():
                raise ConfigError("check() needs actors with twinkle_ray.mixins; others cannot be asked")
            wanted = Wanted(merge=merge_and_sync and adapter is None, adapter=adapter)
            return dry_run(
                self._trainers,
                self._replicas,
                wanted,
                self._mode_for,
                self.bucket_size,
                Deadline.after(self.timeout_s),
                sleeping=self.is_colocated and self.sleep_level > 0,
            )

    def verify(self) -> VerifyReport:
        """Compare digests of every tensor of the base: the trainer's, as sent, and each rollout's, read back from its
        engine. An adapter is not read back.

        Raises:
            VerifyError: a tensor differs; names the first one and the rollout.
            SyncError: nothing was synced yet, or a member failed.
        """
        with self._alone():
            deadline = Deadline.after(self.timeout_s)
            if self._group is None:
                raise SyncError("there is nothing to verify before the first sync_weights()", phase="verify")
            # Not what was asked of a trainer last, which may have been refused: what is held.
            statuses: dict[str, RolloutStatus] = self._round("verify", deadline).run(
                {r.name: Op(handle=r.handle, op="prepare", request={}) for r in self._replicas}
            )
            merged = {name: status.base == MERGED for name, status in statuses.items()}
            if self._agreed is None:  # only adapters were sent
                merge = any(merged.values())
                self._agree(self._look(deadline, merge=merge)[0], deadline, merge=merge)
            agreed = self._agreed
            assert agreed is not None
            held = self._round("verify", deadline).run(
                {r.name: Op(handle=r.handle, op="digest", request={"names": None}) for r in self._replicas}
            )
            return self._compare(agreed, held, merged, deadline)

    def close(self) -> None:
        """Let every actor leave the group. Idempotent; an actor that is gone is no error."""
        if self._closed:
            return
        self._closed = True
        if self._has_mixins():
            # An actor may be in another manager's group by now, which is not ours to end.
            name = self._group.name if self._group is not None else ""
            statuses = self._ask_rollouts("checkpoint_status")
            self._best_effort(
                [t.handle.finalize_checkpoint_engine.remote(True, name) for t in self._trainers],
                [
                    (r, "leave", {})
                    for r in self._replicas
                    if (status := statuses[r.name]) is not None and status.group in ("", name) and not status.updating
                ],
            )
        self._forget()
        self._watch.close()

    def __enter__(self) -> CheckpointEngineManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- sleep -------------------------------------------------------------------------------------------------

    def sleep_rollout(self, *, in_flight: str = "wait") -> None:
        """Put the rollouts that are awake to sleep, at ``sleep_level``; with 0 they stay awake.

        Args:
            in_flight: what happens to requests that run: ``wait`` for them, or ``abort`` them.

        Raises:
            ConfigError: a rollout has no sleep mode; then nobody was put to sleep.
            SyncError: some failed; the others sleep. It says who is in which state, and the call can be made again.
        """
        if in_flight not in IN_FLIGHT or in_flight == "keep":
            raise ConfigError(f"in_flight is {in_flight!r}; before a sleep it must be 'wait' or 'abort'")
        with self._alone():
            if self.sleep_level:
                deadline = Deadline.after(self.timeout_s)
                with self._sleeping():
                    asleep = self._sleepers.sleep(
                        self._replicas, self.sleep_level, in_flight=in_flight, parts=False, deadline=deadline
                    )
                    self._watch.slept(asleep, lost=False)

    def wake_up_rollout(self, tags: Sequence[str] | None = None) -> None:
        """Wake the rollouts that sleep, wholly or only these tags (``weights``, ``kv_cache``).

        Raises:
            ConfigError: there is no such tag.
            SyncError: some failed; the others are awake. It says who is in which state, and the call can be made again.
        """
        with self._alone():
            deadline = Deadline.after(self.timeout_s)
            if self.is_colocated:
                require_tags(tags)
                try:
                    self._release_trainers(Deadline.after(min(_RELEASE_S, self.timeout_s)))
                except SyncError as error:  # rollouts can serve without trainers
                    self._watch.log.warning("trainers gave no memory back before rollouts wake: %s", error)
            with self._sleeping():
                asleep = self._sleepers.wake_up(self._replicas, tags, deadline)
                self._watch.slept(asleep, lost=self._loses)

    @property
    def _loses(self) -> bool:
        """Whether the rollouts lose their weights in the sleep that this manager puts them to."""
        return self.sleep_level > 1

    @contextlib.contextmanager
    def _sleeping(self) -> Iterator[None]:
        """What is known of who sleeps after a failure is seen too."""
        try:
            yield
        except SyncError as error:
            self._watch.slept(error.asleep, lost=self._loses)
            raise

    def offload_trainers(self) -> None:
        """Let the trainers move their models to the CPU, see
        :meth:`~twinkle_ray.mixins.TrainActorMixin.offload_to_cpu`.

        Raises:
            UnsupportedActor: one cannot.
            SyncError: one failed.
        """
        with self._alone():
            self._call_trainers("offload_to_cpu", Deadline.after(self.timeout_s))

    def reload_trainers(self) -> None:
        """Bring the trainers' models back to their devices. Raises as :meth:`offload_trainers`."""
        with self._alone():
            self._call_trainers("reload_to_gpu", Deadline.after(self.timeout_s))

    def _call_trainers(self, method: str, deadline: Deadline) -> None:
        if method == "offload_to_cpu":
            # A device keeps memory that was freed as long as another process has it open. Who is dead has nothing open.
            able = [r for r in self._replicas if r.has_mixin]
            ops: dict[str, Call | Op] = {r.name: Op(handle=r.handle, op="let_go", request={}) for r in able}
            soon = Deadline.after(min(_RELEASE_S, deadline.remaining()))
            for error in self._round("offload", soon).run_all(ops)[1].values():
                self._watch.log.warning("a rollout did not close the trainers' memory before they offload: %s", error)
        if self._naive:
            getattr(self._train_group, method)()
            return
        TrainGroup(lambda: self.train_actors, timeout_s=deadline.remaining()).call(method)

    def _make_ready(self, in_flight: str, deadline: Deadline, dropped: list[str]) -> None:
        """Weights awake, and in colocated mode nothing else.

        Args:
            dropped: gets the names of rollouts that turn out to be dead and may be dropped.
        """

        def make_ready() -> None:
            asleep: Asleep
            if self.is_colocated and self.sleep_level:
                asleep = self._sleepers.sleep(
                    self._replicas, self.sleep_level, in_flight=in_flight, parts=True, deadline=deadline
                )
            else:  # of one that does not answer the sync will say so
                found = self._sleepers.asleep(self._replicas, deadline)
                asleep = {name: tags or () for name, tags in found.items()}
            if any("weights" in tags for tags in asleep.values()):
                self._release_trainers(deadline)
                self._sleepers.wake_up(self._replicas, ["weights"], deadline)

        self._or_drop(make_ready, dropped, deadline)

    def _release_trainers(self, deadline: Deadline) -> None:
        """Memory that trainers hold and do not use is wanted by who wakes."""
        able = [t for t in self._trainers if has_method(t.handle, "release_cached_memory")]
        calls = {t.name: Call(ref=t.handle.release_cached_memory.remote()) for t in able}
        Round("sleep", deadline).run(calls)

    def _or_drop(self, act: Callable[[], _T], dropped: list[str], deadline: Deadline) -> _T:
        """Do it, and again without those who turn out to be dead, if they may be dropped."""
        while True:
            try:
                return act()
            except SyncError as error:
                dead = self._dead_rollouts() if self._on_dead == "drop" and self._has_mixins() else []
                if not dead or len(dead) == len(self._replicas) or deadline.expired:
                    raise
                self._watch.log.warning("%s: dropped, because its actor is dead (%s)", ", ".join(dead), error)
                self._drop(dead)
                dropped += dead

    # --- one sync through a group ------------------------------------------------------------------------------

    def _sync_group(
        self, wanted: Wanted, in_flight: str, phases: dict[str, float], start: float, deadline: Deadline
    ) -> SyncReport:
        dropped: list[str] = []
        while True:
            try:
                results = self._sync_as_agreed(wanted, in_flight, phases, deadline)
                if results is None:
                    results = self._sync_anew(wanted, in_flight, phases, deadline)
                break
            except SyncError as error:
                self._forget()
                dead = self._dead_rollouts() if self._on_dead == "drop" else []
                if dead and len(dead) < len(self._replicas) and not deadline.expired:
                    self._watch.log.warning("%s: dropped, because its actor is dead (%s)", ", ".join(dead), error)
                    self._drop(dead)
                    dropped += dead
                    continue
                late = error.actors if isinstance(error, SyncTimeout) else ()
                statuses: dict[str, RolloutStatus | None] = self._ask_rollouts("checkpoint_status", late)
                error.versions = {name: None if held is None else held.version for name, held in statuses.items()}
                self._watch.asked(statuses)
                raise
            except BaseException:
                # Refused input leaves the group as it is, if it stands; an interrupt in the transfer does not.
                if self._group is None or "transfer" in phases:
                    self._forget()
                raise
        assert self._group is not None
        assert self._last is not None
        sent = results[self._trainers[self._group.routes.senders[0]].name]
        return SyncReport(
            version=self._version,
            mode=self._group.routes.mode,
            tensors=sent["tensors"],
            nbytes=sent["nbytes"],
            seconds=time.perf_counter() - start,
            phases=phases,
            replicas=tuple(ReplicaReport(name=r.name, **results[r.name]) for r in self._replicas),
            sender=sent["seconds"],
            base=self._last.base or "",
            adapter=self._last.adapter,
            dropped=tuple(dropped),
        )

    def _forget(self) -> None:
        """Nothing is agreed with anybody any more."""
        self._group = self._agreed = self._last = self._default = None
        self._adapters = {}

    def _usual(self, wanted: Wanted, in_flight: str) -> Sending | None:
        """What to send if the rollouts are as they were after the last sync; ``None``: that must be asked."""
        last = self._last
        if last is None:
            return None
        if wanted.merge:
            # Each base has the same tensors. What a rollout holds beside it, it compares for itself.
            return Sending(base=last.base) if last.adapter is None else None
        if in_flight == "keep":
            return None  # to be refused
        name = wanted.adapter or self._default
        if last.adapter is None or name not in self._adapters:
            return None
        return Sending(base=None, base_id=last.base_id, adapter=name, default=wanted.adapter is None)

    def _sync_as_agreed(
        self, wanted: Wanted, in_flight: str, phases: dict[str, float], deadline: Deadline
    ) -> dict[str, dict[str, Any]] | None:
        """The steady state: one round of calls, in which each member compares for itself what was agreed with what
        it holds. ``None``: nothing was agreed yet, or it holds no more; then nothing was written.

        Several trainers are always asked first: if one of them saw a change alone and refused, the others would wait
        for it in a gather that nothing ends.
        """
        sending = self._usual(wanted, in_flight)
        if sending is None or self._group is None or len(self._trainers) > 1:
            return None
        try:
            with _timed(phases, "transfer"):
                results = self._transfer(self._version + 1, sending, in_flight, set(), deadline, after=self._version)
        except NotAgreed as error:
            self._watch.log.info("agreeing anew: %s", error)
            self._forget()
            phases["refused"] = phases.pop("transfer")
            return None
        if results[self._trainers[0].name]["outdated"]:
            # Every rollout holds one whole version of what was agreed, but that is not all of the model any more.
            self._watch.log.info("agreeing anew: the trainer's model has got other names or more tensors")
            self._agreed = self._last = None
            phases["outdated"] = phases.pop("transfer")
            return None
        return results

    def _sync_anew(
        self, wanted: Wanted, in_flight: str, phases: dict[str, float], deadline: Deadline
    ) -> dict[str, dict[str, Any]]:
        """Ask everyone, make a group and agree on what is sent where that is needed, and send."""
        with _timed(phases, "prepare"):
            trainers, rollouts = self._look(deadline, merge=wanted.merge)
            sending = decide(wanted, trainers[self._trainers[0].name], rollouts, in_flight)
        if wanted.merge:
            self._warn_idle_lora(rollouts)
        routes = self._routes_for(trainers, rollouts)
        pids = (*(s.pid for s in trainers.values()), *(s.pid for s in rollouts.values()))
        if not self._stands(routes, pids, trainers, rollouts):
            with _timed(phases, "init"):
                self._connect(routes, pids, rollouts, deadline)
        fresh: set[str] = set()
        if sending.base is not None and (self._agreed is None or self._agreed.digest != trainers["trainer[0]"].digest):
            with _timed(phases, "agree"):
                self._agree(trainers, deadline, merge=wanted.merge)
        if sending.base is not None and self._agreed is not None and not self._agreed.told:
            fresh.add("base")
        if sending.adapter is not None:
            with _timed(phases, "agree"):
                if self._agree_adapter(sending.adapter, deadline):
                    fresh.add("adapter")
        with _timed(phases, "transfer"):
            version = 1 + max(status.version for status in rollouts.values())
            return self._transfer(version, sending, in_flight, fresh, deadline)

    def _look(self, deadline: Deadline, *, merge: bool) -> tuple[dict[str, TrainerStatus], dict[str, RolloutStatus]]:
        """Ask everyone what it holds; refuse what cannot be synced before anything is started."""
        how = {} if merge else {"merge": False}
        members: dict[str, Call | Op] = {
            t.name: Call(ref=t.handle.checkpoint_status.remote(**how)) for t in self._trainers
        }
        members |= {r.name: Op(handle=r.handle, op="prepare", request={}) for r in self._replicas}
        answers = self._round("prepare", deadline).run(members)
        trainers: dict[str, TrainerStatus] = {t.name: answers[t.name] for t in self._trainers}
        rollouts: dict[str, RolloutStatus] = {r.name: answers[r.name] for r in self._replicas}
        first = trainers[self._trainers[0].name]
        for name, status in trainers.items():
            if status.digest != first.digest:
                raise ManifestMismatch(
                    f"{name} holds other names, shapes or dtypes than trainer[0]; all trainers must hold one model"
                )
            if (status.adapters, status.active) != (first.adapters, first.active):  # gathers would wait for ever
                raise ManifestMismatch(
                    f"{name} has the adapters {_listed(status.adapters)} of which {_listed(status.active)} are active, "
                    f"trainer[0] {_listed(first.adapters)} of which {_listed(first.active)} are; all trainers must "
                    "have the same, call set_adapter() on each"
                )
        for name, held in rollouts.items():
            if "weights" in held.asleep:
                raise ReplicaUnavailable(
                    f"{name} is asleep ({', '.join(held.asleep)}); wake at least its weights before a sync, with "
                    "manager.wake_up_rollout(['weights'])"
                )
        self._base_ids = {name: status.base_id for name, status in trainers.items()}
        return trainers, rollouts

    def _mode_for(self, trainers: Mapping[str, TrainerStatus], rollouts: Mapping[str, RolloutStatus]) -> str:
        return self._routes_for(trainers, rollouts).mode

    def _routes_for(self, trainers: Mapping[str, TrainerStatus], rollouts: Mapping[str, RolloutStatus]) -> Routes:
        spots = [
            Spot(kind=t.device[0], device=t.device[1], node=t.node, shareable=t.shareable) for t in trainers.values()
        ]
        workers = {name: _spots(held) for name, held in rollouts.items()}
        return routes(self._mode, spots, workers, colocated=self.is_colocated)

    def _stands(
        self,
        routes: Routes,
        pids: tuple[int, ...],
        trainers: dict[str, TrainerStatus],
        rollouts: dict[str, RolloutStatus],
    ) -> bool:
        group = self._group
        if group is None or group.routes != routes or group.pids != pids:
            return False
        in_group = [trainers[self._trainers[i].name].group for i in routes.senders]
        in_group += [status.group for status in rollouts.values()]
        return all(name == group.name for name in in_group)

    def _connect(
        self, routes: Routes, pids: tuple[int, ...], rollouts: dict[str, RolloutStatus], deadline: Deadline
    ) -> None:
        self._forget()
        workers = [rollouts[r.name].workers for r in self._replicas]
        names = [r.name for r in self._replicas]
        if not routes.plain:
            made = topology.arrange(len(self._trainers), workers, names, routes)
            self._connect_parties(routes, made, pids, deadline)
            return
        made = topology.build(len(self._trainers), workers, names)
        backend = BACKENDS[routes.mode]
        prepared = self._round("prepare", deadline).run(
            {
                t.name: Call(ref=t.handle.prepare_checkpoint_engine.remote(i == 0, backend, fresh=True))
                for i, t in enumerate(self._trainers)
            }
        )
        metadata = prepared[self._trainers[0].name]
        left = deadline.remaining()
        members = self._only_gathering(made)
        joining: list[tuple[Trainer | Replica, int]] = [
            (t, rank) for t, rank in zip(self._trainers, made.trainer_ranks, strict=True) if rank is not None
        ]
        joining += [(r, ranks[0]) for r, ranks in zip(self._replicas, made.rollout_ranks, strict=True)]
        for member, rank in joining:
            request = {
                "first_rank": rank,
                "world_size": made.world_size,
                "rendezvous": metadata,
                "timeout_s": left,
            }
            members[member.name] = Op(handle=member.handle, op="connect", request=request)
        self._round("init", deadline, made, metadata["group"]).run(members)
        self._group = _Group(name=metadata["group"], routes=routes, topology=made, pids=pids)
        self._watch.grouped()

    def _only_gathering(self, made: Topology) -> dict[str, Call | Op]:
        return {
            t.name: Call(ref=t.handle.init_checkpoint_process_group.remote(rank=-1, world_size=made.world_size))
            for t, rank in zip(self._trainers, made.trainer_ranks, strict=True)
            if rank is None
        }

    def _connect_parties(self, routes: Routes, made: Topology, pids: tuple[int, ...], deadline: Deadline) -> None:
        """Make several groups, or one on a device. What they have in common is the first part of their names."""
        name = f"twinkle-{uuid.uuid4().hex}"
        groups = [(f"{name}#{number}", BACKENDS[party.mode]) for number, party in enumerate(routes.parties)]
        opened = self._round("prepare", deadline).run(
            {
                self._trainers[i].name: Call(
                    ref=self._trainers[i].handle.prepare_checkpoint_engine.remote(
                        True,
                        groups=[one for one, party in zip(groups, routes.parties, strict=True) if party.trainer == i],
                    )
                )
                for i in routes.senders
            }
        )
        left = deadline.remaining()
        seats: dict[str, list[dict[str, Any]]] = {}
        for (group, _), party, numbers in zip(groups, routes.parties, made.seats, strict=True):
            sender = self._trainers[party.trainer].name
            place = {"rendezvous": opened[sender][group], "numbers": list(numbers)}
            seats.setdefault(sender, []).append({**place, "rank": 0})
            for rank, (at, _) in enumerate(party.workers, start=1):
                seats.setdefault(self._replicas[at].name, []).append({**place, "rank": rank})
        members = self._only_gathering(made)
        for i in routes.senders:
            trainer = self._trainers[i]
            request = {"seats": seats[trainer.name], "timeout_s": left}
            members[trainer.name] = Op(handle=trainer.handle, op="connect", request=request)
        for replica, ranks in zip(self._replicas, made.rollout_ranks, strict=True):
            # Each group lists them in their order, but a replica's workers may be in several.
            own = sorted(seats[replica.name], key=lambda seat: seat["numbers"][seat["rank"]])
            request = {
                "first_rank": ranks[0],
                "world_size": made.world_size,
                "rendezvous": own[0]["rendezvous"],
                "timeout_s": left,
                "seats": own,
            }
            members[replica.name] = Op(handle=replica.handle, op="connect", request=request)
        self._round("init", deadline, made, name).run(members)
        self._group = _Group(name=name, routes=routes, topology=made, pids=pids)
        self._watch.grouped()

    def _agree(self, trainers: dict[str, TrainerStatus], deadline: Deadline, *, merge: bool) -> None:
        self._agreed = None
        first = self._trainers[0]
        # All of them, for one answer: a user's named_weights() may gather, and then needs every rank.
        sent = self._round("agree", deadline).run(
            {t.name: Call(ref=t.handle.checkpoint_manifest.remote(merge)) for t in self._trainers}
        )
        own = Manifest.from_json(sent[first.name])
        answers = self._round("agree", deadline).run(
            {r.name: Op(handle=r.handle, op="agree", request={"manifest": own.as_json()}) for r in self._replicas}
        )
        if problems := disagreements(answers):
            raise mismatch(tuple(problems), "the rollouts")
        wanted = [list(worker["dtypes"]) for workers in answers.values() for worker in workers]
        cuts = agree_cuts(own, [worker["cuts"] for workers in answers.values() for worker in workers])
        wire = own.with_dtypes(agree_dtypes(own, wanted)).with_cuts(cuts)
        dtypes = tuple(meta.dtype for meta in wire)
        self._round("agree", deadline).run(
            {
                t.name: Call(ref=t.handle.agree_checkpoint.remote(own.digest, dtypes, cuts, merge))
                for t in self._trainers
            }
        )
        self._agreed = _Agreed(digest=own.digest, wire=wire)

    def _agree_adapter(self, name: str, deadline: Deadline) -> bool:
        """Agree on one adapter; whether it is another one than the last time."""
        found = self._round("agree", deadline).run(
            {t.name: Call(ref=t.handle.checkpoint_adapter.remote(name)) for t in self._trainers}
        )
        one = _AgreedAdapter(**found[self._trainers[0].name])
        for trainer, other in found.items():
            if other["digest"] != one.digest:
                raise ManifestMismatch(f"{trainer} holds another adapter {name!r} than trainer[0]")
        known = self._adapters.get(name)
        if known is not None and known.digest == one.digest:
            return False
        request = {"name": name, "config": one.config, "manifest": one.manifest}
        self._round("agree", deadline).run(
            {r.name: Op(handle=r.handle, op="check_adapter", request=request) for r in self._replicas}
        )
        self._adapters[name] = one
        return True

    def _transfer(
        self,
        version: int,
        sending: Sending,
        in_flight: str,
        fresh: set[str],
        deadline: Deadline,
        after: int | None = None,
    ) -> dict[str, dict[str, Any]]:
        """One round of calls.

        Args:
            fresh: which of ``base`` and ``adapter`` the rollouts have not been told of yet.
            after: the version that the rollouts must hold; ``None``: any.
        """
        group = self._group
        assert group is not None
        agreed = self._agreed if sending.base is not None else None
        one = self._adapters[sending.adapter] if sending.adapter is not None else None
        left = deadline.remaining()
        self._watch.sending(version)
        alone = base = adapter = None
        if agreed is not None:
            manifest = agreed.wire.as_json() if "base" in fresh else None
            base = {
                "digest": agreed.wire.digest,
                "kind": sending.base,
                "base_id": sending.base_id,
                "manifest": manifest,
            }
        if one is not None:
            alone = {
                "name": one.name,
                "digest": one.digest,
                "base_id": sending.base_id,
                "default": sending.default,
            }
            told = {"config": one.config, "manifest": one.manifest} if "adapter" in fresh else {"manifest": None}
            adapter = {**alone, "wire": one.wire, **told}
        members: dict[str, Call | Op] = {
            r.name: Op(
                handle=r.handle,
                op="receive",
                request={
                    "base": base,
                    "adapter": adapter,
                    "version": version,
                    "bucket_size": self.bucket_size,
                    "timeout_s": left,
                    "in_flight": in_flight,
                    "group": group.name,
                    "after": after,
                },
            )
            for r in self._replicas
        }
        # The trainers last: they are ready sooner, and each call takes 0.2 ms to be sent.
        members |= {
            t.name: Call(
                # One argument: each is a Ray object of its own, which takes some 30 us at either end.
                ref=functools.partial(
                    named(t.handle.send_checkpoint_weights, "twinkle.send").remote,
                    agreed={
                        "digest": None if agreed is None else agreed.wire.digest,
                        "bucket_size": self.bucket_size,
                        "timeout_s": left,
                        "group": None if rank is None else group.name,
                        "kind": sending.base,
                        # each rank has its own names for its shards of the base
                        "adapter": alone and {**alone, "base_id": self._base_ids.get(t.name, alone["base_id"])},
                    },
                )
            )
            for t, rank in zip(self._trainers, group.topology.trainer_ranks, strict=True)
        }
        results = self._round("transfer", deadline, group.topology, group.name).run(members)
        self._version, self._last = version, sending
        if agreed is not None:
            self._agreed = replace(agreed, told=True)
        if sending.default or sending.base == MERGED:
            self._default = sending.adapter
        return results

    def _check_lora(self, adapters: bool) -> None:
        """Compare vLLM's settings with what is to be sent."""
        rollouts: dict[str, RolloutStatus] = self._round("prepare", Deadline.after(self.timeout_s)).run(
            {r.name: Op(handle=r.handle, op="prepare", request={}) for r in self._replicas}
        )
        if not adapters:
            self._warn_idle_lora(rollouts)
            return
        for name, status in rollouts.items():
            require_lora(name, status)

    def _warn_idle_lora(self, rollouts: dict[str, RolloutStatus]) -> None:
        names = idle_lora(rollouts)
        if names and not self._warned:
            self._warned = True
            self._watch.log.warning(
                "%s: vLLM has enable_lora=True, but merged weights need no LoRA in the engine, which costs memory and "
                "speed; make it with enable_lora=False unless adapters are sent too",
                ", ".join(names),
            )

    # --- other ways --------------------------------------------------------------------------------------------

    def _sync_naive(
        self,
        merge_and_sync: bool,
        in_flight: str,
        phases: dict[str, float],
        start: float,
        deadline: Deadline,
        *,
        offload: bool,
    ) -> SyncReport:
        group = self._train_group
        if isinstance(group, TrainGroup) and group.sync is None:

            def sync(merge: bool) -> SyncReport:
                return self._sync_group(Wanted(merge=merge), in_flight, phases, start, deadline)

            with group.syncing_by(sync):
                # What the rollouts hold it asks them.
                report: SyncReport = classic.sync_naive(
                    group,
                    merge=merge_and_sync,
                    base_sync_done=True,
                    colocated=self.is_colocated or offload,
                    reload=not offload,
                )
            return replace(report, seconds=time.perf_counter() - start)
        held, self._held = self._held, ""  # a failure leaves nobody knows what
        with _timed(phases, "transfer"):
            classic.sync_naive(
                self._train_group,
                merge=merge_and_sync,
                base_sync_done=held == PLAIN,
                colocated=self.is_colocated or offload,
                reload=not offload,
            )
        self._held = MERGED if merge_and_sync else PLAIN
        return self._plain_report("naive", phases, start)

    def _sync_classic(self, merge_and_sync: bool, phases: dict[str, float], start: float) -> SyncReport:
        held, self._held = self._held, ""  # a failure leaves nobody knows what
        with _timed(phases, "transfer"):
            classic.sync(
                [t.handle for t in self._trainers],
                [r.handle for r in self._replicas],
                merge=merge_and_sync,
                base_sync_done=held == PLAIN,
                timeout_s=self.timeout_s,
            )
        self._held = MERGED if merge_and_sync else PLAIN
        return self._plain_report("classic", phases, start)

    def _plain_report(self, mode: str, phases: dict[str, float], start: float) -> SyncReport:
        self._plain_version += 1
        return SyncReport(
            version=self._plain_version,
            mode=mode,
            tensors=0,
            nbytes=0,
            seconds=time.perf_counter() - start,
            phases=phases,
            replicas=(),
        )

    # --- helpers -----------------------------------------------------------------------------------------------

    def _has_mixins(self) -> bool:
        return all(t.has_mixin for t in self._trainers) and all(r.has_mixin for r in self._replicas)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._closed:
            raise ConfigError("this manager was closed; make a new one")
        if not self._busy.acquire(blocking=False):
            raise ConfigError("this manager is busy with another call; one call at a time")
        try:
            yield
        finally:
            self._busy.release()

    def _round(self, phase: str, deadline: Deadline, made: Topology | None = None, group: str = "") -> Round:
        def owner(actor: str) -> str:
            number = actor.removeprefix("rank ")
            return made.owner(int(number)) if made is not None and number.isdigit() else actor

        def release(reason: str) -> None:
            # A member that is busy hears it through the group's lifeline.
            for handle in [*self.rollout_actors, *self.train_actors]:
                with contextlib.suppress(Exception):
                    handle.abort_checkpoint.remote(reason, group)

        release_with = release if made is not None else None
        return Round(phase, deadline, release=release_with, owner=owner, seen=self._watch.polled)

    def _ask_rollouts(self, method: str, late: Sequence[str] = ()) -> dict[str, Any]:
        """What each rollout answers within a second, or within 0.2 s if it is known to be late; ``None`` for one that
        does not."""
        refs = {r.name: getattr(r.handle, method).remote() for r in self._replicas}
        for names, wait_s in ([n for n in refs if n not in late], 1.0), (list(refs), 0.2 if late else 0.0):
            if names:
                ready, _ = ray.wait([refs[name] for name in names], num_returns=len(names), timeout=wait_s)
        answers: dict[str, Any] = dict.fromkeys(refs)
        for name, ref in refs.items():
            if ref in ready:
                with contextlib.suppress(Exception):
                    answers[name] = ray.get(ref, timeout=1.0)
        return answers

    def _best_effort(self, refs: list[Any], ops: list[tuple[Replica, str, dict[str, Any]]]) -> None:
        deadline = Deadline.after(_CLEANUP_S)
        members: dict[str, Call | Op] = {f"call[{i}]": Call(ref=ref) for i, ref in enumerate(refs)}
        members |= {r.name: Op(handle=r.handle, op=op, request=request) for r, op, request in ops}
        with contextlib.suppress(Exception):
            Round("finalize", deadline).run_each(members)

    def _compare(
        self,
        agreed: _Agreed,
        held: dict[str, dict[str, tuple[str, str]]],
        merged: dict[str, bool],
        deadline: Deadline,
    ) -> VerifyReport:
        expected: dict[tuple[bool, tuple[str, ...]], dict[str, str]] = {}
        compared = 0
        unverifiable: dict[str, tuple[str, ...]] = {}
        for name, digests in held.items():
            dtypes = tuple(digests.get(m.name, ("", ""))[0] or m.dtype for m in agreed.wire)
            form = merged[name], dtypes
            if form not in expected:
                answers = self._round("verify", deadline).run(
                    {
                        t.name: Call(
                            ref=t.handle.weights_digest.remote(
                                names=None, digest=agreed.digest, dtypes=dtypes, merge=form[0]
                            )
                        )
                        for t in self._trainers
                    }
                )
                expected[form] = answers[self._trainers[0].name]
            dark = []
            for meta in agreed.wire:
                _, found = digests.get(meta.name, ("", UNVERIFIABLE))
                if found == UNVERIFIABLE:
                    dark.append(meta.name)
                elif found != expected[form][meta.name]:
                    raise VerifyError(
                        f"{name} holds other bytes than the trainer for {meta.name!r} (sha256 {found[:12]} against "
                        f"{expected[form][meta.name][:12]}); sync again",
                        tensor=meta.name,
                        actor=name,
                    )
                else:
                    compared += 1
            unverifiable[name] = tuple(dark)
        return VerifyReport(compared=compared, unverifiable=unverifiable)


def _spots(held: RolloutStatus) -> list[Spot]:
    count = len(held.devices)
    nodes, links = held.nodes or ("",) * count, held.links or ((),) * count
    return [
        Spot(kind=kind, device=device, node=node, links=frozenset(others))
        for (kind, device), node, others in zip(held.devices, nodes, links, strict=True)
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


@contextlib.contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    phases[name] = phases.pop(name, 0.0)  # the last one is the one that runs
    try:
        yield
    finally:
        phases[name] += time.perf_counter() - start
