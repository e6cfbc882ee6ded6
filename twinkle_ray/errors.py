"""Every exception that twinkle_ray raises on purpose.

    TwinkleRayError
    ├── ConfigError            an argument or a combination of arguments is wrong (also a ValueError)
    ├── UnsupportedActor       an actor lacks the methods that a sync needs (also a TypeError)
    ├── UnsupportedModel       a model or an engine that cannot be synced exactly, named with the reason
    ├── BackendUnavailable     a package or a device that a backend needs is not there
    ├── ManifestMismatch       trainer and rollout do not agree on names, shapes or dtypes
    ├── WireError              bytes on the group that are no header of ours
    ├── ReplicaUnavailable     a rollout was asked to generate while it does not hold one whole version
    ├── VerifyError            a rollout's digest differs from the trainer's
    └── SyncError              a sync did not reach its end; says in which phase and because of whom
        ├── SyncTimeout        a deadline passed (also a TimeoutError)
        ├── PeerLost           an actor or a worker process died
        ├── NotAgreed          what was agreed with a member holds no more; refused before the first byte
        └── SyncAborted        another member of the group failed first

All of them cross process borders: they pickle with their fields, and a cause is kept as text in
``cause_traceback`` because tracebacks themselves do not travel.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BackendUnavailable",
    "ConfigError",
    "ManifestMismatch",
    "NotAgreed",
    "PeerLost",
    "ReplicaUnavailable",
    "SyncAborted",
    "SyncError",
    "SyncTimeout",
    "TwinkleRayError",
    "UnsupportedActor",
    "UnsupportedModel",
    "VerifyError",
    "WireError",
]


def _rebuild(cls: type[TwinkleRayError], message: str, fields: dict[str, Any]) -> TwinkleRayError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(fields)
    return error


class TwinkleRayError(Exception):
    """Base of all errors of this package. ``str(error)`` is one sentence: what, where, and the mend."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


class ConfigError(TwinkleRayError, ValueError):
    """A wrong argument, or arguments that do not go together."""


class UnsupportedActor(TwinkleRayError, TypeError):
    """An actor without the checkpoint-engine methods."""


class UnsupportedModel(TwinkleRayError):
    """A model or engine whose weights cannot be sent or loaded exactly."""


class BackendUnavailable(TwinkleRayError, RuntimeError):
    """A backend whose package or device is missing; the message names both and the extra to install."""


class ManifestMismatch(TwinkleRayError):
    """What the trainer sends is not what the rollout can load. Raised before any byte of weights moves.

    Attributes:
        problems: one sentence per tensor, all of them (the message lists the first ten).
    """

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class WireError(TwinkleRayError):
    """Received bytes that are not a valid header. Never caused by a healthy peer of the same version."""


class ReplicaUnavailable(TwinkleRayError, RuntimeError):
    """A request reached a rollout that is updating for longer than the request may wait, poisoned, or asleep."""


class VerifyError(TwinkleRayError):
    """Digests differ. ``tensor`` is the first name that differs, ``actor`` the rollout that holds it."""

    def __init__(self, message: str, *, tensor: str = "", actor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
        self.actor = actor


class SyncError(TwinkleRayError):
    """A sync that did not complete.

    Attributes:
        phase: ``prepare | init | agree | transfer``; of other calls ``verify | sleep | wake_up | offload``; of an
            endpoint alone also ``connect``; with actors that have only the seeds' methods also ``merge | unmerge |
            finalize``.
        actors: who failed, as the manager names them: ``trainer[0]``, ``rollout[2]``.
        versions: weights version per rollout after the failure; ``None`` for one that could not be asked.
        asleep: memory tags that sleep per rollout after a failure to sleep or wake, likewise.
        cause_type: class name of the original error, ``""`` if there is none.
        cause_traceback: the original error's traceback as text, ``""`` if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str = "",
        actors: tuple[str, ...] = (),
        versions: dict[str, int | None] | None = None,
        cause_type: str = "",
        cause_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.actors = actors
        self.versions = dict(versions or {})
        self.asleep: dict[str, tuple[str, ...] | None] = {}
        self.cause_type = cause_type
        self.cause_traceback = cause_traceback


class SyncTimeout(SyncError, TimeoutError):
    """A deadline passed."""


class PeerLost(SyncError):
    """A member of the group is gone: its process died or its connection closed."""


class NotAgreed(SyncError):
    """A member refuses to begin because what was agreed with it holds no more: its model, its group or its version is
    another one. Nothing was written anywhere, unless it is a tensor of the trainer that is found to have got another
    shape in place while others were sent already. The manager then agrees anew, and sends all."""


class SyncAborted(SyncError):
    """This member is healthy; the group was given up because another one failed."""


def mismatch(problems: tuple[str, ...], who: str) -> ManifestMismatch:
    """One error for all the tensors that do not fit, ten of them in the message."""
    shown = "; ".join(problems[:10])
    more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
    return ManifestMismatch(
        f"{who} cannot load what the trainer sends, and nothing was sent: {shown}{more}", problems=problems
    )


def vagueness(error: BaseException) -> int:
    """How little an error explains of a failure that several members report: 0 for an error of a member's own, then
    that an agreement holds no more (which one says too that comes to a group which another has just broken), a lost
    peer, a time-out, an abort that others caused; of these kinds, one that names nobody after one that does."""
    if isinstance(error, NotAgreed):
        return 1
    for place, kind in enumerate((SyncAborted, SyncTimeout, PeerLost)):
        if isinstance(error, kind):
            return 7 - 2 * place - bool(error.actors)
    return 0


def first_cause(errors: Iterable[BaseException]) -> BaseException:
    """Of several errors of one failure the one that explains most."""
    return min(errors, key=vagueness)


def to_plain(error: BaseException) -> dict[str, Any]:
    """An error as JSON values: class name, sentence, fields, and the traceback as text."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(error).items() if _is_plain(v)}
    text = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": str(error), "fields": fields, "traceback": text}


def from_plain(value: dict[str, Any]) -> Exception:
    """Rebuild what :func:`to_plain` made: an error of ours or of Python's own; any other becomes a :class:`SyncError`
    that names it."""
    name, message, text = str(value["type"]), str(value["message"]), str(value["traceback"])
    error: Exception
    if name in __all__:
        error = globals()[name](message)
        for key, field in dict(value["fields"]).items():
            setattr(error, str(key), tuple(field) if isinstance(field, list) else field)
        if isinstance(error, SyncError) and not error.cause_traceback:
            error.cause_traceback = text
        return error
    own = getattr(builtins, name, None)
    if isinstance(own, type) and issubclass(own, Exception) and not issubclass(own, UnicodeError):
        error = own(message)
        error.__dict__["twinkle_traceback"] = text
        return error
    return SyncError(f"{name}: {message}", cause_type=name, cause_traceback=text)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (str, int, float, bool))
