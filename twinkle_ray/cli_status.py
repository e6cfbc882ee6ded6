"""``python -m twinkle_ray status``: versions and states of the rollouts of each manager on the cluster, live."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from twinkle_ray.errors import ConfigError
from twinkle_ray.status import LastSync, ManagerStatus, MemberStatus, read

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"whole": "green", "updating": "cyan", "asleep": "blue", "empty": "yellow"}
_REFRESH_S = 1.0


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of :mod:`argparse`."""
    parser = commands.add_parser(
        "status",
        help="versions and states of the syncs that run in this cluster",
        description="Show each manager's rollouts, the sync that runs, and how the last ones ended. Asks no actor.",
    )
    parser.add_argument("--address", default="auto", help="of the running Ray (default: %(default)s)")
    parser.add_argument("--watch", action="store_true", help="go on once a second until interrupted")
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one line each second")


def status(args: argparse.Namespace) -> int:
    """Print it.

    Args:
        args: ``address``, ``json`` and ``watch``, as :func:`add_parser` makes them.

    Returns:
        The exit code: 1 if a manager's last sync has failed or one of its rollouts is neither whole, asleep nor being
        updated, else 0.

    Raises:
        ConfigError: there is no Ray at the address.
    """
    import ray

    connected = ray.is_initialized()
    if not connected:
        try:
            ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConfigError(f"no Ray answers at {args.address!r}; say which one with --address") from error
    out = sys.stdout
    try:
        # Ray prints what its nodes have to say, at any time, and --json must stay JSON.
        with contextlib.redirect_stdout(sys.stderr):
            return _watched(args.json, out) if args.watch else _once(args.json, out)
    finally:
        if not connected:
            ray.shutdown()


def _once(as_json: bool, out: TextIO) -> int:
    found = read()
    if as_json:
        print(json.dumps([manager.as_json() for manager in found], indent=2), file=out)
    else:
        from rich.console import Console

        Console(file=out).print(_picture(found))
    return int(any(not _healthy(manager) for manager in found))


def _watched(as_json: bool, out: TextIO) -> int:
    found: list[ManagerStatus] = []
    try:
        if as_json:
            while True:
                found = read()
                print(json.dumps([manager.as_json() for manager in found]), flush=True, file=out)
                time.sleep(_REFRESH_S)
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=out), auto_refresh=False) as live:
            while True:
                found = read()
                live.update(_picture(found), refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return int(any(not _healthy(manager) for manager in found))


def _healthy(manager: ManagerStatus) -> bool:
    good = ("whole", "asleep", "updating")
    never = manager.version == 0  # nothing was synced yet
    return manager.failure is None and (never or all(member.state in good for member in manager.members))


def _picture(found: Sequence[ManagerStatus]) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not found:
        return Text("No manager runs on this cluster.")
    parts: list[RenderableType] = []
    for manager in found:
        table = Table(box=box.SIMPLE, title=Text(_title(manager)), title_justify="left", title_style="bold")
        for column in ("rollout", "state", "version", "behind", "chunks"):
            table.add_column(column)
        for member in manager.members:
            table.add_row(
                Text(member.name),
                Text(member.state, style=_COLOURS.get(member.state, "bold red")),
                Text("-" if member.version is None else str(member.version)),
                _behind(manager, member),
                Text(f"{member.step} of {member.steps}" if member.steps else ""),
            )
        parts += [table, *(Text(f"  {line}") for line in _history(manager))]
        if manager.silent:
            age = time.time() - manager.written
            parts.append(Text(f"  its process has said nothing for {age:.0f} s: it is gone or stuck", style="bold red"))
    return Group(*parts)


def _title(manager: ManagerStatus) -> str:
    where = f"{manager.manager} ({manager.host}, pid {manager.pid})"
    if manager.started is None:
        return f"{where}: version {manager.version}, group {manager.generation}"
    took = max(0.0, manager.written - manager.started)
    return f"{where}: syncing version {manager.version}, {manager.phase or 'beginning'}, {took:.1f} s"


def _behind(manager: ManagerStatus, member: MemberStatus) -> Any:
    from rich.text import Text

    late = manager.version - (member.version or 0)
    return Text(str(late), style="red" if manager.started is None else "") if late else Text("")


def _history(manager: ManagerStatus) -> list[str]:
    lines = []
    if manager.last is not None:
        lines.append(_last(manager.last))
    failure = manager.failure
    if failure is not None:
        who = f" because of {', '.join(failure.members)}" if failure.members else ""
        message = " ".join(failure.message.split())
        lines.append(f"failed {_ago(failure.ended)} in {failure.phase or 'no phase'}{who}: {failure.error}: {message}")
    return lines


def _last(last: LastSync) -> str:
    rate = f", {last.nbytes / last.seconds / 1e9:.2f} GB/s" if last.nbytes and last.seconds else ""
    phases = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in last.phases.items())
    return (
        f"version {last.version} {_ago(last.ended)} [{last.mode}]: {last.nbytes / 1e6:.2f} MB in "
        f"{last.seconds * 1e3:.1f} ms{rate} (ms: {phases})"
    )


def _ago(then: float) -> str:
    return f"{max(0.0, time.time() - then):.0f} s ago"
