"""Actors that fail once, in one way and at one place of a sync; for the fault matrices on Gloo and on two GPUs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.actors import Probed, RolloutBase, TrainerBase, at_launch, group_class

SLOW_S = 0.7
HANG_S = 12.0
"""Four times the deadline of a sync under test, unless :meth:`Faulty.arm` is told another."""


class Faulty(Probed):
    """Does something once, at one place of a sync."""

    fault = ("", "")
    hang_s = HANG_S
    mark = ""

    def arm(self, where: str, how: str, hang_s: float = HANG_S, mark: str = "") -> None:
        """Args:
        where: ``prepare``, ``init``, ``door`` (in ``init``, when all have met), ``transfer``, ``commit``, ``finalize``.
        how: ``raises``, ``SIGKILL``, ``hangs`` or ``is slow``.
        hang_s: seconds that a hang takes.
        mark: a file to write the time of the failure to.
        """
        self.fault, self.hang_s, self.mark = (where, how), hang_s, mark

    def at(self, where: str) -> None:
        if self.fault[0] == where:
            how, self.fault = self.fault[1], ("", "")
            if self.mark:
                Path(self.mark).write_text(str(time.time()), encoding="ascii")
            misbehave(how, self.hang_s)

    def break_door(self) -> None:
        """Let the next group fail when all ranks have met and it begins to build its communicator."""
        from twinkle_ray.backends.ipc import IpcGroup

        usual = {cls: cls._build for cls in (group_class(), IpcGroup)}

        def failing(group: Any, *args: Any, **kwargs: Any) -> Any:
            for cls, build in usual.items():
                cls._build = build
            self.at("door")
            return group._build(*args, **kwargs)

        for cls in usual:
            cls._build = failing


def misbehave(how: str, hang_s: float = HANG_S) -> None:
    if how == "raises":
        raise OSError("something broke")
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(hang_s if how == "hangs" else SLOW_S)


def forget_faults(actor: Any) -> None:
    actor.fault = ("", "")


class FaultyTrainerBase(Faulty, TrainerBase):
    def checkpoint_status(self, merge: bool = True) -> Any:
        self.at("prepare")
        return super().checkpoint_status(merge)

    def start_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.at("init")
        if self.fault[0] == "door":
            self.break_door()
        return super().start_checkpoint(*args, **kwargs)

    def send_checkpoint_weights(self, *args: Any, **kwargs: Any) -> Any:
        if self.fault[0] == "transfer":
            at_launch(2, lambda: self.at("transfer"))
        sent = super().send_checkpoint_weights(*args, **kwargs)
        self.at("commit")
        return sent

    def finalize_checkpoint_engine(self, leave: bool = False, group: str | None = None) -> None:
        self.at("finalize")
        super().finalize_checkpoint_engine(leave, group)


class FaultyRolloutBase(Faulty, RolloutBase):
    def start_checkpoint(self, key: str, op: str, request: dict[str, Any], wait_s: float = 0.0) -> Any:
        self.at({"prepare": "prepare", "connect": "init", "leave": "finalize"}.get(op, "nowhere"))
        if op == "connect" and self.fault[0] == "door":
            self.break_door()
        if op == "receive" and self.fault[0] == "transfer":
            at_launch(2, lambda: self.at("transfer"))
        if op == "receive" and self.fault[0] == "commit":
            self.break_commit()
        return super().start_checkpoint(key, op, request, wait_s)

    def break_commit(self) -> None:
        from twinkle_ray.serving import Serving

        settle = Serving._settle

        async def failing(*args: Any) -> None:
            Serving._settle = settle  # type: ignore[method-assign]
            self.at("commit")
            await settle(*args)

        Serving._settle = failing  # type: ignore[method-assign]
