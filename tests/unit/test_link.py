"""Messages between two processes: what the kernel may do to them on their way."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from typing import Any

import pytest

from twinkle_ray.backends import link as links
from twinkle_ray.backends.link import Link


@pytest.fixture
def ends() -> Any:
    pair = [Link(one) for one in socket.socketpair()]
    yield pair
    for one in pair:
        with contextlib.suppress(OSError):  # a test may have closed it
            one.close()


def test_the_last_words_of_one_that_left_without_reading_are_heard(ends: list[Link]) -> None:
    ends[1].post({"drop": [1]})
    ends[0].post({"done": 7})
    ends[0].close()  # with something unread, at which the kernel resets the connection
    assert ends[1].take() == [{"done": 7}]
    with pytest.raises(ConnectionError):
        ends[1].take()


def test_descriptors_wait_where_too_many_are_under_way(ends: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    real, crowded = socket.send_fds, [4]

    def send(*args: Any) -> int:
        if crowded[0]:
            crowded[0] -= 1
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return real(*args)

    monkeypatch.setattr(links.socket, "send_fds", send)
    read, write = os.pipe()
    os.write(write, b"x")
    ends[0].post({"open": 1}, [read])
    ends[0].post({"go": 2})
    os.close(read)
    for _ in range(3):
        assert ends[0].unsent
        assert ends[1].take() == []
        ends[0].flush()
    assert not ends[0].unsent
    assert ends[1].take() == [{"open": 1}, {"go": 2}]
    got = ends[1].take_fd()
    assert os.read(got, 1) == b"x"
    for fd in (got, write):
        os.close(fd)


def test_what_follows_the_first_message_is_kept_for_the_next_time(ends: list[Link]) -> None:
    for number in range(3):
        ends[0].post({"go": number})
    assert ends[1].take(1) == [{"go": 0}]
    assert ends[1].take() == [{"go": 1}, {"go": 2}]
    assert ends[1].take() == []


@pytest.fixture
def few_files() -> Any:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(more: int) -> None:
        held = {int(number) for number in os.listdir("/proc/self/fd")}
        free = [number for number in range(len(held) + more + 1) if number not in held]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], before[1]))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_without_descriptors_left_blames_nobody_else_and_keeps_none(ends: list[Link], few_files: Any) -> None:
    mine = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    held = os.listdir("/proc/self/fd")
    few_files(5)
    with pytest.raises(OSError, match="Too many open files") as raised:
        ends[0].post({"open": 20}, mine)
    assert not isinstance(raised.value, ConnectionError)
    assert not ends[0].unsent
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    assert len(os.listdir("/proc/self/fd")) == len(held)

    ends[0].post({"open": 20}, mine)
    few_files(5)
    with pytest.raises(OSError, match="may open no more files") as raised:
        ends[1].take()
    assert not isinstance(raised.value, ConnectionError)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for one in ends:
        one.close()
    assert len(os.listdir("/proc/self/fd")) == len(held) - 2
    for fd in mine:
        os.close(fd)
