"""Every error crosses process borders whole: through pickle, and as the cause of a Ray task error."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import pytest
from ray.exceptions import RayError, RayTaskError

import twinkle_ray.errors as errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", CLASSES)
def test_pickling_keeps_type_message_and_fields(kind: type[errors.TwinkleRayError]) -> None:
    error = kind("one sentence")
    for value in ("phase", "tensor", "actor"):
        if hasattr(error, value):
            setattr(error, value, f"the {value}")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == "one sentence"
        assert again.__dict__ == error.__dict__


@pytest.mark.parametrize("kind", CLASSES)
def test_ray_carries_it(kind: type[errors.TwinkleRayError]) -> None:
    task = RayTaskError("method", "the traceback", kind("one sentence"))
    arrived = RayError.from_bytes(task.to_bytes())
    assert isinstance(arrived, RayTaskError)
    assert isinstance(arrived.as_instanceof_cause(), kind)
    assert str(arrived.cause) == "one sentence"


def test_sync_errors_keep_their_fields() -> None:
    error = errors.SyncTimeout(
        "late", phase="init", actors=("rollout[1]",), versions={"rollout[0]": 3, "rollout[1]": None}, cause_type="X"
    )
    again = pickle.loads(pickle.dumps(error))
    assert (again.phase, again.actors, again.versions, again.cause_type) == (
        "init",
        ("rollout[1]",),
        {"rollout[0]": 3, "rollout[1]": None},
        "X",
    )
    assert isinstance(again, TimeoutError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        assert f"── {name}" in drawn or name == "TwinkleRayError"


class Strange(Exception):
    """Of a user's own, which cannot be pickled."""

    def __init__(self, one: object, other: object) -> None:
        super().__init__(f"{one} and {other}")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.PeerLost("gone", actors=("rank 1",)), errors.PeerLost),
        (errors.ManifestMismatch("no", problems=("a", "b")), errors.ManifestMismatch),
        (errors.SyncTimeout("late", phase="init", versions={"rollout[0]": 3}), errors.SyncTimeout),
        (OSError(28, "No space left on device"), OSError),
        (KeyError("weight"), KeyError),
        (ValueError("a b"), ValueError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), errors.SyncError),
        (Strange("a", 2), errors.SyncError),
    ],
)
def test_errors_travel_as_json(error: Exception, kind: type[Exception]) -> None:
    plain = json.loads(json.dumps(errors.to_plain(error)))
    back = errors.from_plain(plain)
    assert type(back) is kind
    assert str(error).strip("'") in str(back)
    if isinstance(error, errors.TwinkleRayError):
        own = {name: value for name, value in vars(error).items() if name != "cause_traceback"}
        assert own.items() <= vars(back).items()
    elif isinstance(back, errors.SyncError):
        assert back.cause_type == type(error).__name__
