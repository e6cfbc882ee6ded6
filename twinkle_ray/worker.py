"""The receiving side in one process: an endpoint and a sink, driven by small calls.

The same object serves a plain torch module in the rollout actor and each vLLM worker, whichever process that is. Every
call returns at once (``poll`` within its slice); arguments and results are plain data, since a vLLM worker is reached
through vLLM's own RPC.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from twinkle_ray.backends import end_group, identity
from twinkle_ray.endpoint import Endpoint, Operation
from twinkle_ray.errors import NotAgreed, SyncError, TwinkleRayError, mismatch
from twinkle_ray.manifest import Manifest
from twinkle_ray.sinks import Sink
from twinkle_ray.stream import receive_frame, send_frame
from twinkle_ray.transfer import receive
from twinkle_ray.types import Deadline, OpState, OpStatus, Rendezvous

_MANIFESTS_KEPT = 4
_LAUNCH_S = 0.2


class WorkerSide:
    """One process that owns parameters of a rollout.

    Args:
        sink: how tensors come into this process's parameters.
        index: which of the rollout's workers this is.
    """

    def __init__(self, sink: Sink, index: int = 0) -> None:
        self.sink = sink
        self.index = index
        self.endpoint = Endpoint(sink.device)
        self._operation: Operation | None = None
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._last: Manifest | None = None

    def describe(self) -> dict[str, Any]:
        """Facts about this process: ``device_type``, ``device_id``, ``group`` (its sync group's name while nothing is
        known against it, else ``""``), and what the sink adds."""
        return {**self.sink.describe(), **device_facts(self.sink.device), "group": self.endpoint.sound_group}

    def connect(self, first_rank: int, world_size: int, rendezvous: dict[str, Any], timeout_s: float) -> None:
        """Start to join the group of this rendezvous as rank ``first_rank + index``; ``poll`` tells when it is in."""
        self._operation = None  # what is polled must not be an earlier one if this cannot start
        rank = first_rank + self.index
        self._operation = self.endpoint.connect(rank, world_size, Rendezvous(**rendezvous), Deadline.after(timeout_s))

    def agree(self, manifest: list[Any]) -> dict[str, Any]:
        """Compare the trainer's manifest (JSON form) with what is held here; the ``Agreement`` as a dict."""
        return asdict(self.sink.agree(Manifest.from_json(manifest)))

    def remember(self, manifest: list[Any]) -> None:
        """Keep the agreed manifest (JSON form, wire dtypes) for later syncs, which name it by its digest."""
        agreed = Manifest.from_json(manifest)
        self._manifests[agreed.digest] = agreed
        while len(self._manifests) > _MANIFESTS_KEPT:
            self._manifests.popitem(last=False)

    def receive(self, digest: str, bucket_size: int, timeout_s: float) -> None:
        """Start to receive one sync of the remembered manifest.

        Returns when all is launched, or soon: whatever this thread does next, in Python, would hold the launches up.

        Raises:
            NotAgreed: no manifest of this digest was agreed here. The operation itself: this process is in no group, or
                in one that is not sound any more, or its model has changed.
        """
        self._operation = None
        manifest = self._manifests.get(digest)
        if manifest is None:
            raise NotAgreed(f"no manifest {digest} was agreed with this worker", phase="transfer")

        def work(operation: Operation) -> dict[str, Any]:
            group = operation.group
            if group is None:
                raise NotAgreed("this worker is in no sync group", phase="transfer")
            if group.failure is not None:
                raise NotAgreed(f"this worker's group broke since the last sync: {group.failure}", phase="transfer")
            self._last = manifest
            return asdict(receive(group, self.sink, manifest, bucket_size, operation))

        self._operation = self.endpoint.start("transfer", work, Deadline.after(timeout_s))
        self._operation.launched.wait(min(_LAUNCH_S, timeout_s))

    def receive_announced(self, timeout_s: float) -> None:
        """Start to receive one sync whose manifest comes first on the group itself (see :func:`announce`)."""
        self._operation = None

        def work(operation: Operation) -> dict[str, Any]:
            group = operation.group
            if group is None:
                raise SyncError("this worker is in no sync group", phase="transfer")
            content = receive_frame(group, 0, operation.deadline)
            manifest = Manifest.from_json(content.get("manifest"))
            problems = self.sink.agree(manifest).problems
            if problems:
                raise mismatch(problems, "this rollout")
            self._last = manifest
            bucket_size = int(content.get("bucket_size", 0))
            return asdict(receive(group, self.sink, manifest, bucket_size, operation))

        self._operation = self.endpoint.start("transfer", work, Deadline.after(timeout_s))

    def poll(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Status of the last started operation, after at most ``wait_s`` seconds; see :func:`unpack_status`."""
        operation = self._operation
        if operation is None:
            return pack_status(OpStatus(op="", state=OpState.DONE))
        if wait_s > 0:
            operation.ended.wait(wait_s)
        return pack_status(operation.status())

    def abort(self, reason: str) -> None:
        """Give up the running operation and the group."""
        self.endpoint.abort(reason)

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


def announce(operation: Operation, group: Any, manifest: Manifest, bucket_size: int) -> None:
    """The sender's half of :meth:`WorkerSide.receive_announced`: the manifest itself, in band."""
    send_frame(group, 0, {"manifest": manifest.as_json(), "bucket_size": bucket_size}, operation.deadline)


def device_facts(device: Any) -> dict[str, Any]:
    """``device_type`` and ``device_id``: equal ids mean one physical device (``""`` for a CPU)."""
    return {"device_type": device.type, "device_id": identity(device)}


def pack_status(status: OpStatus) -> dict[str, Any]:
    """Plain data of a status. The error is pickled apart, so that one that cannot be pickled loses only its type."""
    error = None
    if status.error is not None:
        try:
            error = pickle.dumps(status.error)
            pickle.loads(error)
        except Exception:
            text = f"{type(status.error).__name__}: {status.error}"
            error = pickle.dumps(TwinkleRayError(text))
    return {
        "op": status.op,
        "state": status.state.value,
        "step": status.step,
        "steps": status.steps,
        "touched": status.touched,
        "seconds": status.seconds,
        "result": status.result,
        "error": error,
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
        error=pickle.loads(error) if error is not None else None,
    )
