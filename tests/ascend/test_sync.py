"""Syncs between Ray actors on simulated NPUs. Most are tests of ``tests/ray``: a handful here, and all of them, as
``pytest tests/ray --device npu`` runs them, among the soak tests."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors import Rollout, Trainer, TrainerBase, placed
from tests.ray import test_adapters, test_lora, test_membership, test_sync
from tests.ray.test_sync import get
from twinkle_ray import CheckpointEngineManager

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(test_sync.test_rollouts_follow_the_trainer_bit_for_bit, id="plain"),
        pytest.param(
            partial(test_lora.test_rollouts_hold_what_pefts_merge_makes_after_every_sync, config={}),
            id="lora",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            partial(test_adapters.test_after_each_call_rollouts_compute_what_the_trainer_computes, sequence="TF"),
            id="adapter alone",
        ),
        pytest.param(
            partial(test_sync.test_an_actor_killed_in_mid_transfer_is_named_and_the_others_go_on, victim="rollout"),
            id="killed rollout",
        ),
        *(
            pytest.param(
                partial(test_adapters.test_each_kind_of_adapter, kind=kind),
                id=kind,
                marks=[] if kind == "dora" else [pytest.mark.soak],
            )
            for kind in ("dora", "pissa", "olora")
        ),
        pytest.param(
            partial(test_adapters.TestFailures().test_in_the_middle_of_the_adapter_the_old_one_stays, at=3),
            id="adapter in part",
        ),
        pytest.param(
            partial(test_membership.test_a_rollout_that_dies, policy="error", when="in the middle of one", caplog=None),
            id="dead rollout is removed",
            marks=pytest.mark.soak,
        ),
        pytest.param(test_sync.test_a_rollout_that_holds_another_module_by_now_is_agreed_with_anew, id="refused"),
    ],
)
def test_what_holds_on_a_cpu_holds_on_an_npu(actors: Any, shared: Callable[[Any], None]) -> None:
    shared(actors)


@pytest.mark.soak
@pytest.mark.timeout(3700)
def test_all_of_tests_ray(root: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "tests/ray",
            "--device",
            "npu",
            "-m",
            "not soak",
            "-q",
            "-p",
            "no:cacheprovider",
        ],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout[-3000:])  # what was skipped, and why


def test_after_hccl_has_broken_a_stream_the_process_syncs_on(actors: Any) -> None:
    """A rollout refuses what its trainer has launched already; the device ends that by force, later."""
    trainer, rollout = actors(Trainer, 1), actors(Rollout, 5)
    with CheckpointEngineManager([trainer], [rollout], timeout_s=60) as manager:
        manager.sync_weights()
        get(trainer.call.remote(partial(impatient, milliseconds="300")))
        get(rollout.call.remote(lambda one: setattr(one, "model", placed(type(one.model)(7)))))
        assert "refused" in manager.sync_weights().phases
        get(trainer.call.remote(partial(impatient, milliseconds="8000")))
        deadline = time.monotonic() + 20
        while get(trainer.call.remote(buried)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for step in range(2):
            get(trainer.step.remote(step))
            manager.sync_weights()
            assert get(rollout.digests.remote()) == get(trainer.digests.remote())


def impatient(actor: TrainerBase, milliseconds: str) -> None:
    from tests.ascend.simulator import knob

    knob("FAKE_HCCL_EXEC_MS", milliseconds)


def buried(actor: TrainerBase) -> int:
    from twinkle_ray.backends.hccl import burials

    return burials()


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
    until = time.monotonic() + 20
    while True:  # a process that was another test's may still be letting go of its last group
        before = get([actor.call.remote(seen) for actor in (trainers[0], *rollouts)])
        if not any(alive for _, _, alive, _ in before) or time.monotonic() > until:
            break
        time.sleep(0.1)
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
