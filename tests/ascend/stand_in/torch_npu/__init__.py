"""Plays torch_npu on a CPU, for tests: true ``npu`` tensors over host memory, streams and events of ``cann.c``.

It works because DLPack says in one field of a capsule on which kind of device its memory is. A CPU tensor whose capsule
is relabelled comes back as an ``npu`` tensor with the same ``data_ptr()``, and the other way round. So each operation
on ``npu`` tensors is done by torch's CPU kernels on relabelled arguments.

Like the real one: names and signatures; tensors, modules, autograd and pickling on ``npu``; the current device and the
current stream are a thread's own; a pool of 32 streams per device; what is done to streams and events is queued on
the host until something needs the device to know of it, ``Stream.npu_stream`` for one.

Not like it, so that no test here says anything about it: kernels run at once on the calling thread, after it has waited
for the current stream, except a copy of one contiguous tensor into another, which runs on the stream; there is no
device memory to run out of and no caching allocator (memory is kept while any stream is busy); a private format is a
label without effect; views have a storage object of their own; no IPC handles, ``pin_memory``, ``autocast``, generators
of the device, or fused ``npu_*`` kernels; the ``hccl`` backend of ``torch.distributed`` is Gloo underneath.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import types
import weakref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.utils.dlpack import from_dlpack, to_dlpack

__version__ = "2.13.0+stand.in"

try:
    # A later CDLL("libhccl.so") finds it by its SONAME, as after the import of the real torch_npu.
    _cann = ctypes.CDLL(os.environ["FAKE_CANN"], mode=ctypes.RTLD_GLOBAL)
except (KeyError, OSError):
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory") from None

_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p
_ARGUMENTS = {
    "aclrtCreateStream": [ctypes.POINTER(_POINTER)],
    "aclrtCreateEvent": [ctypes.POINTER(_POINTER)],
    "aclrtStreamQuery": [_POINTER, ctypes.POINTER(_INT)],
    "aclrtSynchronizeStream": [_POINTER],
    "aclrtRecordEvent": [_POINTER, _POINTER],
    "aclrtStreamWaitEvent": [_POINTER, _POINTER],
    "aclrtQueryEventStatus": [_POINTER, ctypes.POINTER(_INT)],
    "aclrtSynchronizeEvent": [_POINTER],
    "aclrtMemcpyAsync": [_POINTER, ctypes.c_size_t, _POINTER, ctypes.c_size_t, _INT, _POINTER],
    "aclrtSetDevice": [_INT],
    "aclrtGetDeviceCount": [ctypes.POINTER(ctypes.c_uint32)],
    "fake_sleep": [_INT, _POINTER],
}
for _name, _arguments in _ARGUMENTS.items():
    getattr(_cann, _name).argtypes = _arguments


def _acl(name, *arguments):
    if code := getattr(_cann, name)(*arguments):
        raise RuntimeError(f"{name}:build/stand_in NPU function error: {name}, error code is {code}")


def _made(name):
    pointer = _POINTER()
    _acl(name, ctypes.byref(pointer))
    return pointer.value


def _asked(name, handle):
    answer = _INT()
    _acl(name, handle, ctypes.byref(answer))
    return bool(answer.value)


# The host's queue of what the device has not been told yet

_queue: list = []
_queue_lock = threading.RLock()


def _submit(name, *arguments):
    with _queue_lock:
        _queue.append((name, arguments))


def _flush():
    with _queue_lock:
        while _queue:
            name, arguments = _queue.pop(0)
            _acl(name, *arguments)


# Devices and streams

_POOL = 32
_of_thread = threading.local()
_streams_lock = threading.RLock()
_pools: dict = {}
_defaults: dict = {}
_made_streams: list = []


def _index(device=None):
    if isinstance(device, int):
        return device
    device = torch.device(device) if isinstance(device, str) else device
    if device is not None and device.type != "npu":
        raise ValueError(f"Expected a npu device, but got: {device}")
    return current_device() if device is None or device.index is None else device.index


def _check_index(index):
    if not 0 <= index < device_count():
        raise RuntimeError(f"Invalid device ID {index}: there are {device_count()}")
    return index


def device_count():
    count = ctypes.c_uint32()
    _acl("aclrtGetDeviceCount", ctypes.byref(count))
    return count.value


def is_available():
    return device_count() > 0


def current_device():
    return getattr(_of_thread, "device", 0)


def set_device(device):
    _of_thread.device = _check_index(_index(device))
    _acl("aclrtSetDevice", _of_thread.device)


class device:
    def __init__(self, device):
        self._inside, self._before = None if device is None else _index(device), 0

    def __enter__(self):
        self._before = current_device()
        if self._inside is not None:
            set_device(self._inside)

    def __exit__(self, *error):
        set_device(self._before)


def _new_stream(index):
    with device(index):
        handle = _made("aclrtCreateStream")
    _made_streams.append((index, handle))
    return handle


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, *, handle=None):
        index = _check_index(_index(device))
        if handle is None:
            with _streams_lock:
                handles, turn = _pools.get(index, ([], 0))
                if len(handles) < _POOL:
                    handles.append(_new_stream(index))
                handle = handles[turn % _POOL]
                _pools[index] = handles, turn + 1
        return super().__new__(cls, stream_id=handle, device_index=index, device_type=20)

    def __init__(self, *arguments, **named):
        pass

    @property
    def npu_stream(self):
        _flush()
        return self.stream_id

    def query(self):
        return _asked("aclrtStreamQuery", self.npu_stream)

    def synchronize(self):
        _acl("aclrtSynchronizeStream", self.npu_stream)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.npu_event = _made("aclrtCreateEvent")

    def record(self, stream=None):
        _submit("aclrtRecordEvent", self.npu_event, (stream or current_stream()).stream_id)

    def wait(self, stream=None):
        _submit("aclrtStreamWaitEvent", (stream or current_stream()).stream_id, self.npu_event)

    def query(self):
        _flush()
        return _asked("aclrtQueryEventStatus", self.npu_event)

    def synchronize(self):
        _flush()
        _acl("aclrtSynchronizeEvent", self.npu_event)


def default_stream(device=None):
    index = _check_index(_index(device))
    with _streams_lock:
        if index not in _defaults:
            _defaults[index] = _new_stream(index)
    return Stream(index, handle=_defaults[index])


def current_stream(device=None):
    index = _index(device)
    return getattr(_of_thread, "streams", {}).get(index) or default_stream(index)


def set_stream(stream):
    if stream is not None:
        _of_thread.streams = {**getattr(_of_thread, "streams", {}), stream.device_index: stream}


@contextlib.contextmanager
def stream(stream):
    before = None if stream is None else current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device=None):
    _flush()
    index = _index(device)
    for one, handle in list(_made_streams):
        if one == index:
            _acl("aclrtSynchronizeStream", handle)


def _sleep(milliseconds):
    """A kernel on the current stream that takes this long; torch_npu has none."""
    _acl("fake_sleep", milliseconds, current_stream().npu_stream)


def _drain():
    _acl("aclrtSynchronizeStream", current_stream().npu_stream)


def get_device_properties(device=None):
    _check_index(_index(device))
    return types.SimpleNamespace(name="Ascend910B3", total_memory=64 << 30, cube_core_num=20, vector_core_num=40)


def _nothing(*arguments, **named):
    return 0


npu = types.ModuleType("torch_npu.npu")
for _value in (
    *(device_count, is_available, current_device, set_device, device, Stream, Event, default_stream, current_stream),
    *(set_stream, stream, synchronize, get_device_properties, _sleep),
):
    setattr(npu, _value.__name__, _value)
for _name in ("init", "_lazy_init", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all"):
    setattr(npu, _name, _nothing)
for _name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats"):
    setattr(npu, _name, _nothing)
npu.mem_get_info = lambda device=None: (64 << 30, 64 << 30)
npu.get_device_name = lambda device=None: "Ascend910B3"
npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
npu.is_initialized = npu.is_bf16_supported = lambda *arguments: True
npu._is_in_bad_fork = lambda: False
sys.modules["torch_npu.npu"] = sys.modules["torch.npu"] = npu


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self):
        return is_available()

    def is_built(self):
        return True

    def has_primary_context(self, index):
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


torch.utils.backend_registration._setup_privateuseone_for_python_backend(
    "npu", backend_module=npu, hook=_Hooks(), device_guard=_Guard()
)

# Tensors

_CPU, _EXTENSION = 1, 12  # kDLCPU, and kDLExtDev, which torch takes for PrivateUse1
_content_of = ctypes.pythonapi.PyCapsule_GetPointer
_content_of.restype, _content_of.argtypes = _POINTER, [ctypes.py_object, ctypes.c_char_p]


class _Capsule(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("device_type", _INT), ("device_id", _INT))


def _relabelled(tensor, kind, index):
    capsule = to_dlpack(tensor.detach())
    content = _Capsule.from_address(_content_of(capsule, b"dltensor"))
    content.device_type, content.device_id = kind, index
    return from_dlpack(capsule)


def on_npu(tensor, index):
    """The memory of a CPU tensor as an ``npu`` tensor."""
    return _relabelled(tensor, _EXTENSION, index)


def on_cpu(tensor):
    """The memory of an ``npu`` tensor as a CPU tensor: what a kernel sees, whether it should look by now or not."""
    return _relabelled(tensor, _CPU, 0)


_kept: list = []


def _keep(tensor):
    """Memory that was handed out is not reused while a stream may still use it."""
    with _streams_lock:
        _kept.append(tensor.untyped_storage())
        if len(_kept) % 64 == 0 and all(_at_rest(handle) for _, handle in list(_made_streams)):
            _kept[:] = [storage for storage in _kept if torch._C._storage_Use_Count(storage._cdata) > 1]
    return tensor


def _at_rest(handle):
    complete = _INT()
    _cann.aclrtStreamQuery(handle, ctypes.byref(complete))
    return bool(complete.value)


def _target_index(device):
    return _check_index(current_device() if device is None or device.index is None else device.index)


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    index = _target_index(device)
    return on_npu(_keep(torch.empty(size, dtype=dtype or torch.get_default_dtype())), index)


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    index = _target_index(device)
    length = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
    return on_npu(_keep(torch.empty(length, dtype=dtype or torch.get_default_dtype())).as_strided(size, stride), index)


def _is_npu(value):
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _copy(source, target, non_blocking=False):
    plain = source.is_contiguous() and target.is_contiguous() and source.numel() == target.numel()
    if _is_npu(source) and _is_npu(target) and plain and source.dtype == target.dtype and source.numel():
        size = source.numel() * source.element_size()
        stream = current_stream().npu_stream
        _acl("aclrtMemcpyAsync", target.data_ptr(), size, source.data_ptr(), size, 3, stream)
        return target
    _drain()
    with torch.inference_mode(target.is_inference()):
        (on_cpu(target) if _is_npu(target) else target).copy_(on_cpu(source) if _is_npu(source) else source)
    return target


def _either_is_dense(tensor, source):
    """``tensor.data = source`` works across devices, as torch_npu lets it; torch itself knows no NPU."""
    return all(one.device.type in ("cpu", "npu") and one.layout is torch.strided for one in (tensor, source))


def _copy_each(targets, sources, non_blocking=False):
    for target, source in zip(targets, sources, strict=True):
        _copy(source, target)


@functools.cache
def _only_looks(operation):
    """Whether it makes another view of its argument, which is no work for the device."""
    aliases = [returned.alias_info for returned in operation._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _on_aliases(operation, *arguments, **named):
    if "record_stream" in str(operation):
        return None
    if not _only_looks(operation):
        _drain()
    originals, index = {}, current_device()

    def down(value):
        nonlocal index
        if _is_npu(value):
            index = value.device.index
            alias = on_cpu(value)
            originals[id(alias)] = value, alias
            return alias
        if isinstance(value, torch.device) and value.type == "npu":
            index = _target_index(value)
            return torch.device("cpu")
        return type(value)(map(down, value)) if isinstance(value, list | tuple) else value

    def up(value):
        if isinstance(value, torch.Tensor):
            return originals[id(value)][0] if id(value) in originals else on_npu(_keep(value), index)
        return type(value)(map(up, value)) if isinstance(value, list | tuple) else value

    # A view of a tensor that was made outside of inference mode is none that was made inside.
    inference = any(_is_npu(value) and value.is_inference() for value in (*arguments, *named.values()))
    taken = operation._schema.arguments
    arguments = [
        torch.tensor(value) if isinstance(value, int | float) and str(one.type) == "Tensor" else value
        for one, value in zip(taken, arguments, strict=False)  # a number where a tensor may stand comes as a number
    ]
    with torch.inference_mode(inference):
        return up(operation(*map(down, arguments), **{key: down(value) for key, value in named.items()}))


_aten, _all = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
_all.fallback(_on_aliases, "PrivateUse1")
for _name, _kernel in {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy,
    "_copy_from_and_resize": _copy,
    "_foreach_copy_": _copy_each,
    "_has_compatible_shallow_copy_type": _either_is_dense,
}.items():
    _aten.impl(_name, _kernel, "PrivateUse1")
# Made of other operations by torch, of which one resizes an output: a storage here has a fixed size.
_resizing = ("abs", "angle", "sgn", "embedding", "arange", "arange.start", "arange.start_step", "eye", "eye.m")
for _name in _resizing:
    _packet, _, _overload = _name.partition(".")
    _operation = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _aten.impl(_name, functools.partial(_on_aliases, _operation), "PrivateUse1")


def _rebuilt(tensor, index, kind, requires_grad):
    moved = tensor.to(f"npu:{index}")
    return kind(moved, requires_grad) if kind is torch.nn.Parameter else moved.requires_grad_(requires_grad)


def _pickled_by_way_of_the_cpu(kind):
    usual = kind.__reduce_ex__

    def reduce(self, protocol):
        if not _is_npu(self):
            return usual(self, protocol)
        return _rebuilt, (self.detach().cpu(), self.device.index, type(self), self.requires_grad)

    kind.__reduce_ex__ = reduce


for _kind in (torch.Tensor, torch.nn.Parameter):
    _pickled_by_way_of_the_cpu(_kind)

_usual_deepcopy = torch.Tensor.__deepcopy__


def _deepcopy(self, memo):
    if not _is_npu(self):
        return _usual_deepcopy(self, memo)
    if id(self) not in memo:  # torch would copy the storage, for which there is no allocator
        memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
    return memo[id(self)]


torch.Tensor.__deepcopy__ = _deepcopy

_private: dict = {}


def get_npu_format(tensor):
    return _private.get(tensor.data_ptr(), 2)


def npu_format_cast(tensor, form):
    """The same tensor, of which ``get_npu_format`` says ``form`` from now on."""
    address = tensor.data_ptr()
    _private[address] = form
    weakref.finalize(tensor, _private.pop, address, None)
    return tensor


# torch.distributed


class ProcessGroupHCCL(dist.ProcessGroup):
    """For a trainer's own groups."""

    class Options:
        def __init__(self):
            self._timeout, self.group_id, self.global_ranks_in_group, self.hccl_config = None, "", [], {}

    def __init__(self, store, rank, size, options):
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout=options._timeout)

    def _do(self, name, tensors, *more):
        _drain()
        return _Work(getattr(self._gloo, name)([on_cpu(tensor) for tensor in tensors], *more), tensors)

    def broadcast(self, tensors, options=None):
        return self._do("broadcast", tensors, options or dist.BroadcastOptions())

    def allreduce(self, tensors, options=None):
        return self._do("allreduce", tensors, options or dist.AllreduceOptions())

    def barrier(self, options=None):
        return _Work(self._gloo.barrier(), [])

    def getBackendName(self):
        return "hccl"

    def shutdown(self):
        self._gloo = None


class _Work:
    def __init__(self, work, tensors):
        self._work, self._tensors = work, tensors

    def wait(self, timeout=None):
        self._work.wait()
        return True

    def is_completed(self):
        return self._work.is_completed()

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def _new_group(common, options):
    options = options or ProcessGroupHCCL.Options()
    options._timeout = common.timeout
    return ProcessGroupHCCL(common.store, common.group_rank, common.group_size, options)


dist.Backend.register_backend("hccl", _new_group, extended_api=True, devices=["npu"])
dist.is_hccl_available = lambda: True


def __getattr__(name):
    if name.startswith("npu_"):  # transformers imports them when it finds torch_npu

        def absent(*arguments, **named):
            raise NotImplementedError(f"torch_npu.{name} has no stand-in")

        return absent
    raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
