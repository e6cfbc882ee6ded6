"""``repr`` of actors with our mixins, which Ray shows, and that a user's own comes first."""

from __future__ import annotations

from typing import Any

import pytest

from twinkle_ray.mixins import RolloutActorMixin, TrainActorMixin
from twinkle_ray.naming import named


class Users:
    def __repr__(self) -> str:
        return "mine"


class Policy(TrainActorMixin):
    pass


class Sampler(RolloutActorMixin):
    pass


class Both(TrainActorMixin, RolloutActorMixin):
    pass


class Own(TrainActorMixin):
    __repr__ = Users.__repr__


class BaseAfter(RolloutActorMixin, Users):
    pass


class BothAndBase(TrainActorMixin, RolloutActorMixin, Users):
    pass


class Mapping(TrainActorMixin, dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Policy, "Policy[trainer]"),
        (Sampler, "Sampler[rollout]"),
        (Both, "Both[trainer; rollout]"),
        (Own, "mine"),
        (BaseAfter, "mine"),
        (BothAndBase, "mine"),
        (Mapping, "{}"),
    ],
)
def test_says_class_and_role_unless_the_user_says_something(kind: Any, text: str) -> None:
    assert repr(kind()) == text


def test_never_raises() -> None:
    actor: Any = Policy()
    actor._TrainActorMixin__twinkle_training = "broken"
    assert "Policy" in repr(actor)


def test_doubles_of_handles_need_no_options() -> None:
    method = object()
    assert named(method, "twinkle.send") is method
