"""Where the members of a group meet: a store and a lifeline listener on rank 0's node, and the door in front of both.

Both listeners are bound to one address and port 0. Left to itself, torch's TCPStore listens on every interface of the
machine, so it is handed a socket that is bound already. The store speaks a fixed binary protocol of strings, no pickle.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType

import ray
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError

from twinkle_ray.backends.bounded import bounded
from twinkle_ray.errors import ConfigError, PeerLost, SyncAborted, SyncTimeout
from twinkle_ray.types import Deadline, Rendezvous

_STORE_TIMEOUT = timedelta(seconds=30)
_POLL_S = 0.02
_LINGER_S = 0.1


def unique_group_name(prefix: str) -> str:
    """``prefix`` with a random part: a name that no other group ever had or will have."""
    return f"{prefix}-{uuid.uuid4().hex}"


def node_address() -> str:
    """The address under which Ray knows this node; ``127.0.0.1`` in a process without Ray."""
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"  # type: ignore[no-untyped-call]


def address_towards(host: str) -> str:
    """The address of this machine from which it reaches ``host``. Sends nothing.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


class Meeting:
    """Rank 0's side of a rendezvous: it is open from :meth:`open` on, so its address can be handed out at once.

    The group that ``connect`` gives it to closes it; without one, close it yourself (it is a context manager).
    """

    def __init__(self, rendezvous: Rendezvous, store: TCPStore, watch: socket.socket) -> None:
        self._rendezvous = rendezvous
        self._store: TCPStore | None = store
        self._watch = watch

    @staticmethod
    def open(group: str, backend: str, host: str | None = None) -> Meeting:
        """Listen for the other members of ``group``.

        Args:
            group: see :func:`unique_group_name`.
            backend: name of the group's backend.
            host: a numeric address of this node that the others can reach; by default :func:`node_address`.

        Raises:
            ConfigError: this machine cannot listen on ``host``.
        """
        host = host or node_address()
        try:
            listener = socket.create_server((host, 0), family=_family(host))
            watch = socket.create_server((host, 0), family=_family(host), backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host!r}: {error}; pass an address of this node as host") from None
        port = int(listener.getsockname()[1])
        try:
            store = TCPStore(
                host, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        except BaseException:
            watch.close()
            raise
        rendezvous = Rendezvous(
            group=group, backend=backend, host=host, store_port=port, watch_port=int(watch.getsockname()[1])
        )
        return Meeting(rendezvous, store, watch)

    @property
    def rendezvous(self) -> Rendezvous:
        return self._rendezvous

    @property
    def store(self) -> TCPStore:
        """The store's server side. Raises ConfigError once the meeting is closed."""
        if self._store is None:
            raise ConfigError(f"the meeting of group {self._rendezvous.group} is closed")
        return self._store

    def take_watch(self) -> socket.socket:
        """The lifeline's listener, which the caller owns from now on."""
        return socket.socket(fileno=self._watch.detach())

    def close(self) -> None:
        """Stop listening. The store itself ends with its last reference."""
        self._store = None
        self._watch.close()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def join_store(rendezvous: Rendezvous, deadline: Deadline) -> TCPStore:
    """The store of a meeting, for the ranks other than 0.

    Raises:
        PeerLost: nobody listens there. The meeting was open before its address was handed out, so rank 0 is gone.
        SyncTimeout: rank 0's machine or process does not answer.
    """
    where = f"{rendezvous.host}:{rendezvous.store_port}"
    try:  # TCPStore would print a stack trace for each of its own attempts
        socket.create_connection((rendezvous.host, rendezvous.store_port), max(deadline.remaining(), 0.001)).close()
    except TimeoutError:
        raise SyncTimeout(
            f"rank 0 at {where} did not answer within {deadline.seconds:.1f} s", phase="connect", actors=("rank 0",)
        ) from None
    except OSError as error:
        raise PeerLost(
            f"rank 0 is not at {where} any more ({error.strerror or error})", phase="connect", actors=("rank 0",)
        ) from None
    timeout = timedelta(seconds=max(deadline.remaining(), 0.001))

    def construct() -> TCPStore:
        store = TCPStore(rendezvous.host, rendezvous.store_port, None, False, timeout, wait_for_workers=False)
        store.set_timeout(_STORE_TIMEOUT)
        return store

    return bounded(construct, deadline, f"joining the store of rank 0 at {where}")


def meet(
    store: Store, rank: int, world_size: int, deadline: Deadline, given_up: Callable[[], bool] = lambda: False
) -> None:
    """The door: announce this rank, then wait until all have come. Past it, nobody waits for an absent member.

    Args:
        store: the group's own, that is, a PrefixStore with the group's name.
        rank: of this process.
        world_size: how many are expected.
        deadline: until when. The first to time out tells the others, so that all name the same ranks.
        given_up: asked in between whether nobody wants this any more.

    Raises:
        SyncAborted: it was given up.
        ConfigError: this rank was announced by another process too, or another rank expects another world size.
        SyncTimeout: not all came; the message and ``actors`` name those that did not.
        PeerLost: rank 0 closed the store.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not one of a world of {world_size}")
    try:
        expected = store.compare_set("door/world", "", str(world_size))
        if expected != str(world_size).encode():
            raise ConfigError(f"rank {rank} was told of a world of {world_size}, another rank of {expected!r:.40}")
        if store.add(f"door/{rank}", 1) > 1:
            raise ConfigError(f"two processes came as rank {rank}; every member needs a rank of its own")
        _wait_for_all(store, world_size, deadline, given_up)
    except DistNetworkError:
        raise PeerLost("rank 0 closed the group's store", phase="connect", actors=("rank 0",)) from None


def _wait_for_all(store: Store, world_size: int, deadline: Deadline, given_up: Callable[[], bool]) -> None:
    keys = [f"door/{rank}" for rank in range(world_size)]
    pause = 0.001
    while not store.check(keys):
        if given_up():
            raise SyncAborted("the group was given up before all had come", phase="connect")
        if store.check(["door/missing"]):
            raise _absent(_ranks(store.get("door/missing"), world_size), world_size, deadline)
        if deadline.expired:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            store.set("door/missing", ",".join(map(str, missing)))
            time.sleep(_LINGER_S)  # rank 0 takes the store with it; let the others read
            raise _absent(missing, world_size, deadline)
        time.sleep(min(pause, max(deadline.remaining(), 0.001)))
        pause = min(2 * pause, _POLL_S)


def _ranks(text: bytes, world_size: int) -> list[int]:
    return [int(part) for part in text.split(b",") if part.isdigit() and int(part) < world_size]


def _absent(missing: Iterable[int], world_size: int, deadline: Deadline) -> SyncTimeout:
    ranks = [str(rank) for rank in missing]
    return SyncTimeout(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} of {world_size} did not come "
        f"within {deadline.seconds:.1f} s",
        phase="connect",
        actors=tuple(f"rank {rank}" for rank in ranks),
    )
