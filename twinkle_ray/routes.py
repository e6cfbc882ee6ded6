"""Which trainer sends to which worker, and how: by the device that they share, or over the wire. Pure.

A worker whose device a trainer rank holds reads that rank's memory itself (``ipc``); of several trainers in one place
each gets about as many workers. All others get their weights from the first trainer, in one group. So a sync has one
group for each trainer rank that has neighbours, and one for the rest of the world.

If that rest is a single worker, a single trainer sends, and their devices are linked, the worker reads the trainer's
memory too. Two H200s: the copy engines move 386 to 395 GB/s over NVLink, NCCL 369, and there is no communicator to be
made. With more workers each would take its share of what the trainer's device can give, where a broadcast goes on from
one to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinkle_ray.errors import ConfigError

IPC = "ipc"
BY_DEVICE = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The wire between devices of one kind."""
_SHARED = ("cpu", "cuda")
"""Kinds of devices whose memory processes can share here. NPU IPC exists, but was never run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where the parameters of one process are.

    Attributes:
        kind: of the device: ``cpu``, ``cuda``, ``npu``.
        device: names it in the whole cluster; ``""`` for a CPU.
        node: equal for processes that can share memory and talk over a Unix socket.
        links: devices of the same node whose memory this one reads directly.
        shareable: of a trainer: whether processes of linked devices can open its memory.
    """

    kind: str
    device: str
    node: str
    links: frozenset[str] = frozenset()
    shareable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One group: a trainer, which sends, and workers.

    Attributes:
        mode: its transport.
        trainer: index of the sender.
        workers: ``(replica, worker)``, both by index.
    """

    mode: str
    trainer: int
    workers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """All groups of a sync; the one that crosses devices comes first, if there is one."""

    parties: tuple[Party, ...]

    @property
    def mode(self) -> str:
        """``gloo``, ``nccl``, ``hccl``, ``ipc``, or two of them such as ``nccl+ipc``."""
        return "+".join(dict.fromkeys(party.mode for party in self.parties))

    @property
    def plain(self) -> bool:
        """Whether it is one group over the wire, from the first trainer to everybody."""
        return len(self.parties) == 1 and self.parties[0].mode != IPC

    @property
    def senders(self) -> tuple[int, ...]:
        """Trainers that send, by index."""
        return tuple(sorted({party.trainer for party in self.parties}))


def routes(mode: str, trainers: Sequence[Spot], replicas: Mapping[str, Sequence[Spot]], *, colocated: bool) -> Routes:
    """Decide for everybody.

    Args:
        mode: ``auto``, ``ipc``, ``gloo``, ``nccl`` or ``hccl``. On CPUs, where everything on a node is on one device,
            ``auto`` shares memory only if that was asked for by ``colocated``. ``ipc`` has each worker of a linked
            device read the first trainer's memory, however many there are.
        trainers: each one's.
        replicas: those of each one's workers, in their order.
        colocated: each replica must be on a device that a trainer holds, if such devices can share memory.

    Raises:
        ConfigError: the devices do not allow the mode, or a replica is not colocated.
    """
    first = trainers[0]
    load = [0] * len(trainers)
    near: dict[int, list[tuple[int, int]]] = {}
    far: list[tuple[tuple[int, int], Spot]] = []
    kinds = {spot.kind for spot in trainers}
    for r, (name, workers) in enumerate(replicas.items()):
        for w, spot in enumerate(workers):
            hosts = [i for i, trainer in enumerate(trainers) if _one_device(trainer, spot)]
            share = mode == IPC or (mode == "auto" and (spot.kind != "cpu" or colocated))
            if hosts and share and spot.kind in _SHARED:
                host = min(hosts, key=lambda i: load[i])
                load[host] += 1
                near.setdefault(host, []).append((r, w))
                continue
            if not hosts and share and colocated and spot.kind in _SHARED and spot.kind in kinds:
                raise ConfigError(
                    f"is_colocated=True, but worker {w} of {name} is on {_named(spot)}, which no trainer holds; put it "
                    "into a trainer's placement-group bundle, or leave is_colocated out, which allows both kinds"
                )
            far.append(((r, w), spot))
    if mode == IPC or (mode == "auto" and len(far) == len(trainers) == 1):
        linked = [at for at, spot in far if first.shareable and spot.node == first.node and first.device in spot.links]
        if linked:
            near[0] = sorted(near.get(0, []) + linked)
            far = [(at, spot) for at, spot in far if at not in linked]
    if mode == IPC and not near:
        why = "none of these do"
        if "npu" in kinds:
            why = "NPU IPC is not supported (it was never run)"
        elif any(spot.node == first.node and first.device in spot.links for _, spot in far):
            why = (
                "trainer[0]'s memory cannot be read: its model is sharded, NCCL_P2P_DISABLE is set there, or torch has "
                "it in expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False mends that)"
            )
        raise ConfigError(
            "weight_sync_mode='ipc' needs trainers and rollouts that share devices, or whose GPUs are joined by "
            f"NVLink, but {why}; use 'auto', which takes the wire then"
        )
    parties = []
    if far:
        devices = [(spot.kind, spot.device) for spot in (first, *(spot for _, spot in far))]
        wire = wire_mode("auto" if mode == IPC else mode, devices)
        parties.append(Party(mode=wire, trainer=0, workers=tuple(at for at, _ in far)))
    parties += [Party(mode=IPC, trainer=host, workers=tuple(near[host])) for host in sorted(near)]
    return Routes(parties=tuple(parties))


def _one_device(one: Spot, other: Spot) -> bool:
    return bool(one.node) and (one.kind, one.device, one.node) == (other.kind, other.device, other.node)


def wire_mode(mode: str, devices: Sequence[tuple[str, str]]) -> str:
    """The transport of one group.

    Args:
        mode: as it was asked for.
        devices: kind and name of each member's.

    Raises:
        ConfigError: they do not allow the mode.
    """
    kinds = {kind for kind, _ in devices}
    ids = [identity for kind, identity in devices if kind != "cpu"]
    if mode == "auto":
        if len(kinds) == 1 and len(set(ids)) == len(ids):
            return BY_DEVICE.get(next(iter(kinds)), "gloo")
        # Mixed devices, or two ranks on one device (which NCCL refuses): through host memory.
        return "gloo"
    want = next(kind for kind, name in BY_DEVICE.items() if name == mode)
    if mode != "gloo" and kinds != {want}:
        raise ConfigError(
            f"weight_sync_mode={mode!r} needs every model on a {want} device, but these are on "
            f"{', '.join(sorted(kinds))}; use 'auto' or 'gloo'"
            + (", or torch_npu with CANN and .to('npu')" if want == "npu" else "")
        )
    if mode == "nccl" and len(set(ids)) < len(ids):
        raise ConfigError(
            "weight_sync_mode='nccl' needs one GPU per process, but a trainer and a rollout share one; use 'auto', "
            "which takes CUDA IPC there, or 'gloo'"
        )
    return mode


def _named(spot: Spot) -> str:
    return f"{spot.kind} {spot.device}".strip() + (" of another node" if not spot.device else "")
