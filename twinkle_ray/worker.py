"""The receiving side in one process: an endpoint and a sink, driven by small calls.

The same object serves a plain torch module in the rollout actor and each vLLM worker, whichever process that is. Every
call returns at once (``poll`` within its slice); arguments and results are plain data, since a vLLM worker is reached
through vLLM's own RPC.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from twinkle_ray.backends import end_group, identity, linked, neighbourhood
from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.checking import process_facts
from twinkle_ray.endpoint import Endpoint, Operation
from twinkle_ray.errors import (
    ConfigError,
    NotAgreed,
    SyncError,
    TwinkleRayError,
    WireError,
    from_plain,
    mismatch,
    to_plain,
)
from twinkle_ray.manifest import Manifest
from twinkle_ray.sinks import Sink, StagedSink
from twinkle_ray.stream import receive_frame, send_frame
from twinkle_ray.transfer import receive
from twinkle_ray.types import MERGED, PLAIN, Deadline, OpState, OpStatus, Rendezvous, Seat

_MANIFESTS_KEPT = 4
_ADAPTERS_KEPT = 64
_LAUNCH_S = 0.2


class AdapterHolder(Protocol):
    """What holds LoRA adapters in one process, by name and version: :class:`twinkle_ray.vllm.adapters.Adapters` in a
    vLLM worker, :class:`twinkle_ray.module_adapters.ModuleAdapters` beside a plain module. Says what each method does.
    """

    def check(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None: ...

    def register(
        self,
        name: str,
        version: int,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        number: int | None = None,
        digest: str | None = None,
    ) -> None: ...

    def attach(self, name: str, path: str, version: int = 0, number: int | None = None) -> None: ...

    def remove(self, name: str) -> bool: ...

    def entries(self) -> dict[str, Any]: ...

    def restore(self) -> list[str]: ...


class WorkerSide:
    """One process that owns parameters of a rollout.

    Args:
        sink: how tensors come into this process's parameters.
        holder: gives what holds LoRA adapters beside those parameters; asked when the first one comes.
        index: which of the rollout's workers this is.
    """

    def __init__(self, sink: Sink, holder: Callable[[], AdapterHolder], index: int = 0) -> None:
        self.sink = sink
        self.index = index
        self.endpoint = Endpoint(sink.device)
        self._operation: Operation | None = None
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._adapter_manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._received: dict[str, torch.Tensor] = {}
        self._holder = holder
        self._last: Manifest | None = None

    @property
    def adapters(self) -> AdapterHolder:
        """What holds this process's adapters."""
        return self._holder()

    def describe(self) -> dict[str, Any]:
        """Facts about this process: ``device_type``, ``device_id``, ``links`` (see
        :func:`~twinkle_ray.backends.linked`), ``group`` (its sync group's name while nothing is known against it, else
        ``""``), and what the sink adds."""
        device = self.sink.device
        found = {**device_facts(device), "links": list(linked(device)), "group": self.endpoint.sound_group}
        return {**self.sink.describe(), **found}

    def facts(self, backend: str | None) -> dict[str, Any]:
        """See :func:`twinkle_ray.checking.process_facts`."""
        return process_facts(self.sink.device, backend)

    def connect(
        self,
        first_rank: int,
        world_size: int,
        rendezvous: dict[str, Any],
        timeout_s: float,
        seats: list[dict[str, Any]] | None = None,
    ) -> None:
        """Start to join the group of this rendezvous as rank ``first_rank + index``; ``poll`` tells when it is in.

        Args:
            seats: where the workers are in several groups, each one's :class:`~twinkle_ray.types.Seat`.
        """
        self._operation = None  # what is polled must not be an earlier one if this cannot start
        if seats is not None:
            mine = Seat.from_plain(seats[self.index])
            self._operation = self.endpoint.join([mine], Deadline.after(timeout_s))
            return
        rank = first_rank + self.index
        self._operation = self.endpoint.connect(rank, world_size, Rendezvous(**rendezvous), Deadline.after(timeout_s))

    def agree(self, manifest: list[Any]) -> dict[str, Any]:
        """Compare the trainer's manifest (JSON form) with what is held here; the ``Agreement`` as a dict."""
        return asdict(self.sink.agree(Manifest.from_json(manifest)))

    def check_adapter(self, config: dict[str, Any], manifest: list[Any]) -> None:
        """Whether an adapter of this configuration and manifest (JSON form) can be held here. Changes nothing.

        Raises:
            UnsupportedModel, ManifestMismatch: it cannot.
        """
        self.adapters.check(config, {meta.name: meta for meta in Manifest.from_json(manifest)})

    def remember(self, manifest: list[Any]) -> None:
        """Keep the agreed manifest (JSON form, wire dtypes) for later syncs, which name it by its digest."""
        _keep(self._manifests, Manifest.from_json(manifest), _MANIFESTS_KEPT)

    def remember_adapter(self, manifest: list[Any]) -> None:
        """:meth:`remember` for the manifest of an adapter, of which there are more and smaller ones."""
        _keep(self._adapter_manifests, Manifest.from_json(manifest), _ADAPTERS_KEPT)

    def receive(self, digest: str | None, bucket_size: int, timeout_s: float, adapter: str | None = None) -> None:
        """Start to receive one sync of the remembered manifest, of a remembered adapter's, or of one after the other.

        Returns when all is launched, or soon: whatever this thread does next, in Python, would hold the launches up.
        An adapter is held back until :meth:`settle_adapters`.

        Raises:
            NotAgreed: no manifest of this digest was agreed here. The operation itself: this process is in no group, or
                in one that is not sound any more, or its model has changed.
        """
        self._operation = None
        manifest = _kept(self._manifests, digest)
        alone = _kept(self._adapter_manifests, adapter)

        def work(operation: Operation) -> dict[str, Any]:
            group = operation.group
            if group is None:
                raise NotAgreed("this worker is in no sync group", phase="transfer")
            if group.failure is not None:
                raise NotAgreed(f"this worker's group broke since the last sync: {group.failure}", phase="transfer")
            return self._receive(operation, group, manifest, alone, bucket_size)

        self._operation = self.endpoint.start("transfer", work, Deadline.after(timeout_s))
        self._operation.launched.wait(min(_LAUNCH_S, timeout_s))

    def receive_announced(
        self, timeout_s: float, base_id: str | None = None, others: Sequence[str] = (), attached: Sequence[str] = ()
    ) -> None:
        """Start to receive one sync whose manifests come first on the group itself (see :func:`announce`).

        Args:
            base_id: of the plain base that is held here, to which an adapter may be added; ``None``: of no such.
            others: adapters that are held beside the default one, and belong to the plain base.
            attached: those of them that came from a directory, which nothing from a trainer may replace.
        """
        self._operation = None

        def work(operation: Operation) -> dict[str, Any]:
            group = operation.group
            if group is None:
                raise SyncError("this worker is in no sync group", phase="transfer")
            group.rally()
            came = Announced.from_json(receive_frame(group, 0, operation.deadline))
            base, adapter = came.base, came.adapter
            if base is not None:
                problems = self.sink.agree(base.manifest).problems
                if problems:
                    raise mismatch(problems, "this rollout")
                if base.kind == MERGED and others:
                    raise ConfigError(
                        f"this rollout holds {', '.join(map(repr, others))}, which belongs to the plain base, and a "
                        "merged one would replace that; detach it first, or send base and adapter apart"
                    )
            if adapter is not None:
                if adapter.name in attached:
                    raise ConfigError(
                        f"adapter {adapter.name!r} was attached from a directory; detach it, or give one of them "
                        "another name"
                    )
                if base is None and adapter.base_id != base_id:
                    raise SyncError(
                        f"adapter {adapter.name!r} comes alone, but this rollout does not hold the plain base that "
                        "it belongs to; send the base again",
                        phase="transfer",
                    )
                try:
                    self.adapters.check(adapter.config, {meta.name: meta for meta in adapter.manifest})
                except TwinkleRayError:
                    raise
                except Exception as error:  # a value of a kind that no LoRA configuration has
                    raise WireError(
                        f"the configuration of the announced adapter {adapter.name[:80]!r} cannot be read "
                        f"({type(error).__name__}: {error})"
                    ) from error
            manifest = base.manifest if base is not None else None
            alone = adapter.manifest if adapter is not None else None
            result = self._receive(operation, group, manifest, alone, came.bucket_size)
            result["base"] = base and {"kind": base.kind, "base_id": base.base_id}
            result["adapter"] = adapter and {"name": adapter.name, "config": adapter.config}
            return result

        self._operation = self.endpoint.start("transfer", work, Deadline.after(timeout_s))

    def _receive(
        self,
        operation: Operation,
        group: SyncGroup,
        manifest: Manifest | None,
        alone: Manifest | None,
        bucket_size: int,
    ) -> dict[str, Any]:
        self._received = {}
        reports = []
        if manifest is not None:
            self._last = manifest
            reports.append(receive(group, self.sink, manifest, bucket_size, operation, last=alone is None))
        if alone is not None:
            staged = StagedSink(self.sink.device)
            reports.append(receive(group, staged, alone, bucket_size, operation))
            if not operation.ended.is_set():  # else it was given up, and nobody will come for them
                self._received = staged.tensors
        return {
            "path": ", ".join(dict.fromkeys(report.path for report in reports)),
            "tensors": sum(report.tensors for report in reports),
            "nbytes": sum(report.nbytes for report in reports),
            "direct_bytes": sum(report.direct_bytes for report in reports),
            "seconds": reports[-1].seconds,
        }

    def settle_adapters(self, base: bool, remove: list[str], register: dict[str, Any] | None) -> dict[str, Any]:
        """What follows a receive, while no request runs.

        Args:
            base: whether a base was received, which may have dropped what was held beside it.
            remove: names of adapters to let go of.
            register: ``name``, ``version``, ``config``, ``number`` and ``digest`` (or ``None``) of the adapter that was
                received; ``None``: none.

        Returns:
            What is held then, see :meth:`twinkle_ray.vllm.adapters.Adapters.entries`.

        Raises:
            SyncError: it could not be registered; what was held of that name is held on.
        """
        received, self._received = self._received, {}
        for name in remove:
            self.adapters.remove(name)
        if base:
            self.adapters.restore()
        if register is not None:
            self.adapters.register(
                register["name"],
                register["version"],
                register["config"],
                received,
                number=register["number"],
                digest=register["digest"],
            )
        return self.adapters.entries()

    def poll(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Status of the last started operation, after at most ``wait_s`` seconds; see :func:`unpack_status`."""
        operation = self._operation
        if operation is None:
            return pack_status(OpStatus(op="", state=OpState.DONE))
        if wait_s > 0:
            operation.ended.wait(wait_s)
        return pack_status(operation.status())

    def abort(self, reason: str) -> None:
        """Give up the running operation and the group, and what of an adapter has come."""
        self.endpoint.abort(reason)
        self._received = {}

    def let_go(self) -> None:
        """Close what is open here of the trainers' memory."""
        if self.endpoint.group is not None:
            self.endpoint.group.let_go()

    def end_group(self, name: str, reason: str) -> None:
        """See :func:`twinkle_ray.backends.end_group`."""
        end_group(name, reason)

    def pieces(self, names: list[str] | None = None) -> dict[str, Any]:
        """What is really held of the manifest last received: ``{"pieces": [...], "unverifiable": [...]}``.

        Raises:
            SyncError: nothing was received yet, so there is no manifest to read back by.
        """
        if self._last is None:
            raise SyncError(
                "this rollout has received no weights yet, so there is nothing to read back", phase="verify"
            )
        pieces, unverifiable = self.sink.pieces(self._last, names)
        return {"pieces": [asdict(piece) for piece in pieces], "unverifiable": unverifiable}

    def leave(self) -> None:
        """Leave the group and release all that was taken for it."""
        self.endpoint.leave()


@dataclass(frozen=True, slots=True)
class _Base:
    """An announced base."""

    manifest: Manifest
    kind: str
    base_id: str


@dataclass(frozen=True, slots=True)
class _Alone:
    """An announced adapter, and the base that it belongs to."""

    manifest: Manifest
    name: str
    config: dict[str, Any]
    base_id: str


@dataclass(frozen=True, slots=True)
class Announced:
    """What :func:`announce` says, each field checked: at least one of base and adapter comes."""

    bucket_size: int
    base: _Base | None
    adapter: _Alone | None

    @staticmethod
    def from_json(content: dict[str, Any]) -> Announced:
        """Raises WireError: a field is missing or has another type or value than any sender gives it."""
        size, base, adapter = content.get("bucket_size"), content.get("base"), content.get("adapter")
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise WireError("the announced bucket size is not a positive number")
        for part, what in ((base, "base"), (adapter, "adapter")):
            if part is not None and not isinstance(part, dict):
                raise WireError(f"the announced {what} is not a JSON object")
            if part is not None and not isinstance(part.get("base_id"), str):
                raise WireError(f"the announced {what} has no base_id")
        if base is None and adapter is None:
            raise WireError("neither a base nor an adapter is announced")
        if base is not None and base.get("kind") not in (PLAIN, MERGED):
            raise WireError(f"the announced base is neither {PLAIN} nor {MERGED}")
        if adapter is not None and (not isinstance(adapter.get("name"), str) or not adapter["name"]):
            raise WireError("the announced adapter has no name")
        if adapter is not None and not isinstance(adapter.get("config"), dict):
            raise WireError("the announced adapter has no configuration")
        return Announced(
            bucket_size=size,
            base=base and _Base(Manifest.from_json(base.get("manifest")), base["kind"], base["base_id"]),
            adapter=adapter
            and _Alone(
                Manifest.from_json(adapter.get("manifest")), adapter["name"], adapter["config"], adapter["base_id"]
            ),
        )


def announce(operation: Operation, group: SyncGroup, content: dict[str, Any]) -> None:
    """The sender's half of :meth:`WorkerSide.receive_announced`: what comes, in band.

    Args:
        content: ``bucket_size``; ``base`` with its ``manifest``, ``kind`` and ``base_id``, or ``None``; ``adapter``
            with its ``name``, ``config``, ``manifest`` and the ``base_id`` that it belongs to, or ``None``.
    """
    group.assemble(operation.deadline)  # as each operation begins: some groups agree there about what is open
    send_frame(group, 0, content, operation.deadline)


def _keep(kept: OrderedDict[str, Manifest], manifest: Manifest, most: int) -> None:
    kept[manifest.digest] = manifest
    kept.move_to_end(manifest.digest)
    while len(kept) > most:
        kept.popitem(last=False)


def _kept(kept: OrderedDict[str, Manifest], digest: str | None) -> Manifest | None:
    if digest is None:
        return None
    if digest not in kept:
        raise NotAgreed(f"no manifest {digest} was agreed with this worker", phase="transfer")
    kept.move_to_end(digest)
    return kept[digest]


def device_facts(device: Any) -> dict[str, Any]:
    """``device_type`` and ``device_id``: equal ids mean one physical device (``""`` for a CPU); ``node``: see
    :func:`~twinkle_ray.backends.neighbourhood`."""
    return {"device_type": device.type, "device_id": identity(device), "node": neighbourhood(device.type)}


def pack_status(status: OpStatus) -> dict[str, Any]:
    """A status as JSON values."""
    return {
        "op": status.op,
        "state": status.state.value,
        "step": status.step,
        "steps": status.steps,
        "touched": status.touched,
        "seconds": status.seconds,
        "result": status.result,
        "error": to_plain(status.error) if status.error is not None else None,
    }


def unpack_status(packed: dict[str, Any]) -> OpStatus:
    """Inverse of :func:`pack_status`, within one rollout (parent and its vLLM workers)."""
    error = packed["error"]
    return OpStatus(
        op=packed["op"],
        state=OpState(packed["state"]),
        step=packed["step"],
        steps=packed["steps"],
        touched=packed["touched"],
        seconds=packed["seconds"],
        result=packed["result"],
        error=from_plain(error) if error is not None else None,
    )
