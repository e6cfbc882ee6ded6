"""What all groups of this package have in common.

A group is a Ray collective group (registered with ``ray.util.collective``, so ``broadcast``, ``barrier`` and the rest
of its API work on it) with four additions that Ray's stock groups lack: a bounded :meth:`SyncGroup.connect` apart from
the constructor (Ray holds a process-wide lock during construction), :meth:`SyncGroup.broadcast_many` for one chunk in
one launch, a bounded :meth:`SyncGroup.synchronize`, and :meth:`SyncGroup.abort`, which releases a thread that is stuck
in a collective.

A failure has one way through a group, whoever sees it first (a caller's deadline, the lifeline, the transport): it is
kept as :attr:`SyncGroup.failure`, the other ranks are told unless it came from them, and then the transport is severed,
which releases every stuck thread. In that order, because a severed transport looks like a dead peer to the others.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import traceback
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from ray.util.collective import types as ray_types
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from torch._C._distributed_c10d import PrefixStore, Store

from twinkle_ray.backends.bounded import bounded
from twinkle_ray.backends.lifeline import Lifeline
from twinkle_ray.backends.operands import single
from twinkle_ray.backends.rendezvous import Meeting, join_store, meet
from twinkle_ray.errors import ConfigError, PeerLost, SyncAborted, SyncError, TwinkleRayError
from twinkle_ray.types import Deadline, Rendezvous

_GRACE_S = 0.3
"""By how much the bound around a whole ``connect`` exceeds its deadline, so that the inner error, which names ranks,
comes first."""

VERDICT_S = 0.5
"""How long a broken transport waits for the lifeline to say who broke it."""


_GENERATION = "#"
"""Stands in a group's name between that of the sync for which several were made and its own."""


def generation(group_name: str) -> str:
    """Name of the sync for which a group was made; most groups are the only one of theirs and have its name."""
    return group_name.partition(_GENERATION)[0]


_living: weakref.WeakSet[SyncGroup] = weakref.WeakSet()


def living_groups() -> list[SyncGroup]:
    """The groups of this process that were connected and not destroyed."""
    return [group for group in _living if not group._destroyed]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes it the current one of the calling thread, which is thread-local: a new thread starts on device 0."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = module.device(device)
    return context


class SyncGroup(BaseGroup):
    """A Ray collective group that can be bounded and aborted.

    Construction stores the arguments and touches nothing else. Raises of every method after ``connect``:
    :class:`~twinkle_ray.errors.PeerLost`, :class:`~twinkle_ray.errors.SyncTimeout`,
    :class:`~twinkle_ray.errors.SyncAborted`, or ManifestMismatch if the ranks disagree on sizes; after any of them the
    group is unusable and must be destroyed. A ConfigError is about one call's arguments and leaves the group sound.

    One thread at a time may use a group; :meth:`abort` may come from any.

    Attributes:
        numbers: where a sync has several groups, the number that each rank of this one has among all of them; its
            errors then name those. Set before ``connect``.
        followers: groups that are given up with this one.
    """

    name: ClassVar[str]
    """Backend name in Ray's registry, such as ``TWINKLE_GLOO``."""
    device_type: ClassVar[str]
    """Type of the torch devices whose tensors it moves: ``cpu``, ``cuda`` or ``npu``."""
    hosts: bool = False
    """Whether :meth:`host` does anything."""
    op_timeout_s: float = 300.0
    """Seconds for an operation of Ray's own API, which carries no deadline (or -1 ms for none)."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.numbers: tuple[int, ...] | None = None
        self.followers: tuple[SyncGroup, ...] = ()
        self._state = threading.Lock()  # of the fields below
        self._failure: TwinkleRayError | None = None
        self._failed = threading.Event()
        self._connected = False
        self._destroyed = False
        self._meeting: Meeting | None = None
        self._lifeline: Lifeline | None = None
        self._byte: torch.Tensor | None = None

    @classmethod
    def backend(cls) -> str:
        return cls.name

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """What this process lacks for the backend and how to get it, as a sentence; ``None`` if it can work."""

    @classmethod
    def check_backend_availability(cls) -> bool:
        return cls.missing() is None

    @classmethod
    def identity(cls, device: torch.device) -> str:
        """See :func:`twinkle_ray.backends.identity`."""
        if device.type == "cpu":
            return ""
        module = getattr(torch, device.type)
        index = device.index if device.index is not None else module.current_device()
        return str(getattr(module.get_device_properties(index), "uuid", index))

    @classmethod
    def linked(cls, device: torch.device) -> tuple[str, ...]:
        """See :func:`twinkle_ray.backends.linked`."""
        return ()

    @classmethod
    def shareable(cls, device: torch.device, tensors: Iterable[torch.Tensor]) -> bool:
        """See :func:`twinkle_ray.backends.shareable`."""
        return False

    @classmethod
    def wait_for(cls, device: torch.device) -> None:
        """See :func:`twinkle_ray.backends.wait_for`."""
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)

    def connect(self, rendezvous: Rendezvous, deadline: Deadline, meeting: Meeting | None = None) -> None:
        """Meet all other ranks and build the communicator, within the deadline.

        Args:
            rendezvous: where rank 0 waits.
            deadline: when this ends with :class:`~twinkle_ray.errors.SyncTimeout`, naming the ranks that did not come.
            meeting: on rank 0, the meeting that it opened; the group owns it from here on.

        Raises:
            ConfigError: the arguments belong to another group, or two processes have one rank.
            SyncTimeout, PeerLost, SyncAborted: as for every method; the group must be destroyed.
        """
        with self._state:
            if self._connected or self._destroyed:
                raise ConfigError(f"group {self._group_name} was connected or destroyed before; make a new one")
            self._connected = True
            self._meeting = meeting
        _living.add(self)
        if (rendezvous.group, rendezvous.backend) != (self._group_name, self.name):
            raise ConfigError(
                f"group {self._group_name} of {self.name} was given the rendezvous of "
                f"{rendezvous.group} of {rendezvous.backend}"
            )
        if (meeting is None) == (self._rank == 0):
            raise ConfigError(
                f"rank {self._rank} of group {self._group_name}: a meeting belongs to rank 0, and to it only"
            )
        try:
            bounded(
                lambda: self._connect(rendezvous, deadline),
                Deadline(deadline.at + _GRACE_S, deadline.seconds),
                f"connecting rank {self._rank} of group {self._group_name}",
                interrupted=self._raised,
                discard=lambda _: self._sever(),
            )
        except TwinkleRayError as error:
            failure = self._fail(error, tell=True)
            if self.numbers is not None:
                raise failure from None
            raise
        except Exception as error:
            raise self._fail_locally(error, "connect") from error

    def _connect(self, rendezvous: Rendezvous, deadline: Deadline) -> None:
        store = PrefixStore(
            self._group_name, self._meeting.store if self._meeting else join_store(rendezvous, deadline)
        )
        meet(store, self._rank, self._world_size, deadline, self._failed.is_set)
        if self._meeting:
            lifeline = Lifeline.listen(self._meeting.take_watch(), self._group_name, self._world_size, self._on_failure)
        else:
            lifeline = Lifeline.dial(rendezvous, self._rank, deadline, self._on_failure)
        lifeline.on_departure = self._left
        with self._state:
            self._lifeline = lifeline
            abandoned = self._destroyed
        if abandoned:
            lifeline.close()
            return
        lifeline.ready(deadline)
        self._build(store, rendezvous, deadline)
        if self._failed.is_set():
            self._sever()  # what was built after the failure

    @abstractmethod
    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        """Broadcast the bytes of several contiguous tensors from rank ``src`` in one launch, in place at both ends.

        All ranks pass tensors of the same sizes in bytes, in the same order. The work is only launched (on a device: on
        the group's own stream); :meth:`synchronize` waits for it, and until then the tensors must not change.

        Raises:
            ConfigError: a tensor is not contiguous or not on the group's kind of device.
        """

    @abstractmethod
    def synchronize(self, deadline: Deadline) -> None:
        """Wait until all launched work has ended.

        Raises:
            SyncTimeout: the deadline passed; the group is aborted.
        """

    def settle(self, deadline: Deadline, leave: int) -> None:
        """Wait until at most the last ``leave`` calls of :meth:`broadcast_many` have not ended, or longer.

        Raises:
            SyncTimeout: as :meth:`synchronize`.
        """
        self.synchronize(deadline)

    def flush(self) -> None:
        """Launch what was asked for and is held back to be launched together. Waits for nothing.

        Raises:
            SyncError: as :meth:`broadcast_many`.
        """

    def rally(self) -> None:
        """Launch a barrier: nothing that is launched behind it moves before every rank has come this far.

        Here a byte from each rank to all; a backend may know better.
        """
        if self._byte is None:
            self._byte = torch.zeros(1, dtype=torch.uint8, device=self.device_type)
        for rank in range(self._world_size):
            self.broadcast_many([self._byte], src=rank)

    def muster(self, deadline: Deadline) -> None:
        """On a rank that is not in the next barrier yet: wait until all others are, where the backend can tell."""

    def assemble(self, deadline: Deadline) -> None:
        """:meth:`rally` at the sender, whose next launch is then behind it; it may wait for that."""
        self.rally()

    def place(self, device: torch.device) -> None:
        """Say where the tensors are that will be moved, before ``connect``; most backends know by themselves."""

    def host(self, tensors: Iterable[torch.Tensor]) -> None:
        """At the sender: tensors that will be sent at each sync, whose memory may be exchanged for other memory with
        the same contents if that makes sending cheaper. They stay the same objects."""

    def let_go(self) -> None:
        """Close what is open here of other processes' memory, which may then be freed. Not while an operation runs. The
        next one opens again what it needs.

        Raises:
            SyncError: an operation is reading it.
        """

    def fence(self) -> None:
        """Wait until all work that this process has put on the group's device has ended. Without it a launch waits
        for the calling thread's current stream only."""

    def abort(self, reason: str) -> None:
        """Give the group up, from any thread, at any time, more than once. Threads stuck in it are released, and the
        other ranks are told through the lifeline. Returns within about a second, never raises."""
        message = f"the group was given up because of rank {self._rank}: {reason}"
        self._fail(SyncAborted(message, actors=(f"rank {self._rank}",)), tell=True, reason=reason)

    @property
    def failure(self) -> TwinkleRayError | None:
        """Why the group is unusable, ``None`` while it is sound. That a member has left counts, but it does not stop
        the work that is in flight."""
        return self._failure or self._departure()

    def destroy_group(self) -> None:
        """Leave the group in good order and release its sockets, threads and communicator. Idempotent, bounded to a
        few seconds. Work that has not ended is aborted first: wait with :meth:`synchronize`."""
        with self._state:
            if self._destroyed:
                return
            self._destroyed = True
            lifeline, meeting = self._lifeline, self._meeting
        if not self._failed.is_set() and self._busy():
            self.abort("it was destroyed while work was in flight")
        if lifeline is not None:
            lifeline.close()
        self._release()
        if meeting is not None:
            meeting.close()

    @abstractmethod
    def _build(self, store: Store, rendezvous: Rendezvous, deadline: Deadline) -> None:
        """Make the communicator; all ranks are at the door and on the lifeline."""

    @abstractmethod
    def _busy(self) -> bool:
        """Whether launched work may still be running."""

    @abstractmethod
    def _sever(self) -> None:
        """Release every thread and stream that is stuck in the communicator. From any thread, repeatedly."""

    @abstractmethod
    def _release(self) -> None:
        """Free the communicator."""

    def _left(self, rank: int) -> None:
        """A rank has left in good order. Called from the lifeline's thread; must not wait."""

    def _on_failure(self, error: SyncError) -> None:
        self._fail(error, tell=False)

    def _fail(self, error: TwinkleRayError, *, tell: bool, reason: str | None = None) -> TwinkleRayError:
        """Take the group out of use. The first failure stands; returns a copy of it to raise."""
        with self._state:
            first = self._failure is None
            if first:
                self._failure = self._numbered(copy.copy(error))
            lifeline = self._lifeline
        self._failed.set()
        if tell and lifeline is not None:
            lifeline.abort(reason or error.message, self._culprit(error))
        try:
            self._sever()
        except Exception:
            traceback.print_exc()
        if first:
            for follower in self.followers:
                follower.abort(f"another group of this sync failed: {error.message}")
        failure = self._raised()
        assert failure is not None
        return failure

    @property
    def number(self) -> int:
        """Of this rank, see :attr:`numbers`."""
        return self._rank if self.numbers is None else self.numbers[self._rank]

    def _numbered(self, error: TwinkleRayError) -> TwinkleRayError:
        numbers = self.numbers
        if numbers is None or not isinstance(error, SyncError):
            return error
        of = {f"rank {rank}": f"rank {number}" for rank, number in enumerate(numbers)}
        named = set(error.actors) & of.keys()
        error.actors = tuple(of.get(actor, actor) for actor in error.actors)
        error.args = (re.sub(r"\brank \d+\b", lambda m: of[m[0]] if m[0] in named else m[0], error.message),)
        return error

    def _culprit(self, error: TwinkleRayError) -> int:
        """The rank that an error names, else this one."""
        actors = error.actors if isinstance(error, SyncError) else ()
        return next((int(actor[5:]) for actor in actors if actor[5:].isdigit()), self._rank)

    def _fail_locally(self, error: BaseException, phase: str = "transfer") -> TwinkleRayError:
        """For an error of our own that is no transport's: a full memory, a bug."""
        text = "".join(traceback.format_exception(error))
        message = f"rank {self._rank} failed in group {self._group_name}: {type(error).__name__}: {error}"
        failure = SyncError(
            message,
            phase=phase,
            actors=(f"rank {self._rank}",),
            cause_type=type(error).__name__,
            cause_traceback=text,
        )
        return self._fail(failure, tell=True)

    def _broken(self, error: BaseException) -> TwinkleRayError:
        """For an error that the transport raised: whose fault it is, if the lifeline says so in time."""
        if not self._failed.wait(VERDICT_S):
            left = self._lifeline.departed if self._lifeline else None
            rank = left if left is not None else (1 - self._rank if self._world_size == 2 else None)
            how = "left the group" if left is not None else "cannot be reached any more"
            who = "another rank" if rank is None else f"rank {rank}"
            what = (str(error).strip() or repr(error)).splitlines()[0]
            failure = PeerLost(
                f"{who} {how}, in group {self._group_name}: {what}",
                phase="transfer",
                actors=() if rank is None else (f"rank {rank}",),
                cause_type=type(error).__name__,
                cause_traceback="".join(traceback.format_exception(error)),
            )
            self._fail(failure, tell=True)
        failure_now = self._raised()
        assert failure_now is not None
        return failure_now

    def _raised(self) -> TwinkleRayError | None:
        """A copy of the failure, fit to be raised: one exception object must not collect several tracebacks."""
        return None if self._failure is None else copy.copy(self._failure)

    def _require_sound(self) -> None:
        """Raise the failure, if there is one."""
        if (failure := self._raised()) is not None:
            try:
                raise failure
            finally:
                del failure  # or it would hold this frame, and so itself and all that its callers have

    def _check(self) -> None:
        """Raise unless the group may be used."""
        self._require_sound()
        if self._destroyed or not self._connected:
            state = "destroyed" if self._destroyed else "not connected yet"
            raise ConfigError(f"group {self._group_name} is {state}")
        if (error := self._departure()) is not None:
            raise self._fail(error, tell=True)

    def _departure(self) -> PeerLost | None:
        left = self._lifeline.departed if self._lifeline else None
        return None if left is None else PeerLost(f"rank {left} has left the group", actors=(f"rank {left}",))

    def _check_views(self, views: Sequence[torch.Tensor]) -> None:
        # Asked of all at once, which is cheap, and of each only if one is wrong.
        if all(map(torch.Tensor.is_contiguous, views)) and {view.device.type for view in views} <= {self.device_type}:
            return
        for index, view in enumerate(views):
            if not view.is_contiguous() or view.device.type != self.device_type:
                raise ConfigError(
                    f"view {index} is on {view.device} and has strides {view.stride()}; "
                    f"a contiguous tensor on {self.device_type} is needed"
                )

    def _op_deadline(self, options: Any) -> Deadline:
        timeout = getattr(options, "timeout_ms", None)
        seconds = timeout.total_seconds() if timeout is not None else -1.0
        return Deadline.after(seconds if seconds > 0 else self.op_timeout_s)


class BroadcastGroup(SyncGroup):
    """A group that can broadcast and nothing else; from which ranks, it says itself."""

    def broadcast(self, tensor: Any, broadcast_options: Any = ray_types.BroadcastOptions()) -> None:  # noqa: B008
        operand = single(tensor, self.device_type)
        self.broadcast_many([operand.bytes], broadcast_options.root_rank)
        self.synchronize(self._op_deadline(broadcast_options))
        if self._rank != broadcast_options.root_rank:
            operand.put_back()

    def barrier(self, barrier_options: Any = ray_types.BarrierOptions()) -> None:  # noqa: B008
        self.rally()
        self.synchronize(self._op_deadline(barrier_options))

    def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
        raise self._cannot("allreduce")

    def reduce(self, tensor: Any, reduce_options: Any = None) -> None:
        raise self._cannot("reduce")

    def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
        raise self._cannot("allgather")

    def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = None) -> None:
        raise self._cannot("reducescatter")

    def send(self, tensor: Any, send_options: Any) -> None:
        raise self._cannot("send")

    def recv(self, tensor: Any, recv_options: Any) -> None:
        raise self._cannot("recv")

    def _cannot(self, what: str) -> ConfigError:
        return ConfigError(f"{self.name} has no {what}: rank 0 broadcasts there, and nothing else")
