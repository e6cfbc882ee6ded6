"""What is shipped, what an import needs, and rules that hold for every source file."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The only code that may name a kind of device: the backends, and the driver's choice among them.
DEVICE_MODULES = {"twinkle_ray/routes.py"}
DEVICE_PACKAGES = ("twinkle_ray/backends/",)

# Of the discard service. A datagram socket is connected to it, and sends nothing, to learn the route to a host.
DISCARD_PORT = 9

# What a plain `pip install twinkle_ray` does not bring, or what is too heavy for an import.
OPTIONAL = ("accelerate", "cupy", "peft", "rich", "torch_npu", "transformers", "vllm")


def source_files() -> list[Path]:
    # Path.rglob does not follow links, so that mixins/ comes once.
    return sorted([*(ROOT / "twinkle_ray").rglob("*.py"), *(ROOT / "mixins").rglob("*.py")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def in_modules(paths: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            yield relative(path), node


def docstrings(path: Path) -> set[int]:
    """Lines on which the docstrings of this file start."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node) is not None:
                    found.add(node.body[0].lineno)
    return found


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel of this checkout, built in a copy so that no build/ folder is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("twinkle_ray", "mixins"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("twinkle_ray-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_source_file_once_under_its_import_name(wheel: zipfile.ZipFile) -> None:
    in_wheel = {name for name in wheel.namelist() if name.endswith(".py")}

    expected = {re.sub("^mixins/", "twinkle_ray/mixins/", relative(path)) for path in source_files()}

    assert in_wheel == expected
    assert {f"twinkle_ray/mixins/{name}.py" for name in ("__init__", "train", "rollout")} <= in_wheel


def test_wheel_holds_the_mixins_as_they_are_in_the_top_level_folder(wheel: zipfile.ZipFile) -> None:
    for path in (ROOT / "mixins").glob("*.py"):
        assert wheel.read(f"twinkle_ray/mixins/{path.name}") == path.read_bytes()


def test_wheel_is_typed_and_carries_the_licence_and_the_vllm_entry_point(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    (entry_points,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
    (licence,) = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]

    assert "twinkle_ray/py.typed" in names
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    lines = wheel.read(entry_points).decode().splitlines()
    assert lines[lines.index("[vllm.general_plugins]") + 1] == "twinkle_ray = twinkle_ray.vllm.plugin:register"


def test_version_in_the_package_is_that_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]

    ran = run_python("import twinkle_ray; print(twinkle_ray.__version__)", ROOT)

    assert f"Version: {ran.stdout.strip()}" in wheel.read(metadata).decode().splitlines(), ran.stderr


def test_entry_point_names_a_function_that_exists() -> None:
    code = (
        "from importlib.metadata import EntryPoint; "
        "print(EntryPoint('twinkle_ray', 'twinkle_ray.vllm.plugin:register', 'vllm.general_plugins').load().__name__)"
    )

    ran = run_python(code, ROOT)

    assert ran.stdout.strip() == "register", ran.stderr


def test_every_package_folder_is_listed_in_pyproject() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]

    folders = {path.parent for path in source_files()}
    names = {re.sub("^mixins", "twinkle_ray/mixins", relative(folder)).replace("/", ".") for folder in folders}

    assert sorted(names) == sorted(listed)


def test_the_mixins_link_is_a_link_and_git_stores_it_as_one() -> None:
    assert (ROOT / "twinkle_ray" / "mixins").readlink() == Path("../mixins")
    if (ROOT / ".git").exists():  # not in an unpacked archive
        command = ["git", "ls-files", "--stage", "--", "twinkle_ray/mixins"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
        (line,) = listed.splitlines()
        assert line.startswith("120000 ")


def test_importing_the_folder_under_its_short_name_says_how_to_import_it() -> None:
    ran = run_python("import mixins", ROOT)

    assert ran.returncode != 0
    assert "ImportError: import twinkle_ray.mixins, not mixins" in ran.stderr


@pytest.mark.parametrize(
    "module",
    [
        "twinkle_ray",
        "twinkle_ray.mixins",
        "twinkle_ray.checkpoint_engine",
        "twinkle_ray.manager",
        "twinkle_ray.backends",
        "twinkle_ray.vllm",
        "twinkle_ray.cli",
        "twinkle_ray.doctor",
        "twinkle_ray.bench",
    ],
)
def test_import_needs_no_optional_package(module: str) -> None:
    code = f"""
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError("blocked: " + name, name=name)

sys.meta_path.insert(0, Block())
import {module}
print("imported")
"""

    ran = run_python(code, ROOT)

    assert ran.stdout.strip() == "imported", ran.stderr


def test_manager_imports_neither_torch_nor_vllm() -> None:
    imported = set()
    for _, node in in_modules([ROOT / "twinkle_ray" / "manager.py"]):
        match node:
            case ast.Import(names=names):
                imported |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                imported.add(module.partition(".")[0])

    assert imported.isdisjoint({"torch", "vllm", "cupy", "torch_npu"})


def test_device_kinds_are_named_where_backends_are_made_or_chosen_only() -> None:
    kind = re.compile(r"(cuda|npu)(:\d+)?")
    files = [
        path
        for path in source_files()
        if relative(path) not in DEVICE_MODULES and not relative(path).startswith(DEVICE_PACKAGES)
    ]

    found = [
        f"{name}:{node.lineno} {node.value!r}"
        for name, node in in_modules(files)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and kind.fullmatch(node.value)
    ]

    assert found == []


def _port_numbers(node: ast.AST) -> Iterator[int]:
    """Integers that this node gives to something with ``port`` in its name."""
    pairs: list[tuple[str, ast.expr | None]] = []
    match node:
        case ast.keyword(arg=str(name), value=value):
            pairs = [(name, value)]
        case ast.Assign(targets=targets, value=value):
            pairs = [(ast.unparse(target), value) for target in targets]
        case ast.AnnAssign(target=target, value=value):
            pairs = [(ast.unparse(target), value)]
        case ast.arguments():
            positional = [*node.posonlyargs, *node.args]
            with_default = positional[len(positional) - len(node.defaults) :]
            pairs = [(arg.arg, value) for arg, value in zip(with_default, node.defaults, strict=True)]
            pairs += [(arg.arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        case ast.Dict(keys=keys, values=values):
            pairs = [(ast.unparse(key), value) for key, value in zip(keys, values, strict=True) if key is not None]
    for name, value in pairs:
        named_port = re.search(r"(^|[^a-z])ports?($|[^a-z])", name.lower().replace("_", " "))
        if named_port and isinstance(value, ast.Constant) and type(value.value) is int and value.value != 0:
            yield value.value


def test_no_port_number_is_written_down() -> None:
    """Whoever listens binds port 0 and passes on what it got."""
    found = []
    for name, node in in_modules(source_files()):
        found += [f"{name}: {number}" for number in _port_numbers(node)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            address = re.search(r"\w:\d{4,5}\b", node.value)
            if address and node.lineno not in docstrings(ROOT / name):
                found.append(f"{name}:{node.lineno} {address[0]!r}")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".bind", ".connect", "create_connection")):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Tuple) and len(target.elts) == 2:
                port = target.elts[1]
                if isinstance(port, ast.Constant) and port.value not in (0, DISCARD_PORT):
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")

    assert found == []


@pytest.mark.parametrize("function", ["get", "wait"])
def test_every_wait_on_ray_has_a_deadline(function: str) -> None:
    found = []
    for name, node in in_modules(source_files()):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ray"), attr=attr), keywords=keywords):
                bounded = any(keyword.arg == "timeout" for keyword in keywords)
                if attr == function and not bounded:
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
            case ast.ImportFrom(module="ray", names=names) if any(alias.name == function for alias in names):
                found.append(f"{name}:{node.lineno} {ast.unparse(node)}: call it as ray.{function}")

    assert found == []
