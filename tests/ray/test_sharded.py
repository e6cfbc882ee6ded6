"""FSDP2 trainers: gathered one after the other, sent by rank 0, whatever the receiver's pace."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from tests.actors import RolloutBase, TrainerBase
from twinkle_ray import CheckpointEngineManager, SyncError

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.cpu("the stand-in for torch's own hccl process group has no all_gather, which FSDP2 needs"),
]


class Uneven(torch.nn.Module):
    """Rows that do not divide by two ranks, one module that is not sharded, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = torch.nn.Linear(7, 5)
        self.b = torch.nn.Linear(5, 3, bias=False)
        self.c = torch.nn.Linear(3, 1)
        self.whole = torch.nn.LayerNorm(3)
        self.register_buffer("steps", torch.tensor(seed))


class ShardedTrainer(TrainerBase):
    def __init__(self, rank: int, port: int, seed: int) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self.model = Uneven(seed)
        mesh = init_device_mesh("cpu", (2,))
        for module in (self.model.a, self.model.b, self.model.c):
            fully_shard(module, mesh=mesh)

    def kinds(self) -> set[str]:
        return {type(p.data).__name__ for p in self.model.parameters()}

    def train(self) -> float:
        """One real step on the shards."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        x = torch.ones(2, 7)
        loss = self.model.c(self.model.whole(self.model.b(self.model.a(x)))).sum()
        loss.backward()
        optimizer.step()
        return float(loss)

    def total(self) -> float:
        import torch.distributed as dist

        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return value.item()

    def full(self) -> dict[str, torch.Tensor]:
        """The whole tensors by torch's own checkpoint API: not our code."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


class SlowRollout(RolloutBase):
    def __init__(self, seed: int, seconds: float) -> None:
        self.model = Uneven(seed)
        from twinkle_ray.sinks import ModuleSink

        ready = ModuleSink.ready

        def slow(sink: ModuleSink, tensors: Any) -> None:
            time.sleep(seconds)
            ready(sink, tensors)

        ModuleSink.ready = slow  # type: ignore[method-assign]
        ModuleSink._ranges = lambda *_: None  # type: ignore[method-assign]  # nothing in place: all is loaded

    def held(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def break_once(self) -> None:
        from twinkle_ray.sinks import ModuleSink

        ready = ModuleSink.ready

        def fail(sink: ModuleSink, tensors: Any) -> None:
            ModuleSink.ready = ready  # type: ignore[method-assign]
            raise OSError("the receiver broke")

        ModuleSink.ready = fail  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def actors(ray_cluster: str) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trainers = [ray.remote(num_cpus=0.1)(ShardedTrainer).remote(rank, port, 3) for rank in range(2)]
    rollout = ray.remote(num_cpus=0.1)(SlowRollout).remote(9, 0.2)
    assert ray.get([t.kinds.remote() for t in trainers], timeout=60) == [{"DTensor", "Tensor"}] * 2
    yield trainers, rollout
    for actor in (*trainers, rollout):
        ray.kill(actor)


def same(trainers: list[Any], rollout: Any) -> None:
    full = ray.get([t.full.remote() for t in trainers], timeout=30)[0]
    held = ray.get(rollout.held.remote(), timeout=30)
    assert full.keys() == held.keys()
    assert all(torch.equal(full[name], held[name]) for name in full)


def test_two_sharded_ranks_a_tiny_bucket_and_a_slow_receiver(actors: Any) -> None:
    trainers, rollout = actors
    with CheckpointEngineManager(trainers, [rollout], bucket_size=64, timeout_s=40) as manager:
        for _ in range(2):
            manager.sync_weights()
            same(trainers, rollout)
            assert manager.verify().compared == 8
            losses = ray.get([t.train.remote() for t in trainers], timeout=30)
            assert len(losses) == 2


def test_a_receiver_that_breaks_leaves_no_trainer_rank_in_a_gather(actors: Any) -> None:
    trainers, rollout = actors
    with CheckpointEngineManager(trainers, [rollout], bucket_size=64, timeout_s=40) as manager:
        manager.sync_weights()
        ray.get(rollout.break_once.remote(), timeout=10)
        start = time.monotonic()
        with pytest.raises(SyncError, match="the receiver broke") as caught:
            manager.sync_weights()
        assert time.monotonic() - start < 5
        assert caught.value.actors == ("rollout[0]",)
        assert ray.get([t.total.remote() for t in trainers], timeout=5) == [3.0, 3.0]
        ray.get([t.train.remote() for t in trainers], timeout=30)
        manager.sync_weights()
        same(trainers, rollout)


class AdaptedShards(ShardedTrainer):
    """Shards of base and adapter alike."""

    def __init__(self, rank: int, port: int, seed: int, **config: Any) -> None:
        import peft
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        torch.manual_seed(seed)
        config = {"r": 3, "lora_alpha": 6, "target_modules": ["a", "b"], "init_lora_weights": False, **config}
        self.model = peft.get_peft_model(Uneven(seed), peft.LoraConfig(**config))
        mesh = init_device_mesh("cpu", (2,))
        inner = self.model.base_model.model
        for module in (inner.a, inner.b, inner.c):
            fully_shard(module, mesh=mesh)

    def train(self) -> float:
        self.seed = getattr(self, "seed", 0) + 1
        torch.manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
        return 0.0


@pytest.fixture
def adapted(ray_cluster: str) -> Iterator[Any]:
    made: list[Any] = []

    def make(**config: Any) -> list[Any]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        made.extend(ray.remote(num_cpus=0.1)(AdaptedShards).remote(rank, port, 3, **config) for rank in range(2))
        return made

    yield make
    for actor in made:
        ray.kill(actor)


def halves(full: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Base and adapter of a state dict under PEFT, by the names of the base and of PEFT's checkpoints."""
    plain = {name.removeprefix("base_model.model."): tensor for name, tensor in full.items()}
    adapter = {name.replace(".default", ""): tensor for name, tensor in plain.items() if "lora_" in name}
    return {n.replace(".base_layer.", "."): t for n, t in plain.items() if "lora_" not in n}, adapter


@pytest.mark.parametrize(
    "config", [pytest.param({}, id="plain"), pytest.param({"use_dora": True}, id="dora", marks=pytest.mark.soak)]
)
def test_an_adapter_in_shards_is_sent_alone_and_whole(adapted: Any, config: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    trainers = adapted(**config)
    rollout = ray.remote(num_cpus=0.1)(SlowRollout).remote(9, 0.0)
    try:
        manager = CheckpointEngineManager(trainers, [rollout], timeout_s=60, bucket_size=40)
        for sent in ("plain", ""):
            ray.get([t.train.remote() for t in trainers], timeout=30)
            assert manager.sync_weights(False).base == sent
            want = halves(ray.get([t.full.remote() for t in trainers], timeout=30)[0])
            for held, full in zip(halves(ray.get(rollout.held.remote(), timeout=30)), want, strict=True):
                assert held.keys() == full.keys()
                assert all(torch.equal(full[name], held[name]) for name in full)
        manager.verify()
        ray.get([t.total.remote() for t in trainers], timeout=30)
        manager.sync_weights()
        assert not any("lora_" in name for name in ray.get(rollout.held.remote(), timeout=30))
        if not config:
            let_go(trainers)
            by_hand(trainers, rollout)
    finally:
        ray.kill(rollout)


def let_go(trainers: list[Any]) -> None:
    """Rank 0 alone sees that a base is not the one that was sent; the other one is in a gather by then."""
    one = ray.get([t.checkpoint_adapter.remote("default") for t in trainers], timeout=30)[0]
    adapter = {"name": "default", "digest": one["digest"], "base_id": "another", "default": True}
    agreed = {"digest": None, "bucket_size": 64, "timeout_s": 20.0, "adapter": adapter}
    groups = [ray.get(trainers[0].checkpoint_status.remote(), timeout=30).group, None]
    sends = [
        t.send_checkpoint_weights.remote(agreed={**agreed, "group": g}) for t, g in zip(trainers, groups, strict=True)
    ]
    with pytest.raises(SyncError, match="the base under adapter 'default' was changed"):
        ray.get(sends[0], timeout=10)
    assert ray.get(sends[1], timeout=10) == {}
    assert ray.get([t.total.remote() for t in trainers], timeout=10) == [3.0, 3.0]


def by_hand(trainers: list[Any], rollout: Any) -> None:
    """As the seeds' driver does it, twice: all ranks must gather the same, though only rank 0 knows what it sent."""
    metadata = ray.get(trainers[0].prepare_checkpoint_engine.remote(True), timeout=30)
    joins = [
        actor.init_checkpoint_process_group.remote(rank=rank, world_size=2, master_metadata=metadata)
        for actor, rank in zip((*trainers, rollout), (0, -1, 1), strict=True)
    ]
    ray.get(joins, timeout=30)
    for _ in range(2):
        ray.get([t.train.remote() for t in trainers], timeout=30)
        sends = [t.send_checkpoint_weights.remote(adapter_only=True, timeout_s=20.0) for t in trainers]
        ray.get([*sends, rollout.receive_checkpoint_weights.remote(timeout_s=20.0)], timeout=30)
        want = halves(ray.get([t.full.remote() for t in trainers], timeout=30)[0])
        for held, full in zip(halves(ray.get(rollout.held.remote(), timeout=30)), want, strict=True):
            assert held.keys() == full.keys()
            assert all(torch.equal(full[name], held[name]) for name in full)


class LargeShards(ShardedTrainer):
    """Twelve layers of 8 MB."""

    def __init__(self, rank: int, port: int) -> None:
        super().__init__(rank, port, 3)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = torch.nn.ModuleList(torch.nn.Linear(1024, 2048, bias=False) for _ in range(12))
        mesh = init_device_mesh("cpu", (2,))
        for module in self.model:
            fully_shard(module, mesh=mesh)

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        """The highest memory in use beside what was in use before."""
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # forget the highest so far
        before = self.kib("VmRSS")
        sent = super().send_checkpoint_weights(*args, **kwargs)
        self.peak = (self.kib("VmHWM") - before) << 10
        return sent

    def kib(self, what: str) -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            return int(next(line for line in file if line.startswith(what)).split()[1])


class LargeRollout(RolloutBase):
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.ModuleList(torch.nn.Linear(1024, 2048, bias=False) for _ in range(12))


def test_a06_a_sharded_sync_takes_the_memory_of_two_buckets_and_the_largest_tensor(ray_cluster: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # What is freed goes back at once, so that what is in use is what is seen.
    kind = ray.remote(num_cpus=0.1)(LargeShards).options(runtime_env={"env_vars": {"MALLOC_MMAP_THRESHOLD_": "65536"}})
    trainers = [kind.remote(rank, port) for rank in range(2)]
    rollout = ray.remote(num_cpus=0.1)(LargeRollout).remote()
    bucket, largest, whole = 2 << 20, 8 << 20, 96 << 20
    try:
        with CheckpointEngineManager(trainers, [rollout], bucket_size=bucket, timeout_s=60) as manager:
            peaks = []
            for _ in range(4):
                assert manager.sync_weights().nbytes == whole
                peaks.append(ray.get([t.call.remote(lambda one: one.peak) for t in trainers], timeout=30))
    finally:
        for actor in (*trainers, rollout):
            ray.kill(actor)
    for sends, gathers in peaks[1:]:
        assert gathers <= 2 * largest + (2 << 20)  # torch gathers into one, by way of another one
        assert sends <= gathers + 2 * bucket
