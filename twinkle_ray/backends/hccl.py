"""Groups on Ascend NPUs: HCCL by ctypes on ``libhccl.so``, one communicator per process and group.

Not torch_npu's ProcessGroupHCCL: that keeps static state per process, which a second group and a trainer's own default
group would take from each other. Its communicators and ours do not know of one another.

What an NPU cannot do is give up. A collective that was launched stays on its stream until all ranks have come, or until
``HCCL_EXEC_TIMEOUT`` (half an hour unless it is set) ends it and leaves the stream broken; there is no abort. So

* HCCL never receives a sync into memory that is not this group's: :meth:`HcclGroup.broadcast_many` receives into pieces
  of its own, and copies one into the caller's tensors once it has come and the group is known to be sound. A late
  broadcast of a group that was given up cannot tear the weights that a later group has brought.
* The group's stream is its own, and a later group takes an idle one. A stuck collective stops nobody's kernels.
* A communicator that is busy is buried by a thread of its own, which holds on to all memory that HCCL may still write
  to until HCCL lets it go; :func:`burials` counts those that are under way.

Several tensors are packed into one piece, since HCCL has no launch of several broadcasts.

``Stream.npu_stream`` is read for each launch and never kept: reading it makes torch_npu hand all that it has queued to
the device, and a call made with an older pointer would overtake the copies that fill its buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from ray.util.collective import types as ray_types
from torch._C._distributed_c10d import Store

from twinkle_ray.backends.operands import as_bytes
from twinkle_ray.backends.streams import Kind, StreamGroup, published
from twinkle_ray.errors import ConfigError, SyncTimeout, TwinkleRayError
from twinkle_ray.types import Deadline, Rendezvous

logger = logging.getLogger(__name__)

PIECE = 128 << 20
"""Bytes of one broadcast at most. Chosen, not measured: no NPU was at hand."""
IN_FLIGHT = 2
"""Pieces that may be under way: one is packed or unpacked while the wire has the other."""

ROOT_INFO_BYTES = 4108
SUCCESS, AGAIN = 0, 20
UINT8 = 7
DTYPES = {
    torch.int8: 0,
    torch.int16: 1,
    torch.int32: 2,
    torch.float16: 3,
    torch.float32: 4,
    torch.int64: 5,
    torch.bfloat16: 11,
}
"""HcclDataType of what HCCL can reduce. Everything else only moves, as bytes."""
REDUCE_OPS = {
    ray_types.ReduceOp.SUM: 0,
    ray_types.ReduceOp.PRODUCT: 1,
    ray_types.ReduceOp.MAX: 2,
    ray_types.ReduceOp.MIN: 3,
}
"""HcclReduceOp, in which maximum and minimum stand the other way round than in Ray."""

HINTS = {
    1: "ranks that disagree, one NPU in two ranks, or data of a group that is gone",
    5: "this HCCL does not support that dtype or operation",
    6: "HCCL has no stream or channel left, mostly because communicators were never destroyed; restart the actor",
    9: "another rank did not come within HCCL_CONNECT_TIMEOUT or HCCL_EXEC_TIMEOUT",
    11: "HCCL could not listen on or reach a port; set HCCL_HOST_SOCKET_PORT_RANGE=auto and "
    "HCCL_NPU_SOCKET_PORT_RANGE=auto in the runtime_env of all actors",
    19: "the network of the NPUs failed; see HCCL_SOCKET_IFNAME and `hccn_tool`",
    20: "the communicator is busy with earlier work",
    21: "the network reports an error of another rank's NPU",
}
_OTHERS_FAULT = (9, 21)

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_LIBRARY = "HCCL_SO_PATH"
_ND_FORMATS = (2, 0, 1, 30)  # ND, NCHW, NHWC, NCDHW: storage is what shape and strides say
_POOL = 32
_DESTROY_S = 5.0
_ABANDONED_S = 0.2
_RETRY_MIN_S, _RETRY_MAX_S = 0.001, 0.5


class RootInfo(ctypes.Structure):
    """What rank 0 hands to the others."""

    _fields_ = (("internal", ctypes.c_ubyte * ROOT_INFO_BYTES),)


_INT, _U32, _U64, _POINTER = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "HcclGetErrorString": (_INT,),
    "HcclGetRootInfo": (ctypes.POINTER(RootInfo),),
    "HcclCommInitRootInfo": (_U32, ctypes.POINTER(RootInfo), _U32, ctypes.POINTER(_POINTER)),
    "HcclCommDestroy": (_POINTER,),
    "HcclBroadcast": (_POINTER, _U64, _INT, _U32, _POINTER, _POINTER),
    "HcclAllReduce": (_POINTER, _POINTER, _U64, _INT, _INT, _POINTER, _POINTER),
    "HcclReduce": (_POINTER, _POINTER, _U64, _INT, _INT, _U32, _POINTER, _POINTER),
    "HcclAllGather": (_POINTER, _POINTER, _U64, _INT, _POINTER, _POINTER),
    "HcclReduceScatter": (_POINTER, _POINTER, _U64, _INT, _INT, _POINTER, _POINTER),
    "HcclSend": (_POINTER, _U64, _INT, _U32, _POINTER, _POINTER),
    "HcclRecv": (_POINTER, _U64, _INT, _U32, _POINTER, _POINTER),
}
"""Argument types. Without them ctypes would pass a count as 32 bits, and 3 GiB would arrive as a negative number."""


class HcclError(RuntimeError):
    """A call that did not return ``HCCL_SUCCESS``."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} returned {code} ({text})" + (f": {HINTS[code]}" if code in HINTS else ""))
        self.code = code


class Library:
    """``libhccl.so``. A call raises :class:`HcclError` unless it succeeds; ctypes releases the GIL meanwhile."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = arguments
            function.restype = ctypes.c_char_p if name == "HcclGetErrorString" else _INT
            self._functions[name] = function

    def __call__(self, name: str, *arguments: Any) -> None:
        if (code := self.code(name, *arguments)) != SUCCESS:
            raise self.error(name, code)

    def code(self, name: str, *arguments: Any) -> int:
        return int(self._functions[name](*arguments))

    def error(self, name: str, code: int) -> HcclError:
        text = self._functions["HcclGetErrorString"](code) or b"unknown"
        return HcclError(name, code, text.decode(errors="replace"))


@functools.cache
def library() -> Library:
    """The library of this process, loaded once.

    Raises:
        ImportError, OSError: torch_npu or the library is missing or does not load.
        AttributeError: the library lacks a function.
    """
    importlib.import_module("torch_npu")  # which loads CANN, and without which there is no torch.npu
    return Library(os.environ.get(_LIBRARY) or "libhccl.so")


class HcclGroup(StreamGroup):
    """See :class:`~twinkle_ray.backends.streams.StreamGroup`."""

    name: ClassVar[str] = "TWINKLE_HCCL"
    device_type: ClassVar[str] = "npu"

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._flight: deque[_Piece] = deque()
        self._launches = 0
        self._copied: Any = None  # an event behind the last copy out of a piece
        self._burial: _Burial | None = None

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "the package torch_npu is missing; pip install 'twinkle_ray[npu]', where CANN and an NPU are"
        try:
            importlib.import_module("torch_npu")
        except Exception as error:
            return f"torch_npu does not import ({error}); it needs CANN, whose set_env.sh must be sourced"
        try:
            library()
        except OSError as error:
            return f"libhccl.so does not load ({error}); source the set_env.sh of CANN, or set {_LIBRARY} to its path"
        except AttributeError as error:
            return f"libhccl.so is of a CANN that is too old ({error}); CANN 8 has what is needed"
        return _missing_npus()

    @classmethod
    def identity(cls, device: torch.device) -> str:
        index = device.index if device.index is not None else torch.npu.current_device()
        return f"{socket.gethostname()}/npu/{physical_id(index)}"

    @classmethod
    def wait_for(cls, device: torch.device) -> None:
        """See the base class. While a collective that was given up is on the NPU this waits for the default and the
        current stream only: a wait for the whole device would last as long as that. So does it later, if the device
        refuses such a wait because of the stream that HCCL has broken when it ended that collective."""
        npu: Any = torch.npu  # type: ignore[attr-defined]
        with npu.device(device):
            if not burials():
                try:
                    npu.synchronize()
                    return
                except RuntimeError:
                    if not _ended_by_force.is_set():
                        raise
            npu.default_stream().synchronize()
            npu.current_stream().synchronize()

    def _build(self, store: Store, rendezvous: Rendezvous, deadline: Deadline) -> None:
        assert self.device is not None
        hccl = library()
        with self._here():
            self._stream = _idle_stream(self.device)
            self._refuse_shared_npus(store, deadline)
            root = RootInfo()
            comm = _POINTER()
            try:
                if self._rank == 0:
                    hccl("HcclGetRootInfo", ctypes.byref(root))
                    store.set("hccl/root", bytes(root).hex())
                else:
                    root = RootInfo.from_buffer_copy(bytes.fromhex(published(store, "hccl/root", deadline).decode()))
                with _creating(deadline):
                    hccl("HcclCommInitRootInfo", self._world_size, ctypes.byref(root), self._rank, ctypes.byref(comm))
            except HcclError as error:
                raise self._blame(error) from error
            self._adopt(comm, deadline)

    def _refuse_shared_npus(self, store: Store, deadline: Deadline) -> None:
        """Raise ConfigError, on rank 0, if two ranks are on one NPU."""
        assert self.device is not None
        store.set(f"hccl/npu/{self._rank}", self.identity(self.device))
        if self._rank:
            return
        seen: dict[bytes, int] = {}
        for rank in range(self._world_size):
            npu = published(store, f"hccl/npu/{rank}", deadline, by=rank)
            if (other := seen.setdefault(npu, rank)) != rank:
                raise ConfigError(
                    f"ranks {other} and {rank} are on one NPU ({npu.decode()}), which HCCL does not support; give each "
                    "actor an NPU of its own, or sync with weight_sync_mode='gloo'"
                )

    @contextmanager
    def _wire(self, comm: Any) -> Iterator[_HcclWire]:
        yield _HcclWire(library(), comm, self._stream.npu_stream)

    def broadcast_many(self, views: Sequence[torch.Tensor], src: int = 0) -> None:
        """See the base class. At the other ranks the tensors are filled as the pieces come, by this call and by the
        waits that follow it; this call itself waits while :data:`IN_FLIGHT` pieces are under way."""
        self._check_views(views)
        self._check()
        self._launches += 1
        flat = [
            view if view.dtype is torch.uint8 and view.dim() == 1 else as_bytes(view) for view in views if view.numel()
        ]
        for parts in pieces(flat, PIECE):
            while len(self._flight) >= IN_FLIGHT:
                self._land(Deadline.after(self.op_timeout_s))
            with self._here():
                if self._rank != src:
                    memory = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=self.device)
                else:
                    memory = parts[0] if len(parts) == 1 else torch.cat(parts)
            piece = _Piece(memory, () if self._rank == src else parts, self._launches)
            self._flight.append(piece)  # before the launch: from then on HCCL may use the memory
            self._launch(lambda wire, piece=piece: wire.broadcast([piece.memory], src))  # type: ignore[misc]
            piece.event = self._mark()

    def _check_views(self, views: Sequence[torch.Tensor]) -> None:
        super()._check_views(views)
        for index, view in enumerate(views):
            if view.device.index != self._index or view_format(view) not in _ND_FORMATS:
                raise ConfigError(
                    f"view {index} is on {view.device} in format {view_format(view)}; a plain tensor on "
                    f"npu:{self._index} is needed (vllm-ascend keeps weights plain with additional_config "
                    "weight_nz_mode=0)"
                )

    def synchronize(self, deadline: Deadline) -> None:
        self._check_failure()
        if self._stream is None or self._destroyed:
            self._check()
        while self._flight:
            self._land(deadline)
        self._await(self._mark(), deadline)
        self._await_copies(deadline)

    def settle(self, deadline: Deadline, leave: int) -> None:
        self._check_failure()
        while self._flight and self._flight[0].launch <= self._launches - leave:
            self._land(deadline)
        self._await_copies(deadline)

    def _land(self, deadline: Deadline) -> None:
        """Wait for the oldest piece and send it to where it belongs."""
        piece = self._flight[0]
        self._await(piece.event, deadline)
        if piece.targets:
            with self._here(), torch.inference_mode():  # the only mode that may write to every kind of tensor
                torch._foreach_copy_(
                    list(piece.targets), list(torch.split(piece.memory, [len(target) for target in piece.targets]))
                )
                self._copied = self._runtime.Event()
                self._copied.record()
        self._flight.popleft()

    def _await_copies(self, deadline: Deadline) -> None:
        """They are on the calling thread's stream, and whoever reads the tensors next may be on another one."""
        if self._copied is not None:
            self._poll(self._copied, deadline)
            self._copied = None

    def _check_stream(self) -> None:
        self._stream.query()  # a collective that was ended by force leaves its event passed and its stream broken

    def _stream_broke(self, error: Exception) -> TwinkleRayError:
        _ended_by_force.set()
        return self._broken(RuntimeError(f"the NPU ended a collective, as after HCCL_EXEC_TIMEOUT: {error}"))

    def _is_peers_fault(self, error: Exception) -> bool | None:
        return error.code in _OTHERS_FAULT if isinstance(error, HcclError) else None

    def _kind(self, dtype: torch.dtype, op: ray_types.ReduceOp) -> Kind:
        if dtype not in DTYPES:
            raise ConfigError(f"HCCL cannot reduce {dtype}")
        return DTYPES[dtype], REDUCE_OPS[op]

    def _busy(self) -> bool:
        return bool(self._flight or self._held)

    def _sever(self) -> None:
        """Threads that wait for this group poll, and see its failure by themselves; the device cannot be told."""
        with self._state:
            comm, self._comm = self._comm, None
        if comm is not None:
            self._burial = _Burial(self, comm)

    def _release(self) -> None:
        sound = not self._failed.is_set()
        self._sever()
        burial = self._burial
        if burial is not None and not burial.over.wait(_DESTROY_S if sound else _ABANDONED_S):
            logger.warning(
                "the communicator of group %s is busy; its memory is freed when HCCL ends its work, after "
                "HCCL_EXEC_TIMEOUT at the latest",
                self._group_name,
            )
        self._flight, self._held = deque(), []  # new ones: the burial has the old ones


@dataclass(slots=True)
class _Piece:
    """One broadcast that is under way.

    Attributes:
        memory: that HCCL reads or fills.
        targets: what is to be filled from it, in order.
        launch: the call of ``broadcast_many`` that it belongs to.
        event: behind it on the stream.
    """

    memory: torch.Tensor
    targets: Sequence[torch.Tensor]
    launch: int
    event: Any = None


def pieces(views: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Flat byte views, cut and packed into pieces of ``limit`` bytes, the last one smaller. All ranks cut alike."""
    piece: list[torch.Tensor] = []
    room = limit
    for view in views:
        at, size = 0, len(view)
        while at < size:
            taken = min(room, size - at)
            piece.append(view if taken == size else view[at : at + taken])
            at += taken
            room -= taken
            if not room:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece


class _HcclWire:
    def __init__(self, hccl: Library, comm: Any, stream: int) -> None:
        self._hccl, self._comm, self._stream = hccl, comm, stream

    def _put(self, name: str, *arguments: int) -> None:
        self._hccl(name, *arguments, self._comm, self._stream)

    def broadcast(self, views: Sequence[torch.Tensor], src: int) -> None:
        for view in views:
            if view.nbytes:
                self._put("HcclBroadcast", view.data_ptr(), view.nbytes, UINT8, src)

    def all_reduce(self, at: int, count: int, kind: Kind) -> None:
        self._put("HcclAllReduce", at, at, count, *kind)

    def reduce(self, at: int, count: int, kind: Kind, root: int) -> None:
        self._put("HcclReduce", at, at, count, *kind, root)

    def all_gather(self, at: int, into: int, nbytes: int) -> None:
        self._put("HcclAllGather", at, into, nbytes, UINT8)

    def reduce_scatter(self, at: int, into: int, count: int, kind: Kind) -> None:
        self._put("HcclReduceScatter", at, into, count, *kind)

    def send(self, at: int, nbytes: int, peer: int) -> None:
        self._put("HcclSend", at, nbytes, UINT8, peer)

    def receive(self, at: int, nbytes: int, peer: int) -> None:
        self._put("HcclRecv", at, nbytes, UINT8, peer)


_burials: set[_Burial] = set()
_ended_by_force = threading.Event()
"""HCCL has broken a stream of a group of this process, or will: a communicator was given up at work."""


def burials() -> int:
    """Communicators of this process that were given up and still have work on the NPU."""
    return len(_burials)


class _Burial:
    """The end of a communicator, in a thread of its own: HCCL refuses to destroy one that is busy."""

    def __init__(self, group: HcclGroup, comm: Any) -> None:
        self.over = threading.Event()
        self._name, self._device = group.group_name, group.device
        self._comm, self._launching = comm, group._launching
        self._memory = (group._flight, group._held, group._byte)
        _burials.add(self)
        threading.Thread(target=self._dig, name=f"twinkle-hccl-end-{group.rank}", daemon=True).start()

    def _dig(self) -> None:
        hccl = library()
        pause = _RETRY_MIN_S
        with torch.npu.device(self._device):  # type: ignore[attr-defined]
            while True:
                with self._launching:  # a launch in progress uses the communicator
                    code = hccl.code("HcclCommDestroy", self._comm)
                if code != AGAIN:
                    break
                _ended_by_force.set()
                time.sleep(pause)
                pause = min(2 * pause, _RETRY_MAX_S)
        if code == SUCCESS:
            _burials.discard(self)
            self._memory = (deque(), [], None)
        else:  # it stays among the burials with its memory, which HCCL may still use
            logger.warning("the communicator of group %s is lost: %s", self._name, hccl.error("HcclCommDestroy", code))
        self.over.set()


_creation = threading.Lock()


@contextmanager
def _creating(deadline: Deadline) -> Iterator[None]:
    """HCCL does not allow two communicators to be made on one device at a time.

    Raises:
        SyncTimeout: one is being made since before, and does not end.
    """
    if not _creation.acquire(timeout=max(deadline.remaining(), 0.0)):
        raise SyncTimeout(
            f"an earlier group of this process is still in HCCL's initialisation, so this one could not begin within "
            f"{deadline.seconds:.1f} s; HCCL_CONNECT_TIMEOUT ends that one",
            phase="connect",
        )
    try:
        yield
    finally:
        _creation.release()


def _idle_stream(device: torch.device) -> Any:
    """A stream from torch_npu's pool, which hands out the same ones in turn, on which nothing is stuck."""
    stream: Any = None
    for _ in range(_POOL):
        stream = torch.npu.Stream(device)  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # a broken one says so
            if stream.query():
                break
    return stream


def view_format(tensor: torch.Tensor) -> int:
    """aclFormat of a tensor's storage: private ones, such as FRACTAL_NZ, hold the elements in another order."""
    return int(importlib.import_module("torch_npu").get_npu_format(tensor))


def visible_ids() -> list[str] | None:
    """Physical ids that this process may use, in the order of torch's indices; ``None``: all of the node."""
    mask = os.environ.get(_VISIBLE)
    return None if mask is None else [part.strip() for part in mask.split(",") if part.strip()]


def physical_id(index: int) -> str:
    """Of the NPU that torch calls ``npu:<index>`` in this process."""
    ids = visible_ids()
    return ids[index] if ids is not None and index < len(ids) else str(index)


def logical_index(physical: int | str) -> int:
    """What torch calls an NPU of this node in this process, such as one of
    ``ray.get_runtime_context().get_accelerator_ids()["NPU"]``.

    Raises:
        ConfigError: this process may not use it.
    """
    ids = visible_ids()
    if ids is None:
        return int(physical)
    if str(physical) not in ids:
        raise ConfigError(f"NPU {physical} is not among those that this process may use: {_VISIBLE}={','.join(ids)}")
    return ids.index(str(physical))


def _missing_npus() -> str | None:
    count = int(torch.npu.device_count())  # type: ignore[attr-defined]
    if count == 0:
        return "torch_npu sees no NPU; give the actor resources={'NPU': 1}"
    ids = visible_ids()
    if ids is not None and count != len(ids):  # CANN drops an id that does not exist without a word
        return f"{_VISIBLE}={','.join(ids)} names {len(ids)} NPUs, but torch_npu sees {count}; an id does not exist"
    return None
