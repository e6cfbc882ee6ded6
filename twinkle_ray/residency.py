"""What of a rollout's memory is there: the rules of sleeping and waking, and what a request gets meanwhile.

vLLM itself lets requests in whatever sleeps: they wait for ever, or are computed on memory that is not there, which
ends the engine. And after a sleep at level 2 it serves what its memory happens to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twinkle_ray.errors import ConfigError, ReplicaUnavailable

TAGS = ("kv_cache", "weights")
"""Kinds of memory that sleep, sorted."""


def require_tags(tags: Iterable[str] | None) -> None:
    """Raises ConfigError: one of these is no tag of memory that sleeps."""
    unknown = next((tag for tag in tags or () if tag not in TAGS), None)
    if unknown is not None:
        raise ConfigError(f"there is no tag {unknown!r} that could wake; the tags are {', '.join(TAGS)}")


def no_sleep_mode(kind: str) -> str:
    """Why a rollout of this kind that has no sleep mode cannot sleep, as the end of a sentence that names it."""
    if kind == "module":
        return "a plain torch module cannot sleep; use sleep_level=0, with which rollouts stay awake"
    return (
        "made without enable_sleep_mode=True, its vLLM engine cannot sleep; make it so (vLLM's CPU build has no sleep "
        "mode), or use sleep_level=0, with which rollouts stay awake"
    )


def left_asleep(before: Iterable[str], tags: Iterable[str] | None, awake: bool | None) -> set[str]:
    """What sleeps after vLLM's ``wake_up``.

    Args:
        before: what slept.
        tags: that were to wake; ``None``: all.
        awake: vLLM's answer, whether all is awake now; ``None`` from one that does not say.
    """
    left = set(before) - set(tags) if tags else set()
    if awake is None:
        return left
    return set() if awake else left or set(before)


def why_refused(asleep: Iterable[str], *, lost: bool) -> ReplicaUnavailable | None:
    """What a request gets; ``None``: it is let in.

    Args:
        asleep: tags that sleep.
        lost: whether the weights were discarded and have not come back.
    """
    tags = sorted(asleep)
    if tags:
        which = "" if len(tags) > 1 else repr(tags)
        return ReplicaUnavailable(
            f"this rollout is asleep ({', '.join(tags)}); wake it with manager.wake_up_rollout({which}) before it "
            "generates"
        )
    if lost:
        return ReplicaUnavailable(
            "this rollout's weights were discarded by a sleep at level 2; manager.sync_weights() brings them back"
        )
    return None


def described(asleep: Mapping[str, tuple[str, ...] | None]) -> str:
    """Who is in which state, by name; ``None`` of one that could not be asked."""
    if not asleep:
        return "nobody"
    return "; ".join(
        f"{name} " + ("did not say" if tags is None else f"asleep ({', '.join(tags)})" if tags else "awake")
        for name, tags in asleep.items()
    )
