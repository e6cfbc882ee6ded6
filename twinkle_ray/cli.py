"""``python -m twinkle_ray``: what can be asked of a machine or a cluster without writing a program.

    doctor   looks at this machine, or every node of the running Ray, and says what to mend; exit code 1 for an error
    bench    times a sync against a raw broadcast of as many bytes, by model shape
    status   versions and states of the syncs that run in this cluster

Each of them prints tables, or plain data with ``--json``; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinkle_ray.errors import BackendUnavailable, ConfigError, TwinkleRayError

if TYPE_CHECKING:
    from twinkle_ray.doctor import Facts, Finding

MODELS = {"0.6b": "0.6b", "7b": "7b", "30b": "30b-a3b"}
"""Names for the command line of the models in :mod:`twinkle_ray.shapes`."""

_NODE_S = 120.0
_PROBE_S = 5.0
_WIDTH = 200  # of tables that go into a file


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. What goes wrong on purpose is one sentence, not a traceback."""
    parser = argparse.ArgumentParser(prog="python -m twinkle_ray", description="twinkle_ray's tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands)
    _add_bench(commands)
    if importlib.util.find_spec("twinkle_ray.cli_status") is not None:
        importlib.import_module("twinkle_ray.cli_status").add_parser(commands)
    args = parser.parse_args(argv)
    handlers: dict[str, Callable[[argparse.Namespace], int]] = {"doctor": doctor, "bench": bench, "status": status}
    try:
        return handlers[args.command](args)
    except (TwinkleRayError, ConnectionError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# --- doctor ----------------------------------------------------------------------------------------------------


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is wrong with this machine, and the mend",
        description="Look at versions, libraries, devices and limits. Exit code 1 if a sync cannot work.",
    )
    parser.add_argument("--cluster", action="store_true", help="look at each node of the running Ray")
    parser.add_argument("--address", default="auto", help="of that Ray (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")


def doctor(args: argparse.Namespace) -> int:
    """Print findings; 1 if one of them is an error."""
    from twinkle_ray.doctor import Level, compare, diagnose, gather

    silent: list[Finding] = []
    with _quiet():
        if args.cluster:
            nodes, silent = _gather_everywhere(args.address)
        else:
            nodes = [gather()]
    found = {facts.node: diagnose(facts) for facts in nodes}
    between = [*silent, *compare(nodes)]
    everything = [*between, *(finding for findings in found.values() for finding in findings)]
    code = int(any(finding.level is Level.ERROR for finding in everything))
    if args.json:
        one = {facts.node: {"findings": _plain(found[facts.node]), "facts": facts.as_json()} for facts in nodes}
        print(json.dumps({"nodes": one, "cluster": _plain(between), "exit_code": code}, indent=2))
        return code
    for node, findings in [*found.items(), *([("between nodes", between)] if between else [])]:
        _print_findings(node, findings)
    counts = {level: sum(finding.level is level for finding in everything) for level in Level}
    print(f"{counts[Level.ERROR]} error(s), {counts[Level.WARN]} warning(s), {counts[Level.OK]} fine")
    return code


def _gather_everywhere(address: str) -> tuple[list[Facts], list[Finding]]:
    """Facts of each living node, each from a fresh process there; and a finding for each node that gave none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from twinkle_ray.doctor import Finding, Level

    _connect(address)
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        # One call for each process: importing vLLM leaves its marks on it.
        task = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(_gather_here)
        refs = {}
        for node in alive:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            # Several nodes may have one name: raylets of one machine, containers.
            name = f"{node['NodeManagerHostname'] or node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            refs[name] = task.options(scheduling_strategy=here, name="twinkle.doctor").remote()
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=_NODE_S)
        nodes, silent = [], []
        for name, ref in refs.items():
            try:
                nodes.append(replace(ray.get(ref, timeout=0.1), node=name))
            except Exception as error:
                said = " ".join(str(error).split())[:300] or type(error).__name__
                silent.append(
                    Finding(
                        level=Level.ERROR,
                        check="node",
                        text=f"{name} could not be looked at within {_NODE_S:.0f} s: {said}",
                        mend="install twinkle_ray there too; see its log in Ray's dashboard",
                    )
                )
        return nodes, silent
    finally:
        ray.shutdown()


def _gather_here() -> Facts:
    from twinkle_ray.doctor import gather

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # as Ray sets it for a task that asks for no GPU
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return gather()


def _plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [{"level": f.level.value, "check": f.check, "text": f.text, "mend": f.mend} for f in findings]


def _print_findings(node: str, findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "error": "bold red"}
    table = Table("", "check", "found", title=node, title_justify="left", box=None, padding=(0, 1))
    for finding in findings:
        level = finding.level.value
        text = Text(finding.text)
        if finding.mend:
            text.append(f"\n-> {finding.mend}", style="italic")
        table.add_row(Text(level, style=colours[level]), Text(finding.check), text)
    _console().print(table)


def _console() -> Any:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


# --- bench -----------------------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="a sync against the limit of its wire, by model shape",
        description="Time manager.sync_weights() against one raw broadcast of as many bytes through the same group. "
        "In the running Ray if there is one (on its nodes twinkle_ray must be installed), else in a local one.",
    )
    add_measuring(parser, models=list(MODELS), default_models=["0.6b"], default_rollouts=["module"])
    parser.add_argument("--address", help="of a running Ray, auto, or local (default: auto if one runs, else local)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def add_measuring(
    parser: argparse.ArgumentParser, *, models: list[str], default_models: list[str], default_rollouts: list[str]
) -> None:
    """The options that :func:`twinkle_ray.bench.measure` reads."""
    kinds = ["module", "engine", "child"]
    parser.add_argument("--models", "--model", nargs="+", default=default_models, choices=models, dest="models")
    parser.add_argument("--rollouts", "--rollout", nargs="+", default=default_rollouts, choices=kinds, dest="rollouts")
    # Not choices: the backends know the kinds of devices, and import torch, for which `status` need not wait.
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu: one and --replicas (default: %(default)s)")
    parser.add_argument("--scale", type=int, default=7, help="divides widths; 1: full size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="measured syncs, after two that are not")
    parser.add_argument("--share", type=float, default=0.5, help="of a GPU's memory that an engine may take")
    parser.add_argument("--rank", type=int, default=0, help="send a LoRA adapter of this rank alone")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1], help="rollouts, each on a device of its own")
    parser.add_argument("--mode", default="auto", help="weight_sync_mode, such as nccl (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="compare SHA-256 sums in the end (7B: a minute)")


def bench(args: argparse.Namespace) -> int:
    """Measure and print."""
    import ray
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from twinkle_ray import bench as measuring

    if args.scale < 1 or args.rounds < 1 or min(args.replicas) < 1 or args.rank < 0:
        raise ConfigError("--scale, --rounds and --replicas must be at least 1, and --rank at least 0")
    with _quiet(), _a_ray(args.address, args.device, 1 + max(args.replicas)) as where:
        rows: list[dict[str, Any]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for model, kind, replicas in itertools.product(args.models, args.rollouts, args.replicas):
                row = f"{model} into {replicas if replicas > 1 else ''} {kind}".replace("  ", " ")
                task = progress.add_task(row, total=measuring.steps(args.rounds))

                def step(what: str, task: Any = task, row: str = row) -> None:
                    progress.update(task, description=f"{row}: {what}", advance=1)

                try:
                    options = measuring.Options.of(args, replicas)
                    rows.append(measuring.measure(MODELS[model], kind, options, step=step))
                except ray.exceptions.RayError as error:
                    last = str(error).strip().splitlines()[-1].strip()
                    raise BackendUnavailable(
                        f"the actors of {row} could not run ({type(error).__name__}: {last}); "
                        "twinkle_ray must be installed on every node, which `doctor --cluster` shows"
                    ) from error
                progress.remove_task(task)
        machine = rows[-1]["machine"]
        versions = {"ray": ray.__version__}
    if args.json:
        print(json.dumps({"ray": where, "versions": versions, "scale": args.scale, "rows": rows}, indent=2))
    else:
        _print_rows(f"{machine}; Ray: {where}; scale 1/{args.scale}; median of {args.rounds}", rows)
    return 0


def _print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    heads = ["model", "rollout", "replicas", "mode", "tensors", "MB", "raw ms", "sync ms", "sync/raw", "GB/s", "direct"]
    heads += ["first s", "path"]
    table = Table(*heads, title=title, title_justify="left", box=None, padding=(0, 1))
    for row in rows:
        table.add_row(*(str(row[head]) for head in heads))
    _console().print(table)


# --- status ----------------------------------------------------------------------------------------------------


def status(args: argparse.Namespace) -> int:
    """See :mod:`twinkle_ray.cli_status`."""
    return int(importlib.import_module("twinkle_ray.cli_status").status(args) or 0)


# --- Ray -------------------------------------------------------------------------------------------------------


def _connect(address: str) -> None:
    import ray

    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=_PROBE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise ConfigError(f"no Ray answers at {address!r}; start one with `ray start --head`, or say --address") from (
            error
        )


@contextlib.contextmanager
def _a_ray(address: str | None, device: str, devices: int) -> Iterator[str]:
    """A connection to the running Ray, or a local one while the block lasts; yields which.

    Raises:
        ConfigError: there is no Ray at ``address``, or too few devices in it.
    """
    import tempfile

    import ray

    from twinkle_ray.backends import DEVICE_TYPES, ray_resources

    if device not in DEVICE_TYPES:
        raise ConfigError(f"--device is {device!r}; it must be one of {', '.join(DEVICE_TYPES)}")
    wanted = ray_resources(device)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        where = "local"
        if address != "local":
            try:
                _connect(address or "auto")
                where = str(ray.get_runtime_context().gcs_address)
            except ConfigError:
                if address is not None:
                    raise
        if where == "local":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp"))
            stack.callback(ray.shutdown)  # before the folder goes
            ray.init(
                address="local",
                include_dashboard=False,
                _temp_dir=folder,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        for name, count in wanted.items():
            there = ray.cluster_resources().get(name, 0)  # type: ignore[no-untyped-call]
            if there < devices * count:
                raise BackendUnavailable(
                    f"bench on {device} needs {devices * count:g} {name} in the cluster, for one trainer and "
                    f"{devices - 1} rollout(s), and Ray sees {there:.0f}; use --device cpu, or start Ray where they are"
                )
        yield where


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send to standard error what libraries print as they are imported, and Ray whenever a node has something to say,
    so that ``--json`` stays JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
