"""Messages between two processes of one machine: JSON objects over a Unix socket, with descriptors beside them.

Nothing here waits: what cannot be written at once stays in the link and is written by a later :meth:`Link.flush`, so
two ends that both have much to say cannot hold each other up. Whoever waits polls the sockets (:func:`wait`), which
:meth:`Link.sever` wakes from any thread. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from twinkle_ray.errors import PeerLost, SyncError, SyncTimeout
from twinkle_ray.types import Deadline

FDS = 200
"""Descriptors that go with one message at most; the kernel takes 253."""

_LENGTH = struct.Struct("<I")
_LIMIT = 64 << 20
_READ = 1 << 18
_HELLO_S = 5.0
_CROWDED_S = 1e-3
"""Seconds to wait where this user has as many descriptors under way, in all links, as it may have open (unix(7))."""


class Link:
    """One end of a connection. One thread at a time may use it; :meth:`sever` may come from any.

    Args:
        sock: connected; the link owns it from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self._over = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._out)

    def post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message, now or as soon as :meth:`flush` can.

        Args:
            fds: descriptors that go with it, at most :data:`FDS`; the message must say how many. They are duplicated.

        Raises:
            ConnectionError: the other end is gone.
            OSError: this process cannot, as without descriptors left.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        copies: list[int] = []
        try:
            copies.extend(map(os.dup, fds))
        except OSError:
            for fd in copies:
                os.close(fd)
            raise
        self._out.append((memoryview(_LENGTH.pack(len(body)) + body), copies))
        self.flush()

    def flush(self) -> None:
        """Write what can be written at once. Raises OSError: the other end is gone."""
        while self._out:
            data, fds = self._out[0]
            try:
                sent = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(_CROWDED_S)
                return
            for fd in fds:
                os.close(fd)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = data[sent:], []

    def take(self, most: int | None = None) -> list[dict[str, Any]]:
        """The messages that are there; with ``most`` the first ones, and the others the next time.

        Raises:
            ConnectionError: the other end is gone, or sent what is none of ours.
            OSError: this process has no descriptor left for one that came.
        """
        while not self._over:
            try:
                data, fds, flags, _ = socket.recv_fds(self._sock, _READ, FDS, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionResetError:  # it left before it had read all; what it said is here
                data, fds, flags = b"", [], 0
            self._fds += fds
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "this process may open no more files (ulimit -n), and some came to it")
            self._over = not data
            self._in += data
        messages: list[dict[str, Any]] = []
        while len(self._in) >= _LENGTH.size and (most is None or len(messages) < most):
            (length,) = _LENGTH.unpack_from(self._in)
            if length > _LIMIT:
                raise ConnectionError("it sent what is none of our messages")
            if len(self._in) < _LENGTH.size + length:
                break
            try:
                message = json.loads(self._in[_LENGTH.size : _LENGTH.size + length])
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise ConnectionError("it sent what is none of our messages")
            messages.append(message)
            del self._in[: _LENGTH.size + length]
        if self._over and not messages:  # its last words come first
            raise ConnectionError("its end of the line was closed")
        return messages

    def take_fd(self) -> int:
        """The next descriptor that came, which the caller owns. Raises ConnectionError: none did."""
        if not self._fds:
            raise ConnectionError("a descriptor that it speaks of did not come")
        return self._fds.popleft()

    def sever(self) -> None:
        """End the connection; whoever waits for it, here or at the other end, wakes up. From any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        for fd in (*self._fds, *(fd for _, fds in self._out for fd in fds)):
            os.close(fd)
        self._fds.clear()
        self._out.clear()


def wait(links: Iterable[Link], seconds: float) -> None:
    """Until one of them can be read, or written if it has something unsent, or is severed; or for ``seconds``."""
    poll = select.poll()
    for link in links:
        poll.register(link.fileno(), select.POLLIN | (select.POLLOUT if link.unsent else 0))
    poll.poll(seconds * 1e3)


class Host:
    """The end that others call. Its address is an abstract one: there is no file to leave behind.

    Attributes:
        address: for :func:`call`, as text; nobody gets in without it.
    """

    def __init__(self) -> None:
        self._key = secrets.token_hex(32)
        name = f"twinkle_ray-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.address = f"{name} {self._key}"

    def accept(
        self, ranks: Iterable[int], deadline: Deadline, interrupted: Callable[[], BaseException | None]
    ) -> dict[int, Link]:
        """One link to each of these ranks.

        Raises:
            SyncTimeout: not all called by the deadline; names them.
        """
        awaited = set(ranks)
        strangers: dict[Link, float] = {}
        found: dict[int, Link] = {}
        try:
            while awaited:
                if (error := interrupted()) is not None:
                    raise error
                if deadline.expired:
                    names = tuple(f"rank {rank}" for rank in sorted(awaited))
                    raise SyncTimeout(
                        f"{', '.join(names)} did not call within {deadline.seconds:.1f} s",
                        phase="connect",
                        actors=names,
                    )
                readable = [self._listener.fileno(), *(link.fileno() for link in strangers)]
                select.select(readable, [], [], min(0.02, deadline.remaining()))
                with contextlib.suppress(BlockingIOError):
                    strangers[Link(self._listener.accept()[0])] = time.monotonic() + _HELLO_S
                for link, until in list(strangers.items()):
                    rank = self._greet(link, awaited)
                    if rank is not None:
                        awaited.discard(rank)
                        found[rank] = link
                        del strangers[link]
                    elif time.monotonic() > until:
                        link.close()
                        del strangers[link]
        except BaseException:
            for link in found.values():
                link.close()
            raise
        finally:
            for link in strangers:
                link.close()
        for link in found.values():
            link.post({"welcome": True})
        return found

    def _greet(self, link: Link, awaited: set[int]) -> int | None:
        try:
            messages = link.take()
        except OSError:
            return None
        match messages:
            case [{"rank": int(rank), "key": str(key)}] if rank in awaited and hmac.compare_digest(key, self._key):
                return rank
        return None

    def close(self) -> None:
        self._listener.close()


def call(address: str, rank: int, deadline: Deadline, interrupted: Callable[[], BaseException | None]) -> Link:
    """The calling end, once all have called.

    Raises:
        PeerLost: nobody listens there, or not any more.
        SyncTimeout: no answer came by the deadline.
        SyncError: it is not reached from this process though both were taken to be on one machine.
    """
    name, _, key = address.partition(" ")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{name}")
        link = Link(sock)
        link.post({"rank": rank, "key": key})
    except ConnectionRefusedError as error:
        sock.close()
        raise PeerLost(
            f"rank 0 does not listen for its neighbours on this machine ({error}): it is gone, or in another network "
            "namespace",
            phase="connect",
            actors=("rank 0",),
        ) from None
    except OSError as error:
        sock.close()
        raise SyncError(
            f"rank {rank} cannot call rank 0 over a Unix socket ({error})", phase="connect", actors=(f"rank {rank}",)
        ) from None
    try:
        _await_welcome(link, deadline, interrupted)
    except OSError as error:
        link.close()
        if isinstance(error, SyncError):
            raise
        raise PeerLost(f"rank 0 has hung up ({error})", phase="connect", actors=("rank 0",)) from None
    except BaseException:
        link.close()
        raise
    return link


def _await_welcome(link: Link, deadline: Deadline, interrupted: Callable[[], BaseException | None]) -> None:
    while not link.take(1):  # behind it the first operations may have come
        if (error := interrupted()) is not None:
            raise error
        if deadline.expired:
            raise SyncTimeout(f"rank 0 did not answer within {deadline.seconds:.1f} s", phase="connect")
        wait([link], min(0.02, deadline.remaining()))
