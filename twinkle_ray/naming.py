"""What actors and calls are called in Ray's dashboard and logs.

Ray has no public call with which a program adds spans of its own to ``ray timeline``; the calls of a sync are spans
there already, under the names that they have here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MIXINS = ("TrainActorMixin", "RolloutActorMixin")


def named(method: Any, name: str) -> Any:
    """A remote method whose calls have this name in Ray's dashboard, ``ray summary tasks`` and ``ray timeline``."""
    return method.options(name=name) if hasattr(method, "options") else method


def actor_repr(actor: Any, following: Callable[[], str]) -> str:
    """``repr`` of an actor with our mixins: its class and its roles, ``Policy[trainer]``. Ray asks once, when the actor
    was made, and puts it before the actor's log lines and the names of its tasks.

    Args:
        following: ``__repr__`` of what stands after the mixin in the class's order of resolution. If it is not Python's
            own, it is the user's, or the other mixin's, and has its say.
    """
    if getattr(following, "__objclass__", None) is not object:
        return following()
    try:
        says = [getattr(actor, f"_{mixin}__twinkle_role", None) for mixin in _MIXINS]
        return f"{type(actor).__name__}[{'; '.join(say() for say in says if say is not None)}]"
    except Exception:
        return object.__repr__(actor)
