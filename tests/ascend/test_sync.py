"""Syncs between Ray actors on simulated NPUs. Most are tests of ``tests/ray``; ``--device npu`` runs all of those."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.actors import Rollout, Trainer, TrainerBase
from tests.ray import test_adapters, test_lora, test_sync
from tests.ray.test_sync import get
from twinkle_ray import CheckpointEngineManager

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(test_sync.test_rollouts_follow_the_trainer_bit_for_bit, id="plain"),
        pytest.param(
            partial(test_lora.test_rollouts_hold_what_pefts_merge_makes_after_every_sync, config={}), id="lora"
        ),
        pytest.param(
            partial(test_adapters.test_after_each_call_rollouts_compute_what_the_trainer_computes, sequence="TF"),
            id="adapter alone",
        ),
        pytest.param(
            partial(test_sync.test_an_actor_killed_in_mid_transfer_is_named_and_the_others_go_on, victim="rollout"),
            id="killed rollout",
        ),
    ],
)
def test_what_holds_on_a_cpu_holds_on_an_npu(actors: Any, shared: Callable[[Any], None]) -> None:
    shared(actors)


def join_default_group(actor: TrainerBase, rank: int, port: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("hccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def add_up(actor: TrainerBase) -> float:
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank() + 1)], device="npu")
    dist.all_reduce(value)
    return value.item()


def leave_default_group(actor: TrainerBase) -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def seen(actor: Any) -> tuple[str, str, int, int]:
    """Where the model is, which NPU Ray gave, communicators alive and ever made."""
    import os

    from tests.ascend.simulator import fake

    made = fake().fake_calls(b"HcclCommInitRootInfo")
    return str(actor.model.big.device), os.environ["ASCEND_RT_VISIBLE_DEVICES"], fake().fake_live_comms(), made


def test_twenty_syncs_into_three_rollouts_beside_the_trainers_own_group(actors: Any) -> None:
    trainers = [actors(Trainer, 1), actors(Trainer, 1)]
    rollouts = [actors(Rollout, n) for n in (2, 3, 4)]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    get([t.call.remote(partial(join_default_group, rank=i, port=port)) for i, t in enumerate(trainers)], 60)
    before = get([actor.call.remote(seen) for actor in (trainers[0], *rollouts)])
    with CheckpointEngineManager(trainers, rollouts, timeout_s=60) as manager:
        for version in range(1, 21):
            report = manager.sync_weights()
            assert (report.mode, report.version) == ("hccl", version)
            held = get([actor.digests.remote() for actor in (trainers[0], *rollouts)])
            assert held[1:] == held[:1] * 3
            assert get([t.call.remote(add_up) for t in trainers]) == [3.0, 3.0]
            get([t.step.remote(version) for t in trainers])
        facts = get([actor.call.remote(seen) for actor in (trainers[0], *rollouts)])
        assert {where for where, *_ in facts} == {"npu:0"}
        assert len({npu for _, npu, *_ in facts}) == 4
        assert [alive for _, _, alive, _ in facts] == [1] * 4
        assert [made for *_, made in facts] == [made + 1 for *_, made in before]
    assert [get(actor.call.remote(seen))[2] for actor in (trainers[0], *rollouts)] == [0] * 4
    assert get([t.call.remote(add_up) for t in trainers]) == [3.0, 3.0]
    get([t.call.remote(leave_default_group) for t in trainers])


def places(actor: TrainerBase) -> tuple[list[int], set[str]]:
    """The parameters' identities, and their devices."""
    return [id(p) for p in actor.model.parameters()], {str(p.device) for p in actor.model.parameters()}


def test_a_trainer_that_offloads_is_sent_from_the_cpu_and_comes_back_as_it_was(actors: Any) -> None:
    trainer, rollout = actors(test_lora.Adapted), actors(Rollout, 2)
    before, where = get(trainer.call.remote(places))
    assert where == {"npu:0"}
    how: dict[str, Any] = {"weight_sync_mode": "naive", "is_colocated": True, "sleep_level": 0, "timeout_s": 60}
    with CheckpointEngineManager([trainer], [rollout], **how) as manager:
        for seed, base in ((2, "plain"), (3, "")):
            get(trainer.step.remote(seed))
            report = manager.sync_weights(merge_and_sync=False)
            assert (report.mode, report.base) == ("gloo", base)  # moved there and back, it is the base that was sent
            assert get(trainer.call.remote(places)) == (before, {"npu:0"})
            torch.testing.assert_close(get(rollout.logits.remote()), get(trainer.logits.remote()))
        assert manager.sync_and_wake(offload=True).base == "merged"
        assert get(trainer.call.remote(places)) == (before, {"cpu"})
        manager.offload_trainers()  # where it is already
        manager.reload_trainers()
        manager.reload_trainers()
        assert get(trainer.call.remote(places)) == (before, {"npu:0"})
        torch.testing.assert_close(get(rollout.logits.remote()), get(trainer.logits.remote()))
