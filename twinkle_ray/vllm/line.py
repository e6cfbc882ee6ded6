"""A direct line from an actor to the workers of its vLLM engine in other processes.

vLLM's own RPC takes a millisecond each way: through its client, a socket, two threads and the engine's loop. It also
keeps that loop busy as long as a call lasts. Once a worker's side is made, the few calls of a sync that need nothing of
the engine go over a Unix socket straight to a thread of the worker's process. They are JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from twinkle_ray.errors import PeerLost, SyncTimeout

_SPIN_S = 0.06
"""Seconds for which a brisk line asks again and again for the answers to a ``receive`` and to what follows it. A thread
that sleeps is woken 0.2 ms late; a sync that takes longer than this can bear that."""

METHODS = frozenset({"receive", "poll", "abort"})
"""What may be asked over a line: it runs beside the engine's loop, not in it."""


class Server:
    """A worker's end. It lives as long as the process.

    Args:
        answer: called with ``(method, *args)``; must not raise. Answers go back in the order of the questions.
    """

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer
        self._key = secrets.token_bytes(32)
        # An abstract address: there is no file to leave behind, and nobody without the key gets in.
        address = f"\0twinkle_ray-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = Listener(address, family="AF_UNIX", authkey=self._key)
        self.address = [address, self._key.hex()]
        """For :class:`Line`; plain data."""
        threading.Thread(target=self._accept, name="twinkle_ray-line", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):  # a caller that left, or has no key
                time.sleep(0.05)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="twinkle_ray-line", daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            while True:
                method, *args = json.loads(connection.recv_bytes())
                answer = self._answer(method, *args) if method in METHODS else None
                connection.send_bytes(json.dumps(answer).encode())
        except (EOFError, OSError, ValueError, TypeError):  # the last two: not what a Line sends
            connection.close()


class Line:
    """The actor's end: one connection to each worker.

    Args:
        addresses: of the workers' servers, in rank order.
        brisk: the workers' own work is on other devices than CPUs, so that one core of these is to spare meanwhile.

    Raises:
        OSError: a worker is on another machine, or gone.
    """

    def __init__(self, addresses: list[Any], *, brisk: bool = False) -> None:
        self._lock = threading.Lock()
        self._brisk = brisk
        self._received = False
        self._connections = [
            Client(address, family="AF_UNIX", authkey=bytes.fromhex(key)) for address, key in addresses
        ]

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Ask all workers; their answers in rank order. One call at a time. After an error the line is of no more use.

        Raises:
            SyncTimeout: not all answered in time.
            PeerLost: a worker's process is gone.
        """
        deadline = time.monotonic() + timeout_s
        question = json.dumps([method, *args]).encode()
        with self._lock:
            try:
                for connection in self._connections:
                    connection.send_bytes(question)
                spins = self._brisk and (self._received or method == "receive")
                self._received = method == "receive"
                spin_until = min(time.monotonic() + _SPIN_S, deadline) if spins else 0.0
                answers = []
                for connection in self._connections:
                    if not _answers(connection, spin_until, deadline):
                        raise SyncTimeout(f"a vLLM worker did not answer {method} within {timeout_s:.1f} s")
                    answers.append(json.loads(connection.recv_bytes()))
            except SyncTimeout:  # which is an OSError
                raise
            except (EOFError, OSError) as error:
                raise PeerLost(f"a worker process of this vLLM engine is gone ({type(error).__name__})") from error
        return answers

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _answers(connection: Connection[Any, Any], spin_until: float, deadline: float) -> bool:
    """Whether there is an answer by the deadline, or an end."""
    asked = select.poll()
    asked.register(connection.fileno(), select.POLLIN)
    while not (there := asked.poll(0)) and time.monotonic() < spin_until:
        pass
    return bool(there) or connection.poll(max(0.0, deadline - time.monotonic()))
