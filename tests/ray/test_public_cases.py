"""Faults that other projects had, where no other test here runs them. The numbers are those of ``tests/README.md``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from typing import Any

import pytest
import ray
import torch

from tests.actors import Rollout, RolloutBase, Trainer, TrainerBase, at_launch, group_class, no_power, placed
from tests.ray.test_fault_matrix import resident
from tests.ray.test_lora import Adapted, get
from tests.ray.test_sync import SlowRollout
from twinkle_ray import CheckpointEngineManager, SyncError, TwinkleRayError
from twinkle_ray.types import Contents

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def actors(stocked: Any) -> Any:
    return stocked


def equal(trainer: Any, *rollouts: Any) -> bool:
    want = get(trainer.digests.remote())
    return all(get(rollout.digests.remote()) == want for rollout in rollouts)


@pytest.mark.parametrize("rounds", [pytest.param(20, marks=pytest.mark.soak), 4])
def test_a03_ports_that_others_hold(actors: Any, rounds: int) -> None:
    """torch's usual ones and eight more; six managers start at once, again and again."""
    pairs = [(actors(Trainer, seed), actors(Rollout, 50 + seed)) for seed in range(6)]
    get([actor.ping.remote() for pair in pairs for actor in pair])
    errors: list[BaseException] = []
    barrier = threading.Barrier(6)

    def work(trainer: Any, rollout: Any) -> None:
        try:
            for _ in range(rounds):
                barrier.wait(30)
                with CheckpointEngineManager([trainer], [rollout], timeout_s=30) as manager:
                    manager.sync_weights()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with contextlib.ExitStack() as held:
        for port in (29400, 29500, 29501, *[0] * 8):
            with contextlib.suppress(OSError):  # somebody holds it already
                held.enter_context(socket.create_server(("127.0.0.1", port)))
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert errors == []
    assert all(equal(*pair) for pair in pairs)


class CannotReadBase(RolloutBase):
    """Fails to decode a manifest, once."""

    def fail_to_read(self, number: int) -> None:
        from twinkle_ray.errors import WireError
        from twinkle_ray.manifest import Manifest

        usual, left = Manifest.from_json, number

        def failing(value: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                Manifest.from_json = usual  # type: ignore[method-assign]
                raise WireError("a dtype that nobody knows")
            return usual(value)

        Manifest.from_json = staticmethod(failing)  # type: ignore[method-assign, assignment]


CannotRead = ray.remote(num_cpus=0.1)(CannotReadBase)


@pytest.mark.parametrize("number", [0, 1], ids=["before the group is used", "while the others wait in it"])
def test_a07_one_rollout_that_cannot_decode_a_header_holds_nobody(actors: Any, number: int) -> None:
    trainer, one, other = actors(Trainer, 1), actors(Rollout, 5), actors(CannotRead, 6)
    manager = CheckpointEngineManager([trainer], [one, other], timeout_s=30)
    get(other.fail_to_read.remote(number))
    start = time.monotonic()
    with pytest.raises(TwinkleRayError, match=r"rollout\[1\].*a dtype that nobody knows"):
        manager.sync_weights()
    get([actor.ping.remote() for actor in (trainer, one, other)])
    assert time.monotonic() - start < 5
    assert get(one.checkpoint_status.remote()).contents is Contents.NONE
    manager.sync_weights()
    assert equal(trainer, one, other)


def lose_a_chunk(number: int) -> None:
    """Of those that this process sends next, once."""
    cls = group_class()
    usual, left = cls.broadcast_many, number

    def losing(group: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            cls.broadcast_many = usual
        else:
            usual(group, *args, **kwargs)

    cls.broadcast_many = losing


@pytest.mark.parametrize("bucket_size", [1024, 1 << 20], ids=["the second of many", "the only one"])
def test_a08_a_bucket_that_is_lost(actors: Any, bucket_size: int) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60, bucket_size=bucket_size)
    manager.sync_weights()
    before = get(rollout.digests.remote())
    get(trainer.step.remote(1))
    get(trainer.call.remote(lambda one: lose_a_chunk(bucket_size == 1024)))
    manager.timeout_s = 2.0
    start = time.monotonic()
    with pytest.raises(SyncError) as caught:
        manager.sync_weights()
    assert caught.value.phase == "transfer"
    found = re.search(r"\(chunk (\d+) of (\d+)\)", str(caught.value))
    assert found is not None, caught.value
    due, chunks = map(int, found.groups())
    assert 1 <= due <= chunks  # the oldest that had not come when one of another size, or none, was there
    assert (chunks == 1) == (bucket_size > 1024)
    assert time.monotonic() - start < 6
    status = get(rollout.checkpoint_status.remote())
    assert status.contents is Contents.MIXED or get(rollout.digests.remote()) == before
    manager.timeout_s = 60
    manager.sync_weights()
    assert equal(trainer, rollout)


class BusyBase(RolloutBase):
    async def generate(self) -> int:
        await asyncio.sleep(0.02)
        return 1


Busy = ray.remote(num_cpus=0.1, max_concurrency=50)(BusyBase)


def test_a09_two_thousand_queued_requests_do_not_starve_a_sync(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Busy, 5)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=20)
    get(rollout.ping.remote())
    requests = [rollout.generate.remote() for _ in range(2000)]
    start = time.monotonic()
    manager.sync_weights()
    assert time.monotonic() - start < 20
    assert equal(trainer, rollout)
    assert sum(get(requests)) == 2000


def test_a11_the_adapter_is_delivered_by_the_first_call_and_counted(actors: Any) -> None:
    trainer, rollout = actors(Adapted), actors(Rollout, 5)
    manager = CheckpointEngineManager([trainer], [rollout], timeout_s=60)
    layers = sum(name.endswith("lora_A.default.weight") for name in get(trainer.values.remote()))
    base = len(get(rollout.digests.remote()))
    assert manager.sync_weights(merge_and_sync=False).tensors == base + 2 * layers
    first = get(rollout.logits.remote())
    assert torch.equal(first, get(trainer.logits.remote()))
    get(trainer.call.remote(add_one_to_b))
    report = manager.sync_weights(merge_and_sync=False)
    assert (report.base, report.adapter, report.tensors) == ("", "default", 2 * layers)
    assert not torch.equal(get(rollout.logits.remote()), first)
    assert torch.equal(get(rollout.logits.remote()), get(trainer.logits.remote()))


def add_one_to_b(trainer: Any) -> None:
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(1)


def test_a12_merged_tensors_do_not_wait_for_a_slow_receiver_to_be_what_they_are(actors: Any) -> None:
    trainer, slow, other = actors(Adapted), actors(SlowRollout, 5, 0.2), actors(Rollout, 6)
    manager = CheckpointEngineManager([trainer], [slow, other], timeout_s=60, bucket_size=4096)
    want = get(trainer.merged.remote())
    manager.sync_weights(merge_and_sync=True)
    get(trainer.step.remote(9))
    assert get([slow.digests.remote(), other.digests.remote()]) == [want, want]
    assert get(trainer.merged.remote()) != want
    assert get(trainer.drifted.remote()) == []


def stride(actor: Any) -> None:
    """Store one weight transposed, and another one as columns of a wider tensor."""
    actor.wide = []
    for block in actor.model.blocks:
        block["q"].weight = torch.nn.Parameter(block["q"].weight.detach().t().contiguous().t())
        held = block["o"].weight.detach()
        wide = torch.full((16, 48), 7.0, device=held.device)
        wide[:, 8:24] = held
        block["o"].weight = torch.nn.Parameter(wide[:, 8:24])
        actor.wide.append(wide)
    assert not actor.model.blocks[0]["q"].weight.is_contiguous()
    assert not actor.model.blocks[0]["o"].weight.is_contiguous()


def beside(actor: Any) -> set[float]:
    """What stands in the columns that are no part of the weights, which the others still are."""
    for block, wide in zip(actor.model.blocks, actor.wide, strict=True):
        assert torch.equal(block["o"].weight, wide[:, 8:24])
    return {float(value) for wide in actor.wide for value in torch.cat([wide[:, :8], wide[:, 24:]], 1).cpu().unique()}


def test_a15_strided_at_both_ends(actors: Any) -> None:
    trainer, rollouts = actors(Trainer, 1), [actors(Rollout, 5), actors(Rollout, 6)]
    get([actor.call.remote(stride) for actor in (trainer, rollouts[0])])
    with CheckpointEngineManager([trainer], rollouts, timeout_s=60) as manager:
        for seed in range(2):
            manager.sync_weights()
            assert equal(trainer, *rollouts)
            get(trainer.step.remote(seed))
    assert get(rollouts[0].call.remote(beside)) == {7.0}


def hold(sizes: list[int], value: float) -> Any:
    def run(actor: Any) -> None:
        torch.manual_seed(int(value))
        actor.model = placed(torch.nn.ParameterDict({f"w{i}": torch.randn(n) for i, n in enumerate(sizes)}))

    return run


def test_a25_tensors_of_a_buckets_size_and_around_it(actors: Any) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
    sizes = [255, 256, 257, 896, 1, 256, 256]  # floats; a bucket holds 256
    get([trainer.call.remote(hold(sizes, 1)), rollout.call.remote(hold(sizes, 2))])
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60, bucket_size=1024) as manager:
        assert manager.sync_weights().nbytes == 4 * sum(sizes)
        assert equal(trainer, rollout)


def held_memory(actor: Any) -> int:
    """Without what malloc keeps of what was freed, which grows with failures: each ends a thread with an arena."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident(actor)


def object_store() -> tuple[int, int]:
    """Bytes and objects in Ray's object store, as its raylet counts them."""
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    return stats.object_store_bytes_used, stats.num_local_objects


@pytest.mark.cpu("the stand-in has no allocator: memory is kept while any stream is busy")
def test_a27_memory_does_not_grow_with_syncs_of_a_large_model(actors: Any) -> None:
    everyone = trainer, rollout, strange = actors(Trainer, 1), actors(Rollout, 5), actors(Rollout, 6)
    get([actor.call.remote(hold([1 << 20] * 10, seed)) for seed, actor in enumerate(everyone)])
    get(strange.call.remote(lambda one: one.model.half() and None))  # so that it is sent float32 and casts each tensor
    with CheckpointEngineManager([trainer], [rollout, strange], timeout_s=60, bucket_size=8 << 20) as manager:
        for number in range(20):
            if number == 8:
                before, stored = get([actor.call.remote(held_memory) for actor in everyone]), object_store()
            if number == 14:
                get(trainer.call.remote(lambda one: at_launch(2, no_power)))
                with pytest.raises(SyncError, match="no more power"):
                    manager.sync_weights()
            manager.sync_weights()
        after = get([actor.call.remote(held_memory) for actor in everyone])
        assert object_store() <= stored  # no weight goes by way of it
    # The model has 40 MiB, and one bucket kept of each sync would be 96 by now; what else a process keeps varies by 10.
    assert all(now <= then + (24 << 20) for now, then in zip(after, before, strict=True)), (before, after)
    assert equal(trainer, rollout)


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("rollouts", [1, 4])
def test_a33_every_rollout_gets_every_tensor_in_whatever_order_they_are_listed(
    actors: Any, trainers: int, rollouts: int
) -> None:
    train, roll = [actors(Trainer, 1) for _ in range(trainers)], [actors(Rollout, 5 + n) for n in range(rollouts)]
    want = get(train[0].digests.remote())
    for listed in (roll, roll[::-1], roll[2:] + roll[:2]):
        with CheckpointEngineManager(train, listed, timeout_s=60) as manager:
            report = manager.sync_weights()
        assert get([one.digests.remote() for one in roll]) == [want] * rollouts
        assert [replica.tensors for replica in report.replicas] == [len(want)] * rollouts
        get([trainer.step.remote(7) for trainer in train])
        want = get(train[0].digests.remote())


def count_launches(actor: Any) -> None:
    cls = group_class()
    usual = cls.broadcast_many
    actor.launches = 0

    def counted(group: Any, *args: Any, **kwargs: Any) -> None:
        actor.launches += 1
        usual(group, *args, **kwargs)

    cls.broadcast_many = counted
    actor.uncount = lambda: setattr(cls, "broadcast_many", usual)


def in_parts(count: int) -> list[int]:
    """1.6 MB as so many tensors, in floats."""
    return [400 * 1024 // count] * count


@pytest.mark.parametrize("count", [1, 400])
def test_a34_launches_are_by_bytes_not_by_tensors(actors: Any, count: int) -> None:
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
    get([actor.call.remote(hold(in_parts(count), seed)) for seed, actor in enumerate((trainer, rollout))])
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60, bucket_size=256 << 10) as manager:
        manager.sync_weights()
        get(trainer.call.remote(count_launches))
        manager.sync_weights()
        assert get(trainer.call.remote(lambda one: one.launches)) <= 7 + 2  # buckets of 256 KiB in 1.6 MB
        get(trainer.call.remote(lambda one: one.uncount()))
    assert equal(trainer, rollout)


def test_a35_a_good_sync_is_one_line_and_says_what_each_rollout_got(
    actors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, rollouts = actors(Trainer, 1), [actors(Rollout, 5), actors(Rollout, 6)]
    with caplog.at_level(logging.INFO, "twinkle_ray"):
        report = CheckpointEngineManager([trainer], rollouts, timeout_s=60).sync_weights()
    lines = [record.getMessage() for record in caplog.records if "sync v" in record.getMessage()]
    assert lines == [str(report)]
    assert re.fullmatch(rf"sync v1 \[{actors.mode}\]: \d+ tensors, [\d.]+ MB to 2 rollout\(s\) in [^\n]*", lines[0])
    for replica in report.replicas:
        assert (replica.tensors, replica.nbytes, replica.version) == (report.tensors, report.nbytes, 1)
        assert {"pause", "reset", "wire"} <= replica.seconds.keys()


def without(names: tuple[str, ...], base: Any) -> Any:
    """An actor in a process in which these packages cannot be imported. A class of its own, so that the process does
    not import this module, and with it PEFT."""

    class Bare(base):  # type: ignore[misc]
        def __init__(self, seed: int) -> None:
            import sys
            from importlib.abc import MetaPathFinder

            class Block(MetaPathFinder):
                def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
                    if name.partition(".")[0] in names:
                        raise ModuleNotFoundError(f"blocked: {name}", name=name)

            sys.meta_path.insert(0, Block())
            super().__init__(seed)

        def loaded(self) -> list[str]:
            import sys

            return [name for name in names if name in sys.modules]

    return ray.remote(num_cpus=0.1)(Bare)


@pytest.mark.cpu("torch_npu is one of the packages that are missing here")
def test_a36_a_whole_sync_without_optional_packages(actors: Any) -> None:
    names = ("accelerate", "cupy", "peft", "torch_npu", "transformers", "vllm")
    trainer, rollout = actors(without(names, TrainerBase), 1), actors(without(names, RolloutBase), 5)
    with CheckpointEngineManager([trainer], [rollout], weight_sync_mode="gloo", timeout_s=60) as manager:
        manager.sync_weights()
        manager.verify()
    assert equal(trainer, rollout)
    assert get([trainer.loaded.remote(), rollout.loaded.remote()]) == [[], []]
