"""``sync_weights`` from Ray trainers into live vLLM engines, judged by what Hugging Face generates.

One class per setting of vLLM, so that one set of engines runs at a time; what holds for each setting is said once, in
:class:`Follows`, :class:`InFlight`, :class:`Fails` and :class:`BadInput`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from twinkle_ray import (
    CheckpointEngineManager,
    ConfigError,
    ManifestMismatch,
    ReplicaUnavailable,
    SyncError,
    UnsupportedActor,
)
from twinkle_ray.types import Contents, OpState, SyncReport

from . import models
from .sync_actors import BLOCK, Answer, AsyncRollout, OddTrainer, Rollout, ShardedTrainer, Trainer, environment

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("ray_cluster")]

LONG_PROMPT = " ".join(["weights travel from trainers to rollouts, block by block,"] * 4)
LONG = 320
"""New tokens of a request that runs while weights change."""

assert BLOCK < len(LONG_PROMPT) < 2 * BLOCK

Make = Callable[..., Any]


def get(ref: Any, timeout: float = 60) -> Any:
    return ray.get(ref, timeout=timeout)


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [a.tokens for a in answers]


def hashlib_digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of a checkpoint's tensors: not our code."""
    return {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def as_module(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as ``transformers`` holds them in memory: the experts of a layer are stacked."""
    held = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in sorted({name.split(".experts.")[0] + ".experts." for name in tensors.keys() - held.keys()}):
        count = len([name for name in tensors if name.startswith(layer) and name.endswith(".down_proj.weight")])
        gate, up, down = (
            [tensors[f"{layer}{expert}.{part}_proj.weight"] for expert in range(count)]
            for part in ("gate", "up", "down")
        )
        held[f"{layer}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        held[f"{layer}down_proj"] = torch.stack(down)
    return held


def common(a: list[int], b: list[int]) -> list[int]:
    """What both begin with."""
    return [x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))]


class Bench:
    """Trainers and rollouts of one setting, and one manager over them."""

    def __init__(self, root: Path, kind: str, trainer: Any, rollouts: list[Any]) -> None:
        self.root, self.kind = root, kind
        self.trainer, self.rollouts = trainer, rollouts
        self.expected = json.loads((root / "expected.json").read_text())[kind]
        self.manager = CheckpointEngineManager([trainer], rollouts, timeout_s=60)

    def checkpoint(self, seed: int) -> Path:
        return self.root / f"{self.kind}-{seed}"

    def digests(self, seed: int) -> dict[str, str]:
        """Of what the trainer holds after ``load``, by hashlib from the checkpoint's file."""
        return hashlib_digests(as_module(models.tensors(self.checkpoint(seed))))

    def load(self, seed: int) -> None:
        get(self.trainer.load.remote(self.checkpoint(seed)))

    def sync(self, seed: int, **how: Any) -> SyncReport:
        self.load(seed)
        return self.manager.sync_weights(**how)

    def generate(self, prompts: list[str] = models.PROMPTS, new_tokens: int = models.NEW_TOKENS) -> list[list[Answer]]:
        """By rollout, by prompt."""
        return get([r.generate.remote(prompts, new_tokens) for r in self.rollouts])

    def greedy(self, *prompts: str, new_tokens: int = models.NEW_TOKENS) -> list[list[int]]:
        """Hugging Face's tokens, with the trainer's weights."""
        return get(self.trainer.greedy.remote(list(prompts), new_tokens))

    def versions(self) -> list[int]:
        return get([r.weights_version.remote() for r in self.rollouts])

    def contents(self) -> list[Contents]:
        """What the rollouts hold once none is being updated any more."""
        deadline = time.monotonic() + 3
        while True:
            found = get([r.checkpoint_status.remote() for r in self.rollouts])
            if not any(status.updating for status in found):
                return [status.contents for status in found]
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    def holds(self, seed: int) -> bool:
        """Whether every rollout generates what Hugging Face generates with these weights."""
        return all(tokens(answers) == self.expected[str(seed)] for answers in self.generate())


@pytest.fixture(scope="module")
def trainers(ray_cluster: str) -> Iterator[dict[str, Any]]:
    """One trainer whose module is sent, one (``odd``) that sends by a function of its own."""
    made = {
        name: ray.remote(num_cpus=0.1)(kind).options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
        for name, kind in (("plain", Trainer), ("odd", OddTrainer))
    }
    yield made
    for actor in made.values():
        ray.kill(actor)


@pytest.fixture(scope="class")
def start() -> Iterator[Make]:
    """``start(kind, *args, child=, **kwargs)`` starts a rollout; all are killed when the class ends."""
    made: list[Any] = []

    def make(kind: Any, *args: Any, child: bool = False, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        actor = ray.remote(num_cpus=0.1)(kind).options(runtime_env=environment(child=child), **(options or {}))
        made.append(actor.remote(*args, **kwargs))
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


@pytest.fixture(scope="class")
def odd(bench: Bench, trainers: dict[str, Any]) -> Iterator[Bench]:
    """The same rollouts behind a trainer in which something can be wrong."""
    made = Bench(bench.root, bench.kind, trainers["odd"], bench.rollouts)
    with made.manager:
        yield made


def five_syncs(bench: Bench) -> None:
    before = bench.generate()
    version = max(bench.versions())
    for seed in (1, 2, 3, 0, 1):
        version += 1
        report = bench.sync(seed)
        now = bench.generate()
        for rollout, old in zip(now, before, strict=True):
            assert tokens(rollout) == bench.expected[str(seed)]
            assert all(a.tokens != b.tokens for a, b in zip(rollout, old, strict=True))
        assert report.version == version
        assert bench.versions() == [version] * len(bench.rollouts)
        assert {answer.version for rollout in now for answer in rollout} == {version}
        path = "in place, load_weights" if bench.kind == "qwen3_moe" else "in place"
        assert [r.path for r in report.replicas] == [path] * len(bench.rollouts)
        assert all(0 < r.direct_bytes <= r.nbytes for r in report.replicas)
        before = now
    wanted = bench.digests(1)
    assert report.tensors == len(wanted)
    checked = bench.manager.verify()
    assert checked.compared == len(wanted) * len(bench.rollouts)
    assert checked.unverifiable == {f"rollout[{i}]": () for i in range(len(bench.rollouts))}
    assert get(bench.trainer.weights_digest.remote()) == wanted


class Follows:
    """After each sync a rollout is the trainer."""

    def test_five_syncs_in_a_row_generate_what_hugging_face_generates(self, bench: Bench) -> None:
        five_syncs(bench)

    def test_digests_are_those_of_the_checkpoints_own_tensors(self, bench: Bench) -> None:
        bench.sync(2)
        wanted = bench.digests(2)
        assert get([r.weights_digest.remote() for r in bench.rollouts]) == [wanted] * len(bench.rollouts)


class InFlight:
    """Requests that run while weights change."""

    def running(self, bench: Bench) -> list[Any]:
        """Long requests on every rollout, well under way."""
        refs = [r.generate.remote(models.PROMPTS, LONG) for r in bench.rollouts]
        deadline = time.monotonic() + 20
        while not all(len(w) == len(models.PROMPTS) and min(w) > 10 for w in self.written(bench)):
            assert time.monotonic() < deadline, self.written(bench)
            time.sleep(0.02)
        return refs

    def written(self, bench: Bench) -> list[list[int]]:
        return get([r.written.remote() for r in bench.rollouts])

    @pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
    def test_requests_in_flight(self, bench: Bench, mode: str) -> None:
        old, new = 1, 2
        bench.sync(old)
        undisturbed = bench.greedy(*models.PROMPTS, new_tokens=LONG)
        old_words = bench.greedy(LONG_PROMPT)
        bench.load(new)
        for _ in range(2):
            answers = [a[0] for a in bench.generate([LONG_PROMPT])]
            assert [a.tokens for a in answers] == old_words * len(answers)
        assert [a.cached for a in answers] == [BLOCK] * len(answers)  # so a cache is there that could be stale
        version = max(bench.versions())

        refs = self.running(bench)
        called = time.time()
        report = bench.manager.sync_weights(in_flight=mode)
        synced = time.time()

        assert report.version == version + 1
        for rollout, replica in zip(get(refs), report.replicas, strict=True):
            assert {a.version for a in rollout} == ({version + 1} if mode == "keep" else {version})
            if mode == "wait":
                assert tokens(rollout) == undisturbed
                assert {a.reason for a in rollout} == {"length"}
                assert max(a.ended for a in rollout) < synced
                assert replica.seconds["pause"] > 0.05
            elif mode == "abort":
                assert {a.reason for a in rollout} == {"abort"}
                assert all(10 < len(a.tokens) < LONG for a in rollout)
                assert all(a.tokens == was[: len(a.tokens)] for a, was in zip(rollout, undisturbed, strict=True))
                assert max(a.ended for a in rollout) - called < 2
            else:
                assert {a.reason for a in rollout} == {"length"}
                assert all(len(a.tokens) == LONG for a in rollout)
                assert min(a.ended for a in rollout) > synced
                # They went on with the new weights alone: nothing that the old ones had computed was used any more.
                begun = [common(a.tokens, was) for a, was in zip(rollout, undisturbed, strict=True)]
                assert all(10 <= len(b) < LONG for b in begun)
                assert tokens(rollout) == get(bench.trainer.greedy.remote(models.PROMPTS, LONG, begun))
        assert bench.holds(new)
        words = bench.greedy(LONG_PROMPT)
        assert words != old_words
        assert [a[0].tokens for a in bench.generate([LONG_PROMPT])] == words * len(bench.rollouts)

    def test_what_was_cached_is_not_used_with_new_weights(self, bench: Bench) -> None:
        bench.sync(2)
        bench.generate([LONG_PROMPT])
        assert {a[0].cached for a in bench.generate([LONG_PROMPT])} == {BLOCK}
        bench.sync(3)
        first = bench.generate([LONG_PROMPT])
        assert {a[0].cached for a in first} == {0}
        assert [a[0].tokens for a in first] == bench.greedy(LONG_PROMPT) * len(first)


class Fails:
    """A trainer that raises in the middle of a sync."""

    @pytest.fixture
    def failing(self, odd: Bench) -> Iterator[Bench]:
        usual = odd.manager.bucket_size
        yield odd
        odd.manager.bucket_size = usual
        get(odd.trainer.set_faults.remote())

    def fail(self, bench: Bench, raise_at: int, bucket_size: int) -> SyncError:
        bench.manager.bucket_size = bucket_size
        get(bench.trainer.set_faults.remote(raise_at=raise_at))
        start = time.monotonic()
        with pytest.raises(SyncError, match=f"tensor {raise_at} is not there") as caught:
            bench.manager.sync_weights()
        assert time.monotonic() - start < 10
        assert caught.value.phase == "transfer"
        assert caught.value.actors == ("trainer[0]",)
        assert caught.value.cause_type == "KeyError"
        get(bench.trainer.set_faults.remote())
        return caught.value

    def test_before_the_first_byte_the_old_version_is_served_on(self, failing: Bench) -> None:
        failing.sync(1)
        failing.load(2)
        versions = failing.versions()

        error = self.fail(failing, 0, 4096)

        assert error.versions == {f"rollout[{i}]": v for i, v in enumerate(versions)}
        assert failing.contents() == [Contents.WHOLE] * len(failing.rollouts)
        assert failing.versions() == versions
        assert failing.holds(1)
        assert failing.manager.sync_weights().version == max(versions) + 1
        assert failing.holds(2)

    @pytest.mark.parametrize(
        ("raise_at", "bucket_size"), [(1, 200_000), (9, 4096)], ids=["in the first tensor", "later"]
    )
    def test_after_that_it_refuses_to_generate_until_a_sync_succeeds(
        self, failing: Bench, raise_at: int, bucket_size: int
    ) -> None:
        failing.sync(1)
        failing.load(3)
        versions = failing.versions()

        error = self.fail(failing, raise_at, bucket_size)

        assert failing.contents() == [Contents.MIXED] * len(failing.rollouts)
        assert error.versions == {f"rollout[{i}]": v for i, v in enumerate(versions)}
        for rollout in failing.rollouts:
            start = time.monotonic()
            with pytest.raises(ReplicaUnavailable, match=r"mixture of weights.*sync again"):
                get(rollout.generate.remote(["hello"], 4))
            assert time.monotonic() - start < 2
        assert failing.manager.sync_weights().version == max(versions) + 1
        assert failing.contents() == [Contents.WHOLE] * len(failing.rollouts)
        assert failing.holds(3)
        assert failing.manager.verify().unverifiable == {f"rollout[{i}]": () for i in range(len(failing.rollouts))}


class BadInput:
    """What cannot be synced is refused before a byte moves."""

    def test_all_that_does_not_fit_is_named_and_nothing_changes(self, odd: Bench) -> None:
        odd.sync(1)
        versions, sent = odd.versions(), get(odd.trainer.sent.remote())
        changes = {
            "model.layers.0.nonsense.weight": torch.ones(2),
            "model.layers.1.self_attn.q_proj.weight": torch.ones(3, 3),
            "model.norm.weight": None,
        }
        get(odd.trainer.load.remote(odd.checkpoint(2)))
        get(odd.trainer.set_faults.remote(changes=changes))

        with pytest.raises(ManifestMismatch, match="nothing was sent") as caught:
            odd.manager.sync_weights()

        get(odd.trainer.set_faults.remote())
        for index in range(len(odd.rollouts)):
            mine = [p for p in caught.value.problems if p.startswith(f"rollout[{index}]: ")]
            assert all(sum(name in problem for problem in mine) == 1 for name in list(changes)[:1])
            assert all(any(name in problem for problem in mine) for name in changes), mine
            assert "model.norm.weight: the trainer does not send it" in " ".join(mine)
        assert odd.versions() == versions
        assert get(odd.trainer.sent.remote()) == sent
        assert odd.contents() == [Contents.WHOLE] * len(odd.rollouts)
        assert odd.holds(1)
        assert odd.manager.sync_weights().version == max(versions) + 1
        assert odd.holds(2)

    def test_an_engine_that_sleeps_is_named_before_a_byte_is_sent(self, odd: Bench) -> None:
        odd.sync(2)
        odd.load(3)
        versions, sent = odd.versions(), get(odd.trainer.sent.remote())
        get(odd.rollouts[0].fall_asleep.remote())

        start = time.monotonic()
        with pytest.raises(ReplicaUnavailable, match=r"rollout\[0\] is asleep .*wake"):
            odd.manager.sync_weights()

        assert time.monotonic() - start < 5
        assert get(odd.trainer.sent.remote()) == sent
        assert odd.versions() == versions
        get(odd.rollouts[0].get_up.remote())
        assert odd.holds(2)
        assert odd.manager.sync_weights().version == max(versions) + 1
        assert odd.holds(3)

    def test_the_mend_that_the_error_names_works(self, odd: Bench) -> None:
        odd.sync(2)
        odd.load(1)
        get([r.fall_asleep.remote() for r in odd.rollouts])
        with pytest.raises(ReplicaUnavailable, match=r"wake_up_rollout\(\['weights'\]\)"):
            odd.manager.sync_weights()
        with pytest.raises(ReplicaUnavailable, match=r"asleep \(kv_cache, weights\).*wake_up_rollout\(\) before"):
            odd.generate()
        odd.manager.wake_up_rollout(["weights"])
        odd.manager.sync_weights()
        assert {s.asleep for s in get([r.checkpoint_status.remote() for r in odd.rollouts])} == {("kv_cache",)}
        with pytest.raises(ReplicaUnavailable, match=r"asleep \(kv_cache\).*wake_up_rollout\(\['kv_cache'\]\) before"):
            odd.generate()
        odd.manager.wake_up_rollout(["kv_cache"])
        assert odd.holds(1)

    def test_what_a_deep_sleep_discarded_is_not_served(self, odd: Bench) -> None:
        odd.sync(2)
        get([r.fall_asleep.remote(2) for r in odd.rollouts])
        get([r.get_up.remote() for r in odd.rollouts])
        assert odd.contents() == [Contents.NONE] * len(odd.rollouts)
        with pytest.raises(ReplicaUnavailable, match=r"discarded by a sleep at level 2; manager\.sync_weights\(\)"):
            odd.generate()
        odd.manager.sync_and_wake()
        assert odd.holds(2)

    def test_sleep_without_sleep_mode_is_one_sentence_before_anything_happens(self, odd: Bench) -> None:
        odd.sync(2)
        versions, sent = odd.versions(), get(odd.trainer.sent.remote())
        told = r"^rollout\[0\]: made without enable_sleep_mode=True, its vLLM engine cannot sleep.*sleep_level=0"
        with pytest.raises(ConfigError, match=told):
            odd.manager.sleep_rollout()
        with CheckpointEngineManager([odd.trainer], odd.rollouts, is_colocated=True, timeout_s=60) as manager:
            for call in (manager.sync_weights, manager.sync_and_wake):
                with pytest.raises(ConfigError, match=told):
                    call()
            with pytest.raises(ConfigError, match="there is no tag 'cache' that could wake"):
                manager.wake_up_rollout(["cache"])
        assert odd.versions() == versions
        assert get(odd.trainer.sent.remote()) == sent
        assert odd.holds(2)


class TestInProcess(Follows, InFlight, Fails, BadInput):
    """Three rollouts with ``LLM`` and its engine in the actor, which has two threads."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainers: dict[str, Any], start: Make) -> Iterator[Bench]:
        threads = {"max_concurrency": 2}
        rollouts = [start(Rollout, checkpoints / "llama-0", options=threads) for _ in range(3)]
        with (made := Bench(checkpoints, "llama", trainers["plain"], rollouts)).manager:
            yield made

    def test_no_block_of_the_cache_keeps_a_hash(self, bench: Bench) -> None:
        bench.sync(2)
        bench.generate([LONG_PROMPT])
        hashed = get([r.hashed.remote() for r in bench.rollouts])
        assert all(0 < some < of for some, of in hashed)
        bench.sync(3)
        assert get([r.hashed.remote() for r in bench.rollouts]) == [(0, of) for _, of in hashed]

    def test_a_trainers_own_process_group_stands_beside_vllms(self, bench: Bench, trainers: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        pair = [trainers["plain"], trainers["odd"]]
        get([t.join.remote(rank, port) for rank, t in enumerate(pair)])
        get([t.load.remote(bench.checkpoint(3)) for t in pair])

        with CheckpointEngineManager(pair, bench.rollouts, timeout_s=60) as manager:
            manager.sync_weights()
            assert get([t.total.remote() for t in pair]) == [3.0, 3.0]
            manager.sync_weights()

        assert get([t.total.remote() for t in pair]) == [3.0, 3.0]
        assert bench.holds(3)

    def test_a_newcomer_and_one_that_ray_started_again_serve_nobody_before_a_sync(
        self, bench: Bench, start: Make
    ) -> None:
        again = {"max_restarts": 1, "max_task_retries": -1, "max_concurrency": 2}
        rollout = start(Rollout, bench.checkpoint(0), options=again)
        before = get(rollout.pid.remote(), 120)
        with CheckpointEngineManager([bench.trainer], bench.rollouts[:1], timeout_s=60) as manager:
            manager.add_rollout(rollout)
            with pytest.raises(ReplicaUnavailable, match="has just joined and no sync has brought its weights"):
                get(rollout.generate.remote(["hello"], 4))
            bench.load(2)
            manager.sync_weights()
            assert tokens(get(rollout.generate.remote(models.PROMPTS, models.NEW_TOKENS))) == bench.expected["2"]

            os.kill(before, signal.SIGKILL)
            deadline = time.monotonic() + 120
            while get(rollout.pid.remote(), 120) == before:
                assert time.monotonic() < deadline
            with pytest.raises(ReplicaUnavailable, match="Ray has started this rollout again and no sync"):
                get(rollout.generate.remote(["hello"], 4))
            assert not manager.base_sync_done
            manager.sync_weights()
            assert tokens(get(rollout.generate.remote(models.PROMPTS, models.NEW_TOKENS))) == bench.expected["2"]
            ray.kill(rollout)


class TestChildProcess(Follows, InFlight, Fails, BadInput):
    """``LLM`` with its engine in a child process."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainers: dict[str, Any], start: Make) -> Iterator[Bench]:
        rollout = start(Rollout, checkpoints / "llama-0", child=True, options={"max_concurrency": 2})
        with (made := Bench(checkpoints, "llama", trainers["plain"], [rollout])).manager:
            yield made

    @pytest.mark.soak
    def test_all_that_does_not_fit_is_named_and_nothing_changes(self, odd: Bench) -> None:
        super().test_all_that_does_not_fit_is_named_and_nothing_changes(odd)

    @pytest.mark.soak
    def test_an_engine_that_sleeps_is_named_before_a_byte_is_sent(self, odd: Bench) -> None:
        super().test_an_engine_that_sleeps_is_named_before_a_byte_is_sent(odd)

    def test_on_one_device_each_byte_is_copied_once(self, bench: Bench) -> None:
        bench.load(2)
        with CheckpointEngineManager([bench.trainer], bench.rollouts, weight_sync_mode="ipc", timeout_s=60) as manager:
            for seed in (1, 2, 3):
                bench.load(seed)
                report = manager.sync_weights()
                assert report.mode == "ipc"
                assert bench.holds(seed)
                (replica,) = report.replicas
                assert replica.path == "in place"
                assert replica.direct_bytes == report.nbytes  # no copy at the receiver beside that one
            counts = get(bench.trainer.counts.remote())
            assert (counts["staged"], counts["shared"]) == (0, 3 * report.nbytes)
            assert manager.verify().compared == report.tensors
            assert get(bench.rollouts[0].weights_digest.remote()) == bench.digests(3)
        bench.sync(1)  # and back to the other manager's group
        assert bench.holds(1)


class TestAsync(Follows, InFlight, Fails, BadInput):
    """``AsyncLLM`` in an async actor."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainers: dict[str, Any], start: Make) -> Iterator[Bench]:
        rollout = start(AsyncRollout, checkpoints / "llama-0", child=True)
        with (made := Bench(checkpoints, "llama", trainers["plain"], [rollout])).manager:
            yield made

    @pytest.mark.soak
    def test_an_engine_that_sleeps_is_named_before_a_byte_is_sent(self, odd: Bench) -> None:
        super().test_an_engine_that_sleeps_is_named_before_a_byte_is_sent(odd)

    @pytest.mark.soak
    def test_all_that_does_not_fit_is_named_and_nothing_changes(self, odd: Bench) -> None:
        super().test_all_that_does_not_fit_is_named_and_nothing_changes(odd)

    def test_digests_are_those_of_the_checkpoints_own_tensors(self, bench: Bench) -> None:
        """Read by the operation that ``verify`` uses: the method of the actor would wait on its own event loop."""
        bench.sync(2)
        rollout = bench.rollouts[0]
        get(rollout.start_checkpoint.remote("mine", "digest", {"names": None}))
        deadline = time.monotonic() + 20
        while (status := get(rollout.poll_checkpoint.remote("mine", 0.1))).state is OpState.RUNNING:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        held = {name: digest for name, (_, digest) in status.result.items()}
        assert held == bench.digests(2)

    @pytest.mark.parametrize("count", [pytest.param(2000, marks=pytest.mark.soak), 200])
    def test_a09_queued_requests_do_not_starve_a_sync(self, bench: Bench, count: int) -> None:
        old = bench.sync(1).version
        bench.load(2)
        (rollout,) = bench.rollouts
        asked = [number % len(models.PROMPTS) for number in range(count)]
        refs = [rollout.generate.remote([models.PROMPTS[prompt]], 4) for prompt in asked]
        start = time.monotonic()
        bench.manager.sync_weights()
        assert time.monotonic() - start < 20
        whole = {old: bench.expected["1"], old + 1: bench.expected["2"]}
        for prompt, (answer,) in zip(asked, get(refs, 120), strict=True):
            assert answer.version is not None
            assert answer.tokens == whole[answer.version][prompt][:4]
        assert bench.holds(2)

    def test_a_digest_on_the_event_loop_is_refused_with_the_way_that_works(self, bench: Bench) -> None:
        with pytest.raises(UnsupportedActor, match=r"event loop.*manager\.verify\(\)"):
            get(bench.rollouts[0].weights_digest.remote())


class TestTensorParallel(Follows, Fails):
    """``LLM`` over two worker processes, each with its shards and a rank of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainers: dict[str, Any], start: Make) -> Iterator[Bench]:
        rollout = start(Rollout, checkpoints / "llama-0", tensor_parallel_size=2, distributed_executor_backend="mp")
        with (made := Bench(checkpoints, "llama", trainers["plain"], [rollout])).manager:
            assert get(rollout.checkpoint_status.remote(), 120).workers == 2
            yield made

    def test_both_workers_get_their_rows_in_place(self, bench: Bench) -> None:
        (replica,) = bench.sync(3).replicas
        sizes = {name: tensor.nbytes for name, tensor in models.tensors(bench.checkpoint(3)).items()}
        columns = sum(nbytes for name, nbytes in sizes.items() if "o_proj" in name or "down_proj" in name)
        assert replica.nbytes == sum(sizes.values())
        assert replica.direct_bytes >= replica.nbytes - columns
        assert bench.holds(3)

    @pytest.mark.soak
    def test_a33_two_replicas_of_two_workers_in_either_order(self, bench: Bench, start: Make) -> None:
        second = start(Rollout, bench.checkpoint(0), tensor_parallel_size=2, distributed_executor_backend="mp")
        assert get(second.checkpoint_status.remote(), 120).workers == 2
        rollouts = [*bench.rollouts, second]
        for seed, listed in enumerate((rollouts, rollouts[::-1]), 1):
            made = Bench(bench.root, bench.kind, bench.trainer, listed)
            with made.manager:
                report = made.sync(seed)
                assert [replica.tensors for replica in report.replicas] == [report.tensors] * 2
                assert made.holds(seed)
                assert made.manager.verify().compared == 2 * report.tensors
        ray.kill(second)

    def test_two_sharded_trainers_on_the_devices_of_the_two_workers(self, bench: Bench, start: Make) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        trainers = [start(ShardedTrainer) for _ in range(2)]
        get([t.join.remote(rank, port) for rank, t in enumerate(trainers)])
        with CheckpointEngineManager(
            trainers, bench.rollouts, weight_sync_mode="ipc", bucket_size=1 << 18, timeout_s=60
        ) as manager:
            for seed in (1, 2):
                get([t.load.remote(bench.checkpoint(seed)) for t in trainers])
                report = manager.sync_weights()
                assert report.mode == "ipc"
                assert bench.holds(seed)
                assert manager.verify().compared == report.tensors
                assert get(bench.rollouts[0].weights_digest.remote()) == bench.digests(seed)
            for counts in get([t.counts.remote() for t in trainers]):  # each has sent all to its own worker
                assert counts["staged"] + counts["shared"] == 2 * report.nbytes
            # One worker's copy fails: the other one is let go too, and a further sync heals both.
            get(trainers[1].fail_at_launch.remote(1))
            with pytest.raises(SyncError, match="no more power") as caught:
                manager.sync_weights()
            assert caught.value.actors == ("trainer[1]",)
            manager.sync_weights()
            assert bench.holds(2)
            assert get([t.total.remote() for t in trainers]) == [3.0, 3.0]


class TestOtherModels:
    """``LLM`` in an actor with one thread: tied embeddings, and experts, which the CPU build lays out anew."""

    @pytest.fixture(scope="class", params=["qwen3", "qwen3_moe"])
    @classmethod
    def bench(
        cls, checkpoints: Path, trainers: dict[str, Any], start: Make, request: pytest.FixtureRequest
    ) -> Iterator[Bench]:
        rollout = start(Rollout, checkpoints / f"{request.param}-0")
        get(trainers["plain"].load.remote(checkpoints / f"{request.param}-0"))
        with (made := Bench(checkpoints, request.param, trainers["plain"], [rollout])).manager:
            yield made

    def test_five_syncs_in_a_row_generate_what_hugging_face_generates(self, bench: Bench) -> None:
        five_syncs(bench)
        assert get(bench.rollouts[0].weights_digest.remote()) == bench.digests(1)

    @pytest.mark.parametrize("bench", ["qwen3_moe"], indirect=True, scope="class")
    def test_experts_one_by_one_as_the_checkpoint_names_them(self, odd: Bench) -> None:
        odd.load(2)
        file = models.tensors(odd.checkpoint(2))
        stacked = as_module(file).keys() - file.keys()
        split = {name: tensor for name, tensor in file.items() if ".experts." in name}
        get(odd.trainer.set_faults.remote(changes={**dict.fromkeys(stacked), **split}))
        assert odd.manager.sync_weights().tensors == len(file)
        get(odd.trainer.set_faults.remote())
        assert get(odd.rollouts[0].weights_digest.remote()) == hashlib_digests(file)
        assert odd.holds(2)

    def test_an_engine_made_anew_is_empty_and_filled_by_the_next_sync(self, bench: Bench) -> None:
        bench.sync(1)
        assert bench.versions()[0] > 0
        assert bench.contents() == [Contents.WHOLE]

        get(bench.rollouts[0].make.remote(bench.checkpoint(0)), 120)

        assert bench.versions() == [0]
        assert bench.contents() == [Contents.NONE]
        assert bench.holds(0)
        assert bench.manager.sync_weights().version == 1
        assert bench.contents() == [Contents.WHOLE]
        assert bench.holds(1)
