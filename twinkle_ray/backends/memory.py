"""Memory that another process of the same device, or of a linked one, can read: which there is, how it is named, opened
and copied from.

A :class:`Memory` is one kind of device's way. At the sender it says in which *block* a tensor lies: a piece of memory
that can be opened elsewhere as a whole, such as a shared storage or an allocation of the device's driver. A block's
name is never another one's, also if the same address comes again, so what was opened once stays right for as long as
the name is alive. At the receiver it opens blocks and copies out of them.

On a CPU a block is a shared storage. Those of the sender's own parameters are moved into shared memory once, in place
(:meth:`SharedMemory.host`): the tensors stay the same objects, and every view of a storage goes with it. All shared
memory is nameless (a descriptor is handed over), so a process that is killed leaves nothing behind in ``/dev/shm``.

On an NVIDIA GPU a block is an allocation of the driver: :mod:`twinkle_ray.backends.cuda_memory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from twinkle_ray.errors import BackendUnavailable, SyncError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Export:
    """What another process needs to open a block.

    Attributes:
        nbytes: of the block.
        handle: plain text, ``""`` if the descriptor is all.
        fd: a descriptor to hand over, -1 for none. The memory keeps it.
    """

    nbytes: int
    handle: str = ""
    fd: int = -1


class Memory(Protocol):
    """One kind of device's way to share memory. All calls come from one thread."""

    device: torch.device
    batch_nbytes: int
    """Of one copy, behind which a receiver looks whether it is still wanted."""

    at_once: int
    """Chunks that a receiver launches together at most."""

    # at the sender

    def locate(self, view: torch.Tensor) -> tuple[str, int] | None:
        """Name of the block in which a contiguous tensor of at least one byte lies and its offset there, in bytes;
        ``None``: in none that can be shared."""
        ...

    def alive(self, name: str) -> bool:
        """Whether a block that was located is still there and still the same one."""
        ...

    def address(self, name: str) -> object:
        """What no two blocks have that are there at once, but one may have after another."""
        ...

    def export(self, name: str) -> Export:
        """For a block that was just located."""
        ...

    def slot(self, nbytes: int) -> torch.Tensor:
        """New memory that can be shared, 1-D of uint8; it lives as long as the tensor."""
        ...

    def host(self, tensors: Iterable[torch.Tensor]) -> int:
        """Make these tensors' memory such that it can be shared, in place, where that is possible; bytes moved."""
        ...

    # at the receiver

    def open(self, export: Export) -> torch.Tensor:
        """All of a block, 1-D of uint8, not to be written to. Takes over ``export.fd``."""
        ...

    def close(self, blocks: Sequence[torch.Tensor]) -> None:
        """Give up what was opened; no view of it may be used any more. Bounded, and never raises: what cannot be closed
        stays open."""
        ...

    # at both

    def copy(self, into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        """Copy bytes, behind all that the calling thread has put on the device's current stream, but in any order among
        all that is copied; it may only be launched."""
        ...

    def mark(self) -> Any:
        """Stands for all that was copied since the last mark, and for what the calling thread had put on the device's
        current stream before that, or, if nothing was copied, before now."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether all that a mark stands for has ended."""
        ...

    def join(self) -> None:
        """Let what the calling thread puts on the device next wait for all copies."""
        ...


_SHM = "/dev/shm"
_SPARE = 16 << 20
_LOCK_S = 5.0
SMALL = 64 << 10
"""Bytes of a storage under which it may take a place only as long as three quarters of the descriptors are free: a
model may have tens of thousands of them, and each shared one holds a descriptor of its process."""


_FORGET_AT = 64
"""Storages that are remembered before it is looked at which of them are gone."""


class SharedMemory:
    """See :class:`Memory`."""

    batch_nbytes = 64 << 20
    at_once = 1

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._known: dict[str, tuple[_Weak, Export]] = {}
        self._names: dict[int, str] = {}  # by address
        self._refused: dict[int, _Weak] = {}  # that cannot be moved, by address
        self._forget_at = _FORGET_AT
        self._said = False

    def locate(self, view: torch.Tensor) -> tuple[str, int] | None:
        storage = view.untyped_storage()
        address = storage.data_ptr()
        name = self._names.get(address)
        if name is None or not self.alive(name):
            name = self._learn(storage, address)
        return None if name is None else (name, view.data_ptr() - address)

    def _learn(self, storage: torch.UntypedStorage, address: int) -> str | None:
        if not storage.is_shared():
            return None
        try:
            fd, nbytes = storage._share_fd_cpu_()  # of what is shared already it only tells
            found = os.fstat(fd)
        except (OSError, RuntimeError):  # a file that was mapped, or memory shared by name: no descriptor is kept
            return None
        if found.st_size < nbytes:
            return None
        name = f"{found.st_dev}:{found.st_ino}"
        self._forget_dead()
        self._known[name] = _Weak(storage), Export(nbytes, fd=fd)
        self._names[address] = name
        return name

    def _forget_dead(self) -> None:
        """Not each time, since there may be tens of thousands."""
        if len(self._known) + len(self._refused) < self._forget_at:
            return
        for name in [name for name, (weak, _) in self._known.items() if weak.dead]:
            del self._known[name]
        self._names = {address: name for address, name in self._names.items() if name in self._known}
        self._refused = {address: weak for address, weak in self._refused.items() if not weak.dead}
        self._forget_at = _FORGET_AT + 2 * (len(self._known) + len(self._refused))

    def alive(self, name: str) -> bool:
        known = self._known.get(name)
        return known is not None and not known[0].dead

    def address(self, name: str) -> object:
        return name

    def export(self, name: str) -> Export:
        return self._known[name][1]

    def slot(self, nbytes: int) -> torch.Tensor:
        fd = os.memfd_create("twinkle_ray", os.MFD_CLOEXEC)  # not in /dev/shm, so not bounded by its size
        try:
            os.truncate(fd, nbytes)
            shared: Any = torch.UntypedStorage
            storage = shared._new_shared_fd_cpu(fd, nbytes)  # which has a duplicate
        finally:
            os.close(fd)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def host(self, tensors: Iterable[torch.Tensor]) -> int:
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not storage.nbytes() or ((name := self._names.get(address)) is not None and self.alive(name)):
                continue
            refused = self._refused.get(address)
            if (refused is None or refused.dead) and self._learn(storage, address) is None:
                storages[address] = storage
        if not storages:
            return 0
        self._forget_dead()
        moved = 0
        why: dict[str, int] = {}
        with _alone_in_shm():
            held = len(os.listdir("/proc/self/fd"))
            loaded = [] if all(storage.resizable() for storage in storages.values()) else _loaded_files()
            for address, storage in sorted(storages.items(), key=lambda one: -one[1].nbytes()):
                problem = _unmovable(storage, held, loaded) or _move(storage)
                if problem is None:
                    held += 1
                    moved += storage.nbytes()
                    continue
                why[problem] = why.get(problem, 0) + storage.nbytes()
                self._refused[address] = _Weak(storage)
        if why and not self._said:
            self._said = True
            logger.warning(
                "%s cannot be moved into shared memory and will be copied twice at each sync: %s",
                f"{sum(why.values()) / 2**20:.1f} MiB of the trainer's weights",
                "; ".join(f"{nbytes / 2**20:.1f} MiB {problem}" for problem, nbytes in why.items()),
            )
        return moved

    def open(self, export: Export) -> torch.Tensor:
        try:
            nbytes = export.nbytes
            if os.fstat(export.fd).st_size < nbytes:
                raise SyncError("a piece of shared memory is smaller than its sender says", phase="transfer")
            # Not by torch's own function, which keeps a descriptor as long as the memory is mapped.
            address = self._libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, export.fd, 0)
        finally:
            os.close(export.fd)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise SyncError(f"shared memory of {nbytes} bytes cannot be mapped: {os.strerror(code)}", phase="transfer")
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def close(self, blocks: Sequence[torch.Tensor]) -> None:
        for block in blocks:
            self._libc.munmap(block.data_ptr(), block.nbytes)

    def copy(self, into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        for target, source in zip(into, of, strict=True):
            target.copy_(source)

    def mark(self) -> Any:
        return None

    def passed(self, mark: Any) -> bool:
        return True

    def join(self) -> None:
        pass


class _Weak:
    """A weak reference to a storage, not to the Python object that stands for it now."""

    __slots__ = ("_ref",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        from torch.multiprocessing import reductions

        weak_ref: Any = reductions.StorageWeakRef
        self._ref = weak_ref(storage)

    @property
    def dead(self) -> bool:
        return bool(self._ref.expired())


def _loaded_files() -> list[tuple[int, int]]:
    """Where this process has mapped checkpoints for itself alone, as safetensors does: each tensor that was loaded has
    a part of such a mapping for its storage, and nobody else sees what is written there."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            span, kind, *rest = line.split(maxsplit=5)
            if kind.endswith("p") and rest[-1].strip().removesuffix(" (deleted)").endswith(".safetensors"):
                start, _, stop = span.partition("-")
                found.append((int(start, 16), int(stop, 16)))
    return found


def _unmovable(storage: torch.UntypedStorage, held: int, loaded: Sequence[tuple[int, int]]) -> str | None:
    """Why a storage cannot be moved into shared memory, in place; ``None``: it can.

    Args:
        held: descriptors that this process has open.
        loaded: see :func:`_loaded_files`.
    """
    nbytes = storage.nbytes()
    if not storage.resizable() and not any(start <= storage.data_ptr() < stop for start, stop in loaded):
        # Of numpy, for one, whose array would not see any more what is written to the tensor.
        return "belong to somebody else (a mapped file, numpy)"
    if torch.cuda.is_available() and storage.is_pinned():
        return "are pinned"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if held >= (limit // 4 if nbytes < SMALL else limit // 2):
        return f"would take too many of this process's {limit} descriptors"
    if not os.path.isdir(_SHM):
        return f"find no {_SHM} on this machine"
    found = os.statvfs(_SHM)
    if found.f_bavail * found.f_frsize < nbytes + _SPARE:
        return f"find no room in {_SHM}; give the container a larger one, such as --shm-size"
    return None


def _move(storage: torch.UntypedStorage) -> str | None:
    try:
        storage._share_fd_cpu_()
    except (OSError, RuntimeError) as error:
        return f"are refused by torch ({str(error).splitlines()[0][:200]})"
    return None


@contextlib.contextmanager
def _alone_in_shm() -> Iterator[None]:
    """Between the look at how much is free and the last page taken, no other trainer of this machine takes any: memory
    that is promised and not there kills a process."""
    try:
        fd = os.open(_SHM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # then nothing can be moved
        yield
        return
    try:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:  # stuck, or slow: rather without
                    break
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def memory_of(device: torch.device) -> Memory:
    """The way of a device.

    Raises:
        BackendUnavailable: there is none.
    """
    if device.type == "cpu":
        return SharedMemory()
    if device.type == "cuda":
        from twinkle_ray.backends.cuda_memory import CudaMemory

        with torch.cuda.device(device):
            torch.cuda.mem_get_info()  # so that the device's context is current in this thread
            return CudaMemory(device)
    raise BackendUnavailable(
        f"memory of {device.type} devices is not shared between processes here: NPU IPC exists in torch_npu, but was "
        "never run; use weight_sync_mode='auto' or 'gloo'"
    )
