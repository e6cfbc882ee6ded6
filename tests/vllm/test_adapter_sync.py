"""LoRA from a Ray trainer into live vLLM engines, merged and alone, judged by what PEFT's own forward generates."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from twinkle_ray import (
    CheckpointEngineManager,
    ConfigError,
    SyncError,
    TwinkleRayError,
    UnsupportedModel,
)
from twinkle_ray.mixins import RolloutActorMixin
from twinkle_ray.types import Contents

from . import models
from .sync_actors import AdaptedTrainer, Answer, AsyncRollout, Rollout
from .test_sync import LONG_PROMPT, Make, get, hashlib_digests, start, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("ray_cluster")]

__all__ = ["start"]

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DEFAULT = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "use_rslora": True}
TENANT = {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
OTHER = {"r": 2, "lora_alpha": 6, "target_modules": ["o_proj", "up_proj"]}
PROMPTS = [*models.PROMPTS, LONG_PROMPT]
"""The last one is longer than a block of the prefix cache."""


class Bench:
    """One trainer with three adapters, one rollout, one manager."""

    def __init__(self, root: Path, trainer: Any, rollout: Any) -> None:
        self.root, self.trainer, self.rollout = root, trainer, rollout
        self.base = hashlib_digests(models.tensors(root / "llama-0"))
        self.manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
        self.seed = 1

    def begin(self) -> None:
        """Everybody as at the start: adapters that were trained before, a rollout that has nothing but them beside."""
        get(self.trainer.adapt.remote(self.root / "llama-0", default=DEFAULT, tenant=TENANT, other=OTHER))
        for name in [n for n in self.status().adapters if n != self.status().default_adapter]:
            self.manager.detach_adapter(name)

    def step(self, *names: str) -> None:
        self.seed += 1
        get(self.trainer.move.remote(self.seed, *names))

    def status(self) -> Any:
        return get(self.rollout.checkpoint_status.remote())

    def generate(self, adapter: str | None = None) -> list[list[int]]:
        answers: list[Answer] = get(self.rollout.generate.remote(PROMPTS, models.NEW_TOKENS, adapter))
        return tokens(answers)

    def expected(self, adapter: str | None) -> list[list[int]]:
        return get(self.trainer.greedy_of.remote(adapter, PROMPTS, models.NEW_TOKENS))

    def base_held(self) -> dict[str, str]:
        """As ``verify`` reads it back, which works on an event loop too."""
        get(self.rollout.start_checkpoint.remote("mine", "digest", {"names": None}))
        while (status := get(self.rollout.poll_checkpoint.remote("mine", 0.1))).state.value == "running":
            pass
        return {name: digest for name, (_, digest) in status.result.items()}


@pytest.fixture(scope="module")
def trainer(ray_cluster: str) -> Iterator[Any]:
    kind = ray.remote(num_cpus=0.1)(AdaptedTrainer)
    made = kind.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
    yield made
    ray.kill(made)


ARGUMENTS = RolloutActorMixin.lora_arguments(DEFAULT, TENANT, OTHER)


class Serves:
    @pytest.mark.parametrize("sequence", ["FTFF", "TFT"])
    def test_after_each_call_requests_get_what_peft_computes(self, bench: Bench, sequence: str) -> None:
        bench.begin()
        version = bench.status().version
        assert bench.expected("default") != bench.expected(None)
        held = ""
        for letter in sequence:
            report = bench.manager.sync_weights(merge_and_sync=letter == "T")
            version += 1
            assert report.version == bench.status().version == version
            assert report.base == ("merged" if letter == "T" else "" if held == "F" else "plain")
            for _ in range(2):  # the second time from the prefix cache
                assert bench.generate() == bench.expected("default")
            assert get(bench.rollout.loras.remote()) == (letter == "F")
            assert bench.status().adapters == ({"default": version} if letter == "F" else {})
            if letter == "F":
                assert bench.base_held() == bench.base
                assert bench.generate("default") == bench.expected("default")
            else:
                assert bench.base_held() != bench.base
            assert bench.manager.verify().compared == len(bench.base)
            held = letter
            bench.step("default")

    def test_tenants_and_a_directory_are_served_side_by_side(self, bench: Bench, tmp_path: Path) -> None:
        bench.begin()
        manager = bench.manager
        manager.sync_weights(False)
        manager.sync_weights(adapter="tenant")
        get(bench.trainer.save.remote(tmp_path, "other"))
        manager.attach_adapter("from disk", tmp_path / "other")

        def answers() -> dict[str | None, list[list[int]]]:
            return {name: bench.generate(name) for name in (None, "tenant", "from disk")}

        before, versions = answers(), bench.status().adapters
        names = {None: "default", "tenant": "tenant", "from disk": "other"}
        assert before == {mine: bench.expected(theirs) for mine, theirs in names.items()}
        assert len({str(found) for found in before.values()}) == 3

        bench.step("default", "tenant", "other")
        report = manager.sync_weights(adapter="tenant")
        assert list(report.phases) == ["transfer"]
        after = answers()
        assert after["tenant"] == bench.expected("tenant") != before["tenant"]
        assert (after[None], after["from disk"]) == (before[None], before["from disk"])
        assert bench.status().adapters == {**versions, "tenant": report.version}
        with pytest.raises(ConfigError, match=r"'tenant', 'from disk', which belongs to the plain base"):
            manager.sync_weights()
        assert answers() == after
        for name in ("tenant", "from disk"):
            manager.detach_adapter(name)
        manager.sync_weights()
        assert bench.generate() == bench.expected("default")

    def test_an_adapter_of_many_buckets_comes_whole_or_not_at_all(self, bench: Bench) -> None:
        bench.begin()
        manager = bench.manager
        manager.sync_weights(False)
        answers, before = bench.generate(), bench.status()
        bench.step("default")
        usual, manager.bucket_size = manager.bucket_size, 4096
        try:
            get(bench.trainer.fail_at_launch.remote(5))
            with pytest.raises(SyncError, match=r"trainer\[0\].*no more power"):
                manager.sync_weights(False)
            assert bench.generate() == answers
            assert bench.status().adapters == before.adapters
            assert manager.sync_weights(False).base == ""
        finally:
            manager.bucket_size = usual
        assert bench.generate() == bench.expected("default")

    def test_a_base_that_changed_is_sent_again_under_the_adapters(self, bench: Bench) -> None:
        bench.begin()
        bench.manager.sync_weights(False)
        bench.manager.sync_weights(adapter="tenant")
        get(bench.trainer.change_base.remote())
        assert bench.manager.sync_weights(False).base == "plain"
        assert bench.generate() == bench.expected("default")
        assert bench.generate("tenant") == bench.expected("tenant")

    def test_a_base_that_the_users_own_sleep_discarded_is_sent_again(self, bench: Bench) -> None:
        bench.begin()
        bench.manager.sync_weights(False)
        get(bench.rollout.fall_asleep.remote(2))
        get(bench.rollout.get_up.remote())
        assert bench.status().contents is Contents.NONE
        assert bench.manager.sync_weights(False).base == "plain"
        assert bench.generate() == bench.expected("default")

    def test_what_it_cannot_serve_is_refused_before_any_byte(self, bench: Bench) -> None:
        bench.begin()
        bench.manager.sync_weights(False)
        before, answers, sent = bench.status(), bench.generate(), get(bench.trainer.sent.remote())
        for config, kind, text in (
            ({**DEFAULT, "r": 64}, UnsupportedModel, r"rollout\[0\].*rank 64, .*max_lora_rank=8; raise that"),
            ({**DEFAULT, "use_dora": True}, UnsupportedModel, "DoRA; sync it merged into the base"),
            ({**DEFAULT, "modules_to_save": ["lm_head"]}, UnsupportedModel, "modules_to_save"),
        ):
            get(bench.trainer.adapt.remote(bench.root / "llama-0", default=config))
            with pytest.raises(TwinkleRayError, match=text) as caught:
                bench.manager.sync_weights(False)
            assert isinstance(caught.value, kind)
        assert get(bench.trainer.sent.remote()) == sent
        after = bench.status()
        assert (after.version, after.adapters, after.contents) == (before.version, before.adapters, Contents.WHOLE)
        assert bench.generate() == answers


class InFlight:
    """Requests that run while the next version of their adapter comes."""

    @pytest.mark.parametrize(
        ("mode", "adapter"), [pytest.param("wait", None, marks=pytest.mark.soak), ("abort", "tenant")]
    )
    def test_a18_a_request_that_runs_meanwhile_is_of_one_version(
        self, bench: Bench, mode: str, adapter: str | None
    ) -> None:
        bench.begin()
        name, count = adapter or "default", 200
        report = bench.manager.sync_weights(False)
        if adapter is not None:
            report = bench.manager.sync_weights(adapter=adapter)
        undisturbed = get(bench.trainer.greedy_of.remote(name, models.PROMPTS, count))
        running = bench.rollout.generate.remote(models.PROMPTS, count, adapter)
        deadline = time.monotonic() + 20
        while not (len(w := get(bench.rollout.written.remote())) == len(models.PROMPTS) and min(w) > 10):
            assert time.monotonic() < deadline, w
            time.sleep(0.02)
        bench.step(name)

        later = bench.manager.sync_weights(False, adapter=adapter, in_flight=mode)

        answers: list[Answer] = get(running)
        assert {answer.version for answer in answers} == {report.version} == {later.version - 1}
        if mode == "wait":
            assert tokens(answers) == undisturbed
        else:
            assert {answer.reason for answer in answers} == {"abort"}
            for answer, whole in zip(answers, undisturbed, strict=True):
                assert 10 < len(answer.tokens) < count
                assert answer.tokens == whole[: len(answer.tokens)]
        assert bench.generate(adapter) == bench.expected(name)


class TestInProcess(Serves, InFlight):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainer: Any, start: Make) -> Iterator[Bench]:
        rollout = start(Rollout, checkpoints / "llama-0", options={"max_concurrency": 2}, **ARGUMENTS)
        with (made := Bench(checkpoints, trainer, rollout)).manager:
            yield made

    def test_a_failure_within_vllm_leaves_the_old_adapter(self, bench: Bench) -> None:
        bench.begin()
        bench.manager.sync_weights(False)
        answers, before = bench.generate(), bench.status()
        bench.step("default")
        get(bench.rollout.fail_to_register.remote())
        with pytest.raises(SyncError, match=r"rollout\[0\].*what was held before stays.*no more memory"):
            bench.manager.sync_weights(False)
        assert bench.generate() == answers
        assert bench.status().adapters == before.adapters
        assert bench.status().contents is Contents.WHOLE
        assert bench.manager.sync_weights(False).base == ""
        assert bench.generate() == bench.expected("default")

    def test_embeddings_and_the_head(self, bench: Bench) -> None:
        bench.begin()
        config = {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}
        get(bench.trainer.adapt.remote(bench.root / "llama-0", default=config))
        for merge in (False, True):
            bench.manager.sync_weights(merge)
            assert bench.generate() == bench.expected("default")
            bench.step("default")

    def test_an_engine_with_lora_that_only_gets_merged_weights_is_named_once(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench.begin()
        bench.manager.sync_weights()
        with caplog.at_level(logging.WARNING, logger="twinkle_ray"):
            made = CheckpointEngineManager([bench.trainer], [bench.rollout], timeout_s=60, adapters=False)
            for _ in range(2):
                made.sync_weights()
            made.close()
            CheckpointEngineManager([bench.trainer], [bench.rollout], timeout_s=60, adapters=True).close()
        assert [r.getMessage() for r in caplog.records if "enable_lora" in r.getMessage()] == [
            "rollout[0]: vLLM has enable_lora=True, but merged weights need no LoRA in the engine, which costs memory "
            "and speed; make it with enable_lora=False unless adapters are sent too"
        ]


@pytest.mark.soak
class TestChildProcess(Serves):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainer: Any, start: Make) -> Iterator[Bench]:
        rollout = start(Rollout, checkpoints / "llama-0", child=True, **ARGUMENTS)
        with (made := Bench(checkpoints, trainer, rollout)).manager:
            yield made


class TestAsync(Serves, InFlight):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainer: Any, start: Make) -> Iterator[Bench]:
        rollout = start(AsyncRollout, checkpoints / "llama-0", child=True, **ARGUMENTS)
        with (made := Bench(checkpoints, trainer, rollout)).manager:
            yield made

    @pytest.mark.soak
    @pytest.mark.parametrize(("mode", "adapter"), [("wait", None), ("abort", "tenant")])
    def test_a18_a_request_that_runs_meanwhile_is_of_one_version(
        self, bench: Bench, mode: str, adapter: str | None
    ) -> None:
        super().test_a18_a_request_that_runs_meanwhile_is_of_one_version(bench, mode, adapter)


class TestTensorParallel:
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainer: Any, start: Make) -> Iterator[Bench]:
        how = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        rollout = start(Rollout, checkpoints / "llama-0", **how, **ARGUMENTS)
        with (made := Bench(checkpoints, trainer, rollout)).manager:
            yield made

    def test_both_workers_hold_their_part(self, bench: Bench) -> None:
        bench.begin()
        for merge in (False, False, True, False):
            bench.manager.sync_weights(merge)
            assert bench.generate() == bench.expected("default")
            bench.step("default")

    @pytest.mark.parametrize("merge", [False, True])
    def test_a_failure_in_one_of_them_is_healed_by_the_next_sync(self, bench: Bench, merge: bool) -> None:
        bench.begin()
        bench.manager.sync_weights(False)
        get(bench.rollout.fail_in_last_worker.remote())
        with pytest.raises(SyncError, match=r"rollout\[0\].*no more memory"):
            bench.manager.sync_weights(False)
        assert bench.status().contents is Contents.MIXED
        bench.step("default")
        assert bench.manager.sync_weights(merge).base == ("merged" if merge else "plain")
        assert bench.generate() == bench.expected("default")
        assert bench.status().adapters.keys() == (set() if merge else {"default"})


class TestWithoutLora:
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, checkpoints: Path, trainer: Any, start: Make) -> Iterator[Bench]:
        rollout = start(Rollout, checkpoints / "llama-0")
        with (made := Bench(checkpoints, trainer, rollout)).manager:
            yield made

    def test_adapters_are_refused_when_the_manager_is_made_or_at_the_sync(self, bench: Bench, tmp_path: Path) -> None:
        bench.begin()
        text = r"rollout\[0\]: its vLLM engine was made without enable_lora=True"
        with pytest.raises(ConfigError, match=text):
            CheckpointEngineManager([bench.trainer], [bench.rollout], timeout_s=60, adapters=True)
        sent = get(bench.trainer.sent.remote())
        for how in ({"merge_and_sync": False}, {"adapter": "tenant"}):
            with pytest.raises(ConfigError, match=text):
                bench.manager.sync_weights(**how)
        get(bench.trainer.save.remote(tmp_path, "other"))
        with pytest.raises(UnsupportedModel, match="without enable_lora=True"):
            bench.manager.attach_adapter("x", tmp_path / "other")
        assert get(bench.trainer.sent.remote()) == sent
        bench.manager.sync_weights()
        assert bench.generate() == bench.expected("default")


def test_what_vllm_cannot_serve_gets_no_arguments() -> None:
    assert ARGUMENTS == {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
    with pytest.raises(UnsupportedModel, match="DoRA"):
        RolloutActorMixin.lora_arguments({**DEFAULT, "use_dora": True})
    with pytest.raises(ConfigError, match="at least one adapter"):
        RolloutActorMixin.lora_arguments()
    with pytest.raises(ConfigError, match="no None"):
        RolloutActorMixin.lora_arguments(None)
