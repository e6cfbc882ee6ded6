"""Trainers and rollouts that share a device, on CPUs: weights go through shared memory, one copy."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.actors import Probed, Rollout, RolloutBase, Trainer, TrainerBase, at_launch, die, no_power
from tests.ray.test_sharded import ShardedTrainer, Uneven
from twinkle_ray import CheckpointEngineManager, ConfigError, PeerLost, SyncError, SyncTimeout
from twinkle_ray.backends.link import wait
from twinkle_ray.types import Contents, RolloutStatus


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=60)


@pytest.fixture
def actors(stocked: Any) -> Any:
    if stocked.mode != "gloo":
        pytest.skip("for CPUs; NPU memory is not shared")
    return stocked


def manage(trainers: list[Any], rollouts: list[Any], **options: Any) -> CheckpointEngineManager:
    options = {"weight_sync_mode": "ipc", "timeout_s": 60.0, **options}
    return CheckpointEngineManager(trainers, rollouts, **options)


def same(trainer: Any, rollouts: list[Any]) -> None:
    ours, *theirs = get([one.digests.remote() for one in (trainer, *rollouts)])
    assert all(their == ours for their in theirs)


def group_of(actor: Any) -> Any:
    """The group of an actor's endpoint on its device, whichever mixin it has."""
    for value in vars(actor).values():
        if type(value).__name__ == "Training":
            group = value.endpoint.group
            return group.groups[0] if hasattr(group, "groups") else group
        if type(value).__name__ == "Serving":
            return value.target._side.endpoint.group
    raise AssertionError("no endpoint")


def counts(actor: Any) -> dict[str, int]:
    found = group_of(actor).counts
    return {name: getattr(found, name) for name in type(found).__slots__}


def whereabouts(actor: Probed) -> dict[str, int]:
    """Of each parameter the object of shared memory in which it lies, as the kernel says."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        start, stop = (int(part, 16) for part in fields[0].split("-"))
        spans.append((start, stop, int(fields[4]) if "/dev/shm" in line else 0))
    values = actor.model.state_dict()
    return {n: next(i for start, stop, i in spans if start <= v.data_ptr() < stop) for n, v in values.items()}


def mapped(actor: Probed) -> set[int]:
    return {int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()}


def addresses(actor: Probed) -> dict[str, tuple[int, int]]:
    return {name: (id(value), value.data_ptr()) for name, value in actor.model.state_dict(keep_vars=True).items()}


# --- who reads ---------------------------------------------------------------------------------------------------


class LinkedTrainer(TrainerBase):
    """Says that it is on a GPU, whose memory others can open; all else is as it is."""

    def checkpoint_status(self, merge: bool = True) -> Any:
        return replace(super().checkpoint_status(merge), device=("cuda", "GPU-0"), shareable=True)


class LinkedRollout(RolloutBase):
    """Says that it is on another GPU, which is joined to the trainer's."""

    def start_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self._moved(super().start_checkpoint(*args, **kwargs))

    def poll_checkpoint(self, *args: Any) -> Any:
        return self._moved(super().poll_checkpoint(*args))

    def _moved(self, status: Any) -> Any:
        held = status.result
        if isinstance(held, RolloutStatus):
            held = replace(held, devices=(("cuda", "GPU-1"),), links=(("GPU-0", "GPU-2"),))
        return replace(status, result=held)


def test_a_lone_rollout_on_a_linked_gpu_reads_the_trainers_memory(actors: Any) -> None:
    trainer, rollout = (ray.remote(num_cpus=0)(kind).remote() for kind in (LinkedTrainer, LinkedRollout))
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60.0) as manager:
        for seed in range(2):
            get(trainer.step.remote(seed))
            report = manager.sync_weights()
            assert report.mode == "ipc"
            same(trainer, [rollout])
        assert get(trainer.call.remote(counts))["shared"] > 0
    for actor in (trainer, rollout):
        ray.kill(actor)


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_size", [200, 1 << 20])
def test_bit_exact_and_one_copy(actors: Any, bucket_size: int) -> None:
    trainer, rollouts = actors(Trainer, 1, tied=True), [actors(Rollout, seed, tied=True) for seed in (5, 6)]
    objects = get(trainer.call.remote(addresses))
    with manage([trainer], rollouts, bucket_size=bucket_size) as manager:
        for seed in range(3):
            get(trainer.step.remote(seed))
            report = manager.sync_weights()
            same(trainer, rollouts)
            assert report.mode == "ipc"
            assert report.version == seed + 1
        assert set(report.phases) == {"transfer"}
        held = get(trainer.call.remote(addresses))
        assert [i for i, _ in held.values()] == [i for i, _ in objects.values()]  # the same tensors, elsewhere
        ours, *theirs = get([one.call.remote(counts) for one in (trainer, *rollouts)])
        # One parameter is stored transposed, and so is made contiguous for each sync; the rest is copied once.
        turned = 6 * 16 * 4
        assert ours["staged"] == 3 * turned
        assert ours["shared"] == 3 * (report.nbytes - turned)
        assert ours["hosted"] == report.nbytes - turned
        assert all(their["copied"] == 3 * report.nbytes for their in theirs)
        places = get(trainer.call.remote(whereabouts))
        assert places.pop("turned") == 0
        assert all(places.values())
        assert set(places.values()) <= get(rollouts[0].call.remote(mapped))
        assert manager.verify().compared == 2 * report.tensors
        assert manager.check().mode == "ipc"
    assert not set(places.values()) & get(rollouts[0].call.remote(mapped))


def replace_memory(actor: Probed) -> None:
    actor.model.lm_head.weight.data = torch.randn(32, 16)
    actor.model.norm = torch.nn.LayerNorm(16)


def test_memory_that_was_exchanged_between_two_syncs(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
    with manage([trainer], [rollout]) as manager:
        manager.sync_weights()
        before = get(trainer.call.remote(whereabouts))
        for _ in range(2):
            get(trainer.call.remote(replace_memory))
            manager.sync_weights()
            same(trainer, [rollout])
        gone = set(before.values()) - set(get(trainer.call.remote(whereabouts)).values())
        assert len(gone) == 3
        manager.sync_weights()
        assert not gone & get(rollout.call.remote(mapped))


def test_what_trainers_are_about_to_free_is_open_nowhere(actors: Any) -> None:
    """A device keeps memory that was freed as long as another process has it open."""
    trainer, rollouts = actors(Trainer, 1), [actors(Rollout, seed) for seed in (5, 6)]
    with manage([trainer], rollouts) as manager:
        for step in range(3):
            get(trainer.step.remote(step))
            report = manager.sync_weights() if step < 2 else manager.sync_and_wake(offload=True)
            same(trainer, rollouts)
            assert step == 0 or "agree" not in report.phases
            memory = set(get(trainer.call.remote(whereabouts)).values()) - {0}
            if step < 2:
                assert memory <= get(rollouts[0].call.remote(mapped))
                manager.offload_trainers()
            assert not any(memory & there for there in get([one.call.remote(mapped) for one in rollouts]))
        assert get(rollouts[0].call.remote(counts))["repeated"] == 0
        get(trainer.step.remote(9))
        manager.sync_weights()
        ray.kill(rollouts[1])
        manager.offload_trainers()  # whoever is dead has nothing open
        memory = set(get(trainer.call.remote(whereabouts)).values()) - {0}
        assert not memory & get(rollouts[0].call.remote(mapped))


class LateRollout(RolloutBase):
    """Lets go of what it has open when the trainer is sending already, as if it had been told to long before."""

    late = True

    def start_checkpoint(self, key: str, op: str, request: dict[str, Any], wait_s: float = 0.0) -> Any:
        if op == "receive" and self.late and group_of(self)._opened:
            self.late = False
            wait([group_of(self)._peers[0].link], 30.0)
            group_of(self).let_go()
        return super().start_checkpoint(key, op, request, wait_s)


def test_a_rollout_that_lets_go_too_late_is_agreed_with_anew(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 1), ray.remote(num_cpus=0)(LateRollout).remote(5)
    with manage([trainer], [rollout]) as manager:
        manager.sync_weights()
        get(trainer.step.remote(2))
        report = manager.sync_weights()
        assert "refused" in report.phases
        same(trainer, [rollout])
        get(trainer.step.remote(3))
        assert set(manager.sync_weights().phases) == {"transfer"}
        same(trainer, [rollout])
    ray.kill(rollout)


def test_the_seeds_calls_in_a_managers_group_find_what_was_let_go(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
    with manage([trainer], [rollout]) as manager:
        manager.sync_weights()
        for step in (2, 3, 4):
            get(trainer.step.remote(step))
            manager.offload_trainers()  # what was open is closed, which the trainer hears of in its next sync
            get(
                [
                    trainer.send_checkpoint_weights.remote(),
                    rollout.receive_checkpoint_weights.remote(base_sync_done=False, peft_config=None),
                ]
            )
            same(trainer, [rollout])


def test_the_memory_of_a_trainer_that_sends_no_more_is_open_nowhere(actors: Any) -> None:
    before, after, rollouts = actors(Trainer, 1), actors(Trainer, 2), [actors(Rollout, seed) for seed in (5, 6)]
    with manage([before], rollouts) as manager:
        manager.sync_weights()
        memory = set(get(before.call.remote(whereabouts)).values()) - {0}
        assert memory <= get(rollouts[0].call.remote(mapped))
        manager.remove_rollout(rollouts[1])  # the next sync makes another group
        manager.offload_trainers()
        assert not memory & get(rollouts[0].call.remote(mapped))
        manager.sync_weights()
        assert memory <= get(rollouts[0].call.remote(mapped))
        manager.replace_trainers([after])
        until = time.monotonic() + 5
        while memory & get(rollouts[0].call.remote(mapped)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not memory & get(rollouts[0].call.remote(mapped))
        manager.sync_weights()
        same(after, rollouts[:1])


# --- who sends to whom -------------------------------------------------------------------------------------------


def elsewhere(actor: Any) -> None:
    import twinkle_ray.worker

    twinkle_ray.worker.neighbourhood = lambda kind: "another machine"  # type: ignore[assignment]


def test_some_rollouts_share_the_device_and_some_do_not(actors: Any) -> None:
    trainer, near = actors(Trainer, 1), [actors(Rollout, 5), actors(Rollout, 6)]
    far = [ray.remote(num_cpus=0.1)(FarRollout).remote(seed) for seed in (7, 8)]
    rollouts = [near[0], far[0], far[1], near[1]]
    try:
        with manage([trainer], rollouts, bucket_size=1000) as manager:
            for seed in range(3):
                get(trainer.step.remote(seed))
                report = manager.sync_weights()
                same(trainer, rollouts)
            assert report.mode == "gloo+ipc"
            assert set(report.phases) == {"transfer"}
            assert len(report.replicas) == 4
            for failing, name in ((far[1], "rollout[2]"), (near[1], "rollout[3]"), (trainer, "trainer[0]")):
                get(failing.call.remote(fail_late))
                start = time.monotonic()
                with pytest.raises(SyncError, match="no more power") as caught:
                    manager.sync_weights()
                assert time.monotonic() - start < 4
                assert caught.value.actors == (name,)
                get(trainer.step.remote(9))
                manager.sync_weights()
                same(trainer, rollouts)
            for refusing in (far[0], near[0]):  # before the first byte: in no group was anything written
                get(refusing.call.remote(refuse_once))
                with pytest.raises(SyncError, match="not now"):
                    manager.sync_weights()
                states = get([r.checkpoint_status.remote() for r in rollouts])
                assert [s.contents for s in states] == [Contents.WHOLE] * 4
                manager.sync_weights()
                same(trainer, rollouts)
            manager.remove_rollout("rollout[1]")
            manager.remove_rollout("rollout[2]")
            assert manager.sync_weights().mode == "ipc"
        with pytest.raises(ConfigError, match=r"worker 0 of rollout\[1\] is on cpu of another node, which no trainer"):
            manage([trainer], [near[0], far[0]], weight_sync_mode="auto", is_colocated=True).check()
        with pytest.raises(ConfigError, match="but none of these do; use 'auto'"):
            manage([trainer], far).check()
        assert manage([trainer], near, weight_sync_mode="auto").check().mode == "gloo"
    finally:
        for actor in far:
            ray.kill(actor)


class FarRollout(RolloutBase):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        elsewhere(self)


def refuse_once(actor: Any) -> None:
    from twinkle_ray.sinks import ModuleSink

    begin = ModuleSink.begin

    def refuse(*_: Any) -> None:
        ModuleSink.begin = begin  # type: ignore[method-assign]
        raise OSError("not now")

    ModuleSink.begin = refuse  # type: ignore[method-assign]


def fail_late(actor: Any) -> None:
    at_launch(2, no_power)


class UnevenRollout(RolloutBase):
    def __init__(self, seed: int) -> None:
        self.model = Uneven(seed)

    def held(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


class Gathering(ShardedTrainer):
    def seconds(self) -> bool:
        """Whether nobody is left in a gather."""
        return self.total() == 3.0


def test_each_sharded_rank_sends_what_it_has_gathered_to_its_own_neighbours(actors: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trainers = [ray.remote(num_cpus=0.1)(Gathering).remote(rank, port, 3) for rank in range(2)]
    rollouts = [ray.remote(num_cpus=0.1)(UnevenRollout).remote(seed) for seed in (7, 8, 9)]

    def right() -> None:
        full = get([t.full.remote() for t in trainers])[0]
        for held in get([r.held.remote() for r in rollouts]):
            assert held.keys() == full.keys()
            assert all(torch.equal(full[name], held[name]) for name in full)

    try:
        with manage(trainers, rollouts, bucket_size=64) as manager:
            for _ in range(2):
                report = manager.sync_weights()
                right()
                assert manager.verify().compared == 3 * report.tensors
                get([t.train.remote() for t in trainers])
            assert "init" not in report.phases  # the groups are still those of the first one
            first, second = get([t.call.remote(counts) for t in trainers])
            # What was gathered is memory made for it; what each rank has whole is not.
            assert first["shared"] == second["shared"] == 2 * (2 * 3 * 4 + 8)
            assert first["staged"] == second["staged"] == 2 * report.nbytes - first["shared"]
            worlds = get([t.call.remote(lambda one: group_of(one).world_size) for t in trainers])
            assert worlds == [3, 2]
            for failing in (rollouts[1], rollouts[2], trainers[1]):
                get(failing.call.remote(fail_late))
                start = time.monotonic()
                with pytest.raises(SyncError, match="no more power") as caught:
                    manager.sync_weights()
                assert time.monotonic() - start < 4
                name = "trainer[1]" if failing is trainers[1] else f"rollout[{rollouts.index(failing)}]"
                assert caught.value.actors == (name,)
                assert get([t.seconds.remote() for t in trainers]) == [True, True]
                get([t.train.remote() for t in trainers])
                manager.sync_weights()
                right()
            # A rank without neighbours only gathers.
            manager.remove_rollout("rollout[1]")
            manager.remove_rollout("rollout[2]")
            rollouts[1:] = []
            get([t.train.remote() for t in trainers])
            manager.sync_weights()
            right()
    finally:
        for actor in (*trainers, *rollouts):
            ray.kill(actor)


# --- LoRA --------------------------------------------------------------------------------------------------------


def moved_once(trainer: Any) -> None:
    """Its weights are in other memory from now on, and nothing else has changed."""
    before, trainer.start = trainer.start, trainer.values()
    assert all(torch.equal(before[name][1], value) for name, (_, value) in trainer.start.items() if "lora_" not in name)


def test_an_adapter_merged_and_alone(actors: Any) -> None:
    pytest.importorskip("peft")
    from tests.ray.test_adapters import right
    from tests.ray.test_lora import Adapted

    trainer = Adapted.remote()
    rollouts = [actors(Rollout, seed) for seed in (5, 6)]
    try:
        with manage([trainer], rollouts) as manager:
            for round_, (merge, base) in enumerate([(False, "plain"), (False, ""), (True, "merged"), (False, "plain")]):
                get(trainer.step.remote(round_))
                report = manager.sync_weights(merge)
                assert (report.base, report.mode) == (base, "ipc")
                if round_ == 0:
                    get(trainer.call.remote(moved_once))
                right(trainer, rollouts, merge)
            found = get(trainer.call.remote(counts))
            assert found["hosted"] > 0
    finally:
        ray.kill(trainer)


# --- failures ----------------------------------------------------------------------------------------------------


def die_late(actor: Any) -> None:
    at_launch(3, die)


def hang_late(actor: Any) -> None:
    at_launch(3, lambda: time.sleep(4.5))


@pytest.mark.parametrize("victim", ["trainer[0]", "rollout[1]"])
def test_a_member_that_is_killed_in_mid_copy(actors: Any, victim: str) -> None:
    trainer, rollouts = actors(Trainer, 1), [actors(Rollout, seed) for seed in (5, 6)]
    doomed = trainer if victim == "trainer[0]" else rollouts[1]
    manager = manage([trainer], rollouts, bucket_size=1000)
    manager.sync_weights()
    get(doomed.call.remote(die_late))
    start = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        manager.sync_weights()
    assert time.monotonic() - start < 6
    assert caught.value.actors == (victim,)
    if doomed is trainer:
        states = get([r.checkpoint_status.remote() for r in rollouts])
        assert {s.contents for s in states} <= {Contents.MIXED, Contents.WHOLE}
        trainer = actors(Trainer, 2)
        manager.replace_trainers([trainer])
    else:
        manager.remove_rollout("rollout[1]")
        rollouts[1] = actors(Rollout, 7)
        manager.add_rollout(rollouts[1])
    get(trainer.step.remote(3))
    assert manager.sync_weights().mode == "ipc"
    same(trainer, rollouts)
    manager.close()


@pytest.mark.parametrize("victim", ["trainer[0]", "rollout[1]"])
def test_a_member_that_hangs_in_mid_copy(actors: Any, victim: str) -> None:
    trainer, rollouts = actors(Trainer, 1), [actors(Rollout, seed) for seed in (5, 6)]
    hanging = trainer if victim == "trainer[0]" else rollouts[1]
    manager = manage([trainer], rollouts, bucket_size=1000)
    manager.sync_weights()
    get(hanging.call.remote(hang_late))
    manager.timeout_s = 2.0
    start = time.monotonic()
    with pytest.raises(SyncTimeout) as caught:
        manager.sync_weights()
    assert time.monotonic() - start < 5
    assert caught.value.actors == (victim,)
    manager.timeout_s = 60.0
    get(trainer.step.remote(3))
    manager.sync_weights()
    same(trainer, rollouts)
    manager.close()
