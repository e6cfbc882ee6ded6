"""Live vLLM engines under faults: whoever asks gets the answer of one whole version, or a typed refusal."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.actors import at_launch, die, no_power
from tests.faults import HANG_S, SLOW_S, misbehave
from twinkle_ray import CheckpointEngineManager, PeerLost, ReplicaUnavailable, SyncError, SyncTimeout
from twinkle_ray.types import Contents

from . import models
from .sync_actors import Answer, Rollout, Trainer
from .test_sync import Bench, Make, get, start, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("ray_cluster")]

__all__ = ["start"]


DEADLINE_S = HANG_S / 4
SHORT = {
    ("in process", "raises", "prepare"),
    ("in process", "is slow", "commit"),
    ("child", "raises", "commit"),
    ("child", "is slow", "receive"),
}
CELLS = [
    pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.soak)
    for cell in itertools.product(
        ("in process", "child"), ("raises", "hangs", "is slow"), ("prepare", "init", "receive", "commit")
    )
]
CELLS += [
    pytest.param("trainer", "hangs", "send", marks=pytest.mark.soak),
    pytest.param("trainer", "is slow", "send"),
]


def answers_or_refuses(rollout: Any, *whole: list[list[int]]) -> None:
    """It gives the answers of one of these versions, or refuses because it holds a mixture."""
    try:
        assert tokens(get(rollout.generate.remote(models.PROMPTS, models.NEW_TOKENS))) in whole
    except ReplicaUnavailable as error:
        assert "mixture of weights" in str(error)  # noqa: PT017


def sync_when_it_may(manager: CheckpointEngineManager) -> None:
    """A rollout whose own thread is in what was given up says so, and that it is worth another try."""
    until = time.monotonic() + 2 * HANG_S
    while True:
        try:
            manager.sync_weights()
            return
        except SyncError as error:
            if "has not ended yet; try again" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.5)


class FaultyTrainer(Trainer):
    """Fails in the middle of a send when it was told to."""

    def fail_at_launch(self, number: int) -> None:
        at_launch(number, no_power)

    def die_at_launch(self, number: int) -> None:
        at_launch(number, die)

    def break_it(self, where: str, how: str) -> None:
        at_launch(5, lambda: misbehave(how))


class FaultyRollout(Rollout):
    def make(self, *args: Any, **kwargs: Any) -> None:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for functions that are given to workers
        super().make(*args, **kwargs)

    def fail_at_launch(self, number: int) -> None:
        at_launch(number, no_power)

    def break_it(self, where: str, how: str) -> None:
        """Let vLLM's worker, in whichever process it is, do something once at a place of the next sync."""

        def arm(worker: Any) -> None:
            from tests.actors import at_launch
            from tests.faults import misbehave
            from twinkle_ray.vllm.worker import side

            if where == "receive":
                at_launch(5, lambda: misbehave(how))
                return
            one = side(vars(worker).get("worker") or worker)
            holder, name = {
                "prepare": (one, "describe"),
                "init": (one, "connect"),
                "commit": (one.sink, "finish"),
            }[where]
            usual = getattr(holder, name)

            def failing(*args: Any, **kwargs: Any) -> Any:
                vars(holder).pop(name)
                misbehave(how)
                return usual(*args, **kwargs)

            setattr(holder, name, failing)

        self.llm.llm_engine.collective_rpc(arm)

    def reach_worker(self) -> None:
        """Come back when the worker takes calls again."""
        self.llm.llm_engine.collective_rpc(lambda worker: None)

    def engine_pid(self) -> int:
        """Of the child process in which the engine computes."""
        (child,) = [
            p for p in psutil.Process().children() if "EngineCore" in p.name() or "EngineCore" in str(p.cmdline())
        ]
        return int(child.pid)


@pytest.fixture(scope="module")
def trainer(ray_cluster: str) -> Iterator[Any]:
    kind = ray.remote(num_cpus=0.1)(FaultyTrainer)
    made = kind.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
    yield made
    ray.kill(made)


class TestOneEngine:
    """In the actor's process; one test leaves it to the next."""

    @pytest.fixture(scope="class")
    @classmethod
    def rollout(cls, checkpoints: Path, start: Make) -> Any:
        made = start(FaultyRollout, checkpoints / "llama-0", options={"max_concurrency": 3})
        get(made.checkpoint_status.remote(), 120)
        return made

    @pytest.fixture(scope="class")
    @classmethod
    def child(cls, checkpoints: Path, start: Make) -> Any:
        """A second engine, in a child process."""
        made = start(FaultyRollout, checkpoints / "llama-0", child=True, options={"max_concurrency": 3})
        get(made.checkpoint_status.remote(), 120)
        return made

    @pytest.mark.parametrize("seconds", [pytest.param(180.0, marks=pytest.mark.soak), 6.0])
    def test_every_answer_is_that_of_one_whole_version(
        self, checkpoints: Path, trainer: Any, rollout: Any, seconds: float
    ) -> None:
        """A client asks without pause while syncs succeed and fail at random."""
        bench = Bench(checkpoints, "llama", trainer, [rollout])
        bench.load(0)
        chance, seeds = random.Random(5), {bench.manager.sync_weights().version: 0}  # which checkpoint a version is of
        answers: list[Answer] = []
        refusals: list[ReplicaUnavailable] = []
        others: list[BaseException] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                try:
                    answers.extend(get(rollout.generate.remote(models.PROMPTS, models.NEW_TOKENS)))
                except ReplicaUnavailable as error:
                    refusals.append(error)
                except BaseException as error:
                    others.append(error)
                    return

        client = threading.Thread(target=ask)
        client.start()
        deadline = time.monotonic() + seconds
        failed = syncs = 0
        while (time.monotonic() < deadline or syncs < 10) and not others:
            seed = chance.choice(models.SEEDS)
            bench.load(seed)
            bench.manager.bucket_size = chance.choice([4096, 1 << 20])
            syncs += 1
            if syncs == 3 or chance.random() < 0.4:
                victim = chance.choice([trainer, rollout])
                get(victim.fail_at_launch.remote(chance.choice([0, 5]) if bench.manager.bucket_size == 4096 else 0))
            try:
                seeds[bench.manager.sync_weights(in_flight=chance.choice(["wait", "abort"])).version] = seed
            except SyncError:
                failed += 1
            time.sleep(chance.random() * 0.3)
        seeds[bench.manager.sync_weights().version] = seed
        over.set()
        client.join(60)
        bench.manager.close()
        assert others == []
        assert failed > 0
        whole = [answer for answer in answers if answer.reason != "abort"]
        assert len({answer.version for answer in whole}) > 2
        wanted = {version: bench.expected[str(seed)] for version, seed in seeds.items()}
        assert all(answer.tokens in wanted[answer.version] for answer in whole if answer.version in wanted)
        assert {answer.version for answer in whole} <= wanted.keys()
        # One that was ended has the beginning of the answer of its version.
        for answer in answers:
            if answer.reason == "abort" and answer.tokens:
                assert any(full[: len(answer.tokens)] == answer.tokens for full in wanted[answer.version])

    def test_a_trainer_that_is_killed_while_it_sends(self, checkpoints: Path, trainer: Any, rollout: Any) -> None:
        doomed = (
            ray.remote(num_cpus=0.1)(FaultyTrainer).options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
        )
        get([one.load.remote(checkpoints / "llama-1") for one in (trainer, doomed)])
        get(rollout.checkpoint_status.remote(), 120)
        with CheckpointEngineManager([doomed], [rollout], timeout_s=30, bucket_size=4096) as manager:
            manager.sync_weights()
            get(doomed.die_at_launch.remote(5))
            begun = time.monotonic()
            with pytest.raises(PeerLost, match=r"trainer\[0\]"):
                manager.sync_weights()
            assert time.monotonic() - begun < 10
            with pytest.raises(ReplicaUnavailable, match="mixture of weights"):
                get(rollout.generate.remote(["hello"], 4))
            manager.replace_trainers([trainer])
            manager.sync_weights()
            expected = Bench(checkpoints, "llama", trainer, [rollout]).expected
            assert tokens(get(rollout.generate.remote(models.PROMPTS, models.NEW_TOKENS))) == expected["1"]

    @pytest.mark.parametrize(("who", "how", "where"), CELLS)
    def test_a_fault_beside_or_in_a_worker(
        self, checkpoints: Path, trainer: Any, rollout: Any, child: Any, who: str, how: str, where: str
    ) -> None:
        rollouts = [rollout, child]
        members = {
            "in process": ("rollout[0]", rollout),
            "child": ("rollout[1]", child),
            "trainer": ("trainer[0]", trainer),
        }
        name, victim = members.pop(who)
        bench = Bench(checkpoints, "llama", trainer, rollouts)
        bench.sync(0)
        bench.load(1)
        bench.manager.bucket_size = 4096
        if where in ("prepare", "init"):
            bench.manager.replace_trainers([trainer])  # so that everybody is asked again, and a new group is made
        get(victim.break_it.remote(where, how))
        bench.manager.timeout_s = DEADLINE_S if how == "hangs" else 30.0
        start = time.monotonic()
        if how == "is slow":
            bench.manager.sync_weights()
            assert time.monotonic() - start > SLOW_S
        else:
            with pytest.raises(SyncError) as caught:
                bench.manager.sync_weights()
            taken = time.monotonic() - start
            error = caught.value
            assert error.phase == (where if where in ("prepare", "init") else "transfer"), error
            assert error.actors == (name,), error
            assert isinstance(error, SyncTimeout if how == "hangs" else SyncError), error
            assert how == "hangs" or error.cause_type == "OSError", error
            # Within 2 s; and something for a machine with two cores and other work.
            assert taken < (DEADLINE_S if how == "hangs" else 0.5) + 2.0 + 2.0
            for _, actor in members.values():
                asked = time.monotonic()
                get(actor.checkpoint_status.remote())
                assert time.monotonic() - asked < 2.0
            for one in rollouts:
                if one is not victim or how == "raises":
                    answers_or_refuses(one, bench.expected["0"], bench.expected["1"])
            if victim is not trainer:
                get(victim.reach_worker.remote(), 2 * HANG_S)
        bench.manager.timeout_s = 60.0
        sync_when_it_may(bench.manager)
        assert bench.holds(1)
        assert bench.contents() == [Contents.WHOLE] * 2
        bench.manager.close()

    def test_an_engine_whose_process_is_killed_is_named_and_a_new_one_takes_its_place(
        self, checkpoints: Path, trainer: Any, rollout: Any, child: Any
    ) -> None:
        rollouts = [child, rollout]
        get(trainer.load.remote(checkpoints / "llama-1"))
        with CheckpointEngineManager([trainer], rollouts, timeout_s=30) as manager:
            get([rollout.checkpoint_status.remote() for rollout in rollouts], 120)
            manager.sync_weights()
            os.kill(pid := get(rollouts[0].engine_pid.remote()), signal.SIGKILL)
            while psutil.pid_exists(pid):  # it gives its memory back first, and its parent notices then
                time.sleep(0.05)
            begun = time.monotonic()
            with pytest.raises(PeerLost, match=r"rollout\[0\].*the process of this vLLM engine is dead") as caught:
                manager.sync_weights()
            assert time.monotonic() - begun < 15
            assert caught.value.actors == ("rollout[0]",)
            expected = Bench(checkpoints, "llama", trainer, rollouts).expected
            if get(rollouts[1].checkpoint_status.remote()).contents is Contents.WHOLE:
                assert tokens(get(rollouts[1].generate.remote(models.PROMPTS, models.NEW_TOKENS))) == expected["1"]
            else:  # the first byte had come when the other one's worker ended
                with pytest.raises(ReplicaUnavailable, match="mixture"):
                    get(rollouts[1].generate.remote(["hello"], 4))
            get(rollouts[0].make.remote(checkpoints / "llama-0"), 120)
            manager.sync_weights()
            for rollout in rollouts:
                assert tokens(get(rollout.generate.remote(models.PROMPTS, models.NEW_TOKENS))) == expected["1"]
