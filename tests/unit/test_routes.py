"""Who sends to whom, by the devices."""

from __future__ import annotations

from typing import Any

import pytest

from twinkle_ray.errors import ConfigError
from twinkle_ray.routes import Spot, routes
from twinkle_ray.topology import arrange


def gpu(number: int, node: str = "a") -> Spot:
    return Spot(kind="cuda", device=f"GPU-{number}", node=node)


def cpu(node: str = "a") -> Spot:
    return Spot(kind="cpu", device="", node=node)


def npu(number: int) -> Spot:
    return Spot(kind="npu", device=f"NPU-{number}", node="a")


def decide(trainers: list[Spot], *replicas: list[Spot], mode: str = "auto", colocated: bool = False) -> Any:
    named = {f"rollout[{i}]": spots for i, spots in enumerate(replicas)}
    found = routes(mode, trainers, named, colocated=colocated)
    return found.mode, [(party.mode, party.trainer, party.workers) for party in found.parties]


def test_by_the_devices() -> None:
    assert decide([gpu(0)], [gpu(1)]) == ("nccl", [("nccl", 0, ((0, 0),))])
    assert decide([gpu(0)], [gpu(0)]) == ("ipc", [("ipc", 0, ((0, 0),))])
    assert decide([gpu(0)], [gpu(0)], [gpu(1)], [gpu(2), gpu(3)]) == (
        "nccl+ipc",
        [("nccl", 0, ((1, 0), (2, 0), (2, 1))), ("ipc", 0, ((0, 0),))],
    )
    # N sharded ranks under a TP-N engine: each worker from its own.
    assert decide([gpu(0), gpu(1)], [gpu(1), gpu(0)], colocated=True) == (
        "ipc",
        [("ipc", 0, ((0, 1),)), ("ipc", 1, ((0, 0),))],
    )
    # Two rollouts on one device that no trainer holds: NCCL refuses that.
    assert decide([gpu(0)], [gpu(1)], [gpu(1)])[0] == "gloo"
    assert decide([gpu(0)], [cpu()], [gpu(0)])[0] == "gloo+ipc"
    # An equal name of a device on a machine that cannot be reached by a Unix socket.
    assert decide([gpu(0)], [gpu(0, node="b")])[0] == "gloo"
    assert decide([npu(0)], [npu(0)], colocated=True)[0] == "gloo"
    assert decide([npu(0)], [npu(1)])[0] == "hccl"
    assert decide([cpu()], [gpu(0)], colocated=True)[0] == "gloo"  # offloaded


def linked(number: int, *others: int, node: str = "a") -> Spot:
    """A GPU that reads these others' memory."""
    return Spot(kind="cuda", device=f"GPU-{number}", node=node, links=frozenset(f"GPU-{one}" for one in others))


def giver(number: int, node: str = "a") -> Spot:
    """A trainer whose memory others can open."""
    return Spot(kind="cuda", device=f"GPU-{number}", node=node, shareable=True)


def test_a_lone_worker_on_a_linked_gpu_reads_the_lone_trainers_memory() -> None:
    assert decide([giver(0)], [linked(1, 0, 2)]) == ("ipc", [("ipc", 0, ((0, 0),))])
    assert decide([giver(0)], [giver(0)], [linked(1, 0)]) == ("ipc", [("ipc", 0, ((0, 0), (1, 0)))])
    assert decide([giver(0)], [linked(1, 0)], mode="nccl")[0] == "nccl"
    assert decide([gpu(0)], [linked(1, 0)])[0] == "nccl"  # expandable segments
    assert decide([giver(0)], [linked(1, 2)])[0] == "nccl"  # by another GPU only
    assert decide([giver(0)], [linked(1, 0, node="b")])[0] == "nccl"  # equal names on two machines
    # A broadcast goes on from one to the next; readers share what one GPU can give.
    assert decide([giver(0)], [linked(1, 0)], [linked(2, 0)])[0] == "nccl"
    assert decide([giver(0)], [linked(1, 0), linked(2, 0)])[0] == "nccl"
    assert decide([giver(0), giver(1)], [linked(2, 0, 1)])[0] == "nccl"
    # Unless that is asked for.
    assert decide([giver(0)], [linked(2, 0)], [linked(1, 0)], mode="ipc") == ("ipc", [("ipc", 0, ((0, 0), (1, 0)))])
    assert decide([giver(0)], [linked(1, 0)], [gpu(2)], mode="ipc") == (
        "nccl+ipc",
        [("nccl", 0, ((1, 0),)), ("ipc", 0, ((0, 0),))],
    )


def test_cpus_are_one_device_if_that_is_wanted() -> None:
    assert decide([cpu()], [cpu()])[0] == "gloo"
    assert decide([cpu()], [cpu()], colocated=True)[0] == "ipc"
    assert decide([cpu()], [cpu()], mode="ipc")[0] == "ipc"
    assert decide([cpu()], [cpu()], mode="gloo", colocated=True)[0] == "gloo"
    assert decide([cpu(""), cpu()], [cpu("")], [cpu()], mode="ipc")[0] == "gloo+ipc"  # "": it cannot be told
    assert decide([cpu(), cpu("b"), cpu()], [cpu(), cpu()], [cpu()], [cpu("b")], mode="ipc")[1] == [
        ("ipc", 0, ((0, 0), (1, 0))),
        ("ipc", 1, ((2, 0),)),
        ("ipc", 2, ((0, 1),)),
    ]


@pytest.mark.parametrize(
    ("trainers", "replicas", "how", "text"),
    [
        (
            [gpu(0)],
            [[gpu(0)], [gpu(0), gpu(1)]],
            {"colocated": True},
            r"worker 1 of rollout\[1\] is on cuda GPU-1, which",
        ),
        ([cpu()], [[cpu("b")]], {"colocated": True}, "on cpu of another node, which no trainer holds"),
        (
            [gpu(0)],
            [[gpu(1)]],
            {"mode": "ipc"},
            "are joined by NVLink, but none of these do; use 'auto'",
        ),
        ([gpu(0)], [[linked(1, 0)]], {"mode": "ipc"}, "memory cannot be read: its model is sharded, NCCL_P2P_DISABLE"),
        ([npu(0)], [[npu(0)]], {"mode": "ipc"}, "NPU IPC is not supported"),
        ([gpu(0)], [[gpu(0)]], {"mode": "nccl"}, "use 'auto', which takes CUDA IPC there, or 'gloo'"),
    ],
)
def test_what_does_not_go_is_refused_in_a_sentence(trainers: Any, replicas: Any, how: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        decide(trainers, *replicas, **how)


def test_each_member_has_one_number_in_the_whole_and_one_seat_in_each_of_its_groups() -> None:
    named = {"rollout[0]": [gpu(1), gpu(2)], "rollout[4]": [gpu(7)], "rollout[5]": [gpu(2)]}
    found = routes("auto", [gpu(n) for n in range(4)], named, colocated=False)
    made = arrange(4, [2, 1, 1], list(named), found)
    assert found.mode == "nccl+ipc"
    assert made.trainer_ranks == (0, 5, 6, None)
    assert made.seats == ((0, 3), (5, 1), (6, 2, 4))
    owners = [made.owner(number) for number in range(made.world_size)]
    assert owners == ["trainer[0]", *["rollout[0]"] * 2, "rollout[4]", "rollout[5]", "trainer[1]", "trainer[2]"]
    alone = arrange(2, [1], ["rollout[0]"], routes("auto", [gpu(0), gpu(1)], {"rollout[0]": [gpu(1)]}, colocated=True))
    assert (alone.trainer_ranks, alone.seats) == ((None, 2), ((2, 1),))
