"""The trainer actor's side of a sync: its weights as a source, and its endpoint."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.digest import tensor_sha256
from twinkle_ray.endpoint import Endpoint, Operation
from twinkle_ray.errors import ManifestMismatch, NotAgreed
from twinkle_ray.manifest import Manifest
from twinkle_ray.sources import NamedWeights, WeightSource
from twinkle_ray.transfer import send
from twinkle_ray.types import Deadline, OpState, OpStatus, Rendezvous, TrainerStatus
from twinkle_ray.worker import announce, device_facts

_JOINING_KEPT = 4


class Training:
    """State of one trainer actor.

    Args:
        weights: what is sent, asked anew at each call, so that a model replaced between two syncs is seen: a module, or
            a function that yields ``(name, tensor)``.

    Attributes:
        merge: what :meth:`send_announced` sends of a model with LoRA adapters: merged, or the frozen base.
    """

    def __init__(self, weights: Callable[[], torch.nn.Module | NamedWeights]) -> None:
        self.merge = True
        self._weights = weights
        self._source = WeightSource(weights())
        self._held: object = None
        self.endpoint = Endpoint(self._source.device())
        self.rank: int | None = None
        self._agreed: tuple[str, Manifest] | None = None
        self._joining: OrderedDict[str, Operation] = OrderedDict()

    def source(self) -> WeightSource:
        """The source of the present weights; its caches live as long as the same module is held."""
        source = self._present()
        if self._held is not None:
            device = source.device()
            if device != self.endpoint.device:  # offloaded, or moved: other streams, perhaps another backend
                self.endpoint.leave()
                self.endpoint = Endpoint(device)
        return source

    def _present(self) -> WeightSource:
        weights = self._weights()
        held = weights if isinstance(weights, torch.nn.Module) else None
        if held is None or held is not self._held:
            self._held, self._source = held, WeightSource(weights)
        return self._source

    def status(self) -> TrainerStatus:
        """Raises what the source raises: a trainer without weights, a model that cannot be sent."""
        manifest = self.source().manifest()
        endpoint = self.endpoint
        facts = device_facts(endpoint.device)
        return TrainerStatus(
            digest=manifest.digest,
            tensors=len(manifest),
            nbytes=manifest.nbytes,
            device=(facts["device_type"], facts["device_id"]),
            group=endpoint.sound_group,
            pid=os.getpid(),
        )

    def manifest(self) -> list[Any]:
        """The manifest in the trainer's own dtypes, in JSON form."""
        return self.source().manifest().as_json()

    def agree(self, digest: str, dtypes: tuple[str, ...], cuts: tuple[tuple[int, ...], ...] = ()) -> str:
        """Fix the wire dtypes and cuts of the manifest with this digest; the wire manifest's digest.

        Raises:
            ManifestMismatch: the model has another manifest by now, or this rank's differs from rank 0's.
        """
        manifest = self._current(digest)
        wire = manifest.with_dtypes(dtypes).with_cuts(cuts)
        self._agreed = (digest, wire)
        return wire.digest

    def connect(self, rank: int, world_size: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Join the group as ``rank``."""
        self._connect(rank, world_size, rendezvous, timeout_s).outcome()

    def start_connect(self, key: str, rank: int, world_size: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        """:meth:`connect` without waiting, to be polled under the caller's unique key. An actor that waits for others
        to come could not hear that they never will."""
        self._joining[key] = self._connect(rank, world_size, rendezvous, timeout_s)
        while len(self._joining) > _JOINING_KEPT:
            self._joining.popitem(last=False)

    def poll(self, key: str, wait_s: float) -> OpStatus:
        """Status of that connect, after at most ``wait_s`` seconds. In an actor with several threads this may come
        before the start, which is as good as running."""
        operation = self._joining.get(key)
        if operation is None:
            return OpStatus(op="connect", state=OpState.RUNNING)
        operation.ended.wait(wait_s)
        return operation.status()

    def _connect(self, rank: int, world_size: int, rendezvous: Rendezvous, timeout_s: float) -> Operation:
        self.rank = rank
        return self.endpoint.connect(rank, world_size, rendezvous, Deadline.after(timeout_s))

    def send(
        self, digest: str, bucket_size: int, timeout_s: float, group: str | None = None, *, merge: bool = True
    ) -> dict[str, Any]:
        """Send the agreed manifest; returns once the last byte has been read from this trainer's memory.

        If meanwhile it shows that names have changed or something was added, while all that was agreed is still there
        and was sent, the result is ``outdated``.

        A trainer that is not in the group only takes part in the gathers of sharded parameters.

        Args:
            group: in which to send; ``None``: in whichever this trainer is, if any.
            merge: send LoRA adapters merged; else the frozen base.

        Raises:
            NotAgreed: this trainer's weights are no more as agreed, or its group is not sound any more.
        """
        if self._agreed is None or self._agreed[1].digest != digest:
            raise NotAgreed(f"no manifest {digest} was agreed with this trainer", phase="transfer")
        own, wire = self._agreed
        self._present().merge = merge
        if self._held is None:  # of a module this is seen when its stream is opened
            try:
                self._current(own)
            except ManifestMismatch as error:
                raise NotAgreed(str(error), phase="transfer") from error
        return self._send(wire, bucket_size, Deadline.after(timeout_s), own=own, name=group)

    def send_announced(self, bucket_size: int, timeout_s: float) -> dict[str, Any]:
        """Send the model in its own dtypes, its manifest first, to receivers that were told nothing."""
        source = self.source()
        source.merge = self.merge
        return self._send(source.manifest(), bucket_size, Deadline.after(timeout_s))

    def _send(
        self, wire: Manifest, bucket_size: int, deadline: Deadline, *, own: str | None = None, name: str | None = None
    ) -> dict[str, Any]:
        source = self._present()

        def work(operation: Operation) -> dict[str, Any]:
            if self.rank is None and name is None:
                source.gather_only(wire)
                return {}
            if operation.group is not None and name not in (None, operation.group.group_name):
                operation.group = None  # another sync's, and not to be given up with this one
            group = operation.group
            try:
                stream = source.tensors(wire, own, recheck=own is not None)
            except ManifestMismatch as error:
                raise NotAgreed(str(error), phase="transfer") from error
            # On an error the stream's exit still makes the gathers that the other trainer ranks are in.
            with stream as tensors:
                if group is None:
                    raise NotAgreed(
                        "this trainer is not in the group of this sync: it never joined, or another sync has taken it "
                        "into a group of its own; one manager at a time may use it",
                        phase="transfer",
                    )
                if group.failure is not None:
                    raise NotAgreed(
                        f"this trainer's group broke since the last sync: {group.failure}", phase="transfer"
                    )
                if tensors.device not in (None, self.endpoint.device):
                    raise NotAgreed(
                        f"this trainer's weights moved from {self.endpoint.device} to {tensors.device} since its group "
                        "was made",
                        phase="transfer",
                    )
                try:
                    # What the caller has put on the device (an optimizer step on any stream) must have ended.
                    with operation.timed("fence"):
                        _fence(self.endpoint.device, group)
                    if own is None:  # the receivers know of no manifest yet
                        announce(operation, group, wire, bucket_size)
                    send(group, tensors, wire, bucket_size, operation)
                except BaseException as error:
                    group.abort(f"{type(error).__name__}: {error}")  # the receivers need not wait for those gathers
                    raise
            return {
                "nbytes": wire.nbytes,
                "tensors": len(wire),
                "seconds": operation.seconds,
                "outdated": tensors.outdated,
            }

        result: dict[str, Any] = self.endpoint.start("transfer", work, deadline).outcome()
        return result

    def digests(self, names: list[str] | None, digest: str | None, dtypes: tuple[str, ...] | None) -> dict[str, str]:
        """``{name: sha256}`` of the weights as they would be sent in these dtypes, with LoRA adapters merged unless the
        last sync sent the frozen base. Collective over sharded ranks.

        Args:
            names: only these; ``None``: all.
            digest: of the manifest that is meant; ``None``: the present one.
            dtypes: on the wire; ``None``: the trainer's own.
        """
        manifest = self.source().manifest() if digest is None else self._current(digest)
        wire = manifest if dtypes is None else manifest.with_dtypes(dtypes)
        wanted = None if names is None else set(names)
        result = {}
        with torch.no_grad(), self._source.tensors(wire) as tensors:
            for meta, tensor in zip(wire, tensors, strict=True):
                if wanted is None or wanted & set(meta.names):
                    result[meta.name] = tensor_sha256(tensor)
        return result

    def _current(self, digest: str) -> Manifest:
        manifest = self.source().manifest()
        if manifest.digest != digest:
            raise ManifestMismatch(
                "this trainer's weights changed in name, shape or dtype since they were agreed (or differ from "
                "trainer[0]'s); nothing was sent, sync again"
            )
        return manifest


def _fence(device: torch.device, group: SyncGroup) -> None:
    if device.type == group.device_type:
        group.fence()
        return
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None:
        module.synchronize(device)
