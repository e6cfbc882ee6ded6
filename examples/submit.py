"""Start a local Ray, run an example in it through ``ray job submit``, and end all that was started.

    python examples/submit.py [--example rlhf_grpo] [--out DIR] [options of the example]

On a cluster that runs already, ``ray job submit --working-dir . -- python examples/rlhf_grpo.py`` is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 5.0  # of each of two attempts


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, each another one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(token: Path) -> dict[str, str]:
    """Return the environment of head and client: Ray listens on loopback only, this Python's ``bin`` comes first."""
    ours = {
        "NO_PROXY": "127.0.0.1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # the head resolves the job's `python` on its own PATH
        "RAY_AUTH_MODE": "token",  # other users of this machine reach loopback, too
        "RAY_AUTH_TOKEN_PATH": str(token),  # and not the user's, which Ray would look for or make
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise Ray turns 127.0.0.1 into an address of the network
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    others = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN")  # of some other cluster
    return {name: value for name, value in os.environ.items() if name not in others} | ours


@contextlib.contextmanager
def local_ray() -> Iterator[tuple[str, dict[str, str]]]:
    """Run a Ray head on free ports of 127.0.0.1 while the block lasts.

    Yields:
        The address of its dashboard, and the environment that a client needs.
    """
    gcs, dashboard, client, metrics, agent, agent_grpc, runtime_env = free_ports(7)
    temp = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))  # short: the path of a Unix socket ends at 107 characters
    token = temp / "token"
    token.write_text(secrets.token_hex(32))  # nobody else reads it: mkdtemp's folder is ours alone
    environ = environment(token)
    command = [
        *(BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"),
        *(f"--metrics-export-port={metrics}", f"--dashboard-agent-listen-port={agent}"),
        *(f"--dashboard-agent-grpc-port={agent_grpc}", f"--runtime-env-agent-port={runtime_env}"),
        *(f"--num-cpus={max(2, os.cpu_count() or 1)}", f"--object-store-memory={256 << 20}", f"--temp-dir={temp}"),
    ]
    log = temp / "head.log"
    with log.open("wb") as sink:
        # A session of its own, so that Ctrl-C reaches us alone and we end the head in order.
        head = psutil.Popen(command, stdout=sink, stderr=sink, env=environ, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        request = urllib.request.Request(f"{address}/api/version")
        request.add_header("Authorization", f"Bearer {token.read_text()}")
        wait_for(request, head, log)
        yield address, environ
    finally:
        stop(head)
        shutil.rmtree(temp, ignore_errors=True)


def wait_for(request: urllib.request.Request, head: psutil.Popen, log: Path) -> None:
    """Return once the dashboard answers; raise if the head ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with contextlib.suppress(OSError):  # urllib's errors are OSErrors
            opener.open(request, timeout=2.0).close()
            return
        if head.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                "Ray's dashboard does not answer (job submission needs the packages of ray[default]); "
                f"the head's last words:\n{log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.2)


def stop(head: psutil.Popen) -> None:
    """End the head and every process that came from it, and no other."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of them behind
    try:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = head.children(recursive=True)
        # `ray start --block` only watches the others; asked to end, it would wait 30 s for a node that is gone by then.
        with contextlib.suppress(psutil.NoSuchProcess):
            head.kill()
        head.wait(STOP_TIMEOUT_S)
        for ask in (psutil.Process.terminate, psutil.Process.kill):
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ask(process)
            _, family = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGINT, previous)


def main() -> int:
    """Run the example in a Ray of its own and pass on its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    examples = ("rlhf_grpo", "rlhf_colocated")
    parser.add_argument("--example", choices=examples, default=examples[0], help="which one (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for what it leaves (default: out/ and its name)")
    args, passed_on = parser.parse_known_args()
    out = args.out or ROOT / "out" / args.example
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    entrypoint = ["python", f"examples/{args.example}.py", "--out", str(out.resolve()), *passed_on]
    try:
        with local_ray() as (address, environ):
            command = [str(BIN / "ray"), "job", "submit", "--address", address, "--working-dir", ".", "--", *entrypoint]
            print("+", *command[1:], flush=True)
            return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
