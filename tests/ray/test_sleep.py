"""Sleep and wake of rollouts, against a double that keeps to vLLM's rules (``tests/engine_double.py``)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from tests.actors import Rollout, Trainer, TrainerBase, at_launch, no_power
from tests.engine_double import KINDS, TAGS, Device, start
from tests.ray.test_lora import Adapted
from twinkle_ray import CheckpointEngineManager, ConfigError, ReplicaUnavailable, SyncError
from twinkle_ray.checking import CheckFailed
from twinkle_ray.metrics import State
from twinkle_ray.types import Contents

pytestmark = pytest.mark.usefixtures("ray_cluster")

BOTH = ("kv_cache", "weights")


def get(ref: Any, timeout: float = 60) -> Any:
    return ray.get(ref, timeout=timeout)


class Bench:
    """One trainer and rollouts, under colocated and separate managers."""

    def __init__(self, trainer: Any, rollouts: list[Any]) -> None:
        self.trainer, self.rollouts = trainer, rollouts
        self.seeds = itertools.count(1)

    def manager(self, **how: Any) -> CheckpointEngineManager:
        return CheckpointEngineManager([self.trainer], self.rollouts, **{"timeout_s": 60, "is_colocated": True, **how})

    def step(self) -> None:
        get(self.trainer.step.remote(next(self.seeds)))

    def truth(self) -> list[tuple[str, ...]]:
        """What sleeps, by the engines' own books; none of them may have died."""
        assert get([r.dead.remote() for r in self.rollouts]) == [""] * len(self.rollouts)
        return get([r.truth.remote() for r in self.rollouts])

    def told(self) -> list[tuple[str, ...]]:
        return [status.asleep for status in get([r.checkpoint_status.remote() for r in self.rollouts])]

    def generate(self, prompt: str = "a") -> list[Any]:
        """By rollout its logits, or why it was refused."""
        answers = get([r.generate.remote(prompt) for r in self.rollouts])
        return [answer if isinstance(answer, str) else answer.logits for answer in answers]

    def serve(self, prompt: str = "a") -> bool:
        """Whether all of them compute what the trainer's model computes now."""
        wanted = get(self.trainer.logits.remote())
        return all(isinstance(found, torch.Tensor) and torch.equal(found, wanted) for found in self.generate(prompt))

    def hold(self) -> bool:
        """Whether all of them hold the trainer's bytes."""
        return get([r.digests.remote() for r in self.rollouts]) == [get(self.trainer.digests.remote())] * len(
            self.rollouts
        )


@pytest.fixture(scope="module")
def shared(ray_cluster: str) -> Iterator[Bench]:
    """A rollout of each kind, used by many tests; each of them leaves them awake and whole."""
    trainer = Trainer.remote(0)
    rollouts = [start(kind) for kind in KINDS]
    yield Bench(trainer, rollouts)
    for actor in (trainer, *rollouts):
        ray.kill(actor)


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    yield shared
    get([r.fail_at.remote() for r in shared.rollouts])
    with shared.manager() as manager:
        manager.sync_and_wake()
    assert shared.truth() == [()] * len(KINDS)
    assert shared.serve("end of a test")
    get([r.events.remote() for r in shared.rollouts])


class MeteredTrainer(TrainerBase):
    """On a device with a limit: its model is 10, what torch's allocator keeps of a train step 6."""

    def __init__(self, device: Any) -> None:
        super().__init__(0)
        self.meter = device
        self.note("trainer is there", 10)

    def note(self, event: str, change: int) -> None:
        ray.get(self.meter.note.remote(event, change), timeout=30)

    def train(self, seed: int) -> None:
        self.note("train", 6)
        self.step(seed)

    def release_cached_memory(self) -> None:
        self.note("release trainer cache", -6)

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.note("load", 0)
        return super().send_checkpoint_weights(*args, **kwargs)

    def offload_to_cpu(self) -> None:
        self.note("offload trainer", -10)

    def reload_to_gpu(self) -> None:
        self.note("reload trainer", 10)


@pytest.mark.parametrize("naive", [False, True])
def test_a26_the_order_of_the_cycle_keeps_the_peak_of_memory_low(naive: bool) -> None:
    device = Device.remote(limit=25)
    rollout = start("llm in child process", device=device)
    get(rollout.truth.remote())
    get(rollout.sleep_checkpoint.remote())
    trainer = ray.remote(num_cpus=0.1)(MeteredTrainer).remote(device)
    mode = "naive" if naive else "auto"
    with CheckpointEngineManager([trainer], [rollout], is_colocated=True, weight_sync_mode=mode) as manager:
        get(trainer.train.remote(1))
        get(device.seen.remote())

        manager.sync_and_wake(offload=True)

        events, peak, used = get(device.seen.remote())
        cycle = ["release trainer cache", "wake weights", "load", "offload trainer", "wake kv_cache"]
        if naive:  # the seeds offload before they update
            cycle = ["release trainer cache", "wake weights", "offload trainer", "load", "wake kv_cache"]
        # An engine that has computed nothing has nothing to reset.
        assert [event for event in events if event != "reset"] == cycle
        assert peak <= 25
        assert used == 20
        assert isinstance(get(rollout.generate.remote()).logits, torch.Tensor)
        manager.sleep_rollout()
        manager.reload_trainers()
        get(trainer.train.remote(2))
        manager.sync_and_wake(offload=True)
        assert torch.equal(get(rollout.generate.remote()).logits, get(trainer.logits.remote()))
        assert get(device.seen.remote())[1] <= 25
    for actor in (device, rollout, trainer):
        ray.kill(actor)


def test_whoever_is_woken_by_hand_finds_the_memory_that_trainers_do_not_use() -> None:
    device = Device.remote(limit=40)
    rollout = start("llm in child process", device=device)
    get(rollout.truth.remote())
    get(rollout.sleep_checkpoint.remote())
    trainer = ray.remote(num_cpus=0.1)(MeteredTrainer).remote(device)
    with CheckpointEngineManager([trainer], [rollout], is_colocated=True) as manager:
        get(trainer.train.remote(1))
        get(device.seen.remote())
        manager.sync_and_wake()
        assert manager._watch._held["rollout[0]"][0] is State.WHOLE
        manager.sleep_rollout()
        assert manager._watch._held["rollout[0]"][0] is State.ASLEEP
        get(device.seen.remote())
        with pytest.raises(ConfigError):
            manager.wake_up_rollout(["lunch"])
        assert get(device.seen.remote())[0] == []
        manager.wake_up_rollout(["weights"])
        assert get(device.seen.remote())[0][:2] == ["release trainer cache", "wake weights"]
        assert manager._watch._held["rollout[0]"][0] is State.WHOLE
        manager.sleep_rollout()
        ray.kill(trainer)
        manager.wake_up_rollout()
        assert isinstance(get(rollout.generate.remote()).logits, torch.Tensor)
    for actor in (device, rollout, trainer):
        ray.kill(actor)


def test_a28_level_two_is_one_in_colocated_mode_with_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "twinkle_ray"), bench.manager(sleep_level=2) as manager:
        manager.sync_and_wake()
        manager.sleep_rollout()
        manager.wake_up_rollout()
    assert manager.sleep_level == 1
    (warning,) = [r.getMessage() for r in caplog.records if "capped to 1" in r.getMessage()]
    assert "discards the weights" in warning
    assert bench.hold()
    assert bench.serve()


def test_a28_weights_that_level_two_discarded_are_not_served_before_they_are_back(bench: Bench) -> None:
    with bench.manager(is_colocated=False, sleep_level=2) as manager:
        bench.step()
        manager.sync_weights()
        assert bench.serve()
        manager.sleep_rollout()
        with pytest.raises(ConfigError, match=r"rollout\[0\].*slept at level 2; wake its weights before"):
            manager.wake_up_rollout(["kv_cache"])
        with pytest.raises(ReplicaUnavailable, match=r"asleep \(kv_cache, weights\)"):
            manager.sync_weights()
        manager.wake_up_rollout()
        assert bench.truth() == [()] * len(KINDS)
        assert all("discarded by a sleep at level 2; manager.sync_weights()" in why for why in bench.generate())
        assert {s.contents for s in get([r.checkpoint_status.remote() for r in bench.rollouts])} == {Contents.NONE}
        assert not bench.hold()

        manager.sync_weights()

        assert bench.hold()
        assert bench.serve("another")
        # And by the users' own calls, with sync_and_wake() to mend it.
        get([r.of_the_users_own.remote("sleep", 2) for r in bench.rollouts])
        assert all("asleep (kv_cache, weights)" in why for why in bench.generate())
        get([r.of_the_users_own.remote("wake_up") for r in bench.rollouts])
        assert all("discarded" in why for why in bench.generate())
        manager.sync_and_wake()
        assert bench.serve("a third one")


def test_a28_the_base_comes_back_before_an_adapter(reused: Any) -> None:
    trainer = reused(Adapted)
    rollout = start("async llm", lora=True)
    with CheckpointEngineManager([trainer], [rollout], sleep_level=2) as manager:
        first, second = (manager.sync_weights(merge_and_sync=False) for _ in range(2))
        assert (first.base, second.base) == ("plain", "")
        manager.sleep_rollout()
        manager.wake_up_rollout()
        assert isinstance(get(rollout.generate.remote()), str)
        assert manager.sync_weights(merge_and_sync=False).base == "plain"
        found = get(rollout.generate.remote()).logits
        torch.testing.assert_close(found, get(trainer.logits.remote()))
    with CheckpointEngineManager([trainer], [rollout], is_colocated=True) as manager:  # both modes of LoRA
        for merge in (True, False, True):
            manager.sync_and_wake(merge_and_sync=merge)
            found = get(rollout.generate.remote(f"merged: {merge}")).logits
            torch.testing.assert_close(found, get(trainer.logits.remote()))
    assert get(rollout.dead.remote()) == ""
    ray.kill(rollout)


def test_a29_requests_at_an_engine_that_sleeps_or_half_of_it(bench: Bench) -> None:
    with bench.manager() as manager:
        manager.sync_and_wake()
        for awake, mend in ((None, "()"), ("weights", "(['kv_cache'])"), ("kv_cache", "(['weights'])")):
            manager.sleep_rollout()
            if awake is not None:
                manager.wake_up_rollout([awake])
            asleep = tuple(tag for tag in BOTH if tag != awake)
            assert bench.truth() == bench.told() == [asleep] * len(KINDS)
            wanted = f"this rollout is asleep ({', '.join(asleep)}); wake it with manager.wake_up_rollout{mend} before"
            start = time.monotonic()
            assert all(why.startswith(wanted) for why in bench.generate()), bench.generate()
            assert time.monotonic() - start < 4  # and not once the door has been waited for
            manager.wake_up_rollout()
            assert bench.serve()


def test_a29_after_a_colocated_sync_the_cache_sleeps_until_it_is_woken(bench: Bench) -> None:
    with bench.manager() as manager:
        bench.step()
        manager.sync_weights()
        assert bench.truth() == [("kv_cache",)] * len(KINDS)
        assert all("wake_up_rollout(['kv_cache'])" in why for why in bench.generate())
        manager.wake_up_rollout(["kv_cache"])
        assert bench.serve("new")
        bench.step()
        manager.sync_weights()
        bench.step()
        manager.sync_weights()  # while the cache sleeps on
        manager.wake_up_rollout()
        assert bench.serve()  # of a prompt that was computed with other weights


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_a29_requests_that_run_end_by_the_policy_before_the_sleep(bench: Bench, in_flight: str) -> None:
    with bench.manager() as manager:
        manager.sync_and_wake()
        running = [r.generate.remote("long", 100) for r in bench.rollouts]
        time.sleep(0.1)
        manager.sleep_rollout(in_flight=in_flight)
        assert bench.truth() == [BOTH] * len(KINDS)
        outputs = get(running)
        # One that had not begun by then was refused.
        reasons = {output if isinstance(output, str) else output.reason for output in outputs}
        assert {r for r in reasons if "asleep" not in r} <= {"length" if in_flight == "wait" else "abort"}, reasons
        manager.wake_up_rollout()


def test_a29_the_users_own_sleep_leaves_no_request_waiting_for_ever(bench: Bench) -> None:
    with bench.manager() as manager:
        manager.sync_and_wake()
        running = [r.generate.remote("long", 1000) for r in bench.rollouts]
        time.sleep(0.3)
        get([r.of_the_users_own.remote("sleep") for r in bench.rollouts])
        assert {o if isinstance(o, str) else o.reason for o in get(running)} == {"abort"}
        assert bench.told() == bench.truth() == [BOTH] * len(KINDS)
        manager.wake_up_rollout()
        assert bench.serve("after")


def test_a30_what_wakes_is_what_the_trainer_sent(bench: Bench) -> None:
    with bench.manager() as manager:
        for round_ in range(3):
            bench.step()
            manager.sync_and_wake()
            assert bench.hold()
            assert bench.serve()
            manager.sleep_rollout()
            manager.wake_up_rollout()
            assert bench.hold(), round_  # and nothing older was read again
            manager.sleep_rollout()
    for events in get([r.events.remote() for r in bench.rollouts]):
        assert set(events) <= {"sleep", "wake weights", "wake kv_cache", "reset", "start weights", "start kv_cache"}


def test_a31_a_cycle_that_fails_midway_leaves_a_mixture_that_is_refused(bench: Bench) -> None:
    pair = Bench(bench.trainer, bench.rollouts[1:])
    with pair.manager(bucket_size=1024) as manager:
        manager.sync_and_wake()
        before = get([r.weights_version.remote() for r in pair.rollouts])
        bench.step()
        digests = get(bench.trainer.digests.remote())
        get(pair.rollouts[1].call.remote(lambda _: at_launch(3, no_power)))
        with pytest.raises(SyncError, match="no more power") as caught:
            manager.sync_and_wake()
        assert caught.value.actors == ("rollout[1]",)
        # Each reads the trainer's memory for itself, so the other one may have all of it by then.
        held = get([r.weights_version.remote() for r in pair.rollouts])
        assert held[1] == before[1]
        assert held[0] in (before[0], before[0] + 1)
        assert caught.value.versions == {"rollout[0]": held[0], "rollout[1]": held[1]}
        assert pair.truth() == pair.told() == [("kv_cache",)] * 2
        manager.wake_up_rollout()
        assert "mixture of weights" in pair.generate()[1]
        assert get(bench.trainer.digests.remote()) == digests
        manager.sleep_rollout()
        manager.wake_up_rollout()
        assert "mixture of weights" in pair.generate()[1]  # a sleep does not mend it
        manager.sync_and_wake()
        assert pair.hold()
        assert pair.serve()


STEPS = ("sleep", "wake weights", "first byte", "mid transfer", "reset", "wake kv_cache")


def cases() -> Iterator[Any]:
    """Step, kinds of two rollouts, and which of them fails: of each kind one, and those in the transfer of one kind."""
    for step, first, who in itertools.product(STEPS, range(len(KINDS)), range(2)):
        kinds = first, (first + 1) % len(KINDS)
        long = who == 1 or (first > 0 and step in ("first byte", "mid transfer", "reset"))
        name = f"{step}: {KINDS[kinds[who]]} beside {KINDS[kinds[1 - who]]}"
        yield pytest.param(step, kinds, who, id=name, marks=[pytest.mark.soak] if long else [])


@pytest.mark.parametrize(("step", "kinds", "who"), list(cases()))
def test_a_step_that_fails_leaves_sleep_as_it_is_told_and_a_retry_works(
    bench: Bench, step: str, kinds: tuple[int, int], who: int
) -> None:
    bench = Bench(bench.trainer, [bench.rollouts[kind] for kind in kinds])
    with bench.manager(**({"bucket_size": 1024} if step == "mid transfer" else {})) as manager:
        manager.sync_and_wake()
        bench.generate()  # or nothing is there to be reset
        get(bench.trainer.step.remote(100 + STEPS.index(step)))
        if step in ("first byte", "mid transfer"):
            number = 0 if step == "first byte" else 3
            get(bench.rollouts[who].call.remote(lambda _: at_launch(number, no_power)))
        else:
            get(bench.rollouts[who].fail_at.remote(step))

        with pytest.raises(SyncError, match="no more power") as caught:
            manager.sync_and_wake()

        assert caught.value.actors == (f"rollout[{who}]",)
        truth = bench.truth()
        after = {"sleep": (), "wake weights": BOTH, "wake kv_cache": ("kv_cache",)}.get(step, ("kv_cache",))
        other = {"sleep": BOTH, "wake weights": ("kv_cache",), "wake kv_cache": ()}.get(step, ("kv_cache",))
        assert truth == [after if index == who else other for index in range(2)]
        assert bench.told() == truth
        if step in ("sleep", "wake weights", "wake kv_cache"):
            assert caught.value.asleep == {f"rollout[{index}]": tags for index, tags in enumerate(truth)}
            assert f"rollout[{who}] " + (f"asleep ({', '.join(after)})" if after else "awake") in str(caught.value)
        answers = bench.generate()
        assert [isinstance(answer, str) for answer in answers] == [bool(tags) for tags in truth]
        assert all(isinstance(a, str) or not a.isnan().any() for a in answers)
        bench.truth()

        manager.sync_and_wake()

        assert bench.truth() == bench.told() == [(), ()]
        assert bench.hold()
        assert bench.serve()


def test_sleep_and_wake_may_be_called_twice_and_by_anybody(bench: Bench) -> None:
    with bench.manager() as manager, bench.manager() as other:
        manager.sync_and_wake()
        manager.sleep_rollout()
        assert manager.check().tensors  # a sync of this manager wakes them
        manager.wake_up_rollout()
        get([r.events.remote() for r in bench.rollouts])
        get(bench.rollouts[0].of_the_users_own.remote("sleep"))
        manager.sleep_rollout()
        other.sleep_rollout()
        other.wake_up_rollout(["weights"])
        manager.wake_up_rollout(["weights", "kv_cache"])  # one of which is awake
        other.wake_up_rollout()
        assert get([r.events.remote() for r in bench.rollouts]) == [["sleep", "wake weights", "wake kv_cache"]] * 3
        manager.wake_up_rollout(["weights"])
        manager.sleep_rollout()
        manager.wake_up_rollout(["weights"])
        manager.sleep_rollout()  # of the weights, beside the cache
        assert bench.truth() == [BOTH] * len(KINDS)
        manager.wake_up_rollout()
        assert bench.serve()


def test_bad_input_is_refused_before_anybody_sleeps_or_wakes(bench: Bench) -> None:
    with bench.manager() as manager:
        manager.sync_weights()
        with pytest.raises(
            ConfigError, match="there is no tag 'weight' that could wake; the tags are kv_cache, weights"
        ):
            manager.wake_up_rollout(["kv_cache", "weight"])
        assert bench.truth() == [("kv_cache",)] * len(KINDS)
        with pytest.raises(ConfigError, match=r"in_flight is 'keep'; before a sleep it must be"):
            manager.sleep_rollout(in_flight="keep")
        with pytest.raises(ConfigError, match="in_flight='keep' is not for colocated mode"):
            manager.sync_weights(in_flight="keep")


def test_rollouts_without_a_sleep_mode_are_named_before_anybody_sleeps(bench: Bench) -> None:
    module = Rollout.remote()
    rollouts = [bench.rollouts[0], module]
    with CheckpointEngineManager([bench.trainer], rollouts, is_colocated=True, timeout_s=60) as manager:
        for call in (manager.sleep_rollout, manager.sync_weights, manager.sync_and_wake):
            with pytest.raises(
                ConfigError, match=r"^rollout\[1\]: a plain torch module cannot sleep; use sleep_level=0"
            ):
                call()
        with pytest.raises(CheckFailed, match=r"rollout\[1\]: a plain torch module cannot sleep"):
            manager.check()
        assert get(bench.rollouts[0].truth.remote()) == ()
    with CheckpointEngineManager([bench.trainer], rollouts, is_colocated=True, sleep_level=0, timeout_s=60) as manager:
        bench.step()
        manager.sleep_rollout()
        manager.sync_and_wake()
        assert get(module.digests.remote()) == get(bench.trainer.digests.remote())
        assert get(bench.rollouts[0].truth.remote()) == ()
    ray.kill(module)


def test_a_rollout_that_dies_before_it_sleeps_is_dropped_if_it_may_be() -> None:
    trainer, rollouts = Trainer.remote(0), [start("llm in process") for _ in range(2)]
    get([r.truth.remote() for r in rollouts])
    with CheckpointEngineManager([trainer], rollouts, is_colocated=True, on_dead_rollout="drop") as manager:
        manager.sync_and_wake()
        ray.kill(rollouts[0])
        assert manager.sync_and_wake().dropped == ("rollout[0]",)
        assert get(rollouts[1].digests.remote()) == get(trainer.digests.remote())
        assert get(rollouts[1].truth.remote()) == ()
    for actor in (trainer, rollouts[1]):
        ray.kill(actor)


class MovingTrainer(TrainerBase):
    """Writes down what becomes of its model."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.calls: list[str] = []

    def offload_to_cpu(self) -> None:
        self.calls.append("offload")
        super().offload_to_cpu()

    def reload_to_gpu(self) -> None:
        self.calls.append("reload")
        super().reload_to_gpu()

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("send")
        return super().send_checkpoint_weights(*args, **kwargs)

    def called(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_naive_mode_makes_its_own_train_group(bench: Bench) -> None:
    trainer = ray.remote(num_cpus=0.1)(MovingTrainer).remote(7)
    how: dict[str, Any] = {"weight_sync_mode": "naive", "is_colocated": True, "timeout_s": 60, "bucket_size": 1024}
    rollouts = bench.rollouts[:2]
    with CheckpointEngineManager([trainer], rollouts, **how) as manager:
        report = manager.sync_and_wake()
        calls = get(trainer.called.remote())
        assert (calls[0], calls[-1]) == ("offload", "reload")
        assert set(calls[1:-1]) == {"send"}
        assert report.replicas[0].version == report.version
        assert get([r.digests.remote() for r in rollouts]) == [get(trainer.digests.remote())] * 2
        assert manager.base_sync_done is True
        get(rollouts[1].call.remote(lambda _: at_launch(3, no_power)))
        with pytest.raises(SyncError, match="no more power"):
            manager.sync_weights()
        assert get(trainer.called.remote())[-1] == "reload"
    ray.kill(trainer)


def test_tags_are_those_of_vllm() -> None:
    from twinkle_ray.residency import TAGS as OURS

    assert sorted(TAGS) == list(OURS)
