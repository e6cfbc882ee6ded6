"""The seeds' engines, driven by hand in Ray actors exactly as the seed's example drives them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
import torch

from tests.payload import facts, payload
from twinkle_ray import ConfigError, PeerLost, SyncAborted, SyncError, SyncTimeout
from twinkle_ray.checkpoint_engine import CheckpointEngine, GlooCheckpointEngine

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.cpu("tests/ascend/test_engine.py drives the engine of NPUs"),
]
ENDS = (SyncError, ray.exceptions.RayError)


@ray.remote(num_cpus=0)
class Hand:
    """An async actor that holds one engine, as an RLHF actor would."""

    def __init__(self, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        self.engine = GlooCheckpointEngine(**kwargs)

    async def prepare(self, is_master: bool) -> Any:
        self.engine.is_master = is_master
        return self.engine.prepare()

    async def init(self, **kwargs: Any) -> None:
        import asyncio

        await asyncio.to_thread(self.engine.init_process_group, **kwargs)

    async def send(self, bucket_size: int, seed: int) -> None:
        await self.engine.send_weights(iter(payload(bucket_size, seed)))

    async def send_failing(self, after: int) -> None:
        def weights() -> Any:
            for i in range(after):
                yield f"w{i}", torch.full((1000,), float(i))
            raise ValueError("the generator broke")

        await self.engine.send_weights(weights())

    async def send_slowly(self, seconds: float) -> None:
        def weights() -> Any:
            for i in range(1000):
                time.sleep(seconds)
                yield f"w{i}", torch.zeros(1000)

        await self.engine.send_weights(weights())

    async def send_named(self, names: list[str]) -> None:
        await self.engine.send_weights([(name, torch.ones(2)) for name in names])

    async def receive(self, spoil: bool = False) -> Any:
        kept = []
        found = []
        async for name, tensor in self.engine.receive_weights():
            kept.append((name, tensor))
            if spoil:
                found.append(facts(name, tensor))
        # Every yielded tensor owns its storage: all are still right after the last one has come.
        again = [facts(name, tensor) for name, tensor in kept]
        assert not spoil or again == found
        storages = {t.untyped_storage().data_ptr() for _, t in kept if t.numel()}
        assert len(storages) == sum(1 for _, t in kept if t.numel())
        return again

    async def ping(self) -> float:
        return time.time()

    async def finalize(self) -> None:
        self.engine.finalize()

    async def pid(self) -> int:
        import os

        return os.getpid()


def connected(count: int, **kwargs: Any) -> list[Any]:
    hands = [Hand.remote(**kwargs) for _ in range(count)]
    metadata = ray.get([h.prepare.remote(i == 0) for i, h in enumerate(hands)], timeout=30)
    assert metadata[1:] == [{}] * (count - 1)
    first = hands[0].init.remote(rank=0, world_size=count)  # the master needs no metadata
    rest = [h.init.remote(rank=i, world_size=count, master_metadata=metadata[0]) for i, h in enumerate(hands) if i]
    ray.get([first, *rest], timeout=30)
    return hands


def end(hands: list[Any]) -> None:
    for hand in hands:
        ray.kill(hand)


@pytest.mark.parametrize(
    "bucket_size", [1 << 10, *(pytest.param(size, marks=pytest.mark.soak) for size in (64 << 10, 512 << 20))]
)
def test_every_kind_of_tensor_arrives_bit_for_bit_and_in_order(bucket_size: int) -> None:
    hands = connected(3, bucket_size=bucket_size, timeout=120)
    for seed in (1, 2):
        sent = hands[0].send.remote(bucket_size, seed)
        received = ray.get([h.receive.remote() for h in hands[1:]], timeout=180)
        ray.get(sent, timeout=10)
        expected = [facts(name, tensor) for name, tensor in payload(bucket_size, seed)]
        assert received == [expected, expected]
    ray.get([h.finalize.remote() for h in hands], timeout=10)
    end(hands)


def test_the_ends_may_differ_in_bucket_size() -> None:
    sender, receiver = Hand.remote(bucket_size=4096), Hand.remote(bucket_size=1 << 20)
    metadata = ray.get(sender.prepare.remote(True), timeout=30)
    ray.get(
        [
            sender.init.remote(rank=0, world_size=2),
            receiver.init.remote(rank=1, world_size=2, master_metadata=metadata),
        ],
        timeout=30,
    )
    sent = sender.send.remote(4096, 3)
    received = ray.get(receiver.receive.remote(True), timeout=60)
    ray.get(sent, timeout=10)
    assert received == [facts(name, tensor) for name, tensor in payload(4096, 3)]
    end([sender, receiver])


def test_a_generator_that_raises_releases_the_receivers_with_its_reason() -> None:
    hands = connected(3, bucket_size=8000, timeout=60)
    sent = hands[0].send_failing.remote(20)
    received = [h.receive.remote() for h in hands[1:]]
    with pytest.raises(ValueError, match="the generator broke"):
        ray.get(sent, timeout=10)
    for ref in received:
        with pytest.raises(SyncAborted, match="the generator broke"):
            ray.get(ref, timeout=5)
    ray.get([h.ping.remote() for h in hands], timeout=2)
    # The same actors make a new generation.
    ray.get([h.finalize.remote() for h in hands], timeout=10)
    metadata = ray.get([h.prepare.remote(i == 0) for i, h in enumerate(hands)], timeout=30)[0]
    ray.get([h.init.remote(rank=i, world_size=3, master_metadata=metadata) for i, h in enumerate(hands)], timeout=30)
    sent = hands[0].send.remote(8000, 5)
    expected = [facts(name, tensor) for name, tensor in payload(8000, 5)]
    assert ray.get([h.receive.remote() for h in hands[1:]], timeout=60) == [expected, expected]
    ray.get(sent, timeout=10)
    end(hands)


def test_two_tensors_of_one_name_are_refused() -> None:
    hands = connected(2, timeout=30)
    received = hands[1].receive.remote()
    with pytest.raises(ConfigError, match="two tensors are named 'a'"):
        ray.get(hands[0].send_named.remote(["a", "b", "a"]), timeout=10)
    with pytest.raises(SyncAborted):
        ray.get(received, timeout=5)
    end(hands)


def test_a_peer_that_never_comes_ends_the_connect_at_its_deadline() -> None:
    hands = [Hand.remote(timeout=3) for _ in range(2)]
    metadata = ray.get(hands[0].prepare.remote(True), timeout=30)
    ray.get(hands[1].prepare.remote(False), timeout=30)
    start = time.monotonic()
    refs = [hands[0].init.remote(rank=0, world_size=3)]
    refs.append(hands[1].init.remote(rank=1, world_size=3, master_metadata=metadata))
    for ref in refs:
        with pytest.raises(SyncTimeout):
            ray.get(ref, timeout=6)
    assert 2.5 < time.monotonic() - start < 5
    ray.get([h.ping.remote() for h in hands], timeout=1)
    end(hands)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_peer_killed_in_mid_transfer_ends_the_others_within_two_seconds(victim: int) -> None:
    hands = connected(3, bucket_size=8000, timeout=60)
    received = [h.receive.remote() for h in hands[1:]]
    sent = hands[0].send_slowly.remote(0.02)
    time.sleep(1.0)
    ray.kill(hands[victim])
    start = time.monotonic()
    for index, ref in enumerate([sent, *received]):
        if index != victim:
            with pytest.raises((PeerLost, SyncAborted)):
                ray.get(ref, timeout=4)
    assert time.monotonic() - start < 2
    ray.get([h.ping.remote() for i, h in enumerate(hands) if i != victim], timeout=1)
    end(hands)


def test_a_transfer_that_takes_too_long_ends_at_its_deadline() -> None:
    hands = connected(2, bucket_size=8000, timeout=3)
    received = hands[1].receive.remote()
    sent = hands[0].send_slowly.remote(0.05)
    start = time.monotonic()
    for ref in (sent, received):
        with pytest.raises((SyncTimeout, SyncAborted)):
            ray.get(ref, timeout=8)
    assert time.monotonic() - start < 5
    end(hands)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bucket_size": 0}, "bucket_size is 0"),
        ({"bucket_size": -5}, "bucket_size is -5"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_bad_sizes_are_refused_at_construction(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GlooCheckpointEngine(**kwargs)


def test_a_receiver_without_metadata_is_told_what_it_needs() -> None:
    engine = GlooCheckpointEngine()
    assert engine.prepare() == {}
    with pytest.raises(ConfigError, match="needs master_metadata"):
        engine.init_process_group(rank=1, world_size=2)
    engine.finalize()
    engine.finalize()


def test_topology_has_the_seeds_form() -> None:
    train, rollout = CheckpointEngine.build_topology(2, 3, [{"m": 1}, None])
    assert train == {"rank": [0, -1], "world_size": [4, 4], "master_metadata": [{"m": 1}] * 2}
    assert rollout == {"rank": [1, 2, 3], "world_size": [4] * 3, "master_metadata": [{"m": 1}] * 3}
