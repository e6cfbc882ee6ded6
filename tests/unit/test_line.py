"""The direct line between an actor and the workers of a child engine."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import pytest

from twinkle_ray.errors import PeerLost, SyncTimeout
from twinkle_ray.vllm.line import METHODS, Line, Server


def echo(method: str, *args: Any) -> list[Any]:
    if method == "poll":
        time.sleep(args[0])
    return ["ok", [method, *args]]


def serve(pipe: Any) -> None:
    pipe.send(Server(echo).address)
    time.sleep(60)


def test_each_worker_answers_in_rank_order_and_again_and_again() -> None:
    servers = [Server(lambda *call, rank=rank: ["ok", rank, *call]) for rank in range(3)]
    line = Line([server.address for server in servers])
    for number in range(3):
        assert line.call("receive", number, timeout_s=5.0) == [["ok", rank, "receive", number] for rank in range(3)]
    line.close()
    again = Line([servers[0].address])
    assert again.call("abort", timeout_s=5.0) == [["ok", 0, "abort"]]


def test_only_what_needs_nothing_of_the_engine_is_answered() -> None:
    asked: list[str] = []
    line = Line([Server(lambda method, *_: asked.append(method)).address])
    line.call("agree", timeout_s=5.0)
    assert asked == []
    assert "agree" not in METHODS


def test_nobody_without_the_key_gets_in_and_others_still_do() -> None:
    server = Server(echo)
    address, key = server.address
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        Line([[address, "00" * 32]])
    assert Line([[address, key]]).call("receive", timeout_s=5.0) == [["ok", ["receive"]]]


@pytest.mark.parametrize("brisk", [False, True])
def test_a_worker_that_does_not_answer_is_a_time_out(brisk: bool) -> None:
    line = Line([Server(echo).address], brisk=brisk)
    start = time.monotonic()
    with pytest.raises(SyncTimeout, match="did not answer poll"):
        line.call("poll", 5.0, timeout_s=0.2)
    assert time.monotonic() - start < 2.0


def test_a_worker_on_another_machine_cannot_be_called() -> None:
    with pytest.raises(OSError, match="refused"):
        Line([["\0twinkle_ray-nobody-listens", "00" * 32]])


@pytest.mark.parametrize("brisk", [False, True])
def test_a_killed_worker_is_noticed_at_once(brisk: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60)
        line = Line([ours.recv()], brisk=brisk)
        assert line.call("receive", timeout_s=5.0) == [["ok", ["receive"]]]
        threading.Timer(0.3, process.kill).start()
        start = time.monotonic()
        with pytest.raises(PeerLost, match="is gone"):
            line.call("poll", 30.0, timeout_s=40.0)
        assert time.monotonic() - start < 5.0
    finally:
        process.kill()
        process.join(10)


def test_nothing_is_unpickled_and_what_is_no_question_ends_the_connection() -> None:
    address, key = Server(echo).address
    for content in (pickle.dumps(("poll", 0.0)), b"", b"[", b"3", b"{}", b"null"):
        with Client(address, family="AF_UNIX", authkey=bytes.fromhex(key)) as connection:
            connection.send_bytes(content)
            with pytest.raises((EOFError, OSError)):
                connection.recv_bytes()
    assert Line([[address, key]]).call("receive", timeout_s=5.0) == [["ok", ["receive"]]]
