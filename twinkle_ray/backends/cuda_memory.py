"""Memory of NVIDIA GPUs that another process of the same GPU, or of one that NVLink joins to it, can read.

A block is an allocation of the driver, opened by CUDA IPC. In the tests doubles stand for the driver and for streams;
``tests/gpu/one_gpu.py`` runs this within a GPU and ``tests/gpu/direct_vllm.py`` over NVLink, as both did on H200s.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from twinkle_ray.backends.memory import Export
from twinkle_ray.errors import BackendUnavailable, SyncError

logger = logging.getLogger(__name__)

LARGE = 1 << 20
"""Bytes from which a tensor is copied by a call of its own, which the driver does at the device's own rate; smaller
ones go together through torch's batched kernel. So with a driver that has no call for many copies."""

_AT_ONCE = 256
"""Copies in one call of the driver's. One of 339 was measured; of 50,000 others report that it crashes."""

_DRAIN_S = 1.0
_POLL_S = 50e-6

_STREAMS = 2
"""Of copies, taken in turn, so that one chunk begins while the last tensor of the one before it ends. The 339 tensors
of a 7B within an H200, 12 in each of the driver's calls: 8.3 ms on one, 7.6 on two, 7.5 on four, where one copy of them
all takes 7.1; to another one over NVLink 38.6 ms on any number, and 39.3 to 39.8 by a call for each tensor."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Where(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _How(ctypes.Structure):
    """``CUmemcpyAttributes``; places that are left at zero the driver looks up by itself."""

    _fields_ = (("order", ctypes.c_int), ("source", _Where), ("target", _Where), ("flags", ctypes.c_uint))


class CudaDriver:
    """The few calls of CUDA's driver that are needed, by ctypes, in the context that is current where it is made
    (torch's). What opens or frees may be called in any thread; the rest where that context is current.

    Raises:
        BackendUnavailable: there is no driver.
    """

    _BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
    _LEGACY_IPC = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    _LAZY_PEER = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    _IN_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BackendUnavailable(
                f"CUDA IPC needs NVIDIA's driver, but libcuda.so.1 does not load: {error}"
            ) from None
        self._attribute = self._lib.cuPointerGetAttribute
        self._attribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
        self._found = ctypes.c_uint64()
        self._into_found = ctypes.byref(self._found)  # made once, since thousands of blocks are asked about
        self._context = ctypes.c_void_p()
        self._do("cuCtxGetCurrent", ctypes.byref(self._context))

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[None]:
        self._do("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def address_range(self, address: int) -> tuple[int, int]:
        """Base and size of the allocation in which an address lies."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._do("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def buffer_id(self, address: int) -> int | None:
        """A number that no other allocation of this process ever has; ``None``: nothing is allocated there."""
        return None if self._attribute(self._into_found, self._BUFFER_ID, address) else self._found.value

    def exportable(self, address: int) -> bool:
        """Whether it was allocated in a way that IPC handles can be made of: not by expandable segments."""
        found = ctypes.c_int()
        code = self._attribute(ctypes.byref(found), self._LEGACY_IPC, address)
        return not code and bool(found.value)

    def handle(self, base: int) -> bytes:
        made = _Handle()
        with self._in_context():
            self._do("cuIpcGetMemHandle", ctypes.byref(made), ctypes.c_uint64(base))
        return bytes(bytearray(made))

    def open(self, handle: bytes) -> int:
        """Address here of a block of another process."""
        address = ctypes.c_uint64()
        wanted = _Handle.from_buffer_copy(handle)
        with self._in_context():
            self._do("cuIpcOpenMemHandle_v2", ctypes.byref(address), wanted, ctypes.c_uint(self._LAZY_PEER))
        return address.value

    def close(self, address: int) -> None:
        with self._in_context():
            self._do("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        with self._in_context():
            self._do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        with self._in_context():
            self._do("cuMemFree_v2", ctypes.c_uint64(address))

    def copy_many(self, into: Sequence[int], of: Sequence[int], sizes: Sequence[int], stream: int) -> bool:
        """Launch copies between addresses, in any order among themselves but in the stream's order as a whole;
        ``False``: this driver has no call for that (before CUDA 12.8), and nothing was done."""
        if not (hasattr(self._lib, "cuMemcpyBatchAsync_v2") or hasattr(self._lib, "cuMemcpyBatchAsync")):
            return False
        for first in range(0, len(sizes), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            self._copy_many(into[part], of[part], sizes[part], stream)
        return True

    def _copy_many(self, into: Sequence[int], of: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        count = len(sizes)
        addresses, lengths = ctypes.c_uint64 * count, ctypes.c_size_t * count
        how, first = _How(order=self._IN_ORDER), ctypes.c_size_t(0)
        args: list[Any] = [addresses(*into), addresses(*of), lengths(*sizes), ctypes.c_size_t(count)]
        args += [ctypes.byref(how), ctypes.byref(first), ctypes.c_size_t(1)]
        if hasattr(self._lib, "cuMemcpyBatchAsync_v2"):  # CUDA 13
            self._do("cuMemcpyBatchAsync_v2", *args, ctypes.c_void_p(stream))
        else:
            self._do("cuMemcpyBatchAsync", *args, ctypes.byref(ctypes.c_size_t()), ctypes.c_void_p(stream))

    def _do(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise SyncError(f"{name} failed with {(text.value or b'').decode() or code}", phase="transfer")


class CudaMemory:
    """See :class:`Memory`.

    Args:
        device: of torch; it must be the current one of the calling thread in every call.
        driver: of CUDA.
        runtime: torch's side of it.
    """

    batch_nbytes = 1 << 62  # a launch takes no time
    at_once = 4  # each call of the driver takes 45 us, and a chunk within a device is copied in 200

    def __init__(self, device: torch.device, driver: Any = None, runtime: Any = None) -> None:
        self.device = device
        self._driver = driver if driver is not None else CudaDriver()
        self._runtime = runtime if runtime is not None else _Runtime(device, self._driver)
        self._blocks: dict[str, tuple[int, int, int | None]] = {}  # base, size and number, by name
        self._last = (0, 0, "")
        self._said = False

    def locate(self, view: torch.Tensor) -> tuple[str, int] | None:
        address = view.data_ptr()
        base, stop, name = self._last
        if not (base <= address < stop and self.alive(name)):
            if not self._driver.exportable(address):
                self._say()
                return None
            base, size = self._driver.address_range(address)
            number = self._driver.buffer_id(base)
            name = f"{base:x}:{number}"
            self._blocks[name] = base, size, number
            self._last = base, base + size, name
        return name, address - base

    def _say(self) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "this trainer's memory cannot be shared by CUDA IPC handles (torch's expandable segments?) and is "
                "copied twice at each sync, through two buckets; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False "
                "avoids that"
            )

    def alive(self, name: str) -> bool:
        block = self._blocks.get(name)
        if block is not None and block[2] is not None and self._driver.buffer_id(block[0]) == block[2]:
            return True
        self._blocks.pop(name, None)
        return False

    def address(self, name: str) -> object:
        return name.partition(":")[0]

    def export(self, name: str) -> Export:
        base, size, _ = self._blocks[name]
        return Export(size, self._driver.handle(base).hex())

    def slot(self, nbytes: int) -> torch.Tensor:
        address = self._driver.allocate(nbytes)
        return self._runtime.tensor(address, nbytes, lambda: self._driver.free(address))

    def host(self, tensors: Iterable[torch.Tensor]) -> int:
        return 0

    def open(self, export: Export) -> torch.Tensor:
        try:
            address = self._driver.open(bytes.fromhex(export.handle))
        except SyncError as error:
            raise BackendUnavailable(
                f"this process cannot open the trainer's GPU memory ({error}), as in a container that shares no PID or "
                "IPC namespace with the trainer's; use weight_sync_mode='nccl', or 'gloo' on one GPU"
            ) from error
        return self._runtime.tensor(address, export.nbytes, None)

    def close(self, blocks: Sequence[torch.Tensor]) -> None:
        if not blocks:
            return
        try:
            why = "" if self._runtime.drain(_DRAIN_S) else "copies out of it do not end"
        except Exception as error:  # the device itself failed
            why = str(error)
        if why:
            logger.warning("the trainer's GPU memory stays open here: %s", why)
            return
        for block in blocks:
            try:
                self._driver.close(block.data_ptr())
            except SyncError as error:
                logger.warning("a block of the trainer's GPU memory cannot be closed: %s", error)

    def copy(self, into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        self._runtime.copy(into, of)

    def mark(self) -> Any:
        return self._runtime.mark()

    def passed(self, mark: Any) -> bool:
        return bool(self._runtime.passed(mark))

    def join(self) -> None:
        self._runtime.join()


class _Runtime:
    """torch's side: streams of our own, events, tensors over foreign addresses."""

    def __init__(self, device: torch.device, driver: Any) -> None:
        self._device = device
        self._driver = driver
        self._cuda: Any = torch.cuda
        self._streams = [self._cuda.Stream(device) for _ in range(_STREAMS)]
        self._turn = 0
        self._unmarked: list[Any] = []  # streams with copies of which no mark knows

    def tensor(self, address: int, nbytes: int, free: Any) -> torch.Tensor:
        made = torch.as_tensor(_Foreign(address, nbytes, free), device=self._device)
        if made.data_ptr() != address:  # as an older torch does with memory of another GPU that it sees
            raise BackendUnavailable(
                f"torch {torch.__version__} copies another GPU's memory instead of reading it; use "
                "weight_sync_mode='nccl'"
            )
        return made

    def copy(self, into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        stream = self._streams[self._turn]
        self._turn = (self._turn + 1) % len(self._streams)
        self._unmarked.append(stream)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        places = [[tensor.data_ptr() for tensor in tensors] for tensors in (into, of)]
        if self._driver.copy_many(*places, [tensor.nbytes for tensor in into], stream.cuda_stream):
            return
        with torch.cuda.stream(stream):
            small: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
            for target, source in zip(into, of, strict=True):
                if target.nbytes >= LARGE:
                    target.copy_(source, non_blocking=True)
                else:
                    small[0].append(target)
                    small[1].append(source)
            if small[0]:
                torch._foreach_copy_(small[0], small[1])

    def mark(self) -> Any:
        streams = self._unmarked or [torch.cuda.current_stream(self._device)]
        self._unmarked = []
        events = [self._cuda.Event() for _ in streams]
        for event, stream in zip(events, streams, strict=True):
            event.record(stream)
        return events

    def passed(self, mark: Any) -> bool:
        return all(event.query() for event in mark)

    def join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def drain(self, seconds: float) -> bool:
        """Wait for all copies, and say whether they have ended."""
        until = time.monotonic() + seconds
        self._unmarked = list(self._streams)
        mark = self.mark()
        while not self.passed(mark):
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True


class _Foreign:
    """Memory of which torch knows nothing; ``free`` is called when the last tensor over it is gone."""

    def __init__(self, address: int, nbytes: int, free: Any) -> None:
        self._free = free
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 2,
        }

    def __del__(self) -> None:
        if self._free is not None:
            with contextlib.suppress(Exception):
                self._free()


def cuda_exportable(device: torch.device, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether IPC handles can be made of the memory of these tensors, and of what torch allocates now. ``False`` where
    that cannot be told."""
    try:
        with torch.cuda.device(device):
            torch.cuda.mem_get_info()  # so that the device's context is current in this thread
            driver = CudaDriver()
            new = torch.empty(1, device=device)
            held = [t for t in (new, *tensors) if t.device == new.device and t.nbytes]
            return all(driver.exportable(tensor.data_ptr()) for tensor in held)
    except Exception as error:
        logger.debug("whether this trainer's memory can be shared cannot be told: %s", error)
        return False
