"""The trainer actor's side of a sync: its weights as a source, and its endpoint."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from twinkle_ray.adapter import Adapter
from twinkle_ray.backends import shareable, wait_for
from twinkle_ray.backends.base import SyncGroup, generation
from twinkle_ray.digest import tensor_sha256
from twinkle_ray.endpoint import Endpoint, Operation
from twinkle_ray.errors import ManifestMismatch, NotAgreed, TwinkleRayError
from twinkle_ray.lora import active_adapters, adapter_config, adapter_names, has_adapters
from twinkle_ray.manifest import Manifest
from twinkle_ray.sending import the_active
from twinkle_ray.sources import NamedWeights, TensorStream, WeightSource, device_of, gather_only
from twinkle_ray.transfer import send
from twinkle_ray.types import MERGED, PLAIN, Deadline, OpState, OpStatus, Rendezvous, Seat, TrainerStatus
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
        self._sent_merged = True
        self._weights = weights
        self._source = WeightSource(weights())
        self._held: torch.nn.Module | None = None
        self.endpoint = Endpoint(self._source.device())
        self.rank: int | None = None
        self._agreed: tuple[str, Manifest] | None = None
        self._told = ("", "")  # group, and base_id of the plain base that all its members got
        self._joining: OrderedDict[str, Operation] = OrderedDict()
        self._shareable: bool | None = None  # of the module that is held, on this endpoint's device

    def source(self) -> WeightSource:
        """The source of the present weights; its caches live as long as the same module is held."""
        source = self._present()
        if self._held is not None:
            device = source.device()
            if device != self.endpoint.device:  # offloaded, or moved: other streams, perhaps another backend
                self.endpoint.leave()
                self.endpoint = Endpoint(device)
                self._shareable = None
        return source

    def base_stays(self) -> contextlib.AbstractContextManager[None]:
        """See :meth:`twinkle_ray.sources.WeightSource.base_stays`."""
        return self._present().base_stays()

    def _present(self) -> WeightSource:
        weights = self._weights()
        held = weights if isinstance(weights, torch.nn.Module) else None
        if held is None or held is not self._held:
            self._held, self._source = held, WeightSource(weights)
            self._shareable = None
        return self._source

    def status(self, *, merge: bool = True) -> TrainerStatus:
        """Raises what the source raises: a trainer without weights, a model that cannot be sent.

        Args:
            merge: how it is to be sent.
        """
        source = self.source()
        manifest = source.manifest(merge=merge)
        model = self._held if self._held is not None and has_adapters(self._held) else None
        endpoint = self.endpoint
        facts = device_facts(endpoint.device)
        return TrainerStatus(
            digest=manifest.digest,
            tensors=len(manifest),
            nbytes=manifest.nbytes,
            device=(facts["device_type"], facts["device_id"]),
            group=endpoint.sound_group,
            pid=os.getpid(),
            adapters=tuple(adapter_names(model)) if model is not None else (),
            active=tuple(active_adapters(model)) if model is not None else (),
            base_id=source.base_id(),
            node=facts["node"],
            shareable=self._is_shareable(source),
        )

    def _is_shareable(self, source: WeightSource) -> bool:
        """Asked once for a module on a device: another answer would only make its syncs slower."""
        if self._shareable is None:
            tensors = self._held.parameters() if self._held is not None else ()
            self._shareable = not source.sharded and shareable(self.endpoint.device, tensors)
        return self._shareable

    def adapter(self, name: str | None = None) -> Adapter:
        """One adapter alone; ``None``: the one that is active.

        Raises:
            ConfigError: there is no such adapter, or not one.
            UnsupportedModel: it cannot be sent alone.
        """
        source = self.source()
        if name is None:
            model = self._held if self._held is not None else torch.nn.Module()
            name = the_active(tuple(adapter_names(model)), tuple(active_adapters(model)))
        return source.adapter(name)

    def peft_config(self, name: str | None) -> dict[str, Any] | None:
        """PEFT's configuration of an adapter, as JSON values; ``None`` without adapters. See :meth:`adapter`."""
        self.source()
        model = self._held
        if model is None or not (names := adapter_names(model)):
            return None
        return adapter_config(model, name or the_active(tuple(names), tuple(active_adapters(model))))

    def manifest(self, *, merge: bool = True) -> list[Any]:
        """The manifest in the trainer's own dtypes, in JSON form, as :meth:`status` has it."""
        return self.source().manifest(merge=merge).as_json()

    def agree(
        self, digest: str, dtypes: tuple[str, ...], cuts: tuple[tuple[int, ...], ...] = (), *, merge: bool = True
    ) -> str:
        """Fix the wire dtypes and cuts of the manifest with this digest; the wire manifest's digest.

        Raises:
            ManifestMismatch: the model has another manifest by now, or this rank's differs from rank 0's.
        """
        manifest = self._current(digest, merge=merge)
        wire = manifest.with_dtypes(dtypes).with_cuts(cuts)
        self._agreed = (digest, wire)
        return wire.digest

    def connect(self, rank: int, world_size: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Join the group as ``rank``."""
        self._connect(rank, world_size, rendezvous, timeout_s).outcome()

    def start_connect(self, key: str, rank: int, world_size: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        """:meth:`connect` without waiting, to be polled under the caller's unique key. An actor that waits for others
        to come could not hear that they never will."""
        self._keep_joining(key, self._connect(rank, world_size, rendezvous, timeout_s))

    def _keep_joining(self, key: str, operation: Operation) -> None:
        self._joining[key] = operation
        while len(self._joining) > _JOINING_KEPT:
            self._joining.popitem(last=False)

    def start_join(self, key: str, seats: Sequence[Seat], timeout_s: float) -> None:
        """:meth:`start_connect` for the groups of a sync that has several, in each of which this trainer sends."""
        self.rank = 0
        self._keep_joining(key, self.endpoint.join(seats, Deadline.after(timeout_s)))

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
        self,
        digest: str | None,
        bucket_size: int,
        timeout_s: float,
        group: str | None = None,
        *,
        kind: str | None = None,
        adapter: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send the agreed manifest, an agreed adapter, or one after the other; returns once the last byte has been read
        from this trainer's memory.

        If meanwhile it shows that names have changed or something was added, while all that was agreed is still there
        and was sent, the result is ``outdated``.

        A trainer that is not in the group only takes part in the gathers of sharded parameters.

        Args:
            digest: of the wire's manifest; ``None``: the receivers hold the frozen base already.
            group: in which to send; ``None``: in whichever this trainer is, if any.
            kind: of the base that is sent: ``merged`` with LoRA adapters, or ``plain``; ``None``: without ``digest``.
            adapter: to send after it: ``name``, its ``digest``, the ``base_id`` of the base that it belongs to, and
                whether it is the ``default``, which must be the active one.

        Raises:
            NotAgreed: this trainer's weights are no more as agreed, or its group is not sound any more.
        """
        own = wire = None
        if digest is not None:
            if self._agreed is None or self._agreed[1].digest != digest:
                raise NotAgreed(f"no manifest {digest} was agreed with this trainer", phase="transfer")
            own, wire = self._agreed
        # Without adapters both are the same, and merged is what shows that there are some by now.
        merge = adapter is None
        self._present()
        if self._held is None and own is not None:  # of a module this is seen when its stream is opened
            try:
                self._current(own, merge=merge)
            except ManifestMismatch as error:
                raise NotAgreed(str(error), phase="transfer") from error
        deadline = Deadline.after(timeout_s)
        return self._send(wire, bucket_size, deadline, merge=merge, own=own, name=group, kind=kind, adapter=adapter)

    def send_announced(self, bucket_size: int, timeout_s: float, *, adapter_only: bool = False) -> dict[str, Any]:
        """Send in the trainer's own dtypes, manifests first, to receivers that were told nothing.

        Args:
            adapter_only: send the active adapter alone; and the frozen base before it, unless that was the last base
                which this trainer sent in this group. Always of a sharded model, whose other ranks cannot know that.
        """
        source = self.source()
        merge = self.merge and not adapter_only
        base_id = source.base_id()
        one = None
        if adapter_only:
            alone = self.adapter()
            one = {"name": alone.name, "digest": alone.digest, "base_id": base_id, "default": True}
        there = adapter_only and not source.sharded and self._told == (self.endpoint.sound_group, base_id)
        wire = None if there else source.manifest(merge=merge)
        return self._send(wire, bucket_size, Deadline.after(timeout_s), merge=merge, adapter=one)

    def _alone(self, wanted: dict[str, Any]) -> Adapter:
        """Raises NotAgreed: the adapter is another one by now."""
        source = self._present()
        try:
            found = source.adapter(wanted["name"])
        except TwinkleRayError as error:
            raise NotAgreed(str(error), phase="transfer") from error
        if found.digest != wanted["digest"]:
            raise NotAgreed(f"adapter {found.name!r} has other tensors than were agreed", phase="transfer")
        if wanted["default"] and source.active() != (found.name,):
            raise NotAgreed(f"adapter {found.name!r} is not the active one any more", phase="transfer")
        return found

    def _send(
        self,
        wire: Manifest | None,
        bucket_size: int,
        deadline: Deadline,
        *,
        merge: bool,
        own: str | None = None,
        name: str | None = None,
        kind: str | None = None,
        adapter: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Without ``name`` the receivers were told nothing."""
        source = self._present()
        told, self._told = self._told, ("", "")
        self._sent_merged = merge

        def work(operation: Operation) -> dict[str, Any]:
            if operation.group is not None and name not in (None, generation(operation.group.group_name)):
                operation.group = None  # another sync's, and not to be given up with this one
            alone = self._alone(adapter) if adapter is not None else None
            if self.rank is None and name is None:
                if wire is not None:
                    source.gather_only(wire, merge=merge)
                if alone is not None:
                    gather_only(alone.tensors, alone.manifest)
                return {}
            group = operation.group
            parts: list[tuple[TensorStream, Manifest]] = []
            if wire is not None:
                try:
                    parts.append((source.tensors(wire, own, recheck=own is not None, merge=merge), wire))
                except ManifestMismatch as error:
                    raise NotAgreed(str(error), phase="transfer") from error
            if alone is not None:
                stream = TensorStream(alone.tensors, alone.manifest, device=device_of(alone.pairs()))
                parts.append((stream, alone.manifest))
            # On an error the streams' exit still makes the gathers that the other trainer ranks are in.
            with _closing([stream for stream, _ in parts]):
                if merge and kind not in (None, MERGED if source.adapted else PLAIN):
                    change = "has got" if source.adapted else "has lost its"
                    raise NotAgreed(
                        f"this trainer's model {change} LoRA adapters since the last sync", phase="transfer"
                    )
                # Each rank has names of its own for its shards, and the rollouts know those of this one.
                if adapter is not None and source.base_id(looked=True) != adapter["base_id"]:
                    raise NotAgreed(
                        f"the base under adapter {adapter['name']!r} was changed since it was sent", phase="transfer"
                    )
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
                for stream, _ in parts:
                    if stream.device not in (None, self.endpoint.device):
                        raise NotAgreed(
                            f"this trainer's weights moved from {self.endpoint.device} to {stream.device} since its "
                            "group was made",
                            phase="transfer",
                        )
                if group.hosts:
                    _host(source, group, [stream for stream, _ in parts])
                try:
                    # What the caller has put on the device (an optimizer step on any stream) must have ended.
                    with operation.timed("fence"):
                        _fence(self.endpoint.device, group)
                    if name is None:
                        base = None
                        if wire is not None:
                            base_id = source.base_id(looked=True)
                            merged = merge and source.adapted
                            base = {
                                "manifest": wire.as_json(),
                                "kind": MERGED if merged else PLAIN,
                                "base_id": "" if merged else base_id,
                            }
                        one = None
                        if alone is not None:
                            one = {**alone.as_json(), "base_id": source.base_id(looked=True)}
                        announce(operation, group, {"bucket_size": bucket_size, "base": base, "adapter": one})
                    for stream, manifest in parts:
                        send(group, stream, manifest, bucket_size, operation)
                except ManifestMismatch as error:  # some tensor got another shape or dtype in place
                    group.abort(f"{type(error).__name__}: {error}")
                    if own is None:
                        raise
                    raise NotAgreed(str(error), phase="transfer") from error
                except BaseException as error:
                    group.abort(f"{type(error).__name__}: {error}")  # the receivers need not wait for those gathers
                    raise
            if wire is not None:
                self._told = ("", "") if merge else (generation(group.group_name), source.base_id(looked=True))
            else:
                self._told = told
            return {
                "nbytes": sum(manifest.nbytes for _, manifest in parts),
                "tensors": sum(len(manifest) for _, manifest in parts),
                "seconds": operation.seconds,
                "outdated": any(stream.outdated for stream, _ in parts),
            }

        result: dict[str, Any] = self.endpoint.start("transfer", work, deadline).outcome()
        return result

    def digests(
        self,
        names: list[str] | None,
        digest: str | None,
        dtypes: tuple[str, ...] | None,
        *,
        merge: bool | None = None,
    ) -> dict[str, str]:
        """``{name: sha256}`` of the weights as they would be sent in these dtypes. Collective over sharded ranks.

        Args:
            names: only these; ``None``: all.
            digest: of the manifest that is meant; ``None``: the present one.
            dtypes: on the wire; ``None``: the trainer's own.
            merge: with LoRA adapters merged, or the frozen base; ``None``: as they were sent last.
        """
        merge = self._sent_merged if merge is None else merge
        manifest = self.source().manifest(merge=merge) if digest is None else self._current(digest, merge=merge)
        wire = manifest if dtypes is None else manifest.with_dtypes(dtypes)
        wanted = None if names is None else set(names)
        result = {}
        with torch.no_grad(), self._source.tensors(wire, merge=merge) as tensors:
            for meta, tensor in zip(wire, tensors, strict=True):
                if wanted is None or wanted & set(meta.names):
                    result[meta.name] = tensor_sha256(tensor)
        return result

    def _current(self, digest: str, *, merge: bool) -> Manifest:
        manifest = self.source().manifest(merge=merge)
        if manifest.digest != digest:
            raise ManifestMismatch(
                "this trainer's weights changed in name, shape or dtype since they were agreed (or differ from "
                "trainer[0]'s); nothing was sent, sync again"
            )
        return manifest


@contextlib.contextmanager
def _closing(streams: list[TensorStream]) -> Iterator[None]:
    """Close the streams on every path out, the first one first: the other ranks gather in that order."""
    try:
        yield
    except BaseException as error:
        try:
            for stream in streams:
                stream.close()
        except Exception as late:
            error.add_note(f"while the other trainer ranks were let go: {type(late).__name__}: {late}")
        raise
    for stream in streams:
        stream.close()


def _host(source: WeightSource, group: SyncGroup, streams: Sequence[TensorStream]) -> None:
    """Let the group exchange the memory of what is sent as it lies."""
    with source.base_stays():
        for stream in streams:
            group.host(stream.lasting())


def _fence(device: torch.device, group: SyncGroup) -> None:
    if device.type == group.device_type:
        group.fence()
    else:
        wait_for(device)
