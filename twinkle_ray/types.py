"""Records that cross processes: frozen, slotted, keyword-only, with units in their names."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

UNVERIFIABLE = "unverifiable"
"""Stands for a digest where the engine holds a tensor in a form that cannot be read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the members of one group meet; made by rank 0, handed on by the driver.

    Attributes:
        group: the group's name, which no other group ever had.
        backend: ``TWINKLE_GLOO``, ``TWINKLE_NCCL``, ``TWINKLE_HCCL`` or ``TWINKLE_IPC``.
        host: address of rank 0's node.
        store_port: of the TCPStore there.
        watch_port: of the lifeline there (see :mod:`twinkle_ray.backends.lifeline`).
    """

    group: str
    backend: str
    host: str
    store_port: int
    watch_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One process's place in a group.

    Attributes:
        rendezvous: of the group.
        rank: there.
        world_size: members of it.
        numbers: where a sync has several groups, its members' ranks in the whole.
    """

    rendezvous: Rendezvous
    rank: int
    world_size: int
    numbers: tuple[int, ...] | None = None

    @staticmethod
    def from_plain(value: dict[str, Any]) -> Seat:
        """Of ``rendezvous``, ``rank`` and ``numbers``, as the manager sends them."""
        numbers = tuple(value["numbers"])
        rendezvous = Rendezvous(**value["rendezvous"])
        return Seat(rendezvous=rendezvous, rank=value["rank"], world_size=len(numbers), numbers=numbers)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point of the monotonic clock of this process. Send ``remaining()`` to other processes, never the point."""

    at: float
    seconds: float

    @staticmethod
    def after(seconds: float) -> Deadline:
        return Deadline(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Seconds left, 0.0 once it has passed."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at


class OpState(Enum):
    """Life of one operation of an endpoint."""

    RUNNING = "running"  # in its thread
    DONE = "done"  # ended well; its result stands
    FAILED = "failed"  # ended with an error; its group is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStatus:
    """What an operation has come to, small enough to be polled.

    Attributes:
        op: ``connect``, ``send``, ``receive``, ``agree``, ``digest`` ...
        state: see :class:`OpState`.
        step: chunks moved so far; ``steps`` of them in all (0 while unknown).
        touched: whether a byte of the model may have been overwritten.
        seconds: seconds per named part, such as ``wire``, ``load``, ``reset``.
        result: of a ``DONE`` operation, plain data.
        error: of a ``FAILED`` one.
    """

    op: str
    state: OpState
    step: int = 0
    steps: int = 0
    touched: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    result: Any = None
    error: BaseException | None = None


class Contents(Enum):
    """What a rollout's parameters are."""

    NONE = "none"  # what it was started with, or nothing: no sync has reached it
    WHOLE = "whole"  # one whole version
    MIXED = "mixed"  # a sync failed after its first byte; only a full sync heals it


PLAIN = "plain"
MERGED = "merged"
"""Kinds of a base: as it is, or with LoRA adapters merged into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """What a rollout says of itself.

    Attributes:
        kind: ``module``, ``llm in process``, ``llm in child process`` or ``async llm``.
        version: of the weights held; 0 before the first sync.
        contents: see :class:`Contents`.
        updating: whether a sync is writing into it now.
        asleep: memory tags that sleep (``weights``, ``kv_cache``).
        group: name of the sync group it is in and nothing is known against, ``""`` if none.
        workers: processes that own its parameters.
        step, steps: chunks moved by the running sync.
        devices: per worker ``(type, id)``; known after ``prepare``.
        nodes: per worker a name of the machine, equal for those that can share memory.
        links: per worker the ids of other devices whose memory its own reads directly, such as over NVLink.
        pid: of the actor's process.
        base: ``plain``, or ``merged`` with adapters of the trainer; ``""`` before the first sync.
        base_id: the :class:`TrainerStatus`'s of that plain base, when it was sent.
        adapters: version by name of each LoRA adapter that is held; known after ``prepare``.
        default_adapter: the one that requests are served with which name none; ``None``: the base.
        lora: what a vLLM engine can hold, see :func:`twinkle_ray.vllm.adapters.lora_facts`; empty for a module.
        sleep_mode: whether it can sleep; not a module, nor a vLLM without ``enable_sleep_mode``.
    """

    kind: str
    version: int
    contents: Contents
    updating: bool
    asleep: tuple[str, ...]
    group: str
    workers: int
    step: int = 0
    steps: int = 0
    devices: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    pid: int = 0
    base: str = ""
    base_id: str = ""
    adapters: dict[str, int] = field(default_factory=dict)
    default_adapter: str | None = None
    lora: dict[str, Any] = field(default_factory=dict)
    sleep_mode: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """What a trainer says of itself.

    Attributes:
        digest: of its manifest in its own dtypes.
        tensors, nbytes: of that manifest.
        device: ``(type, id)`` of its parameters.
        group: name of the sync group it is in and nothing is known against, ``""`` if none.
        pid: of the actor's process.
        adapters: names of its LoRA adapters.
        active: of those that its forward pass uses now.
        base_id: of its frozen base: another one if any tensor of that was written or replaced since (but for writes
            through ``tensor.data``, which torch does not count). ``""`` without adapters.
        node: a name of its machine, as those of a rollout.
        shareable: whether processes of linked devices can open its memory.
    """

    digest: str
    tensors: int
    nbytes: int
    device: tuple[str, str]
    group: str
    pid: int
    adapters: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    base_id: str = ""
    node: str = ""
    shareable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """How one rollout took one sync in.

    Attributes:
        name: ``rollout[i]``.
        version: held afterwards.
        path: ``in place``, ``load_weights`` or ``layerwise reload``.
        tensors, nbytes: received by each of its workers.
        direct_bytes: of the tensors of which all that a worker holds was written by the wire straight into parameters;
            of the worker with the fewest.
        seconds: per part, the slowest worker's: ``wire``, ``load``, ``pause``, ``reset``.
    """

    name: str
    version: int
    path: str
    tensors: int
    nbytes: int
    direct_bytes: int
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one ``sync_weights`` did. Its ``str`` is one line.

    Attributes:
        version: that all replicas hold now.
        mode: the transport: ``gloo``, ``nccl``, ``hccl``, ``ipc``, ``naive``; two if some rollouts share a trainer's
            device and others do not, such as ``nccl+ipc``.
        tensors, nbytes: sent once, however many replicas received them.
        seconds: from call to return.
        phases: seconds per phase: ``transfer``, and where needed ``sleep``, ``prepare``, ``init``, ``agree``; and
            ``refused`` or ``outdated``, if what was agreed turned out to hold no more before anything was sent, or to
            be no longer all of the model after it was.
        replicas: one record per rollout.
        sender: seconds of the first trainer's parts: ``fence`` (what was on its device had to end), ``gather``,
            ``wire``.
        base: kind of the base that was sent, ``plain`` or ``merged``; ``""`` if none was.
        adapter: name of the LoRA adapter that was sent.
        dropped: names of the rollouts that turned out to be dead and are not the manager's any more.
    """

    version: int
    mode: str
    tensors: int
    nbytes: int
    seconds: float
    phases: dict[str, float]
    replicas: tuple[ReplicaReport, ...]
    sender: dict[str, float] = field(default_factory=dict)
    base: str = ""
    adapter: str | None = None
    dropped: tuple[str, ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Useful bytes over wall time of the whole call, in GB/s (1e9 bytes)."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in self.phases.items())
        adapter = f", adapter {self.adapter!r}" + (" and base" if self.base else "") if self.adapter else ""
        return (
            f"sync v{self.version} [{self.mode}{adapter}]: {self.tensors} tensors, {self.nbytes / 1e6:.2f} MB to "
            f"{len(self.replicas)} rollout(s) in {self.seconds * 1e3:.1f} ms, {self.gb_per_s:.2f} GB/s (ms: {phases})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``verify`` compared.

    Attributes:
        compared: tensors whose digests are equal, counted once per rollout.
        unverifiable: per rollout the names that its engine holds in a form that cannot be read back.
    """

    compared: int
    unverifiable: dict[str, tuple[str, ...]]
