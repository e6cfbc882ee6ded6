"""Real processes for tests of groups: each runs one function as one rank and talks to the test through a pipe.

They are forked from a server that has imported torch already, so that one costs milliseconds, not seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from twinkle_ray.backends import group_class
from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.backends.rendezvous import Meeting, unique_group_name
from twinkle_ray.types import Deadline, Rendezvous

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.unit.members"])


@dataclass(frozen=True, slots=True)
class Seat:
    """What a member's function is given."""

    rank: int
    world_size: int
    pipe: Connection
    backend: str = "TWINKLE_GLOO"

    def say(self, what: Any) -> None:
        self.pipe.send(what)

    def hear(self, seconds: float = 30.0) -> Any:
        assert self.pipe.poll(seconds), "the test said nothing"
        return self.pipe.recv()

    def group(self, seconds: float = 10.0, world_size: int | None = None, rank: int | None = None) -> SyncGroup:
        """A connected group; the test must call :func:`introduce`."""
        rank = self.rank if rank is None else rank
        meeting = Meeting.open(unique_group_name("test"), self.backend) if rank == 0 else None
        if meeting:
            self.say(meeting.rendezvous)
        rendezvous: Rendezvous = meeting.rendezvous if meeting else self.hear()
        group = group_class(self.backend)(world_size or self.world_size, rank, rendezvous.group)
        group.connect(rendezvous, Deadline.after(seconds), meeting)
        return group


@dataclass(frozen=True, slots=True)
class Member:
    process: BaseProcess
    pipe: Connection

    def say(self, what: Any) -> None:
        self.pipe.send(what)

    def hear(self, seconds: float = 30.0) -> Any:
        assert self.pipe.poll(seconds), f"{self.process.name} said nothing within {seconds} s"
        heard = self.pipe.recv()
        if isinstance(heard, _Crash):
            raise AssertionError(f"{self.process.name} failed:\n{heard.text}")
        return heard

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class _Crash:
    text: str


def _main(body: Callable[..., Any], seat: Seat, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        seat.say(("result", body(seat, *args)))
    except BaseException:
        seat.say(_Crash(traceback.format_exc()))


@contextmanager
def members(
    body: Callable[..., Any], world_size: int, *args: Any, ranks: range | None = None
) -> Iterator[list[Member]]:
    """Run ``body(seat, *args)`` as each rank. All processes are gone afterwards."""
    started = []
    try:
        for rank in ranks or range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(body, Seat(rank, world_size, theirs), args), name=f"member {rank}", daemon=True
            )
            process.start()
            theirs.close()
            started.append(Member(process, ours))
        yield started
    finally:
        for member in started:
            member.process.kill()
            member.process.join(5)
            member.pipe.close()


def introduce(people: list[Member]) -> Rendezvous:
    """Hand the rendezvous of the first one to the others."""
    rendezvous: Rendezvous = people[0].hear()
    for member in people[1:]:
        member.say(rendezvous)
    return rendezvous


def results(people: list[Member], seconds: float = 30.0) -> list[Any]:
    """What the functions returned, in rank order."""
    deadline = time.monotonic() + seconds
    values = []
    for member in people:
        kind, value = member.hear(max(0.01, deadline - time.monotonic()))
        assert kind == "result"
        values.append(value)
    return values


def footprint() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settled(early: tuple[int, int], seconds: float = 8.0) -> tuple[int, int]:
    """The footprint when it is an earlier one again, or after so long: a joined thread is listed for a moment more, and
    one that was left behind in an aborted group needs a core before it can end."""
    until = time.monotonic() + seconds
    while not no_more(late := footprint(), early) and time.monotonic() < until:
        time.sleep(0.02)
    return late


def no_more(late: tuple[int, int], early: tuple[int, int]) -> bool:
    """Whether a footprint has not grown."""
    return late[0] <= early[0] and late[1] <= early[1]
