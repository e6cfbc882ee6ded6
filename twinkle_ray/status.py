"""The live status of managers, for any terminal of the cluster: one record each in Ray's internal key-value store.

A manager's driver writes its record (see :mod:`twinkle_ray.watching`), and removes it with ``manager.close()``. Readers
ignore and remove what is left of jobs that have ended. Records are JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from twinkle_ray.errors import ConfigError

logger = logging.getLogger("twinkle_ray")

NAMESPACE = b"twinkle_ray"
_PREFIX = "status/"
HEARTBEAT_S = 30.0
"""Seconds after which an idle manager's record is written again; one much older has lost its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One rollout.

    Attributes:
        name: ``rollout[i]``.
        state: name of a :class:`~twinkle_ray.metrics.State` in lower case: ``whole``, ``updating``, ``mixed`` ...
        version: held; ``None``: not known.
        step, steps: chunks of the running sync that have arrived, and all of them; 0 while unknown.
    """

    name: str
    state: str
    version: int | None = None
    step: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSync:
    """The last sync that succeeded. Sizes in bytes; ``ended`` in seconds since 1970, by the driver's clock."""

    version: int
    mode: str
    seconds: float
    nbytes: int
    phases: dict[str, float]
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFailure:
    """Why the last sync failed; there is none once a later one has succeeded."""

    phase: str
    error: str
    members: tuple[str, ...]
    message: str
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatus:
    """One manager. Times are seconds since 1970, by the clock of its driver.

    Attributes:
        manager: its id, as in metrics and logs.
        job: Ray's id of its job, in hexadecimal.
        host, pid: of its process.
        written: when this was written.
        version: that the last sync brought or, if it failed, was to bring; 0 before the first one.
        generation: groups made so far.
        phase: of the sync that runs; ``""``: none does.
        started: when that sync was called; ``None`` likewise.
        members: the rollouts.
        last, failure: how the last syncs ended.
    """

    manager: str
    job: str
    host: str
    pid: int
    written: float
    version: int
    generation: int
    phase: str
    started: float | None
    members: tuple[MemberStatus, ...]
    last: LastSync | None = None
    failure: LastFailure | None = None

    @property
    def silent(self) -> bool:
        """Whether its process has not written for so long that it must be gone or stuck."""
        return time.time() - self.written > 3 * HEARTBEAT_S

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ManagerStatus:
        """What :meth:`as_json` made; fields of a later version are ignored."""
        known = _known(ManagerStatus, value)
        known["members"] = tuple(MemberStatus(**_known(MemberStatus, member)) for member in known["members"])
        if known.get("last"):
            known["last"] = LastSync(**_known(LastSync, known["last"]))
        if known.get("failure"):
            failure = _known(LastFailure, known["failure"])
            known["failure"] = LastFailure(**{**failure, "members": tuple(failure["members"])})
        return ManagerStatus(**known)


def _known(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)}
    return {name: item for name, item in value.items() if name in names}


@dataclass(slots=True)
class Store:
    """The records of the cluster to which this process is connected.

    Args:
        timeout_s: seconds that one access may take.
    """

    timeout_s: float = 2.0
    client: Any = field(default=None)

    def __post_init__(self) -> None:
        from ray.experimental import internal_kv

        self.client = internal_kv.internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
        if self.client is None:
            raise ConfigError(
                "the status of managers is in Ray's internal store, and this process is not connected to a cluster; "
                "call ray.init(address=...) first (a ray:// address will not do)"
            )

    def write(self, status: ManagerStatus) -> None:
        text = json.dumps(status.as_json(), separators=(",", ":"))
        self.client.internal_kv_put(_key(status.job, status.manager), text.encode(), True, NAMESPACE, self.timeout_s)

    def remove(self, job: str, manager: str) -> None:
        self.client.internal_kv_del(_key(job, manager), False, NAMESPACE, self.timeout_s)

    def read(self) -> list[ManagerStatus]:
        keys = self.client.internal_kv_keys(_PREFIX.encode(), NAMESPACE, self.timeout_s)
        if not keys:
            return []
        # Before the jobs, so that a job which is not in the table cannot be one that has just begun.
        texts = self.client.internal_kv_multi_get(keys, NAMESPACE, self.timeout_s)
        running = self._running_jobs()
        found = []
        for key in keys:
            _, job, manager = key.decode().split("/", 2)
            if job not in running:
                self.remove(job, manager)
            elif key in texts:
                try:
                    found.append(ManagerStatus.from_json(json.loads(texts[key])))
                except (ValueError, TypeError, KeyError):
                    logger.warning("the status of manager %s was written by another version of twinkle_ray", manager)
        return sorted(found, key=lambda status: status.manager)

    def _running_jobs(self) -> set[str]:
        jobs = self.client.get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=self.timeout_s
        )
        return {job.hex() for job, info in jobs.items() if not info.is_dead}


def _key(job: str, manager: str) -> bytes:
    return f"{_PREFIX}{job}/{manager}".encode()


def read(timeout_s: float = 2.0) -> list[ManagerStatus]:
    """The managers of all jobs that run on this cluster, by id.

    Takes milliseconds and asks no actor, so that it answers while syncs run. What is left of jobs that have ended is
    removed.

    Args:
        timeout_s: seconds that each of its few calls to Ray's GCS may take.

    Raises:
        ConfigError: this process has not called ``ray.init``.
        ray.exceptions.RpcError: the GCS does not answer.
    """
    return Store(timeout_s).read()
