"""``sync_weights`` end to end over Gloo, into rollouts that hold a plain torch module."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import ray
import torch

from tests.actors import Rollout, RolloutBase, Trainer, TrainerBase, placed
from twinkle_ray import (
    CheckpointEngineManager,
    ConfigError,
    ManifestMismatch,
    PeerLost,
    SyncError,
    SyncTimeout,
    UnsupportedActor,
    UnsupportedModel,
    VerifyError,
)
from twinkle_ray.types import Contents

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def actors(stocked: Any) -> Any:
    return stocked


def get(ref: Any, timeout: float = 30) -> Any:
    return ray.get(ref, timeout=timeout)


def test_rollouts_follow_the_trainer_bit_for_bit(actors: Any) -> None:
    trainer, rollouts = actors(Trainer), [actors(Rollout, 7), actors(Rollout, 8)]
    with CheckpointEngineManager([trainer], rollouts, timeout_s=60) as manager:
        for version in range(1, 6):
            report = manager.sync_weights()
            held = get([trainer.digests.remote(), *[r.digests.remote() for r in rollouts]])
            assert held[1] == held[0]
            assert held[2] == held[0]
            assert report.version == version
            assert get([r.weights_version.remote() for r in rollouts]) == [version, version]
            get(trainer.step.remote(version))
        assert report.mode == actors.mode
        assert report.tensors == len(get(trainer.digests.remote()))
        assert report.nbytes == sum(v.numel() * v.element_size() for v in TrainerBase(0).model.state_dict().values())
        assert [r.name for r in report.replicas] == ["rollout[0]", "rollout[1]"]
        assert all(r.tensors == report.tensors and r.nbytes == report.nbytes for r in report.replicas)
        assert {"transfer"} == set(report.phases)
        assert report.seconds >= sum(report.phases.values()) * 0.99
        assert "\n" not in str(report)
        assert f"sync v{report.version}" in str(report)
        assert manager.base_sync_done


def test_buckets_smaller_than_every_tensor(actors: Any) -> None:
    trainer, rollout = actors(Trainer), actors(Rollout)
    with CheckpointEngineManager([trainer], [rollout], bucket_size=100, timeout_s=60) as manager:
        manager.sync_weights()
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())


def test_each_tensor_is_cast_once_to_what_the_receivers_hold(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 3), actors(Rollout, 4, dtype=torch.bfloat16)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        report = manager.sync_weights()
        expected = TrainerBase(3).model
        for value in expected.parameters():
            value.data = value.data.to(torch.bfloat16)
        from tests.actors import digests

        assert get(rollout.digests.remote()) == digests(expected)  # fp32 and int64 buffers stay as they are
        assert report.nbytes < sum(v.numel() * v.element_size() for v in TrainerBase(3).model.state_dict().values())
        assert manager.verify().compared == report.tensors


def test_tied_weights_are_sent_once_and_fill_every_name(actors: Any) -> None:
    tied = actors(Trainer, 1, tied=True)
    same, apart = actors(Rollout, 2, tied=True), actors(Rollout, 3)
    with CheckpointEngineManager([tied], [same, apart], timeout_s=60) as manager:
        report = manager.sync_weights()
        held = get(tied.digests.remote())
        assert held["lm_head.weight"] == held["embed.weight"]
        assert get(same.digests.remote()) == held
        assert get(apart.digests.remote()) == held
        assert report.tensors == len(held) - 1


def test_two_different_tensors_for_one_tied_weight_are_refused(actors: Any) -> None:
    apart, tied = actors(Trainer, 1), actors(Rollout, 2, tied=True)
    before = get(tied.digests.remote())
    with (
        CheckpointEngineManager([apart], [tied], timeout_s=60) as manager,
        pytest.raises(ManifestMismatch, match="tied"),
    ):
        manager.sync_weights()
    assert get(tied.digests.remote()) == before


def test_verify_names_the_tensor_that_differs(actors: Any) -> None:
    trainer, rollouts = actors(Trainer), [actors(Rollout, 1), actors(Rollout, 2)]
    with CheckpointEngineManager([trainer], rollouts, timeout_s=60) as manager:
        with pytest.raises(SyncError, match="nothing to verify"):
            manager.verify()
        report = manager.sync_weights()
        checked = manager.verify()
        assert checked.compared == 2 * report.tensors
        assert checked.unverifiable == {"rollout[0]": (), "rollout[1]": ()}

        def flip(actor: RolloutBase) -> None:
            with torch.no_grad():
                actor.model.big.view(-1).view(torch.uint8)[5] ^= 1

        get(rollouts[1].call.remote(flip))
        with pytest.raises(VerifyError, match="'big'") as caught:
            manager.verify()
        assert caught.value.tensor == "big"
        assert caught.value.actor == "rollout[1]"


def test_digests_of_both_ends_are_those_of_hashlib(actors: Any) -> None:
    trainer, rollout = actors(Trainer), actors(Rollout)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        with pytest.raises(SyncError, match="received no weights"):
            get(rollout.weights_digest.remote())
        manager.sync_weights()
        expected = get(trainer.digests.remote())
        assert get(rollout.weights_digest.remote()) == expected
        assert get(trainer.weights_digest.remote()) == expected
        assert get(rollout.weights_digest.remote(["big"])) == {"big": expected["big"]}


def test_a_user_defined_source_and_target(actors: Any) -> None:
    @ray.remote(num_cpus=0.1)
    class Odd(TrainerBase):
        def named_weights(self) -> Any:
            for name, value in self.model.state_dict().items():
                yield f"inner.{name}", value * 2 if value.is_floating_point() else value

    @ray.remote(num_cpus=0.1)
    class Elsewhere(RolloutBase):
        def __init__(self) -> None:
            super().__init__(5)
            self.held = torch.nn.Module()
            self.held.inner = self.model
            del self.model

        def checkpoint_target(self) -> torch.nn.Module:
            return self.held

        def value(self) -> torch.Tensor:
            return self.held.inner.big.detach().cpu()

    trainer, rollout = actors(Odd), actors(Elsewhere)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
    assert torch.equal(get(rollout.value.remote()), TrainerBase(0).model.big.detach() * 2)


def test_the_trainer_is_not_touched(actors: Any) -> None:
    trainer, rollout = actors(Trainer), actors(Rollout)
    before = get(trainer.digests.remote())
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
        get(trainer.step.remote(1))
        held = get(rollout.digests.remote())
    assert held == before  # what the trainer does after the call is not seen by the rollout


def test_a_hundred_syncs_make_one_group_and_leave_nothing(actors: Any) -> None:
    import os

    trainer, rollouts = actors(Trainer), [actors(Rollout, 1), actors(Rollout, 2)]
    with CheckpointEngineManager([trainer], rollouts, timeout_s=60) as manager:
        for _ in range(5):
            manager.sync_weights()
        everyone = [trainer, *rollouts]
        before = get([a.things.remote() for a in everyone])
        groups = {s.group for s in get([a.checkpoint_status.remote() for a in everyone])}
        shm = set(os.listdir("/dev/shm"))
        keys = len(ray.experimental.internal_kv._internal_kv_list(""))
        named = ray.util.list_named_actors(all_namespaces=True)
        for _ in range(100):
            manager.sync_weights()
        after = get([a.things.remote() for a in everyone])
        for was, now in zip(before, after, strict=True):
            assert abs(now["threads"] - was["threads"]) <= 2
            assert abs(now["fds"] - was["fds"]) <= 2
        assert {s.group for s in get([a.checkpoint_status.remote() for a in everyone])} == groups
        assert len(groups) == 1
        assert len(set(os.listdir("/dev/shm")) - shm) <= 2
        assert abs(len(ray.experimental.internal_kv._internal_kv_list("")) - keys) <= 2
        assert ray.util.list_named_actors(all_namespaces=True) == named
    closed = get([a.things.remote() for a in everyone])
    assert all(c["fds"] < b["fds"] for c, b in zip(closed, before, strict=True))


def test_two_managers_at_once_do_not_cross(actors: Any) -> None:
    pairs = [(actors(Trainer, s), actors(Rollout, 50 + s)) for s in (1, 2)]
    managers = [CheckpointEngineManager([t], [r], timeout_s=60) for t, r in pairs]
    errors: list[BaseException] = []

    def work(manager: CheckpointEngineManager) -> None:
        try:
            for _ in range(10):
                manager.sync_weights()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(m,)) for m in managers]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not errors
    held = [get([t.digests.remote(), r.digests.remote()]) for t, r in pairs]
    assert held[0][0] == held[0][1]
    assert held[1][0] == held[1][1]
    assert held[0][0] != held[1][0]
    for m in managers:
        m.close()


def test_closing_a_manager_leaves_the_group_of_another_one_alone(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 2)
    first = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
    first.sync_weights()
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as second:
        assert second.sync_weights().version == 2
        group = get(rollout.checkpoint_status.remote()).group
        first.close()
        assert {s.group for s in get([a.checkpoint_status.remote() for a in (trainer, rollout)])} == {group}
        report = second.sync_weights()
        assert report.version == 3
        assert "init" not in report.phases


def test_six_managers_started_at_once_ten_rounds(actors: Any) -> None:
    trainers = [actors(Trainer, s) for s in range(6)]
    rollouts = [actors(Rollout, 100 + s) for s in range(6)]
    get([a.ping.remote() for a in trainers + rollouts], 60)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for round_ in range(10):
                other = (index + round_) % 6  # other pairs each round
                with CheckpointEngineManager([trainers[index]], [rollouts[other]], timeout_s=60) as manager:
                    barrier.wait(60)
                    manager.sync_weights()
                assert get(rollouts[other].digests.remote()) == get(trainers[index].digests.remote())
                barrier.wait(60)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    barrier = threading.Barrier(6)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    assert not errors, errors


def test_trainers_that_own_a_default_process_group_keep_it(actors: Any) -> None:
    def join(rank: int, port: int) -> Any:
        def run(actor: TrainerBase) -> None:
            import torch.distributed as dist

            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

        return run

    def total(actor: TrainerBase) -> float:
        import torch.distributed as dist

        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return value.item()

    def part(actor: TrainerBase) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trainers, rollouts = [actors(Trainer, 1), actors(Trainer, 1)], [actors(Rollout, 2), actors(Rollout, 3)]
    get([t.call.remote(join(i, port)) for i, t in enumerate(trainers)])
    start = time.monotonic()
    with CheckpointEngineManager(trainers, rollouts, timeout_s=60) as manager:
        manager.sync_weights()
        assert time.monotonic() - start < 20
        held = get(trainers[0].digests.remote())
        assert get([r.digests.remote() for r in rollouts]) == [held, held]
        assert get([t.call.remote(total) for t in trainers]) == [3.0, 3.0]
    get([t.call.remote(part) for t in trainers])


def test_a_changed_model_is_agreed_anew(actors: Any) -> None:
    trainer, rollout = actors(Trainer), actors(Rollout)

    def widen(actor: Any) -> None:
        actor.model.big = torch.nn.Parameter(torch.randn(5, 7).to(actor.model.big.device))

    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
        get(trainer.call.remote(widen))
        before = get(rollout.digests.remote())
        with pytest.raises(ManifestMismatch, match="big"):
            manager.sync_weights()
        assert get(rollout.digests.remote()) == before
        get(rollout.call.remote(widen))
        assert manager.sync_weights().version == 2
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())


def renamed(actor: Any) -> None:
    norm = actor.model.norm
    norm._parameters["shift"] = norm._parameters.pop("bias")


def grown(actor: Any) -> None:
    actor.model.blocks.append(placed(torch.nn.Linear(3, 3)))


def deepened(actor: Any) -> None:
    actor.model.norm.add_module("more", placed(torch.nn.Linear(3, 3)))


def reshaped(actor: Any) -> None:
    norm = actor.model.norm
    norm.bias.data = norm.bias.data[:-1].clone()


@pytest.mark.parametrize("change", [renamed, grown, deepened, reshaped])
def test_new_names_and_more_tensors_are_agreed_anew_in_the_same_call(actors: Any, change: Any) -> None:
    trainer, rollout = actors(Trainer), actors(Rollout)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
        get([a.call.remote(change) for a in (trainer, rollout)])
        get(trainer.step.remote(5))
        report = manager.sync_weights()
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())
        assert "agree" in report.phases
        get(trainer.step.remote(6))
        assert set(manager.sync_weights().phases) == {"transfer"}
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())


def test_a_tensor_is_sent_from_the_memory_that_it_has_now(actors: Any) -> None:
    def moved(actor: Any) -> None:
        for parameter in actor.model.parameters():
            parameter.data = torch.randn_like(parameter)

    trainer, rollout = actors(Trainer), actors(Rollout)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
        for _ in range(2):
            get(trainer.call.remote(moved))
            assert set(manager.sync_weights().phases) == {"transfer"}
            assert get(rollout.digests.remote()) == get(trainer.digests.remote())


@pytest.mark.parametrize("change", [grown, deepened])
def test_what_the_rollout_has_no_place_for_is_refused_and_it_holds_one_whole_version(actors: Any, change: Any) -> None:
    trainer, rollout = actors(Trainer), actors(Rollout)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
        versions = [get(trainer.digests.remote())]
        get(trainer.call.remote(change))
        get(trainer.step.remote(5))
        versions.append(get(trainer.digests.remote()))
        for _ in range(2):
            with pytest.raises(ManifestMismatch, match=r"blocks\.2|norm\.more"):
                manager.sync_weights()
        held = get(rollout.digests.remote())
        assert held in [{name: version[name] for name in held} for version in versions]
        assert get(rollout.checkpoint_status.remote()).contents is Contents.WHOLE


def test_a_rollout_that_holds_another_module_by_now_is_agreed_with_anew(actors: Any) -> None:
    def replace(actor: Any) -> None:
        actor.model = placed(type(actor.model)(7))

    trainer, rollout = actors(Trainer), actors(Rollout)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
        get(rollout.call.remote(replace))
        start = time.monotonic()
        report = manager.sync_weights()
        assert time.monotonic() - start < 10
        assert {"refused", "init", "agree"} <= set(report.phases)
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())
        get(trainer.call.remote(replace))
        manager.sync_weights()
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())


def test_a_steady_sync_is_one_call_to_each_member(actors: Any) -> None:
    @ray.remote(num_cpus=0.1)
    class CountingTrainer(TrainerBase):
        calls = 0

        def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().send_checkpoint_weights(*args, **kwargs)

        def checkpoint_status(self) -> Any:
            self.calls += 1
            return super().checkpoint_status()

    @ray.remote(num_cpus=0.1)
    class CountingRollout(RolloutBase):
        calls = 0

        def start_checkpoint(self, *args: Any) -> Any:
            self.calls += 1
            return super().start_checkpoint(*args)

        def poll_checkpoint(self, *args: Any) -> Any:
            self.calls += 1
            return super().poll_checkpoint(*args)

    trainer, rollouts = actors(CountingTrainer), [actors(CountingRollout, n) for n in (1, 2)]
    with CheckpointEngineManager([trainer], rollouts, timeout_s=60) as manager:
        manager.sync_weights()
        before = get([a.call.remote(lambda actor: actor.calls) for a in (trainer, *rollouts)])
        for _ in range(5):
            manager.sync_weights()
        after = get([a.call.remote(lambda actor: actor.calls) for a in (trainer, *rollouts)])
    assert after == [count + 5 for count in before]


# --- failures ------------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0.1)
class SlowRollout(RolloutBase):
    """Sleeps in every load; can be told how long."""

    def __init__(self, seed: int, seconds: float) -> None:
        super().__init__(seed)
        from twinkle_ray.sinks import ModuleSink

        ready = ModuleSink.ready

        def slow(sink: ModuleSink, tensors: Any) -> None:
            time.sleep(seconds)
            ready(sink, tensors)

        ModuleSink.ready = slow  # type: ignore[method-assign]
        ModuleSink._ranges = lambda *_: None  # type: ignore[method-assign]  # nothing in place: all is loaded


@ray.remote(num_cpus=0.1)
class SlowTrainer(TrainerBase):
    """Takes 0.3 s for each tensor that it sends."""

    walks = 9
    pause_s = 0.3

    def hurry(self) -> None:
        self.pause_s = 0.0

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.walks = 0
        return super().send_checkpoint_weights(*args, **kwargs)

    def named_weights(self) -> Any:
        self.walks += 1
        sends = self.walks == 2  # the first one only looks whether the model is still the same
        for pair in self.model.state_dict().items():
            time.sleep(self.pause_s * sends)
            yield pair


@pytest.mark.parametrize("victim", ["trainer", "rollout"])
def test_an_actor_killed_in_mid_transfer_is_named_and_the_others_go_on(actors: Any, victim: str) -> None:
    # A fast trainer would be done, and `other` whole, while a slow rollout still loads.
    trainer, one, other = actors(SlowTrainer), actors(Rollout, 1), actors(Rollout, 2)
    manager = CheckpointEngineManager([trainer], [one, other], bucket_size=500, timeout_s=60)
    get([a.ping.remote() for a in (trainer, one, other)])
    killed: list[float] = []

    def kill() -> None:
        time.sleep(2.5)
        killed.append(time.monotonic())
        ray.kill(trainer if victim == "trainer" else one)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(PeerLost) as caught:
        manager.sync_weights()
    took = time.monotonic() - killed[0]
    thread.join()
    assert took < 2 + 1.5
    assert caught.value.phase == "transfer"
    assert caught.value.actors == (("trainer[0]",) if victim == "trainer" else ("rollout[0]",))
    survivors = [other, one if victim == "trainer" else trainer]
    get([a.ping.remote() for a in survivors], 2)
    assert get(other.checkpoint_status.remote()).contents is Contents.MIXED
    assert caught.value.versions["rollout[1]"] == 0
    fresh = actors(Trainer, 9) if victim == "trainer" else trainer
    if victim == "rollout":
        get(trainer.hurry.remote())
    with CheckpointEngineManager([fresh], [other], timeout_s=60) as again:
        again.sync_weights()
        assert get(other.digests.remote()) == get(fresh.digests.remote())
        assert get(other.checkpoint_status.remote()).contents is Contents.WHOLE


def test_an_error_in_the_trainer_reaches_the_driver_with_its_type_and_the_next_sync_works(actors: Any) -> None:
    @ray.remote(num_cpus=0.1)
    class Breaks(TrainerBase):
        broken = True
        sending = False

        def mend(self) -> None:
            self.broken = False

        def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
            self.sending, self.walks = True, 0
            return super().send_checkpoint_weights(*args, **kwargs)

        def named_weights(self) -> Any:
            for i, pair in enumerate(self.model.state_dict().items()):
                self.walks = getattr(self, "walks", 0) + (i == 0)
                # The first walk while sending compares the manifest, the second one sends.
                if self.broken and self.sending and self.walks == 2 and i == 9:
                    raise KeyError("tensor 9 is not there")
                yield pair

    trainer, rollouts = actors(Breaks), [actors(Rollout, 1), actors(Rollout, 2)]
    get([a.ping.remote() for a in (trainer, *rollouts)])
    with CheckpointEngineManager([trainer], rollouts, timeout_s=60, bucket_size=300) as manager:
        start = time.monotonic()
        with pytest.raises(SyncError, match="tensor 9 is not there") as caught:
            manager.sync_weights()
        assert time.monotonic() - start < 5
        assert caught.value.cause_type == "KeyError"
        assert caught.value.actors == ("trainer[0]",)
        assert caught.value.phase == "transfer"
        assert "in named_weights" in caught.value.cause_traceback
        get([r.ping.remote() for r in rollouts], 2)
        get(trainer.mend.remote())
        manager.sync_weights()
        expected = get(trainer.digests.remote())
        assert get([r.digests.remote() for r in rollouts]) == [expected, expected]


def test_a_rollout_that_hangs_in_init_is_named_at_the_deadline(actors: Any) -> None:
    @ray.remote(num_cpus=0.1)
    class Hangs(RolloutBase):
        def start_checkpoint(self, key: str, op: str, request: Any, wait_s: float = 0.0) -> Any:
            if op == "connect":
                time.sleep(60)
            return super().start_checkpoint(key, op, request, wait_s)

    trainer, rollouts = actors(Trainer), [actors(Rollout, 1), actors(Hangs, 2)]
    get([a.ping.remote() for a in (trainer, *rollouts)])
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=5)
    start = time.monotonic()
    with pytest.raises(SyncTimeout) as caught:
        manager.sync_weights()
    assert 4.5 < time.monotonic() - start < 8
    assert caught.value.phase == "init"
    assert caught.value.actors == ("rollout[1]",)
    get([trainer.ping.remote(), rollouts[0].ping.remote()], 2)
    with CheckpointEngineManager([trainer], rollouts[:1], timeout_s=30) as manager:
        manager.sync_weights()
        assert get(rollouts[0].digests.remote()) == get(trainer.digests.remote())


def test_a_rollout_killed_before_the_sync_is_named(actors: Any) -> None:
    trainer, rollouts = actors(Trainer), [actors(Rollout, 1), actors(Rollout, 2)]
    manager = CheckpointEngineManager([trainer], rollouts, timeout_s=30)
    manager.sync_weights()
    pid = get(rollouts[1].pid.remote())
    ray.kill(rollouts[1])
    while os.path.exists(f"/proc/{pid}"):  # on a busy machine it could take part in a whole sync until then
        time.sleep(0.01)
    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"rollout\[1\]") as caught:
        manager.sync_weights()
    assert time.monotonic() - start < 5
    assert caught.value.actors == ("rollout[1]",)
    assert caught.value.versions == {"rollout[0]": 1, "rollout[1]": None}


def test_a_slow_receiver_is_waited_for(actors: Any) -> None:
    trainer, rollout = actors(Trainer), actors(SlowRollout, 1, 0.1)
    with CheckpointEngineManager([trainer], [rollout], bucket_size=1000, timeout_s=60) as manager:
        manager.sync_weights()
        assert get(rollout.digests.remote()) == get(trainer.digests.remote())


def test_status_answers_while_a_sync_runs(actors: Any) -> None:
    trainer, rollout = actors(Trainer), actors(SlowRollout, 1, 0.2)
    with CheckpointEngineManager([trainer], [rollout], bucket_size=500, timeout_s=60) as manager:
        get([trainer.ping.remote(), rollout.ping.remote()])
        thread = threading.Thread(target=manager.sync_weights)
        thread.start()
        seen = []
        while thread.is_alive():
            start = time.monotonic()
            seen.append(get(rollout.checkpoint_status.remote()))
            assert time.monotonic() - start < 1
            time.sleep(0.05)
        thread.join()
        updating = [s for s in seen if s.updating]
        assert updating
        assert {s.version for s in updating} == {0}
        steps = [s.step for s in updating if s.steps]
        assert steps == sorted(steps)
        assert len(set(steps)) > 3


# --- bad input -----------------------------------------------------------------------------------------------------


class TestBadInput:
    def test_no_trainers_or_rollouts(self, actors: Any) -> None:
        trainer, rollout = actors(Trainer), actors(Rollout)
        with pytest.raises(ConfigError, match="train_actors is empty"):
            CheckpointEngineManager([], [rollout])
        with pytest.raises(ConfigError, match="rollout_replicas is empty"):
            CheckpointEngineManager([trainer], [])

    def test_the_same_actor_twice(self, actors: Any) -> None:
        trainer, rollout = actors(Trainer), actors(Rollout)
        with pytest.raises(ConfigError, match=r"rollout\[1\] is the same actor as rollout\[0\]"):
            CheckpointEngineManager([trainer], [rollout, rollout])
        with pytest.raises(ConfigError, match=r"trainer\[1\] is the same actor as trainer\[0\]"):
            CheckpointEngineManager([trainer, trainer], [rollout])

    def test_an_actor_without_the_mixin(self, actors: Any) -> None:
        @ray.remote(num_cpus=0)
        class Bare:
            pass

        trainer, rollout, bare = actors(Trainer), actors(Rollout), actors(Bare)
        with pytest.raises(UnsupportedActor, match=r"rollout\[0\] has no prepare_checkpoint_engine.*RolloutActorMixin"):
            CheckpointEngineManager([trainer], [bare])
        with pytest.raises(UnsupportedActor, match=r"trainer\[0\] .*TrainActorMixin"):
            CheckpointEngineManager([bare], [rollout])
        with pytest.raises(UnsupportedActor, match=r"trainer\[0\]"):
            CheckpointEngineManager([rollout], [rollout])

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"weight_sync_mode": "rdma"}, "weight_sync_mode is 'rdma'.*auto, nccl, hccl, gloo, ipc, naive"),
            ({"bucket_size": 0}, "bucket_size is 0"),
            ({"bucket_size": -1}, "bucket_size is -1"),
            ({"timeout_s": 0}, "timeout_s is 0"),
            ({"timeout_s": float("inf")}, "not endless"),
            ({"timeout_s": float("nan")}, "timeout_s is nan"),
            ({"sleep_level": -1}, "sleep_level is -1"),
        ],
    )
    def test_arguments(self, actors: Any, kwargs: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            CheckpointEngineManager([actors(Trainer)], [actors(Rollout)], **kwargs)

    def test_in_flight(self, actors: Any) -> None:
        manager = CheckpointEngineManager([actors(Trainer)], [actors(Rollout)])
        with pytest.raises(ConfigError, match="in_flight is 'drop'"):
            manager.sync_weights(in_flight="drop")

    @pytest.mark.parametrize(
        ("mode", "needs"),
        [
            ("nccl", "cuda device"),
            pytest.param(
                "hccl", "npu device.* torch_npu with CANN", marks=pytest.mark.cpu("hccl has its devices there")
            ),
        ],
    )
    def test_a_transport_without_its_device(self, actors: Any, mode: str, needs: str) -> None:
        rollout = actors(Rollout)
        before = get(rollout.digests.remote())
        manager = CheckpointEngineManager([actors(Trainer)], [rollout], weight_sync_mode=mode, timeout_s=30)
        with pytest.raises(ConfigError, match=rf"weight_sync_mode='{mode}' needs every model on a {needs}"):
            manager.sync_weights()
        assert get(rollout.digests.remote()) == before

    def test_a_trainer_with_no_weights(self, actors: Any) -> None:
        @ray.remote(num_cpus=0)
        class Empty(TrainerBase):
            def __init__(self) -> None:
                self.model = torch.nn.ReLU()

        manager = CheckpointEngineManager([actors(Empty)], [actors(Rollout)], timeout_s=30)
        with pytest.raises(ConfigError, match=r"trainer\[0\].*no weights"):
            manager.sync_weights()

    def test_two_tensors_of_one_name(self, actors: Any) -> None:
        @ray.remote(num_cpus=0)
        class Twice(TrainerBase):
            def named_weights(self) -> Any:
                yield "a", torch.ones(2)
                yield "a", torch.ones(2)

        manager = CheckpointEngineManager([actors(Twice)], [actors(Rollout)], timeout_s=30)
        with pytest.raises(ConfigError, match=r"trainer\[0\].*'a'"):
            manager.sync_weights()

    def test_names_shapes_and_dtypes_that_the_rollout_does_not_know_are_all_listed(self, actors: Any) -> None:
        @ray.remote(num_cpus=0)
        class Other(TrainerBase):
            def __init__(self) -> None:
                super().__init__()
                self.model.extra = torch.nn.Parameter(torch.ones(2))
                self.model.norm = torch.nn.LayerNorm(4)
                self.model.table = torch.ones(8, dtype=torch.bool)
                del self.model.lm_head
                placed(self.model)

        trainer, rollout = actors(Other), actors(Rollout)
        before = get(rollout.digests.remote())
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30)
        with pytest.raises(ManifestMismatch, match="nothing was sent") as caught:
            manager.sync_weights()
        for name in ("extra", "norm.weight", "norm.bias", "table", "lm_head.weight"):
            assert name in str(caught.value)
        assert len(caught.value.problems) == 5
        assert get(rollout.digests.remote()) == before
        assert get(rollout.weights_version.remote()) == 0

    def test_a_hundred_unknown_names_list_ten(self, actors: Any) -> None:
        @ray.remote(num_cpus=0)
        class Many(TrainerBase):
            def named_weights(self) -> Any:
                yield from self.model.state_dict().items()
                for i in range(100):
                    yield f"more.{i}", torch.ones_like(self.model.norm.bias)

        manager = CheckpointEngineManager([actors(Many)], [actors(Rollout)], timeout_s=30)
        with pytest.raises(ManifestMismatch, match="and 90 more") as caught:
            manager.sync_weights()
        assert len(caught.value.problems) == 100

    def test_a_dead_actor(self, actors: Any) -> None:
        trainer, rollout = actors(Trainer), actors(Rollout)
        get([trainer.ping.remote(), rollout.ping.remote()])
        ray.kill(trainer)
        manager = CheckpointEngineManager([trainer], [rollout], timeout_s=30)
        with pytest.raises(PeerLost, match=r"trainer\[0\]"):
            manager.sync_weights()
        assert get(rollout.weights_version.remote()) == 0

    def test_an_actor_that_holds_no_model(self, actors: Any) -> None:
        @ray.remote(num_cpus=0)
        class Nothing(RolloutBase):
            def __init__(self) -> None:
                pass

        manager = CheckpointEngineManager([actors(Trainer)], [actors(Nothing)], timeout_s=30)
        with pytest.raises(UnsupportedActor, match=r"rollout\[0\].*neither self.llm nor self.model"):
            manager.sync_weights()

    def test_an_adapter_that_cannot_be_merged_is_refused_by_name(self, actors: Any) -> None:
        @ray.remote(num_cpus=0)
        class Adapted(TrainerBase):
            def __init__(self) -> None:
                super().__init__()
                from peft import IA3Config, get_peft_model

                self.model = get_peft_model(self.model, IA3Config(target_modules=["q"], feedforward_modules=[]))

        manager = CheckpointEngineManager([actors(Adapted)], [actors(Rollout)], timeout_s=60)
        with pytest.raises(UnsupportedModel, match=r"trainer\[0\].*adapter default is of type IA3"):
            manager.sync_weights()

    def test_a_closed_manager(self, actors: Any) -> None:
        manager = CheckpointEngineManager([actors(Trainer)], [actors(Rollout)])
        manager.close()
        manager.close()
        with pytest.raises(ConfigError, match="was closed"):
            manager.sync_weights()
