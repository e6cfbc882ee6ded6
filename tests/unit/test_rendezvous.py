"""The store, its addresses and the door."""

import gc
import os
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore

from twinkle_ray.backends.bounded import bounded
from twinkle_ray.backends.rendezvous import Meeting, address_towards, join_store, meet, unique_group_name
from twinkle_ray.errors import ConfigError, PeerLost, SyncAborted, SyncTimeout
from twinkle_ray.types import Deadline, Rendezvous


def listening() -> set[tuple[str, int]]:
    """Local addresses that this process listens on, by the kernel's own table."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def door(meeting: Meeting, world_size: int, ranks: range, seconds: float) -> list[BaseException | None]:
    def come(rank: int) -> BaseException | None:
        deadline = Deadline.after(seconds)
        store = meeting.store if rank == 0 else join_store(meeting.rendezvous, deadline)
        try:
            meet(PrefixStore("g", store), rank, world_size, deadline)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(come, ranks))


def test_names_are_never_equal():
    assert len({unique_group_name("a") for _ in range(1000)}) == 1000


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_meeting_listens_on_its_own_address_only(host):
    before = listening()
    with Meeting.open("g", "TWINKLE_GLOO", host) as meeting:
        new = listening() - before
        loopback = {"127.0.0.1": "0100007F", "::1": "00000000000000000000000001000000"}[host]
        assert {address for address, _ in new} == {loopback}
        assert {port for _, port in new} == {meeting.rendezvous.store_port, meeting.rendezvous.watch_port}
        store = join_store(meeting.rendezvous, Deadline.after(5))
        meeting.store.set("k", "v")
        assert store.get("k") == b"v"
        del store


def test_closing_a_meeting_twice_frees_both_ports():
    meeting = Meeting.open("g", "TWINKLE_GLOO")
    rendezvous = meeting.rendezvous
    meeting.close()
    meeting.close()
    for port in (rendezvous.store_port, rendezvous.watch_port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((rendezvous.host, port), 1).close()
    with pytest.raises(PeerLost, match="rank 0"):
        join_store(rendezvous, Deadline.after(2))


def test_an_address_of_another_machine_is_a_config_error():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        Meeting.open("g", "TWINKLE_GLOO", "192.0.2.1")


def test_joining_a_store_that_accepts_and_is_silent_is_bounded():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        rendezvous = Rendezvous(group="g", backend="b", host="127.0.0.1", store_port=port, watch_port=port)
        began = time.monotonic()
        with pytest.raises(SyncTimeout):
            join_store(rendezvous, Deadline.after(0.5))
        assert time.monotonic() - began < 1.5


def test_all_ranks_pass_the_door():
    with Meeting.open("g", "TWINKLE_GLOO") as meeting:
        assert door(meeting, 4, range(4), 10) == [None] * 4


def test_ranks_that_do_not_come_are_named_by_all_who_did():
    with Meeting.open("g", "TWINKLE_GLOO") as meeting:
        began = time.monotonic()
        errors = door(meeting, 5, range(3), 0.7)
        assert time.monotonic() - began < 2
    for error in errors:
        assert isinstance(error, SyncTimeout)
        assert error.actors == ("rank 3", "rank 4")
        assert error.phase == "connect"
        assert str(error) == "ranks 3, 4 of 5 did not come within 0.7 s"


def test_a_rank_that_is_given_up_at_the_door_waits_there_no_longer():
    began = time.monotonic()
    with Meeting.open("g", "TWINKLE_GLOO") as meeting, pytest.raises(SyncAborted):
        meet(PrefixStore("g", meeting.store), 0, 2, Deadline.after(30), lambda: time.monotonic() > began + 0.2)
    assert time.monotonic() - began < 5


def test_a_call_that_was_left_behind_keeps_nothing_alive_by_its_error():
    class Held:
        pass

    enter, names = threading.Event(), []

    def call() -> None:
        held = Held()
        names.append(weakref.ref(held))
        enter.wait(10)
        raise OSError

    gc.disable()
    try:
        with pytest.raises(SyncTimeout):
            bounded(call, Deadline.after(0.1), "a call")
        enter.set()
        until = time.monotonic() + 5
        while names[0]() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert names[0]() is None
    finally:
        gc.enable()


def test_one_rank_missing_is_named_in_the_singular():
    with Meeting.open("g", "TWINKLE_GLOO") as meeting:
        (error,) = door(meeting, 2, range(1), 0.2)
    assert str(error) == "rank 1 of 2 did not come within 0.2 s"


def test_two_processes_of_one_rank_are_refused():
    with Meeting.open("g", "TWINKLE_GLOO") as meeting:
        assert door(meeting, 1, range(1), 1) == [None]
        (error,) = door(meeting, 1, range(1), 1)
    assert isinstance(error, ConfigError)
    assert "rank 0" in str(error)


def test_another_world_size_is_refused():
    with Meeting.open("g", "TWINKLE_GLOO") as meeting:
        door(meeting, 2, range(2), 5)
        with pytest.raises(ConfigError, match=r"world of 3.*b'2'"):
            meet(PrefixStore("g", meeting.store), 2, 3, Deadline.after(1))


def test_garbage_on_the_store_port_does_not_disturb_the_door():
    with Meeting.open("g", "TWINKLE_GLOO") as meeting:
        stop = threading.Event()

        def spray() -> None:
            while not stop.wait(0.005):
                for data in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 100, b"\x00" * 5000, bytes(range(256)) * 20):
                    try:
                        with socket.create_connection((meeting.rendezvous.host, meeting.rendezvous.store_port), 1) as s:
                            s.sendall(data)
                    except OSError:
                        pass

        thread = threading.Thread(target=spray)
        thread.start()
        try:
            assert door(meeting, 3, range(3), 10) == [None] * 3
        finally:
            stop.set()
            thread.join()


def test_the_address_towards_a_host_is_a_local_one():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("::1") == "::1"
