"""Messages between two processes: what the kernel may do to them on their way."""

from __future__ import annotations

import errno
import os
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
