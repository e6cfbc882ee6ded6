"""One rank's death, abort or leave, as the others see it."""

import queue
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from tests.unit.members import footprint, no_more, settled
from twinkle_ray.backends.lifeline import Lifeline
from twinkle_ray.errors import PeerLost, SyncAborted, SyncTimeout
from twinkle_ray.types import Deadline, Rendezvous


def rendezvous_of(sock: socket.socket) -> Rendezvous:
    host, port = sock.getsockname()[:2]
    return Rendezvous(group="g-1", backend="b", host=host, store_port=0, watch_port=port)


@contextmanager
def lifelines(world_size, dialling=None):
    """The ends of all ranks and, per rank, the failures reported to it."""
    heard = [queue.Queue() for _ in range(world_size)]
    listener = socket.create_server(("127.0.0.1", 0))
    rendezvous = rendezvous_of(listener)
    ends = [Lifeline.listen(listener, "g-1", world_size, heard[0].put)]
    try:
        for rank in dialling or range(1, world_size):
            ends.append(Lifeline.dial(rendezvous, rank, Deadline.after(5), heard[rank].put))
        if dialling is None:
            ends[0].ready(Deadline.after(5))
        yield ends, heard, rendezvous
    finally:
        for end in reversed(ends):
            end.close()


def soon(failures):
    return failures.get(timeout=2)


def test_a_lost_rank_is_named_to_all_others_at_once():
    with lifelines(4) as (ends, heard, _):
        began = time.monotonic()
        ends[2]._sock.shutdown(socket.SHUT_RDWR)  # what the kernel does for a killed process
        for rank in (0, 1, 3):
            error = soon(heard[rank])
            assert isinstance(error, PeerLost)
            assert error.actors == ("rank 2",)
        assert time.monotonic() - began < 0.5


def test_the_loss_of_rank_0_is_seen_by_all():
    heard = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:  # a rank 0 that welcomes, then dies without a word
        conns = []

        def welcome():
            for _ in range(2):
                conns.append(server.accept()[0])
                conns[-1].recv(1000)
                conns[-1].sendall(b'{"welcome":"g-1"}\n')

        thread = threading.Thread(target=welcome)
        thread.start()
        ends = [Lifeline.dial(rendezvous_of(server), rank, Deadline.after(5), heard.put) for rank in (1, 2)]
        thread.join()
        for conn in conns:
            conn.close()
        for _ in ends:
            error = soon(heard)
            assert isinstance(error, PeerLost)
            assert error.actors == ("rank 0",)
        for end in ends:
            end.close()


@pytest.mark.parametrize("origin", [0, 1])
def test_an_abort_reaches_all_but_its_origin_with_reason_and_rank(origin):
    with lifelines(3) as (ends, heard, _):
        ends[origin].abort("no memory ☠ " + "x" * 100_000)
        ends[origin].abort("again")
        for rank in {0, 1, 2} - {origin}:
            error = soon(heard[rank])
            assert isinstance(error, SyncAborted)
            assert error.actors == (f"rank {origin}",)
            assert "no memory ☠" in str(error)
        time.sleep(0.1)
        assert all(failures.empty() for failures in heard)


def test_only_the_first_failure_is_reported():
    with lifelines(3) as (ends, heard, _):
        ends[1].abort("first")
        soon(heard[0])
        ends[2]._sock.shutdown(socket.SHUT_RDWR)
        time.sleep(0.1)
        assert heard[0].empty()


def test_a_member_that_leaves_is_no_failure_but_known():
    with lifelines(3) as (ends, heard, _):
        ends[2].close()
        until = time.monotonic() + 2
        while not ends[0].departed == ends[1].departed == 2 and time.monotonic() < until:
            time.sleep(0.005)
        assert (ends[0].departed, ends[1].departed) == (2, 2)
        ends[0].close()
        time.sleep(0.1)
        assert all(failures.empty() for failures in heard)


def test_rank_0_leaves_in_good_order_while_another_one_leaves(monkeypatch):
    with lifelines(3) as (ends, heard, _):
        tell_all = ends[0]._tell_all

        def late(line):
            ends[1].close()  # wakes rank 0's thread between its close and its bye
            tell_all(line)

        monkeypatch.setattr(ends[0], "_tell_all", late)
        ends[0].close()
        ends[2]._thread.join(2)
        assert ends[2].departed is not None
        assert heard[2].empty()


def test_an_abort_is_heard_by_one_who_dials_after_it():
    with lifelines(3, dialling=[1]) as (ends, heard, rendezvous):
        ends[1].abort("early")
        soon(heard[0])
        ends.append(Lifeline.dial(rendezvous, 2, Deadline.after(5), heard[2].put))
        assert "early" in str(soon(heard[2]))


def test_ready_names_who_did_not_dial():
    with (
        lifelines(4, dialling=[2]) as (ends, _, _),
        pytest.raises(SyncTimeout, match=r"ranks 1, 3 of 4") as caught,
    ):
        ends[0].ready(Deadline.after(0.2))
    assert caught.value.actors == ("rank 1", "rank 3")


def test_garbage_and_strangers_are_dropped_and_disturb_nobody():
    with lifelines(2) as (ends, heard, rendezvous):
        lines = [
            b"\x00\xff" * 100 + b"\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"[" * 10_000 + b"\n",
            b"{}\n",
            b'{"hello": "other", "rank": 1}\n',
            b'{"hello": "g-1", "rank": 1}\n',  # taken
            b'{"hello": "g-1", "rank": 77}\n',
            b'{"hello": "g-1", "rank": "1"}\n',
            b'{"abort": "me", "rank": 1}\n',
            b'{"bye": 1}\n',
            b"x" * 40_000,
            b"9" * 10_000 + b"\n",
        ]
        for line in lines:
            with socket.create_connection((rendezvous.host, rendezvous.watch_port), 2) as sock:
                sock.settimeout(2)
                try:
                    sock.sendall(line)
                    assert sock.recv(10) == b"", line
                except ConnectionResetError:
                    pass
        idle = [socket.create_connection((rendezvous.host, rendezvous.watch_port), 2) for _ in range(100)]
        assert heard[0].empty()
        assert heard[1].empty()
        ends[1].abort("still here")
        assert "still here" in str(soon(heard[0]))
        for sock in idle:
            sock.close()


def test_a_member_that_speaks_garbage_is_lost():
    with lifelines(3) as (ends, heard, _):
        ends[1]._sock.send(b"\x80garbage\n")
        assert soon(heard[0]).actors == ("rank 1",)
        assert soon(heard[2]).actors == ("rank 1",)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400\r\n\r\n"])
def test_dialling_something_else_ends_at_once(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer_once, args=(server, answer), daemon=True).start()
        with pytest.raises(PeerLost) as caught:
            Lifeline.dial(rendezvous_of(server), 1, Deadline.after(5), print)
    assert caught.value.actors == ("rank 0",)


def test_dialling_a_silent_rank_0_is_bounded():
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        with pytest.raises(SyncTimeout):
            Lifeline.dial(rendezvous_of(server), 1, Deadline.after(0.3), print)
        assert time.monotonic() - began < 1


def test_a_handler_may_close_and_a_failing_one_harms_nobody():
    listener = socket.create_server(("127.0.0.1", 0))
    rendezvous = rendezvous_of(listener)
    done = threading.Event()

    def close_and_fail(error):
        hub.close()
        done.set()
        raise RuntimeError("handler")

    hub = Lifeline.listen(listener, "g-1", 2, close_and_fail)
    spoke = Lifeline.dial(rendezvous, 1, Deadline.after(5), print)
    spoke.abort("x")
    assert done.wait(2)
    spoke.close()
    hub._thread.join(2)
    assert not hub._thread.is_alive()


def test_a_hundred_lifelines_leave_no_thread_and_no_descriptor():
    with lifelines(3):
        pass
    before = footprint()
    for _ in range(100):
        with lifelines(3):
            pass
    assert no_more(settled(before), before)


def _answer_once(server: socket.socket, answer: bytes) -> None:
    sock, _ = server.accept()
    with sock:
        sock.recv(100)
        sock.sendall(answer)
