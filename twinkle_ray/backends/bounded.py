"""A call that may never return, made with a deadline.

Some calls below us cannot be interrupted: a store's constructor whose server is stopped, ``ncclCommInitRank`` whose
peer is gone. Such a call runs in a daemon thread of its own. Past the deadline the thread is left behind, never
joined, and whatever the call yields later is handed to ``discard``.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from twinkle_ray.errors import SyncTimeout
from twinkle_ray.types import Deadline

T = TypeVar("T")

_POLL_S = 0.02


def bounded(
    call: Callable[[], T],
    deadline: Deadline,
    what: str,
    *,
    phase: str = "connect",
    interrupted: Callable[[], BaseException | None] = lambda: None,
    discard: Callable[[T], None] = lambda result: None,
) -> T:
    """``call()`` in a helper thread, for as long as the deadline allows.

    Args:
        call: what to do.
        deadline: when to stop waiting for it.
        what: the sentence's subject in the error, such as ``"joining the store at 10.0.0.1:4000"``.
        phase: of the error.
        interrupted: asked every 20 ms; what it returns is raised, and the call is left behind.
        discard: takes the result of a call that was left behind and has ended after all.

    Raises:
        SyncTimeout: the deadline passed.
        BaseException: whatever ``call`` raised or ``interrupted`` returned.
    """
    future: Future[T] = Future()
    lock = threading.Lock()
    left_behind = False

    def body() -> None:
        try:
            result = call()
        except BaseException as error:
            with lock:
                late = left_behind
                if not late:
                    future.set_exception(error)
            if late:  # nobody will see it, and its frames hold sockets until the garbage collector comes by
                traceback.clear_frames(error.__traceback__)
            return
        with lock:
            late = left_behind
            if not late:
                future.set_result(result)
        if late:
            discard(result)

    threading.Thread(target=body, name=f"twinkle-bounded {what}"[:60], daemon=True).start()
    while not wait([future], timeout=min(_POLL_S, deadline.remaining())).done:
        error = interrupted()
        if error is None and deadline.expired:
            error = SyncTimeout(f"{what} did not end within {deadline.seconds:.1f} s", phase=phase)
        if error is not None:
            with lock:
                left_behind = not future.done()
            if left_behind:
                raise error
    return future.result()
