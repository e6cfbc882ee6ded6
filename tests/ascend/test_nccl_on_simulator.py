"""The NCCL group with its calls turned into HCCL's, on the simulator: launches, streams and waits, without a GPU.

Nothing here is NCCL or CUDA; those are run by ``tests/gpu/nccl_group.py``.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from ray.util.collective.types import ReduceOp

from tests.ascend.simulator import IMPATIENT, npus
from tests.ascend.test_hccl_group import MIXED, buried, exchange, leave
from tests.unit.members import Seat, introduce, results
from tests.unit.test_gloo_group import failure_of
from twinkle_ray.backends import hccl, nccl
from twinkle_ray.errors import PeerLost, SyncAborted, SyncTimeout
from twinkle_ray.types import Deadline


class Communicator:
    """cupy's, as far as the group uses it."""

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        self._hccl, self._comm = hccl.library(), ctypes.c_void_p()
        root = hccl.RootInfo.from_buffer_copy(unique_id)
        self._hccl("HcclCommInitRootInfo", size, ctypes.byref(root), rank, ctypes.byref(self._comm))

    def bcast(self, at: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._hccl("HcclBroadcast", at, count, dtype, root, self._comm, stream)

    def allReduce(self, at: int, into: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._hccl("HcclAllReduce", at, into, count, dtype, op, self._comm, stream)

    def reduce(self, at: int, into: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        self._hccl("HcclReduce", at, into, count, dtype, op, root, self._comm, stream)

    def allGather(self, at: int, into: int, count: int, dtype: int, stream: int) -> None:
        self._hccl("HcclAllGather", at, into, count, dtype, self._comm, stream)

    def reduceScatter(self, at: int, into: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._hccl("HcclReduceScatter", at, into, count, dtype, op, self._comm, stream)

    def send(self, at: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._hccl("HcclSend", at, count, dtype, peer, self._comm, stream)

    def recv(self, at: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._hccl("HcclRecv", at, count, dtype, peer, self._comm, stream)

    def check_async_error(self) -> None:
        pass

    def destroy(self) -> None:
        self._hccl("HcclCommDestroy", self._comm)

    def abort(self) -> None:
        def end() -> None:
            while self._hccl.code("HcclCommDestroy", self._comm) == hccl.AGAIN:
                time.sleep(0.01)

        threading.Thread(target=end, daemon=True).start()


def unique_id() -> bytes:
    root = hccl.RootInfo()
    hccl.library()("HcclGetRootInfo", ctypes.byref(root))
    return bytes(root)


class OnSimulator(nccl.NcclGroup):
    device_type = "npu"


def group_of(seat: Seat, **kwargs: Any) -> Any:
    library: Any = ModuleType("cupy.cuda.nccl")
    library.NcclError, library.NcclCommunicator, library.get_unique_id = hccl.HcclError, Communicator, unique_id
    library.groupStart = library.groupEnd = lambda: None
    numbers = {"INT8": 0, "INT32": 2, "FLOAT32": 4, "UINT8": 7, "SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3}
    for name, number in numbers.items():
        setattr(library, f"NCCL_{name}", number)
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(nccl=library, Device=lambda index: nullcontext())
    sys.modules.update({"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.nccl": library})
    stream: Any = torch.npu.Stream  # type: ignore[attr-defined]
    stream.cuda_stream = stream.npu_stream
    nccl.NcclGroup = OnSimulator  # type: ignore[misc]
    return Seat(seat.rank, seat.world_size, seat.pipe, "TWINKLE_NCCL").group(**kwargs)


def transfers(seat: Seat) -> Any:
    group = group_of(seat)
    n, rank = seat.world_size, seat.rank
    right = {f"from {src}": exchange(group, MIXED, src, src) for src in range(n)}
    right["several launches"] = exchange(group, tuple(16 + i % 300 for i in range(1200)), 1)
    launched = [torch.full((5,), float(rank + k), device="npu") for k in range(4)]
    group.rally()
    for tensor in launched:
        group.broadcast_many([tensor.view(torch.uint8)], 2)
    group.settle(Deadline.after(5), 2)
    right["settled"] = [tensor.tolist()[0] for tensor in launched[:2]] == [2.0, 3.0]
    right["held"] = len(group._held) == len(group._marks) == 2
    group.synchronize(Deadline.after(5))
    right["all"] = [tensor.tolist()[0] for tensor in launched] == [2.0, 3.0, 4.0, 5.0] and not group._held
    base = torch.arange(24.0).view(6, 4).t()
    mine = base.to("npu") + rank

    def options(**values: Any) -> Any:
        return SimpleNamespace(**values)

    x = mine.clone()
    group.broadcast([x], options(root_rank=n - 1))
    right["broadcast"] = torch.equal(x.cpu(), base + n - 1)
    x = mine.clone()
    group.allreduce([x], options(reduceOp=ReduceOp.MAX))
    right["allreduce"] = torch.equal(x.cpu(), base + n - 1)
    x = mine.clone()
    group.reduce([x], options(root_rank=1, reduceOp=ReduceOp.SUM))
    right["reduce"] = torch.equal(x.cpu(), base * n + sum(range(n)) if rank == 1 else base + rank)
    outputs = [torch.zeros_like(mine) for _ in range(n)]
    group.allgather([outputs], [mine])
    right["allgather"] = all(torch.equal(o.cpu(), base + r) for r, o in enumerate(outputs))
    x = torch.zeros_like(mine)
    group.reducescatter([x], [[mine + 10 * r for r in range(n)]], options(reduceOp=ReduceOp.SUM))
    right["reducescatter"] = torch.equal(x.cpu(), base * n + sum(range(n)) + 10 * rank * n)
    if rank == 0:
        group.send([mine], options(dst_rank=1, n_elements=0))
    elif rank == 1:
        x = torch.zeros_like(mine)
        group.recv([x], options(src_rank=0, n_elements=0))
        right["recv"] = torch.equal(x.cpu(), base)
    group.barrier()
    leave(group)
    return [what for what, holds in right.items() if not holds], buried()


def test_transfers_and_rays_operations(library: Path) -> None:
    with npus(library, transfers, 3) as people:
        introduce(people)
        assert results(people) == [([], True)] * 3


def give_up(seat: Seat) -> Any:
    """Rank 0 never sends, and is killed in the end."""
    group = group_of(seat)
    if seat.rank == 0:
        while group.failure is None:
            time.sleep(0.005)
        return type(group.failure), True
    group.broadcast_many([torch.zeros(1 << 20, dtype=torch.uint8, device="npu")])
    took, error = failure_of(lambda: group.synchronize(Deadline.after(0.3)))
    group.destroy_group()
    return type(error), took < 1.0 and buried()


def test_a_deadline_releases_the_waiting_rank_and_tells_the_other(library: Path) -> None:
    with npus(library, give_up, 2, **IMPATIENT) as people:
        introduce(people)
        assert results(people) == [(SyncAborted, True), (SyncTimeout, True)]


def mourn(seat: Seat) -> Any:
    group = group_of(seat)
    seat.say("connected")
    seat.hear()
    _, error = failure_of(lambda: [exchange(group, (8 << 20,), seed=n) for n in range(1000)])
    group.destroy_group()
    return type(error), error.actors


def test_a_killed_rank_is_named(library: Path) -> None:
    with npus(library, mourn, 3, **IMPATIENT) as people:
        introduce(people)
        assert [member.hear() for member in people] == ["connected"] * 3
        for member in people:
            member.say("go")
        time.sleep(0.2)
        people[1].kill()
        assert results([people[0], people[2]]) == [(PeerLost, ("rank 1",))] * 2
