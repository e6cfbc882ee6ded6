"""One endpoint per process that owns parameters: its device, its group and the one thread that works in them.

Collectives block, and a plain Ray actor whose only thread blocks answers nobody. So every operation runs in the
endpoint's own daemon thread; the actor's thread starts it, waits in slices, and can give it up. A thread that is stuck
in a collective is never joined: it is left behind with its generation, and the next operation gets a new one. What is
left behind still knows only its own group, may not begin to write, and the next operation that uses the parameters
waits until it is out.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from twinkle_ray import backends
from twinkle_ray.backends.base import SyncGroup, on_device
from twinkle_ray.backends.fanout import FanOut
from twinkle_ray.backends.rendezvous import Meeting, unique_group_name
from twinkle_ray.errors import SyncAborted, SyncError, SyncTimeout
from twinkle_ray.types import Deadline, OpState, OpStatus, Rendezvous, Seat

_SLICE_S = 0.05
_SWITCH_S = 2e-4
"""Seconds after which a thread is asked for the interpreter while an operation runs. With Python's 5 ms a thread that
waits for the wire learns that much later that it has ended, if another one is computing."""

_LONGEST_S = 3600.0
"""Seconds that the alarm waits at a time: a lock refuses to wait for ever, which a deadline may be."""

_LATE_S = 0.4
"""The group ends by the deadline itself and can say who was missing; only then does the endpoint end the operation."""


class Operation:
    """One piece of work in the endpoint's thread, as its starter sees it.

    Attributes:
        group: that it works in, and that is given up with it; another one's is none of its business.
        launched: all that it has for the wire is under way, and its thread has little left to do but wait.
        ended: its outcome is fixed.
        left: its thread is out of the work, which for one that was given up may be later.
    """

    def __init__(self, op: str, deadline: Deadline, group: SyncGroup | None = None) -> None:
        self.op = op
        self.deadline = deadline
        self.group = group
        self.step = 0
        self.steps = 0
        self.touched = False
        self.seconds: dict[str, float] = {}
        self.launched = threading.Event()
        self.ended = threading.Event()
        self.left = threading.Event()
        self._lock = threading.Lock()
        self._state = OpState.RUNNING
        self._result: Any = None
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds spent inside to ``seconds[part]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def touch(self) -> None:
        """Say that bytes of the model may be overwritten from here on.

        Raises:
            SyncAborted: the operation was given up, and its starter has been told what it had touched.
        """
        with self._lock:
            if self._state is not OpState.RUNNING:
                raise SyncAborted(f"{self.op} was given up in the meantime", phase=self.op)
            self.touched = True

    def end(self, *, result: Any = None, error: BaseException | None = None) -> bool:
        """Fix the outcome; the first one stands. Returns whether this was it."""
        with self._lock:
            if self._state is not OpState.RUNNING:
                return False
            self._result, self._error = result, error
            self._state = OpState.FAILED if error is not None else OpState.DONE
        self.ended.set()
        self.launched.set()
        return True

    def status(self) -> OpStatus:
        with self._lock:
            return OpStatus(
                op=self.op,
                state=self._state,
                step=self.step,
                steps=self.steps,
                touched=self.touched,
                seconds=dict(self.seconds),
                result=self._result,
                error=self._error,
            )

    def outcome(self) -> Any:
        """Wait for the end (the deadline bounds it) and return the result or raise the error."""
        self.ended.wait(self.deadline.remaining() + 5.0)
        status = self.status()
        if status.state is OpState.RUNNING:
            raise SyncTimeout(f"{self.op} did not end within {self.deadline.seconds:.1f} s", phase=self.op)
        if status.error is not None:
            raise status.error
        return status.result


class _Thread:
    """A daemon thread that runs one callable after the other on one device."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # else the last operation's tensors live until the next one

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def retire(self) -> None:
        """End after the current callable, whenever that is."""
        self._work.put(None)


class _Alarm:
    """Calls back at deadlines, from one thread for the whole process: to make one for each operation takes 0.2 ms."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, list[Callable[[], None]]]] = []
        self._numbers = itertools.count()
        self._moved = threading.Condition()
        self._thread: threading.Thread | None = None

    def set(self, at: float, ring: Callable[[], None]) -> list[Callable[[], None]]:
        """Call ``ring`` at this time (of the monotonic clock), unless the list that is returned was cleared before."""
        entry = [ring]
        with self._moved:
            first = not self._due or at < self._due[0][0]
            heapq.heappush(self._due, (at, next(self._numbers), entry))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="twinkle-alarm", daemon=True)
                self._thread.start()
            elif first:
                self._moved.notify()
        return entry

    def _run(self) -> None:
        while True:
            with self._moved:
                while not self._due or (wait_s := self._due[0][0] - time.monotonic()) > 0:
                    self._moved.wait(min(wait_s, _LONGEST_S) if self._due else None)
                entry = heapq.heappop(self._due)[-1]
            for ring in list(entry):
                threading.Thread(target=ring, name="twinkle-deadline", daemon=True).start()  # it may take a second


class _Brisk:
    """A context in which threads of this process switch faster; see :data:`_SWITCH_S`. Several may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_S, self._before))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.setswitchinterval(self._before)


def _afresh() -> None:
    """A forked process, such as a child engine's, has neither the alarm's thread nor the operations inside."""
    global _alarm, _brisk
    _alarm, _brisk = _Alarm(), _Brisk()


_alarm = _Alarm()
_brisk = _Brisk()
os.register_at_fork(after_in_child=_afresh)


class Endpoint:
    """This process's member of a sync group.

    Args:
        device: where this process's parameters live. Set as the current device in the thread of every operation.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.group: SyncGroup | None = None
        self.meeting: Meeting | None = None
        self.meetings: list[Meeting] = []  # of several groups
        self.rendezvous: Rendezvous | None = None
        self._seats: tuple[Seat, ...] = ()
        self._thread: _Thread | None = None
        self._operation: Operation | None = None
        self._inside: list[Operation] = []  # that use the parameters and are not known to be out
        self._lock = threading.Lock()  # of the fields above, and of the end of an operation with its group

    def open_meeting(self, backend: str, *, fresh: bool = False) -> Rendezvous:
        """On the rank that will be 0: open the place where the group meets. A sound group is kept and named again,
        unless ``fresh`` asks for a new one.

        Raises:
            BackendUnavailable: the backend's package or device is missing here.
        """
        if not fresh and self.rendezvous is not None and self.is_sound() and self.rendezvous.backend == backend:
            return self.rendezvous
        self.leave()
        backends.require(backend)
        self.meeting = Meeting.open(unique_group_name(backend.lower()), backend)
        return self.meeting.rendezvous

    def open_meetings(self, groups: Sequence[tuple[str, str]]) -> list[Rendezvous]:
        """:meth:`open_meeting` for several new groups at once, of these names and backends."""
        self.leave()
        for _, backend in groups:
            backends.require(backend)
        self.meetings = [Meeting.open(name, backend) for name, backend in groups]
        return [meeting.rendezvous for meeting in self.meetings]

    def is_sound(self) -> bool:
        """Whether there is a group and nothing is known against it."""
        return self.group is not None and self.group.failure is None

    @property
    def sound_group(self) -> str:
        """Name of the group that this process is in while nothing is known against it, else ``""``; of several groups
        that were made for one sync what they have in common."""
        return self.group_name if self.is_sound() else ""

    @property
    def group_name(self) -> str:
        """The same of a group that may have failed."""
        return backends.generation(self.rendezvous.group) if self.rendezvous is not None else ""

    def connect(self, rank: int, world_size: int, rendezvous: Rendezvous, deadline: Deadline) -> Operation:
        """Start to join the group; a no-op if this very group is joined and sound."""
        return self.join([Seat(rendezvous=rendezvous, rank=rank, world_size=world_size)], deadline)

    def join(self, seats: Sequence[Seat], deadline: Deadline) -> Operation:
        """:meth:`connect` for several groups of one sync, in each of which this process is rank 0; or for one."""

        def work(operation: Operation) -> None:
            if self._seats == tuple(seats) and self.is_sound():
                return
            with self._lock:
                _require_running(operation)
                old, self.group, operation.group = self.group, None, None
            if old is not None:
                backends.destroy_group(old)
            groups: list[SyncGroup] = []
            try:
                groups += (self._make(seat) for seat in seats)
            except BaseException:
                for made in groups:
                    backends.destroy_group(made)
                raise
            # The one on this device first: the others make progress while it is waited for.
            groups.sort(key=lambda one: one.name != backends.IPC)
            group = groups[0]
            if len(groups) > 1:
                group = FanOut(backends.generation(group.group_name), groups)
            try:
                with self._lock:
                    _require_running(operation)
                    self.group = operation.group = group
                    self.rendezvous, self._seats = seats[0].rendezvous, tuple(seats)
                    opened = [*([self.meeting] if self.meeting is not None else []), *self.meetings]
                    self.meeting, self.meetings = None, []
            except SyncAborted:
                backends.destroy_group(group)
                raise
            wanted = [seat.rendezvous for seat in seats]
            meetings = {meeting.rendezvous.group: meeting for meeting in opened if meeting.rendezvous in wanted}
            for meeting in opened:
                if meeting.rendezvous not in wanted:
                    meeting.close()
            try:
                for seat in seats:
                    found = meetings.pop(seat.rendezvous.group, None)
                    if seat.rank == 0 and found is None:
                        raise SyncError(
                            "rank 0 has closed the place where this group was to meet: another sync has taken it into "
                            "a group of its own; one manager at a time may use it",
                            phase="connect",
                        )
                    one = next(one for one in groups if one.group_name == seat.rendezvous.group)
                    one.connect(seat.rendezvous, deadline, found)
            finally:
                for meeting in meetings.values():  # whoever waits in one of them need not wait any more
                    meeting.close()

        return self.start("connect", work, deadline, parameters=False)

    def _make(self, seat: Seat) -> SyncGroup:
        backend = seat.rendezvous.backend
        backends.require(backend)
        group = backends.create_group(backend, seat.world_size, seat.rank, seat.rendezvous.group)
        group.numbers = seat.numbers
        group.place(self.device)
        return group

    def start(
        self, op: str, work: Callable[[Operation], Any], deadline: Deadline, *, parameters: bool = True
    ) -> Operation:
        """Run ``work(operation)`` in the endpoint's thread. Any error, and the deadline, gives up the group.

        Args:
            parameters: whether the work uses this process's parameters. Then it begins only when all such work that
                was given up is out of them.

        Raises:
            SyncError: another operation is running.
        """
        with self._lock:
            if self._operation is not None and not self._operation.ended.is_set():
                raise SyncError(f"{op} was asked for while {self._operation.op} is running in this process", phase=op)
            operation = self._operation = Operation(op, deadline, self.group)
            if self._thread is None:
                self._thread = _Thread("twinkle-endpoint")
            thread = self._thread
            self._inside = [earlier for earlier in self._inside if not earlier.left.is_set()]
            before = list(self._inside) if parameters else []
            if parameters:
                self._inside.append(operation)
        alarm = _alarm.set(deadline.at + _LATE_S, lambda: self._expire(operation))

        def run() -> None:
            try:
                _await_exit(before, operation)
                with torch.no_grad(), on_device(self.device), _brisk:
                    result = work(operation)
            except BaseException as error:
                # Peers wait in collectives for this rank: tell them before anyone is told here.
                if operation.group is not None:
                    operation.group.abort(f"{op}: {type(error).__name__}: {error}")
                _keep_traceback(error)
                _clear_frames(error)
                operation.end(error=error)
            else:
                operation.end(result=result)
            finally:
                operation.left.set()
                alarm.clear()

        thread.submit(run)
        return operation

    def abort(self, reason: str) -> None:
        """Give up the running operation and the group, from any thread. Returns within about a second."""
        with self._lock:
            operation, group = self._operation, self.group
            if operation is not None and operation.end(error=SyncAborted(reason, phase=operation.op)):
                self._abandon_thread()
        if group is not None:
            group.abort(reason)

    def leave(self) -> None:
        """Leave the group in order, and close what this process opened. Idempotent."""
        operation = self._operation
        if operation is not None and not operation.ended.is_set():
            self.abort("the endpoint is being closed")
        with self._lock:
            group, self.group = self.group, None
            opened = [*([self.meeting] if self.meeting is not None else []), *self.meetings]
            self.meeting, self.meetings = None, []
            self.rendezvous = self._operation = None
            self._seats = ()
            self._abandon_thread()
        for meeting in opened:
            meeting.close()
        if group is not None:
            backends.destroy_group(group)

    def _expire(self, operation: Operation) -> None:
        """End an operation that its group did not end: this process's own part of the work is what takes so long."""
        group = operation.group
        message = f"{operation.op} did not end within {operation.deadline.seconds:.1f} s"
        # Whose group ran out of time first was waiting for others, and is only slow to say so.
        waited = group is None or isinstance(group.failure, SyncTimeout)
        culprit = () if group is None or waited else (f"rank {group.number}",)
        with self._lock:
            first = operation.end(error=SyncTimeout(message, phase=operation.op, actors=culprit))
            if first and self._operation is operation:
                self._abandon_thread()
            group = operation.group
        if first and group is not None:
            group.abort(message)

    def _abandon_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.retire()


def _require_running(operation: Operation) -> None:
    if operation.ended.is_set():
        raise SyncAborted(f"{operation.op} was given up in the meantime", phase=operation.op)


def _await_exit(earlier: list[Operation], operation: Operation) -> None:
    """Wait until operations that were given up are out of their work: a stuck load may still write."""
    for one in earlier:
        while not one.left.wait(min(_SLICE_S, operation.deadline.remaining())):
            _require_running(operation)
            if operation.deadline.expired:
                rank = () if operation.group is None else (f"rank {operation.group.number}",)
                raise SyncTimeout(
                    f"an earlier {one.op} that was given up is still in its work in this process, so {operation.op} "
                    f"could not begin within {operation.deadline.seconds:.1f} s",
                    phase=operation.op,
                    actors=rank,
                )
    _require_running(operation)


def _keep_traceback(error: BaseException) -> None:
    """Tracebacks do not pickle; keep the text where the driver finds it."""
    if isinstance(error, SyncError) and not error.cause_traceback and error.__cause__ is not None:
        error.cause_type = type(error.__cause__).__name__
        error.cause_traceback = "".join(traceback.format_exception(error.__cause__))
    elif not isinstance(error, SyncError):
        with contextlib.suppress(Exception):
            error.__dict__.setdefault("twinkle_traceback", "".join(traceback.format_exception(error)))


def _clear_frames(error: BaseException) -> None:
    """An operation is remembered until the next one, and frames hold the tensors that were on their way."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        pending += [one.__cause__, one.__context__]
