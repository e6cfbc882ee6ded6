"""The lifeline of a group: one TCP connection from every rank to rank 0, held for as long as the group lives.

The kernel closes a dead process's connections at once, SIGKILL included, so its death is seen within milliseconds;
TCP keepalive finds a machine that vanished within about 11 s. What one rank has to say reaches all others through
rank 0: it failed (``abort``), it is gone (``lost``), or it has left in good order (``bye``).

A ``bye`` is no failure in itself, since members do not finish at the same moment: it is noted in
:attr:`Lifeline.departed`, and a group refuses *further* use with it. After rank 0's ``bye`` the lifeline is silent.

The wire is one JSON object a line, at most 16 KiB, strictly checked. A connection is nobody's until it has said the
group's name, which only members know; one that says anything else, or nothing for 5 s, is dropped without a trace.

    rank -> 0   {"hello": group, "rank": r}   answered by {"welcome": group}
    both ways   {"abort": reason, "rank": r}, {"bye": r}
    0 -> rank   {"lost": r}
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from twinkle_ray.errors import PeerLost, SyncAborted, SyncError, SyncTimeout
from twinkle_ray.types import Deadline, Rendezvous

logger = logging.getLogger(__name__)

OnFailure = Callable[[SyncError], None]

_LINE_LIMIT = 16 << 10
_REASON_LIMIT = 2000
_HELLO_S = 5.0
_STRANGERS = 64
_MAX_RANK = 1 << 20


class Lifeline(ABC):
    """One member's end. Made by :meth:`listen` on rank 0 and :meth:`dial` on the others.

    ``on_failure`` is called at most once, from the lifeline's own thread, and never after this member's own
    :meth:`abort` or :meth:`close`: with PeerLost (a process died, ``actors`` says which) or SyncAborted (one gave up).

    Attributes:
        on_departure: called from the same thread with each rank that has left in good order; may be set later.
    """

    def __init__(self, group: str, rank: int, on_failure: OnFailure) -> None:
        self._group = group
        self._rank = rank
        self._on_failure = on_failure
        self.on_departure: Callable[[int], None] | None = None
        self._lock = threading.Lock()  # of the flags below and of sending
        self._settled = False  # a failure is known, or this end is closed: nothing is reported any more
        self._closed = False
        self._departed: int | None = None
        self._thread = threading.Thread(target=self._serve, name=f"twinkle-lifeline-{rank}-{group}", daemon=True)

    @staticmethod
    def listen(sock: socket.socket, group: str, world_size: int, on_failure: OnFailure) -> Lifeline:
        """Rank 0's end, on a listening socket that it owns from now on. :meth:`ready` waits for the others."""
        return _Hub(sock, group, world_size, on_failure)

    @staticmethod
    def dial(rendezvous: Rendezvous, rank: int, deadline: Deadline, on_failure: OnFailure) -> Lifeline:
        """Another rank's end, connected and welcomed.

        Raises:
            PeerLost: rank 0 is gone or refuses this member.
            SyncTimeout: rank 0 does not answer.
        """
        return _Spoke(_dial(rendezvous, rank, deadline), rendezvous.group, rank, on_failure)

    @property
    def departed(self) -> int | None:
        """A rank that has left in good order, the first one; ``None`` while all are here."""
        return self._departed

    def ready(self, deadline: Deadline) -> None:  # noqa: B027 - only rank 0 has somebody to wait for
        """Wait until every member's connection stands.

        Raises:
            SyncTimeout: naming the ranks that did not dial.
        """

    def abort(self, reason: str, rank: int | None = None) -> None:
        """Tell every other member that the group is given up, because of ``rank`` (this one by default).

        Never blocks and never raises; more than one call is harmless.
        """
        with self._lock:
            self._settled = True
        culprit = self._rank if rank is None else rank
        self._tell_all(_line({"abort": reason[:_REASON_LIMIT], "rank": culprit}))

    def close(self) -> None:
        """Say bye and release the connections and the thread. Idempotent; from any thread but ``on_failure``'s own
        it also waits (up to a second) for the thread's end."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._settled = True
        self._tell_all(_line({"bye": self._rank}))
        self._hang_up()

    def _report(self, error: SyncError) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled = True
        try:
            self._on_failure(error)
        except Exception:
            logger.exception("the failure handler of group %s failed", self._group)

    def _note_departure(self, rank: int) -> None:
        if self._departed is None:
            self._departed = rank
        if self.on_departure is not None:
            self.on_departure(rank)

    def _send(self, sock: socket.socket, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # its end is gone; the reader finds out
            sock.send(line, socket.MSG_DONTWAIT)

    def _join(self, seconds: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    @abstractmethod
    def _serve(self) -> None:
        """The thread."""

    @abstractmethod
    def _tell_all(self, line: bytes) -> None:
        """Send to everyone whom this end reaches."""

    @abstractmethod
    def _hang_up(self) -> None:
        """End the thread and close all sockets."""


class _Peer:
    """A connection at rank 0. ``rank`` is ``None`` until it has said hello."""

    __slots__ = ("buffer", "left", "rank", "since", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()
        self.rank: int | None = None
        self.left = False
        self.since = time.monotonic()


class _Hub(Lifeline):
    def __init__(self, sock: socket.socket, group: str, world_size: int, on_failure: OnFailure) -> None:
        super().__init__(group, 0, on_failure)
        self._listener = sock
        self._listener.setblocking(False)
        self._awaited = set(range(1, world_size))  # ranks that have not dialled yet
        self._world_size = world_size
        self._complete = threading.Event()
        if world_size == 1:
            self._complete.set()
        self._members: dict[int, _Peer] = {}
        self._strangers: set[_Peer] = set()
        self._ended = False  # later than _closed: the thread closes the connections, which the bye must precede
        self._said = b""  # what a member that dials late must hear
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread.start()

    def ready(self, deadline: Deadline) -> None:
        if not self._complete.wait(deadline.remaining()):
            ranks = sorted(self._awaited)
            raise SyncTimeout(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._world_size} "
                f"came to the door but did not dial the lifeline within {deadline.seconds:.1f} s",
                phase="connect",
                actors=tuple(f"rank {rank}" for rank in ranks),
            )

    def _serve(self) -> None:
        try:
            while not self._ended:
                ready = [key.fileobj for key, _ in self._selector.select(1.0 if self._strangers else None)]
                for peer in [peer for peer in self._peers() if peer.sock in ready]:
                    self._read(peer)
                if self._listener in ready:
                    self._accept()  # last, since it may drop a stranger
                self._drop_silent_strangers()
        finally:
            for sock in (self._listener, self._wake_reader, self._wake_writer, *(peer.sock for peer in self._peers())):
                sock.close()
            self._selector.close()

    def _peers(self) -> list[_Peer]:
        return [*self._members.values(), *self._strangers]

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            time.sleep(0.01)  # out of descriptors, or the caller is gone already
            return
        sock.setblocking(False)
        _keep_alive(sock)
        if len(self._strangers) >= _STRANGERS:
            self._drop(min(self._strangers, key=lambda peer: peer.since))
        peer = _Peer(sock)
        self._strangers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        messages = _messages(peer.buffer, data) if data else None
        if messages is None or not all(self._handle(peer, message) for message in messages):
            self._drop(peer)

    def _handle(self, peer: _Peer, message: dict[str, Any]) -> bool:
        """Whether the connection may stay."""
        if peer.rank is None:
            return self._welcome(peer, message)
        match message:
            case {"abort": str(reason), "rank": int(rank)} if 0 <= rank < self._world_size:
                self._spread(_line({"abort": reason[:_REASON_LIMIT], "rank": rank}), but=peer.rank)
                self._report(_aborted(reason, rank))
                return True
            case {"bye": int(rank)} if rank == peer.rank:
                peer.left = True
                self._note_departure(rank)
                self._spread(_line({"bye": rank}), but=rank)
                return True
        return False

    def _welcome(self, peer: _Peer, message: dict[str, Any]) -> bool:
        match message:
            case {"hello": self._group, "rank": int(rank)} if rank in self._awaited:
                self._strangers.discard(peer)
                peer.rank = rank
                with self._lock:
                    self._members[rank] = peer
                    self._awaited.discard(rank)
                    said = self._said
                self._send(peer.sock, _line({"welcome": self._group}) + said)
                if not self._awaited:
                    self._complete.set()
                return True
        return False

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._strangers.discard(peer)
        if peer.rank is None:
            return
        with self._lock:
            self._members.pop(peer.rank, None)
        if not peer.left:
            self._spread(_line({"lost": peer.rank}), but=peer.rank)
            self._report(_lost(peer.rank))

    def _drop_silent_strangers(self) -> None:
        oldest = time.monotonic() - _HELLO_S
        for peer in [peer for peer in self._strangers if peer.since < oldest]:
            self._drop(peer)

    def _spread(self, line: bytes, but: int) -> None:
        with self._lock:
            if self._awaited:
                self._said += line
            socks = [peer.sock for rank, peer in self._members.items() if rank != but]
        for sock in socks:
            self._send(sock, line)

    def _tell_all(self, line: bytes) -> None:
        self._spread(line, but=0)

    def _hang_up(self) -> None:
        with self._lock:
            socks = [peer.sock for peer in self._members.values()]
        for sock in socks:
            _shutdown(sock, socket.SHUT_WR)
        self._ended = True
        with contextlib.suppress(OSError):  # the thread has ended by itself
            self._wake_writer.send(b"x")
        self._join(1.0)


class _Spoke(Lifeline):
    def __init__(self, sock: socket.socket, group: str, rank: int, on_failure: OnFailure) -> None:
        super().__init__(group, rank, on_failure)
        self._sock = sock
        self._thread.start()

    def _serve(self) -> None:
        buffer = bytearray()
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except OSError:
                data = b""
            messages = _messages(buffer, data) if data else None
            if messages is None or not all(self._handle(message) for message in messages):
                if self._departed != 0:
                    self._report(_lost(0))
                return

    def _handle(self, message: dict[str, Any]) -> bool:
        match message:
            case {"abort": str(reason), "rank": int(rank)} if 0 <= rank < _MAX_RANK:
                self._report(_aborted(reason, rank))
            case {"lost": int(rank)} if 0 <= rank < _MAX_RANK:
                self._report(_lost(rank))
            case {"bye": int(rank)} if 0 <= rank < _MAX_RANK:
                if rank == 0:
                    self._departed = 0
                self._note_departure(rank)
            case _:
                return False
        return True

    def _tell_all(self, line: bytes) -> None:
        self._send(self._sock, line)

    def _hang_up(self) -> None:
        # Rank 0 closes its end on our FIN. To close ours before that could reset the connection under our own bye.
        _shutdown(self._sock, socket.SHUT_WR)
        self._join(0.25)
        _shutdown(self._sock, socket.SHUT_RDWR)
        self._join(1.0)
        self._sock.close()


def _dial(rendezvous: Rendezvous, rank: int, deadline: Deadline) -> socket.socket:
    where = f"{rendezvous.host}:{rendezvous.watch_port}"
    try:
        sock = socket.create_connection((rendezvous.host, rendezvous.watch_port), max(deadline.remaining(), 0.001))
        try:
            _keep_alive(sock)
            sock.sendall(_line({"hello": rendezvous.group, "rank": rank}))
            welcome = _line({"welcome": rendezvous.group})
            answer = b""
            while len(answer) < len(welcome):  # byte-exact, so that nothing behind it is swallowed
                sock.settimeout(max(deadline.remaining(), 0.001))
                data = sock.recv(len(welcome) - len(answer))
                if not data:
                    break
                answer += data
            if answer != welcome:
                raise ConnectionError("it refused this rank")
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
    except TimeoutError:
        raise SyncTimeout(
            f"rank 0's lifeline at {where} did not answer within {deadline.seconds:.1f} s",
            phase="connect",
            actors=("rank 0",),
        ) from None
    except OSError as error:
        raise PeerLost(
            f"rank 0's lifeline at {where} is not there for rank {rank} ({error})", phase="connect", actors=("rank 0",)
        ) from None
    return sock


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _messages(buffer: bytearray, data: bytes) -> list[dict[str, Any]] | None:
    """The messages that ``data`` completes; the rest stays in ``buffer``. ``None`` for what is none of ours."""
    buffer += data
    *lines, rest = buffer.split(b"\n")
    if any(len(line) > _LINE_LIMIT for line in (*lines, rest)):
        return None
    buffer[:] = rest
    try:
        messages = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return None
    return messages if all(isinstance(message, dict) and len(message) <= 2 for message in messages) else None


def _lost(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} is gone: its connection closed without a bye", actors=(f"rank {rank}",))


def _aborted(reason: str, rank: int) -> SyncAborted:
    return SyncAborted(
        f"the group was given up because of rank {rank}: {reason[:_REASON_LIMIT]}", actors=(f"rank {rank}",)
    )


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 11_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shutdown(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        sock.shutdown(how)
