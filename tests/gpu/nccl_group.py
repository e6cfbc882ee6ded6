"""Exercises NcclGroup on as many GPUs as there are; run by hand: ``python tests/gpu/nccl_group.py [--gpus N]``.

One process per GPU, every wait bounded. Prints one JSON line per check and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast does not work on every rented host

import torch

from twinkle_ray.backends import Meeting, create_group, destroy_group, unique_group_name
from twinkle_ray.errors import PeerLost, SyncAborted, SyncError, SyncTimeout
from twinkle_ray.types import Deadline

NCCL = "TWINKLE_NCCL"
HEAR_S = 120.0


class Seat:
    def __init__(self, rank: int, gpu: int, world_size: int, pipe: Connection) -> None:
        self.rank, self.gpu, self.world_size, self.pipe = rank, gpu, world_size, pipe
        torch.cuda.set_device(gpu)

    def hear(self) -> Any:
        if not self.pipe.poll(HEAR_S):
            raise TimeoutError("the main process said nothing")
        return self.pipe.recv()

    def group(self, seconds: float = 60.0, world_size: int | None = None, rank: int | None = None) -> Any:
        rank = self.rank if rank is None else rank
        meeting = Meeting.open(unique_group_name("gpu"), NCCL) if rank == 0 else None
        if meeting:
            self.pipe.send(meeting.rendezvous)
        rendezvous = meeting.rendezvous if meeting else self.hear()
        group = create_group(NCCL, world_size or self.world_size, rank, rendezvous.group)
        group.connect(rendezvous, Deadline.after(seconds), meeting)
        return group


def pattern(sizes: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def exchange(group: Any, sizes: list[int], seed: int = 0, src: int = 0) -> bool:
    expected = pattern(sizes, seed)
    views = [t.cuda() if group.rank == src else torch.zeros_like(t, device="cuda") for t in expected]
    group.broadcast_many(views, src)
    group.synchronize(Deadline.after(30))
    return all(torch.equal(view.cpu(), t) for view, t in zip(views, expected, strict=True))


def failing(call: Any) -> tuple[float, SyncError]:
    began = time.monotonic()
    try:
        call()
    except SyncError as error:
        return time.monotonic() - began, error
    raise AssertionError("it did not fail")


def round_trips(seat: Seat) -> dict[str, Any]:
    began = time.monotonic()
    group = seat.group()
    connect_s = time.monotonic() - began
    n, rank = seat.world_size, seat.rank
    right = {
        "mixed": exchange(group, [0, 1, 7, 4096, 1 << 20, 0, (64 << 20) + 3, 2]),
        "last rank": exchange(group, [5, 1 << 22], seed=1, src=n - 1),
        "20,000 small": exchange(group, [16 + i % 300 for i in range(20_000)], seed=2),
        "nothing": exchange(group, []),
    }
    mine = torch.arange(24.0, device="cuda").view(6, 4).t() + rank  # not contiguous
    base = torch.arange(24.0).view(6, 4).t()
    x = mine.clone(memory_format=torch.preserve_format)
    group.broadcast([x], SimpleNamespace(root_rank=n - 1))
    right["broadcast strided"] = torch.equal(x.cpu(), base + n - 1)
    x = mine.clone(memory_format=torch.preserve_format)
    group.allreduce([x])
    right["allreduce"] = torch.equal(x.cpu(), base * n + sum(range(n)))
    x = mine.clone(memory_format=torch.preserve_format)
    from ray.util.collective.types import ReduceOp

    group.reduce([x], SimpleNamespace(root_rank=n - 1, reduceOp=ReduceOp.MAX))
    right["reduce"] = torch.equal(x.cpu(), base + (n - 1 if rank == n - 1 else rank))
    outputs = [torch.zeros_like(mine) for _ in range(n)]
    group.allgather([outputs], [mine])
    right["allgather"] = all(torch.equal(o.cpu(), base + r) for r, o in enumerate(outputs))
    x = torch.zeros_like(mine)
    group.reducescatter([x], [[mine + 10 * r for r in range(n)]])
    right["reducescatter"] = torch.equal(x.cpu(), base * n + sum(range(n)) + 10 * rank * n)
    if rank == 0:
        group.send([mine], SimpleNamespace(dst_rank=1, n_elements=0))
    if rank == 1:
        x = torch.zeros_like(mine)
        group.recv([x], SimpleNamespace(src_rank=0, n_elements=0))
        right["recv"] = torch.equal(x.cpu(), base)
    flag = torch.tensor([rank == 0], device="cuda")
    group.broadcast([flag], SimpleNamespace(root_rank=0))
    right["bool"] = bool(flag.item())
    import cupy

    array = cupy.full((3, 5), float(rank), dtype=cupy.float16).T
    group.broadcast([array], SimpleNamespace(root_rank=1))
    right["cupy"] = float(array.sum()) == 15.0
    # A launch must wait for what the caller has put on the stream, and the caller's stream for the launch.
    big = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    if rank == 0:
        torch.cuda._sleep(200_000_000)
        big.fill_(7)
    group.broadcast_many([big])
    group.synchronize(Deadline.after(30))
    right["behind the current stream"] = int(big.min()) == 7
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        if rank == 0:
            torch.cuda._sleep(200_000_000)
            big.fill_(9)
    group.fence()
    group.broadcast_many([big])
    group.synchronize(Deadline.after(30))
    right["behind another stream, fenced"] = int(big.min()) == 9
    group.barrier()
    began = time.monotonic()
    destroy_group(group)
    return {"ok": all(right.values()), "connect_s": connect_s, "destroy_s": time.monotonic() - began, **right}


def door(seat: Seat) -> dict[str, Any]:
    took, error = failing(lambda: seat.group(2.0, world_size=seat.world_size + 1))
    ok = isinstance(error, SyncTimeout) and error.actors == (f"rank {seat.world_size}",) and took < 4
    return {"ok": ok, "took_s": took, "error": str(error)}


def deadline(seat: Seat) -> dict[str, Any]:
    """Rank 0 never sends; the others' deadline passes; all go on in a new group."""
    group = seat.group()
    if seat.rank == 0:
        until = time.monotonic() + 20
        while group.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        took, error = 0.0, group.failure
    else:
        group.broadcast_many([torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")])
        took, error = failing(lambda: group.synchronize(Deadline.after(1.0)))
    began = time.monotonic()
    destroy_group(group)
    destroy_s = time.monotonic() - began
    began = time.monotonic()
    new = seat.group()
    connect_s = time.monotonic() - began
    right = exchange(new, [1 << 20, 5])
    destroy_group(new)
    ok = right and isinstance(error, SyncTimeout | SyncAborted) and took < 3
    return {"ok": ok, "took_s": took, "destroy_s": destroy_s, "reconnect_s": connect_s, "error": str(error)}


def abort(seat: Seat) -> dict[str, Any]:
    """A thread aborts the group under a stuck synchronize."""
    group = seat.group()
    if seat.rank == 0:
        until = time.monotonic() + 20
        while group.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        took, error = 0.0, group.failure
    else:
        group.broadcast_many([torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")])
        calls: list[float] = []

        def give_up() -> None:
            began = time.monotonic()
            group.abort("enough")
            calls.append(time.monotonic() - began)

        timer = threading.Timer(0.5, give_up)
        timer.start()
        took, error = failing(lambda: group.synchronize(Deadline.after(30)))
        timer.join(10)
        took = max(took - 0.5, *calls)
    destroy_group(group)
    torch.cuda.synchronize()
    return {"ok": isinstance(error, SyncAborted) and took < 2, "abort_s": took, "error": str(error)}


def killed(seat: Seat, when: str) -> dict[str, Any]:
    """The last rank is killed by the main process; the others name it and go on."""
    victim = seat.world_size - 1
    group = seat.group()
    exchange(group, [1 << 20])
    seat.pipe.send("ready")
    seat.hear()
    if seat.rank == victim and when == "mid":
        while True:  # alive, and not in the collective that the others are stuck in
            time.sleep(1)
    if when == "before":
        until = time.monotonic() + 20
        while group.failure is None and time.monotonic() < until:
            time.sleep(0.002)
        noticed = time.time()
        _, error = failing(lambda: group.broadcast_many([torch.zeros(4, dtype=torch.uint8, device="cuda")]))
    else:
        # The sender may be through with a first broadcast before the receiver is there; not with many.
        data = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")

        def transfer() -> None:
            for _ in range(50):
                group.broadcast_many([data])
            group.synchronize(Deadline.after(30))

        _, error = failing(transfer)
        noticed = time.time()
    seat.pipe.send(("noticed", noticed))
    destroy_group(group)
    result = {"ok": isinstance(error, PeerLost) and error.actors == (f"rank {victim}",), "error": str(error)}
    began = time.monotonic()
    torch.ones(8, device="cuda").sum().item()
    if seat.world_size > 2:
        new = seat.group(world_size=seat.world_size - 1)
        result["ok"] &= exchange(new, [1 << 20])
        destroy_group(new)
    result["usable_s"] = time.monotonic() - began
    return result


def throughput(seat: Seat) -> dict[str, Any]:
    group = seat.group()
    result: dict[str, Any] = {"ok": True}
    for label, sizes in {
        "4 GiB": [4 << 30],
        "64 x 64 MiB": [64 << 20] * 64,
        "512 x 1 MiB": [1 << 20] * 512,
        "5,000 x 8 KiB": [8 << 10] * 5000,
    }.items():
        views = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]
        times, launch = [], []
        for _ in range(5):
            group.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            group.broadcast_many(views)
            launch.append(time.perf_counter() - began)
            group.synchronize(Deadline.after(30))
            times.append(time.perf_counter() - began)
        best = sorted(times)[len(times) // 2]
        result[label] = {
            "ms": best * 1e3,
            "launch_ms": sorted(launch)[len(launch) // 2] * 1e3,
            "gb_per_s": sum(sizes) / best / 1e9,
        }
        del views
    destroy_group(group)
    return result


def many(seat: Seat) -> dict[str, Any]:
    """Ten generations leave neither threads nor descriptors nor device memory behind."""
    marks = []
    for n in range(12):
        group = seat.group()
        assert exchange(group, [1 << 16], seed=n)
        if n % 3 == 2:
            group.barrier()
            time.sleep(0.2)
            group.abort("now and then")
        destroy_group(group)
        free, _ = torch.cuda.mem_get_info()
        marks.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), free >> 20))
    (threads, fds, free), (threads_end, fds_end, free_end) = marks[2], marks[-1]
    ok = threads_end <= threads + 2 and fds_end <= fds + 8 and free_end >= free - 64
    return {"ok": ok, "threads, fds, free MiB": [marks[2], marks[-1]]}


CHECKS: dict[str, Any] = {
    "round_trips": (round_trips, ()),
    "door": (door, ()),
    "deadline": (deadline, ()),
    "abort": (abort, ()),
    "killed before": (killed, ("before",)),
    "killed mid": (killed, ("mid",)),
    "throughput": (throughput, ()),
    "many": (many, ()),
}


def member(check: str, rank: int, gpu: int, world_size: int, pipe: Connection) -> None:
    body, args = CHECKS[check]
    try:
        pipe.send(("result", body(Seat(rank, gpu, world_size, pipe), *args)))
    except BaseException:
        pipe.send(("result", {"ok": False, "crash": traceback.format_exc()}))
    pipe.poll(HEAR_S)  # the main process ends this one: an exit by itself could wait for a thread in NCCL


def run(check: str, gpus: int) -> bool:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(gpus):
        ours, theirs = context.Pipe()
        process = context.Process(target=member, args=(check, rank, rank, gpus, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    alive = set(range(gpus))
    ready: set[int] = set()
    outcome: dict[int, Any] = {}
    killed_at = 0.0
    until = time.monotonic() + HEAR_S
    while len(outcome) < len(alive) and time.monotonic() < until:
        for rank in sorted(alive - set(outcome)):
            if rank not in alive or not pipes[rank].poll(0.005):
                continue
            try:
                said = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                outcome[rank] = {"ok": False, "crash": f"exit code {processes[rank].exitcode}"}
                continue
            if isinstance(said, tuple) and said[0] == "result":
                outcome[rank] = said[1]
            elif isinstance(said, tuple):
                print(json.dumps({"check": check, "rank": rank, "noticed_s": said[1] - killed_at}), flush=True)
            elif said == "ready":
                ready.add(rank)
                if len(ready) == gpus:
                    for pipe in pipes:
                        pipe.send("go")
                    if check == "killed mid":
                        time.sleep(1.0)
                    victim = gpus - 1
                    killed_at = time.time()
                    os.kill(processes[victim].pid, signal.SIGKILL)
                    alive.discard(victim)
            else:
                for other in sorted(alive - {rank}):
                    pipes[other].send(said)
    ok = len(outcome) == len(alive) and all(result["ok"] for result in outcome.values())
    for rank in sorted(alive):
        print(json.dumps({"check": check, "rank": rank, **outcome.get(rank, {"ok": False, "crash": "no answer"})}))
    for process in processes:
        process.kill()
        process.join(10)
    sys.stdout.flush()
    return ok


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--only", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    arguments = parser.parse_args()
    if arguments.gpus < 2 or torch.cuda.device_count() < arguments.gpus:
        sys.exit(f"needs at least 2 GPUs, and as many as --gpus; there are {torch.cuda.device_count()}")
    failed = [check for check in arguments.only if not run(check, arguments.gpus)]
    print(json.dumps({"failed": failed, "ok": not failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
