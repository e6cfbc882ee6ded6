"""Driving actors that have only the seeds' methods, such as those of ms-swift.

They cannot be polled or asked what they hold, so this keeps to the seeds' order: prepare, topology, concurrent init,
merge, concurrent send and receive, unmerge, finalize. What the seeds leave out is here: every wait has a deadline, and
what was begun is undone on every path out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from twinkle_ray import topology
from twinkle_ray.errors import SyncError
from twinkle_ray.rounds import Call, Round
from twinkle_ray.types import Deadline

Methods = dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]
"""By member the remote method to call, with its arguments."""


def sync(
    trainers: Sequence[Any], rollouts: Sequence[Any], *, merge: bool, base_sync_done: bool, timeout_s: float
) -> None:
    """One sync over the actors' own transport.

    Args:
        merge: send the base with the adapter merged; else base (if it was not sent yet) and then adapter alone.
        base_sync_done: whether the rollouts hold the plain base already.
        timeout_s: for the whole.

    Raises:
        SyncError: names the phase and the actor; adapters are unmerged and engines finalized before it is raised.
    """
    deadline = Deadline.after(timeout_s)

    def phase(name: str, methods: Methods) -> dict[str, Any]:
        answers = Round(name, deadline).run(
            {who: Call(ref=method.remote(*args, **kwargs)) for who, (method, args, kwargs) in methods.items()}
        )
        for who, answer in answers.items():
            _require_success(answer, who, name)
        return answers

    train = {f"trainer[{i}]": actor for i, actor in enumerate(trainers)}
    roll = {f"rollout[{i}]": actor for i, actor in enumerate(rollouts)}
    with _finally(lambda: _finalize({**train, **roll})):
        flags: Methods = {n: (a.prepare_checkpoint_engine, (n == "trainer[0]",), {}) for n, a in train.items()}
        metadata = phase("prepare", flags)["trainer[0]"]
        phase("prepare", {n: (a.prepare_checkpoint_engine, (False,), {}) for n, a in roll.items()})
        sides = topology.init_arguments(topology.build(len(train), [1] * len(roll)), metadata)
        init: Methods = {}
        for members, kwargs in zip((train, roll), sides, strict=True):
            for index, (name, actor) in enumerate(members.items()):
                own = {key: values[index] for key, values in kwargs.items()}
                init[name] = (actor.init_checkpoint_process_group, (), own)
        phase("init", init)
        passes = [False] if merge or not base_sync_done else []
        if not merge and _has_adapter(train):
            passes.append(True)
        for adapter_only in passes:
            config = None
            if adapter_only:
                first: Methods = {"trainer[0]": (trainers[0].get_peft_config_dict, (), {})}
                config = phase("prepare", first)["trainer[0]"]
            with contextlib.ExitStack() as undo:
                if merge:
                    undo.enter_context(_finally(lambda: _unmerge(train)))
                    phase("merge", {n: (a.merge_lora, (), {}) for n, a in train.items()})
                received = {"base_sync_done": base_sync_done or adapter_only, "peft_config": config}
                phase(
                    "transfer",
                    {
                        **{
                            n: (a.send_checkpoint_weights, (), {"adapter_only": adapter_only}) for n, a in train.items()
                        },
                        **{n: (a.receive_checkpoint_weights, (), received) for n, a in roll.items()},
                    },
                )


def sync_naive(group: Any, *, merge: bool, base_sync_done: bool, colocated: bool, reload: bool = True) -> Any:
    """One sync that the train group does itself. Whatever fails, what was merged or offloaded is undone; an undo that
    fails then is a note on the error.

    Args:
        group: the seeds' train group.
        merge: merge the adapter first.
        base_sync_done: whether the rollouts hold the plain base already; if not, and it is not merged, base and adapter
            are sent, one after the other.
        colocated: free the device before the update and come back after it.
        reload: whether to come back if all went well.

    Returns:
        What the group's last ``update_weights`` did.
    """
    answer: Any = None
    undo: list[Callable[[], Any]] = []
    with _undoing(undo):
        if merge:
            undo.append(group.unmerge_lora)
            group.merge_lora()
        if colocated:
            undo.append(group.reload_to_gpu)
            group.offload_to_cpu()
        for adapter_only in ([False] if merge or not base_sync_done else []) + ([] if merge else [True]):
            answer = group.update_weights(adapter_only=adapter_only)
            _require_success(answer, "train_group", "transfer")
        if colocated and not reload:
            undo.remove(group.reload_to_gpu)
    return answer


@contextlib.contextmanager
def _undoing(steps: list[Callable[[], Any]]) -> Iterator[None]:
    """Take all steps, the last one first, on every path out. The first error is raised, the later ones are notes."""
    first: BaseException | None = None
    try:
        yield
    except BaseException as error:
        first = error
    for step in reversed(steps):
        try:
            step()
        except Exception as late:
            if first is None:
                first = late
            else:
                first.add_note(f"then {getattr(step, '__name__', step)} failed: {type(late).__name__}: {late}")
    if first is not None:
        raise first


def _require_success(answer: Any, who: str, phase: str) -> None:
    """Raise for who returns its failure instead of raising it."""
    if answer is False or (isinstance(answer, Mapping) and answer.get("success") is False):
        raise SyncError(f"{phase}: {who} answered {answer!r}", phase=phase, actors=(who,))


def _has_adapter(trainers: dict[str, Any]) -> bool:
    return all(hasattr(getattr(actor, "get_peft_config_dict", None), "remote") for actor in trainers.values())


def _unmerge(trainers: dict[str, Any]) -> None:
    Round("unmerge", Deadline.after(30.0)).run_each({n: Call(ref=a.unmerge_lora.remote()) for n, a in trainers.items()})


def _finalize(actors: dict[str, Any]) -> None:
    calls = {n: Call(ref=a.finalize_checkpoint_engine.remote()) for n, a in actors.items()}
    Round("finalize", Deadline.after(30.0)).run_each(calls)


@contextlib.contextmanager
def _finally(undo: Any) -> Iterator[None]:
    """Run ``undo`` on every path out. After a failure its own error is secondary and must not hide the first."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            undo()
        raise
    undo()
