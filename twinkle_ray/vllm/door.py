"""The door of a synchronous vLLM engine: while weights change, no request gets in and none is computed.

``LLM.generate`` adds requests and steps its engine in the caller's own thread, so the only place where it can be held
is the engine itself: :class:`Door` stands in for four methods of *one* ``llm_engine`` instance. What it does there
depends on its state::

    OPEN      all pass
    CLOSED    new requests wait; running ones are still computed (they drain)
    FROZEN    new requests and steps wait
    REFUSED   new requests and steps raise ReplicaUnavailable at once; running requests are gone

In every state a new request is refused at once while the engine is ``unfit``: asleep, or without its weights.

A waiting caller calls ``advance`` meanwhile, so that an actor with a single thread, whose only thread sits in
``generate``, still drives the update that it waits for. It gives up with ``ReplicaUnavailable`` after ``wait_s``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

from twinkle_ray.errors import ReplicaUnavailable, SyncTimeout
from twinkle_ray.types import Deadline

_GUARDED = ("add_request", "step", "has_unfinished_requests")
_SLICE_S = 0.05


class DoorState(Enum):
    """What a :class:`Door` lets pass."""

    OPEN = "open"  # requests and steps
    CLOSED = "closed"  # steps only: running requests drain
    FROZEN = "frozen"  # nothing
    REFUSED = "refused"  # nothing; callers get an error


class Door:
    """Guards one engine. :meth:`install` sets it up, :meth:`remove` takes every trace of it away.

    Args:
        engine: a ``vllm.v1.engine.llm_engine.LLMEngine`` or the like.
        abort: ends all running requests with finish reason ``abort`` and returns their last outputs.
        own_core: the engine computes in this process, when stepped; a child engine computes by itself.
        advance: called by waiting callers again and again with the seconds that it may take.
        wait_s: how long a caller waits for the door to open.
        fill: gives the arguments that a request is really added with, and changes the keyword arguments in place.
        unfit: why the engine can compute nothing at all now; ``None``: it can.

    Attributes:
        lock: held by whoever is inside a guarded method that computes or speaks to workers.
        used: whether a request may have computed anything since this was last set to ``False``.
    """

    def __init__(
        self,
        engine: Any,
        *,
        abort: Callable[[], list[Any]],
        own_core: bool,
        advance: Callable[[float], None] | None = None,
        wait_s: float = 60.0,
        fill: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]] | None = None,
        unfit: Callable[[], ReplicaUnavailable | None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.state = DoorState.OPEN
        self.lock = threading.RLock()
        self.advance = advance
        self.wait_s = wait_s
        self.used = True
        self._abort = abort
        self._own_core = own_core
        self._fill = fill
        self._unfit = unfit
        self._moved = threading.Condition()
        self._error: ReplicaUnavailable | None = None
        self._outputs: list[Any] = []
        self._dropped = False
        self._add_request: Callable[..., Any] = engine.add_request
        self._step: Callable[[], list[Any]] = engine.step
        self._has_unfinished: Callable[[], bool] = engine.has_unfinished_requests

    def install(self) -> None:
        """Stand in for the engine's methods."""
        for name in _GUARDED:
            setattr(self.engine, name, getattr(self, name))

    def remove(self) -> None:
        """Open, and give the engine its own methods back."""
        self.open()
        for name in _GUARDED:
            vars(self.engine).pop(name, None)

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's ``add_request``, once the door is open."""
        while True:
            if (why := self._unfit()) is not None:
                raise why
            self._wait(DoorState.CLOSED, DoorState.FROZEN)
            with self.lock:
                if self.state is DoorState.OPEN and self._unfit() is None:
                    if self._fill is not None:
                        args = self._fill(args, kwargs)
                    self.used = True
                    return self._add_request(*args, **kwargs)

    def step(self) -> list[Any]:
        """The engine's ``step``, unless frozen; outputs that came while others stepped are handed out first."""
        while True:
            try:
                self._wait(DoorState.FROZEN, unless_outputs=True)
            except ReplicaUnavailable:
                self._dropped = False
                raise
            with self.lock:
                outputs, self._outputs = self._outputs, []
                if outputs:
                    return outputs
                if self.state not in (DoorState.OPEN, DoorState.CLOSED):
                    continue
                if self._own_core:
                    return self._step()
            # A child engine's step blocks until there is an output; nobody may wait for the lock that long.
            return self._step()

    def has_unfinished_requests(self) -> bool:
        """The engine's answer, and true as long as a caller has outputs or an error to fetch."""
        return bool(self._outputs) or self._dropped or self._has_unfinished()

    @property
    def idle(self) -> bool:
        """Whether no request runs. While the door is closed it stays so."""
        with self.lock:
            return not self._has_unfinished()

    def close(self) -> None:
        """Let no new request in; running ones go on."""
        with self.lock:
            self._move(DoorState.CLOSED)

    def drain(self, deadline: Deadline) -> None:
        """Step the engine until no request runs, and freeze. For engines that compute in this process.

        Raises:
            SyncTimeout: requests were still running at the deadline.
        """
        while True:
            with self.lock:
                if not self._has_unfinished():
                    self._move(DoorState.FROZEN)
                    return
                if deadline.expired:
                    raise still_running(deadline)
                # Whoever should step may be waiting at this very door, with half of its requests added.
                self._outputs += self._step()

    def abort(self) -> None:
        """End running requests, as their callers learn from last outputs."""
        with self.lock:
            self._outputs += self._abort()

    def freeze(self, *, abort: bool) -> None:
        """Stop between two steps. With ``abort`` the running requests end, as their callers learn from last outputs."""
        with self.lock:
            if abort:
                self._outputs += self._abort()
            self._move(DoorState.FROZEN)

    def open(self) -> None:
        """Let all pass again."""
        with self.lock:
            self._error, self._dropped = None, False
            self._move(DoorState.OPEN)

    def refuse(self, error: ReplicaUnavailable) -> None:
        """End running requests; all callers get ``error`` until the door is opened."""
        with self.lock:
            self._dropped = self._dropped or bool(self._outputs) or self._has_unfinished()
            self._abort()
            self._outputs = []
            self._error = error
            self._move(DoorState.REFUSED)

    def _move(self, state: DoorState) -> None:
        with self._moved:
            self.state = state
            self._moved.notify_all()

    def _wait(self, *states: DoorState, unless_outputs: bool = False) -> None:
        """Wait while the door is in one of these states.

        Raises:
            ReplicaUnavailable: it refuses, or it did not open within ``wait_s``.
        """
        deadline = Deadline.after(self.wait_s)
        while True:
            with self._moved:
                if self.state is DoorState.REFUSED and self._error is not None:
                    raise ReplicaUnavailable(self._error.message)
                if self.state not in states or (unless_outputs and self._outputs):
                    return
                if deadline.expired:
                    raise ReplicaUnavailable(
                        f"this rollout has been updating its weights for {self.wait_s:.0f} s; try again later"
                    )
                slice_s = min(_SLICE_S, max(deadline.remaining(), 0.001))
                if self.advance is None:
                    self._moved.wait(slice_s)
            if self.advance is not None:
                self.advance(slice_s)


def still_running(deadline: Deadline) -> SyncTimeout:
    """The error for requests that outlast a deadline."""
    return SyncTimeout(
        f'requests were still running after {deadline.seconds:.1f} s; raise the timeout or sync with in_flight="abort"',
        phase="transfer",
    )
