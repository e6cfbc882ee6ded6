"""Seed 004's driver: its calls and attributes, against actors that have only the seeds' methods and log every call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

from twinkle_ray import CheckpointEngineManager, ConfigError, SyncError

pytestmark = pytest.mark.usefixtures("ray_cluster")


@ray.remote(num_cpus=0)
class Log:
    def __init__(self) -> None:
        self.events: list[tuple[float, float, str, str, Any]] = []

    def add(self, began: float, ended: float, who: str, what: str, arguments: Any) -> None:
        self.events.append((began, ended, who, what, arguments))

    def all(self) -> list[tuple[float, float, str, str, Any]]:
        return sorted(self.events)


class Logged:
    """Does nothing but record, slowly enough that concurrency shows; can be told to fail at one method."""

    says: Any = None

    def say(self, says: Any) -> None:
        """What to return when weights were moved."""
        self.says = says

    def __init__(self, log: Any, who: str, fail_at: str = "", slow: float = 0.05) -> None:
        self.log, self.who, self.fail_at, self.slow = log, who, fail_at, slow

    def note(self, what: str, arguments: Any = None) -> None:
        began = time.time()
        time.sleep(self.slow)
        ray.get(self.log.add.remote(began, time.time(), self.who, what, arguments), timeout=10)
        if what == self.fail_at:
            raise ValueError(f"{self.who} was told to fail at {what}")


class Engine(Logged):
    def prepare_checkpoint_engine(self, is_master: bool) -> Any:
        self.note("prepare", is_master)
        return {"address": "of the master"} if is_master else None

    def init_checkpoint_process_group(self, rank: int, world_size: int, master_metadata: Any) -> None:
        self.note("init", (rank, world_size, master_metadata))

    def finalize_checkpoint_engine(self) -> None:
        self.note("finalize")


@ray.remote(num_cpus=0)
class ClassicTrainer(Engine):
    def merge_lora(self) -> None:
        self.note("merge")

    def unmerge_lora(self) -> None:
        self.note("unmerge")

    def get_peft_config_dict(self) -> dict[str, Any]:
        return {"r": 8}

    def send_checkpoint_weights(self, adapter_only: bool = False) -> None:
        self.note("send", adapter_only)


@ray.remote(num_cpus=0)
class ClassicRollout(Engine):
    def receive_checkpoint_weights(self, base_sync_done: bool, peft_config: Any) -> Any:
        self.note("receive", (base_sync_done, peft_config))
        return self.says


class ClassicReplica(Logged):
    """The seeds' replica object of the driver."""

    def __init__(self, log: Any, who: str, primary: Any, **kwargs: Any) -> None:
        super().__init__(log, who, **kwargs)
        self.primary = primary

    def sleep(self, level: int) -> None:
        self.note("sleep", level)

    def wake_up(self, tags: list[str] | None) -> None:
        self.note("wake_up", tags)


class TrainGroup(Logged):
    def merge_lora(self) -> None:
        self.note("merge")

    def unmerge_lora(self) -> None:
        self.note("unmerge")

    def offload_to_cpu(self) -> None:
        self.note("offload")

    def reload_to_gpu(self) -> None:
        self.note("reload")

    def update_weights(self, adapter_only: bool) -> Any:
        self.note("update", adapter_only)
        return self.says


@pytest.fixture
def log() -> Any:
    return Log.remote()


def setting(log: Any, fail: dict[str, str] | None = None) -> tuple[list[Any], list[Any]]:
    """Two trainers, and two replicas in the seeds' form."""
    fail = fail or {}
    trainers = [ClassicTrainer.remote(log, f"t{i}", fail.get(f"t{i}", "")) for i in range(2)]
    rollouts = [ClassicRollout.remote(log, f"r{i}", fail.get(f"r{i}", "")) for i in range(2)]
    replicas = [
        ClassicReplica(log, f"replica{i}", r, fail_at=fail.get(f"replica{i}", "")) for i, r in enumerate(rollouts)
    ]
    return trainers, replicas


def order(log: Any) -> list[str]:
    """The kinds of events in order, each run of equal ones once."""
    kinds: list[str] = []
    for _, _, _, what, _ in ray.get(log.all.remote(), timeout=10):
        kind = {"send": "transfer", "receive": "transfer"}.get(what, what)
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return kinds


def calls(log: Any, what: str) -> dict[str, Any]:
    return {who: arguments for _, _, who, kind, arguments in ray.get(log.all.remote(), timeout=10) if kind == what}


def sent_by_t0(log: Any) -> list[bool]:
    events = ray.get(log.all.remote(), timeout=10)
    return [arguments for _, _, who, what, arguments in events if (who, what) == ("t0", "send")]


def overlap(log: Any, *kinds: str) -> bool:
    """Whether all events of these kinds were running at one moment."""
    spans = [(a, b) for a, b, _, what, _ in ray.get(log.all.remote(), timeout=10) if what in kinds]
    return max(a for a, _ in spans) < min(b for _, b in spans)


def test_the_seeds_flow_in_the_seeds_order(log: Any) -> None:
    trainers, replicas = setting(log)
    manager = CheckpointEngineManager(trainers, replicas, weight_sync_mode="nccl", train_group=None)
    assert manager.base_sync_done is False
    assert manager.is_colocated is False
    assert manager.sleep_level == 1
    assert manager.train_actors == trainers
    assert manager.rollout_actors == [r.primary for r in replicas]
    manager.sync_weights()
    assert order(log) == ["prepare", "init", "merge", "transfer", "unmerge", "finalize"]
    assert calls(log, "prepare") == {"t0": True, "t1": False, "r0": False, "r1": False}
    metadata = {"address": "of the master"}
    assert calls(log, "init") == {
        "t0": (0, 3, metadata),
        "t1": (-1, 3, metadata),
        "r0": (1, 3, metadata),
        "r1": (2, 3, metadata),
    }
    assert overlap(log, "init")
    assert overlap(log, "send", "receive")
    assert calls(log, "send") == {"t0": False, "t1": False}
    assert calls(log, "receive") == {"r0": (False, None), "r1": (False, None)}
    assert set(calls(log, "unmerge")) == {"t0", "t1"}
    assert set(calls(log, "finalize")) == {"t0", "t1", "r0", "r1"}
    assert manager.base_sync_done is True


def test_adapter_only_sends_the_adapter_on_the_first_sync_too(log: Any) -> None:
    trainers, replicas = setting(log)
    manager = CheckpointEngineManager(trainers, replicas, weight_sync_mode="nccl")
    manager.sync_weights(merge_and_sync=False)
    assert sent_by_t0(log) == [False, True]
    assert calls(log, "receive") == {"r0": (True, {"r": 8}), "r1": (True, {"r": 8})}
    assert "merge" not in order(log)
    manager.sync_weights(merge_and_sync=False)
    assert sent_by_t0(log) == [False, True, True]


def sent_each_time(log: Any, act: Callable[[bool], Any], kind: str, sequence: str) -> list[list[bool]]:
    """What each sync of a sequence sends: ``False`` is a base, ``True`` an adapter alone."""
    found, seen = [], 0
    for letter in sequence:
        act(letter == "T")
        logged = ray.get(log.all.remote(), timeout=10)
        events = [arguments for _, _, who, what, arguments in logged if (what, who[0]) == kind]
        found.append(events[seen:])
        seen = len(events)
    return found


def test_an_adapter_is_never_sent_onto_a_merged_base(log: Any) -> None:
    trainers, replicas = setting(log)
    for mode, kind in (("nccl", ("send", "t")), ("naive", ("update", "g"))):
        group = TrainGroup(log, "group", slow=0.0)
        manager = CheckpointEngineManager(trainers[:1], replicas[:1], weight_sync_mode=mode, train_group=group)
        sent = sent_each_time(log, manager.sync_weights, kind, "FTFFT")
        assert sent == [[False, True], [False], [False, True], [True], [False]], mode
        with pytest.raises(ConfigError, match="adapter='tenant' needs actors with"):
            manager.sync_weights(adapter="tenant")


@pytest.mark.parametrize(("who", "where"), [("t0", "send"), ("r1", "receive"), ("r0", "init"), ("t1", "merge")])
def test_what_was_begun_is_undone_when_a_step_fails(log: Any, who: str, where: str) -> None:
    trainers, replicas = setting(log, {who: where})
    manager = CheckpointEngineManager(trainers, replicas, weight_sync_mode="nccl", timeout_s=20)
    with pytest.raises(SyncError, match=f"{who} was told to fail at {where}") as caught:
        manager.sync_weights()
    assert caught.value.actors == ({"t": "trainer", "r": "rollout"}[who[0]] + f"[{who[1]}]",)
    assert caught.value.cause_type == "ValueError"
    if where != "init":
        assert set(calls(log, "unmerge")) == {"t0", "t1"}
    assert set(calls(log, "finalize")) == {"t0", "t1", "r0", "r1"}
    assert manager.base_sync_done is False


def test_colocated_sleeps_wakes_the_weights_syncs_and_leaves_the_cache_asleep(
    log: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainers, replicas = setting(log)
    with caplog.at_level(logging.WARNING, "twinkle_ray"):
        manager = CheckpointEngineManager(trainers, replicas, weight_sync_mode="nccl", is_colocated=True, sleep_level=2)
    assert manager.sleep_level == 1
    assert len([r for r in caplog.records if "capped to 1" in r.getMessage()]) == 1
    manager.sync_weights()
    assert order(log)[:3] == ["sleep", "wake_up", "prepare"]
    assert calls(log, "sleep") == {"replica0": 1, "replica1": 1}
    assert calls(log, "wake_up") == {"replica0": ["weights"], "replica1": ["weights"]}
    manager.wake_up_rollout(["kv_cache"])
    assert calls(log, "wake_up") == {"replica0": ["kv_cache"], "replica1": ["kv_cache"]}
    before = len(ray.get(log.all.remote(), timeout=10))
    manager.wake_up_rollout()  # nothing sleeps any more
    assert len(ray.get(log.all.remote(), timeout=10)) == before


def test_a_replica_that_fails_to_sleep_does_not_hide_the_one_that_sleeps(log: Any) -> None:
    trainers, replicas = setting(log, {"replica1": "sleep"})
    manager = CheckpointEngineManager(trainers, replicas, weight_sync_mode="nccl")
    told = r"replica1 was told to fail.*now rollout\[0\] asleep \(kv_cache, weights\); rollout\[1\] awake"
    with pytest.raises(SyncError, match=told) as caught:
        manager.sleep_rollout()
    assert caught.value.phase == "sleep"
    assert caught.value.actors == ("rollout[1]",)
    assert caught.value.cause_type == "ValueError"
    assert caught.value.asleep == {"rollout[0]": ("kv_cache", "weights"), "rollout[1]": ()}
    assert overlap(log, "sleep")
    manager.wake_up_rollout()
    assert calls(log, "wake_up") == {"replica0": None}


def test_sync_and_wake_is_the_whole_cycle_and_offloads_before_the_cache_wakes(log: Any) -> None:
    trainers, replicas = setting(log)
    group = TrainGroup(log, "group", slow=0.0)
    manager = CheckpointEngineManager(
        trainers, replicas, weight_sync_mode="naive", is_colocated=True, train_group=group
    )
    manager.sync_and_wake()
    cycle = ["sleep", "wake_up", "merge", "offload", "update", "reload", "unmerge", "wake_up"]
    assert order(log) == cycle
    manager.sync_and_wake(offload=True)
    manager.reload_trainers()
    offloaded = ["sleep", "wake_up", "merge", "offload", "update", "unmerge", "wake_up", "reload"]
    assert order(log)[len(cycle) :] == offloaded
    assert set(calls(log, "wake_up").values()) == {None}


def test_naive_mode_offloads_updates_reloads_and_unmerges(log: Any) -> None:
    trainers, replicas = setting(log)
    with pytest.raises(ConfigError, match=r"needs a train_group.*of actors with twinkle_ray\.mixins one is made"):
        CheckpointEngineManager(trainers, replicas, weight_sync_mode="naive", is_colocated=True)
    group = TrainGroup(log, "group", slow=0.0)
    manager = CheckpointEngineManager(
        trainers, replicas, weight_sync_mode="naive", is_colocated=True, train_group=group
    )
    manager.sync_weights()
    assert order(log) == ["sleep", "wake_up", "merge", "offload", "update", "reload", "unmerge"]
    assert calls(log, "update") == {"group": False}
    manager.sync_weights(merge_and_sync=False)
    assert calls(log, "update") == {"group": True}


@pytest.mark.parametrize("where", ["merge", "offload", "update", "reload"])
def test_naive_mode_undoes_what_it_did_when_a_step_fails(log: Any, where: str) -> None:
    trainers, replicas = setting(log)
    group = TrainGroup(log, "group", fail_at=where, slow=0.0)
    manager = CheckpointEngineManager(
        trainers, replicas, weight_sync_mode="naive", is_colocated=True, train_group=group
    )
    with pytest.raises(ValueError, match=f"fail at {where}"):
        manager.sync_weights()
    assert "unmerge" in order(log)
    if where != "merge":
        assert order(log)[-2:] == ["reload", "unmerge"]
    assert manager.base_sync_done is False


def test_an_undo_that_fails_is_a_note_and_the_others_are_done(log: Any) -> None:
    class Broken(TrainGroup):
        def reload_to_gpu(self) -> None:
            super().reload_to_gpu()
            raise OSError("the device is gone")

    trainers, replicas = setting(log)
    group = Broken(log, "group", fail_at="update", slow=0.0)
    manager = CheckpointEngineManager(
        trainers, replicas, weight_sync_mode="naive", is_colocated=True, train_group=group
    )
    with pytest.raises(ValueError, match="fail at update") as caught:
        manager.sync_weights()
    assert caught.value.__notes__ == ["then reload_to_gpu failed: OSError: the device is gone"]
    assert order(log)[-2:] == ["reload", "unmerge"]
    group.fail_at = ""
    with pytest.raises(OSError, match="the device is gone"):
        manager.sync_weights()
    assert order(log)[-2:] == ["reload", "unmerge"]
    assert manager.base_sync_done is False


def test_a35_a_failure_that_is_returned_is_raised(log: Any) -> None:
    trainers, replicas = setting(log)
    group = TrainGroup(log, "group", slow=0.0)
    for says in (False, {"success": False}):
        ray.get(replicas[1].primary.say.remote(says), timeout=30)
        manager = CheckpointEngineManager(trainers, replicas, weight_sync_mode="nccl", timeout_s=20)
        with pytest.raises(SyncError, match="answered") as caught:
            manager.sync_weights()
        assert caught.value.actors == ("rollout[1]",)
        assert {"t0", "t1"} <= calls(log, "unmerge").keys()
        assert manager.base_sync_done is False
        group.say(says)
        manager = CheckpointEngineManager(trainers, replicas, weight_sync_mode="naive", train_group=group)
        with pytest.raises(SyncError, match="train_group answered"):
            manager.sync_weights()
        assert manager.base_sync_done is False
