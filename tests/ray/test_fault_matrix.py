"""Every way to fail in every phase of a sync: the error names phase and actor in time, the others are free, and after
healing a sync is bit-exact. The whole matrix is a soak test; its short form has each row and each column."""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

import pytest
import ray

from tests.actors import open_things
from tests.faults import HANG_S, SLOW_S, FaultyRolloutBase, FaultyTrainerBase, forget_faults
from tests.ray.test_lora import get
from twinkle_ray import CheckpointEngineManager, PeerLost, SyncError, SyncTimeout
from twinkle_ray.types import Contents

DEADLINE_S = HANG_S / 4
WHO = ("trainer[0]", "rollout[1]")
HOW = ("raises", "SIGKILL", "hangs", "is slow")
WHERE = ("prepare", "init", "transfer", "commit", "finalize")


FaultyTrainer = ray.remote(num_cpus=0.1)(FaultyTrainerBase)
FaultyRollout = ray.remote(num_cpus=0.1)(FaultyRolloutBase)


@pytest.fixture
def actors(reused: Any) -> Any:
    return reused


def short(who: str, how: str, where: str) -> bool:
    """A cell of the short form: each way to fail by each side once, and each place by one of them."""
    cells = {
        "trainer[0]": {("raises", "prepare"), ("SIGKILL", "transfer"), ("hangs", "init"), ("is slow", "commit")},
        "rollout[1]": {("raises", "commit"), ("SIGKILL", "init"), ("hangs", "transfer"), ("is slow", "finalize")},
    }
    return (how, where) in cells[who]


CELLS = [
    pytest.param(*cell, marks=() if short(*cell) else pytest.mark.soak) for cell in itertools.product(WHO, HOW, WHERE)
]


@pytest.mark.parametrize(("who", "how", "where"), CELLS)
def test_a_fault(actors: Any, who: str, how: str, where: str) -> None:
    trainer, rollouts = actors(FaultyTrainer, 1), [actors(FaultyRollout, seed) for seed in (5, 6)]
    members = {"trainer[0]": trainer, "rollout[0]": rollouts[0], "rollout[1]": rollouts[1]}
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=60.0, bucket_size=1024)
    manager.sync_weights()
    get([actor.call.remote(forget_faults) for actor in members.values()])
    if where in ("prepare", "init"):
        manager.remove_rollout("rollout[0]")  # so that everybody is asked again, and a new group is made
        manager.add_rollout(rollouts[0])
        members = {"trainer[0]": trainer, "rollout[1]": rollouts[1], "rollout[2]": rollouts[0]}
    get(trainer.step.remote(1))
    get(members[who].arm.remote(where, how))
    manager.timeout_s = DEADLINE_S
    start = time.monotonic()
    if where == "finalize":
        manager.sync_weights()
        manager.close()  # which nobody's failure makes fail
        assert time.monotonic() - start < 2 * DEADLINE_S + 5
        manager = CheckpointEngineManager([trainer], rollouts)
    elif how == "is slow":
        manager.sync_weights()
        assert time.monotonic() - start > SLOW_S
    else:
        with pytest.raises(SyncError) as caught:
            manager.sync_weights()
        taken = time.monotonic() - start
        error = caught.value
        assert error.phase == {"commit": "transfer"}.get(where, where), error
        assert error.actors == (who,), error
        assert isinstance(error, {"SIGKILL": PeerLost, "hangs": SyncTimeout}.get(how, SyncError)), error
        assert how != "raises" or error.cause_type == "OSError"
        # Within 2 s of the failure or the deadline; and something for a machine with two cores and other work.
        assert taken < (DEADLINE_S if how == "hangs" else 0.5) + 2.0 + 2.0
        for name, actor in members.items():
            if name != who:
                asked = time.monotonic()
                get(actor.ping.remote())
                assert time.monotonic() - asked < 2.0
    manager.timeout_s = 60.0
    trainer, rollouts = heal(actors, manager, who, how, trainer, rollouts)
    manager.sync_weights()
    want = get(trainer.digests.remote())
    for rollout in rollouts:
        assert get(rollout.digests.remote()) == want
        status = get(rollout.checkpoint_status.remote())
        assert (status.contents, status.updating) == (Contents.WHOLE, False)
    manager.close()


def heal(actors: Any, manager: Any, who: str, how: str, trainer: Any, rollouts: list[Any]) -> tuple[Any, list[Any]]:
    """Another actor for one that is dead, or that will hang for some time yet."""
    if how not in ("SIGKILL", "hangs"):
        return trainer, rollouts
    if who == "trainer[0]":
        ray.kill(trainer)
        trainer = actors(FaultyTrainer, 3)
        manager.replace_trainers([trainer])
    else:
        ray.kill(rollouts[1])
        manager.remove_rollout(rollouts[1])
        rollouts = [rollouts[0], actors(FaultyRollout, 7)]
        manager.add_rollout(rollouts[1])
    return trainer, rollouts


def resident(actor: Any) -> int:
    """Bytes of memory of the process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shared_memory(actor: Any) -> int:
    """Mappings of shared memory in the process."""
    with open("/proc/self/maps", encoding="ascii") as file:
        return sum("/dev/shm" in line for line in file)


def held(actors: list[Any]) -> dict[str, Any]:
    """All that a sync could leave behind."""
    from ray.experimental.internal_kv import _internal_kv_list

    things = [get(actor.things.remote()) for actor in actors]
    return {
        "threads": [thing["threads"] for thing in things],
        "fds": [thing["fds"] for thing in things],
        "driver": open_things(),
        "shm": [get(actor.call.remote(shared_memory)) for actor in actors],
        "kv": len(_internal_kv_list(b"")),
        "named": len(ray.util.list_named_actors(all_namespaces=True)),
        "bytes": [get(actor.call.remote(resident)) for actor in actors],
    }


@pytest.mark.parametrize("rounds", [pytest.param(1000, marks=pytest.mark.soak), 20])
def test_syncs_of_which_some_fail_leave_nothing_behind(actors: Any, rounds: int) -> None:
    trainer, rollouts = actors(FaultyTrainer, 1), [actors(FaultyRollout, seed) for seed in (5, 6)]
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=30.0, bucket_size=1024)
    chance = random.Random(rounds)
    failures: list[SyncError] = []
    before: dict[str, Any] = {}
    for number in range(rounds):
        if number == rounds // 4:
            before = held([trainer, *rollouts])
        get(trainer.step.remote(number))
        faulty = chance.random() < 0.05 or number in (3, rounds // 2)
        if faulty:
            victim = chance.choice([trainer, *rollouts])
            get(victim.arm.remote(chance.choice(["transfer", "commit"]), "raises"))
        try:
            manager.sync_weights()
        except SyncError as error:
            failures.append(error)
        get([actor.call.remote(forget_faults) for actor in (trainer, *rollouts)])
    manager.sync_weights()
    assert len(failures) > 1
    assert {error.cause_type for error in failures} == {"OSError"}
    want = get(trainer.digests.remote())
    assert get([rollout.digests.remote() for rollout in rollouts]) == [want, want]
    deadline = time.monotonic() + 20
    while True:  # what was given up ends by itself
        after = held([trainer, *rollouts])
        grown = [key for key in ("threads", "fds", "driver", "shm", "kv", "named") if more(after[key], before[key])]
        if not grown or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert grown == [], (before, after)
    assert all(now <= 1.05 * then for now, then in zip(after["bytes"], before["bytes"], strict=True)), (before, after)


def more(after: Any, before: Any) -> bool:
    """Whether there is more of it; two are allowed for what comes and goes."""
    if isinstance(after, dict):
        return any(more(after[key], before[key]) for key in after)
    if isinstance(after, list):
        return any(more(a, b) for a, b in zip(after, before, strict=True))
    return int(after) > int(before) + 2
