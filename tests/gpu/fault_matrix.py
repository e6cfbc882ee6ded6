"""One trainer and one rollout on two NVIDIA GPUs over NCCL, each way to fail at each place of a sync: run by hand.

    python tests/gpu/fault_matrix.py                 # needs two GPUs, cupy, Ray; about three minutes
    python tests/gpu/fault_matrix.py --device cpu    # the same steps on a CPU over Gloo

Prints one JSON line per cell and a summary, exits non-zero on a failure. Parts: ``init`` (joining the group),
``transfer`` (in the third launch), ``commit`` (after the last byte), and ``door``: within ``init``, when all ranks have
met and NCCL makes the communicator. What is asked of each cell:

- the sync ends in an error of the right type, which names phase and actor, at most 2 s after the failure (a time that
  the failing actor writes down itself) or after the deadline;
- the other one answers at once: within 1 s a rollout, within 2 s a trainer, which must abort its communicator first;
- the next sync is bit-exact, by SHA-256 on both sides: by the same actors, or by a new one for one that was killed;
- then no process has more threads of ours, sockets or native threads of NCCL than after its first sync. One exception
  is documented (``twinkle_ray/backends/nccl.py``): a rank that was in ``ncclCommInitRank`` when its peer failed leaves
  that thread behind; it is counted in the line of the cell, and allowed in ``door`` only.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import ray

from tests.actors import open_things
from tests.faults import FaultyRolloutBase, FaultyTrainerBase, forget_faults
from tests.gpu.common import attempt, cluster, get, make, say, verdict
from twinkle_ray import CheckpointEngineManager, PeerLost, SyncError, SyncTimeout

DEADLINE_S = 2.0
PATIENCE_S = 4.0
"""The deadline where nothing hangs: a thread in a call that cannot be interrupted ends by it (see ``bounded.py``)."""

PARTS = ("init", "transfer", "commit", "door")
HOW = ("raises", "hangs", "SIGKILL")
WHO = ("trainer", "rollout")
TYPES = {"raises": SyncError, "hangs": SyncTimeout, "SIGKILL": PeerLost}
LEFT_BEHIND = "twinkle-bounded connecting rank"


def threads() -> dict[str, int]:
    """Of this process: ours by the first words of their names, NCCL's and all by the kernel's count."""
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("twinkle")]
    found = collections.Counter(LEFT_BEHIND if LEFT_BEHIND in name else name[:12] for name in ours)
    native = [
        path.read_text(errors="replace").strip().lower()
        for path in Path("/proc/self/task").glob("*/comm")
        if path.exists()
    ]
    return {**found, "nccl": sum("nccl" in name for name in native), "native": len(native)}


def held(actor: Any) -> dict[str, int]:
    """What an actor's process holds, and MiB in use on its device."""
    return {**threads(), "fds": open_things()["fds"], "mib": device_mib()}


def device_mib() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def grown(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What there is more of. A few native threads and descriptors come with the first use of something."""
    allowed = {"native": 4, "fds": 4}
    more = {key: value - before.get(key, 0) for key, value in now.items() if key != "mib"}
    return {key: value for key, value in more.items() if value > allowed.get(key, 0)}


class Pair:
    """A trainer, a rollout and the manager that syncs them; whoever was killed is replaced."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.mode = options.mode
        self.members: dict[str, Any] = {}
        self.first: dict[str, dict[str, int]] = {}
        self.rollouts = 0
        self.steps = itertools.count(1)
        self.start()

    def make(self, who: str) -> Any:
        kind = FaultyTrainerBase if who == "trainer" else FaultyRolloutBase
        self.members[who] = make(kind, self.options, next(self.steps))
        self.first.pop(who, None)
        self.rollouts += who == "rollout"
        return self.members[who]

    def start(self) -> None:
        """Both anew; what was there is gone."""
        for actor in self.members.values():
            ray.kill(actor)
        self.rollouts = 0
        trainer, rollout = [self.make(who) for who in WHO]
        self.manager = CheckpointEngineManager(
            [trainer], [rollout], weight_sync_mode=self.mode, timeout_s=60.0, bucket_size=1024
        )
        self.sync()  # its time-out has room for the start of both
        self.first.clear()
        self.anew()
        self.sync()

    def anew(self) -> None:
        """Let the next sync make a new group."""
        self.manager.replace_trainers([self.members["trainer"]])

    def sync(self) -> None:
        """A good one, compared byte by byte."""
        get(self.members["trainer"].step.remote(next(self.steps)), 60)
        self.manager.timeout_s = 60.0
        report = self.manager.sync_weights()
        ours, theirs = get([self.members[who].digests.remote() for who in WHO])
        assert ours == theirs, [name for name in ours if ours[name] != theirs[name]]
        assert report.mode == self.mode, f"it went over {report.mode}"
        for who, actor in self.members.items():
            if who not in self.first:
                self.first[who] = get(actor.call.remote(held))

    def name(self, who: str) -> str:
        return "trainer[0]" if who == "trainer" else f"rollout[{self.rollouts - 1}]"

    def heal(self, who: str, how: str) -> None:
        """Another actor for a dead one; one that hangs comes back by itself."""
        if how != "SIGKILL":
            get(self.members[who].ping.remote(), 4 * DEADLINE_S + 5)
            return
        old = self.members[who]
        ray.kill(old)
        new = self.make(who)
        get(new.ping.remote(), 60)
        if who == "trainer":
            self.manager.replace_trainers([new])
        else:
            self.manager.add_rollout(new)
            self.manager.remove_rollout(old)

    def leftovers(self, wait_s: float) -> tuple[dict[str, Any], int]:
        """What each process holds more of than after its first sync, when ``wait_s`` seconds have been given for its
        end; and the threads left behind in a connect."""
        until = time.monotonic() + wait_s
        while True:
            now = {who: get(actor.call.remote(held)) for who, actor in self.members.items()}
            more = {who: extra for who in now if (extra := grown(now[who], self.first[who]))}
            if not more or time.monotonic() > until:
                behind = sum(n for one in now.values() for name, n in one.items() if name.startswith(LEFT_BEHIND))
                return more, behind
            time.sleep(0.25)


def cell(pair: Pair, who: str, how: str, where: str) -> None:
    options = pair.options
    other = "rollout" if who == "trainer" else "trainer"
    name = pair.name(who)
    if where in ("init", "door"):
        pair.anew()
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "failed"
        get(pair.members["trainer"].step.remote(next(pair.steps)))
        get(pair.members[who].arm.remote(where, how, 4 * DEADLINE_S, str(mark)))
        pair.manager.timeout_s = DEADLINE_S if how == "hangs" else PATIENCE_S
        start = time.time()
        try:
            pair.manager.sync_weights()
        except SyncError as caught:
            ended, error = time.time(), caught
        else:
            raise AssertionError("the sync succeeded")
        late_s = ended - (start + DEADLINE_S if how == "hangs" else float(mark.read_text(encoding="ascii")))
    asked = time.monotonic()
    get(pair.members[other].ping.remote(), 10)
    ping_s = time.monotonic() - asked
    for actor in pair.members.values():
        actor.call.remote(forget_faults)
    pair.heal(who, how)
    start_s = time.monotonic()
    pair.sync()
    retry_s = time.monotonic() - start_s
    start_s = time.monotonic()
    # What is in ncclCommInitRank does not end by any deadline.
    more, behind = pair.leftovers(1.0 if (options.device, where) == ("cuda", "door") else PATIENCE_S + 2.0)
    gone_s = time.monotonic() - start_s
    say(
        "cell",
        who=who,
        how=how,
        where=where,
        error=type(error).__name__,
        phase=error.phase,
        actors=error.actors,
        late_s=round(late_s, 2),
        ping_s=round(ping_s, 3),
        retry_s=round(retry_s, 2),
        equal=True,
        gone_s=round(gone_s, 2),
        left_behind=behind,
        more=more,
        mib={who: get(actor.call.remote(held))["mib"] - pair.first[who]["mib"] for who, actor in pair.members.items()},
        says=str(error).splitlines()[0][:200],
    )
    assert isinstance(error, TYPES[how]), f"a {type(error).__name__}: {error}"
    assert error.phase == {"commit": "transfer", "door": "init"}.get(where, where), f"phase {error.phase}: {error}"
    assert error.actors == (name,), f"{error.actors} are named, not {name}: {error}"
    assert how != "raises" or error.cause_type == "OSError", f"the cause is a {error.cause_type}: {error}"
    assert late_s <= 2.0 + options.slack, f"the error came {late_s:.2f} s late"
    assert ping_s <= (1.0 if other == "rollout" else 2.0) + options.slack, f"{other} answered after {ping_s:.2f} s"
    if where == "door":
        for one in more:  # with a thread that was left behind, and what it holds
            pair.first.pop(one)
        pair.sync()
    else:
        assert not more, f"left over: {more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--limit", type=float, default=230.0, help="seconds for all; what finds no time left fails")
    parser.add_argument("--slack", type=float, help="seconds allowed beyond each limit; 0, on a CPU 2")
    parser.add_argument("--mode", help="weight_sync_mode (default: nccl, on a CPU gloo); ipc reads over NVLink")
    options = parser.parse_args()
    if options.mode is None:
        options.mode = "nccl" if options.device == "cuda" else "gloo"
    if options.slack is None:
        options.slack = 0.0 if options.device == "cuda" else 2.0
    os.environ["TWINKLE_TEST_DEVICE"] = options.device  # for the actors, see tests/actors.py
    cells = [
        (who, how, where)
        for where, how, who in itertools.product(options.only, HOW, WHO)
        if (where, how) != ("door", "hangs")  # for those who wait it is as in init
    ]
    passed = 0
    pairs: list[Pair] = []

    def matrix() -> None:
        nonlocal passed
        pairs.append(Pair(options))
        for who, how, where in cells:
            work = functools.partial(cell, pairs[0], who, how, where)
            good = attempt("cell", work, 45, who=who, how=how, where=where)
            passed += good
            if not good:
                pairs[0].start()

    with cluster(options):
        attempt("matrix", matrix, options.limit)
    say("summary", device=options.device, cells=len(cells), passed=passed)
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
