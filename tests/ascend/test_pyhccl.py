"""The ABI against pyhccl, CANN's own bindings from PyPI, whose constants and signatures come from the real headers."""

from __future__ import annotations

import ctypes
import importlib
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.util.collective.types import ReduceOp

from tests.ascend.simulator import fake, npus
from tests.ascend.test_hccl_group import MIXED, exchange, leave
from tests.unit.members import Seat, introduce, results
from twinkle_ray.backends import hccl

if platform.machine() != "x86_64":
    pytest.skip("PyPI has pyhccl for x86-64 only", allow_module_level=True)
pyhccl: Any = importlib.import_module("pyhccl")

TYPES = {
    "buf": ctypes.c_void_p,
    "sendBuf": ctypes.c_void_p,
    "recvBuf": ctypes.c_void_p,
    "comm": ctypes.c_void_p,
    "stream": ctypes.c_void_p,
    "count": ctypes.c_uint64,
    "sendCount": ctypes.c_uint64,
    "recvCount": ctypes.c_uint64,
    "dataType": ctypes.c_int,
    "op": ctypes.c_int,
    "code": ctypes.c_int,
    "root": ctypes.c_uint32,
    "rank": ctypes.c_uint32,
    "nRanks": ctypes.c_uint32,
    "destRank": ctypes.c_uint32,
    "srcRank": ctypes.c_uint32,
    "rootInfo": ctypes.POINTER(hccl.RootInfo),
}
"""Of the parameters in HCCL's documentation, by the names that pyhccl has for them too."""
RETURNED = {
    "HcclGetRootInfo": (ctypes.POINTER(hccl.RootInfo),),
    "HcclCommInitRootInfo": (ctypes.POINTER(ctypes.c_void_p),),
}
"""What C gives back through a last pointer, and pyhccl beside the result code."""


@pytest.mark.parametrize("name", sorted(hccl.SIGNATURES))
def test_each_signature_is_that_of_the_header(name: str) -> None:
    parameters = re.findall(r"(\w+): ", getattr(pyhccl, name).__doc__)
    assert hccl.SIGNATURES[name] == (*(TYPES[parameter] for parameter in parameters), *RETURNED.get(name, ()))


def test_each_constant_is_that_of_the_header() -> None:
    names = {
        torch.int8: "INT8",
        torch.int16: "INT16",
        torch.int32: "INT32",
        torch.int64: "INT64",
        torch.float16: "FP16",
        torch.float32: "FP32",
        torch.bfloat16: "BFP16",
    }
    assert {dtype: int(getattr(pyhccl, f"HCCL_DATA_TYPE_{name}")) for dtype, name in names.items()} == hccl.DTYPES
    assert int(pyhccl.HCCL_DATA_TYPE_UINT8) == hccl.UINT8
    for op, name in zip(
        (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN), ("SUM", "PROD", "MAX", "MIN"), strict=True
    ):
        assert hccl.REDUCE_OPS[op] == int(getattr(pyhccl, f"HCCL_REDUCE_{name}"))
    assert ctypes.sizeof(hccl.RootInfo) == hccl.ROOT_INFO_BYTES == pyhccl.HCCL_ROOT_INFO_BYTES
    assert int(pyhccl.HCCL_SUCCESS) == hccl.SUCCESS
    assert int(pyhccl.HCCL_E_AGAIN) == hccl.AGAIN
    codes = ("PARA", "NOT_SUPPORT", "NOT_FOUND", "TIMEOUT", "TCP_CONNECT", "NETWORK", "AGAIN", "REMOTE")
    assert sorted(hccl.HINTS) == sorted(int(getattr(pyhccl, f"HCCL_E_{code}")) for code in codes)


class Theirs:
    """Stands for our :class:`~twinkle_ray.backends.hccl.Library`, and makes every call by pyhccl."""

    def __call__(self, name: str, *arguments: Any) -> None:
        assert self.code(name, *arguments) == 0

    def code(self, name: str, *arguments: Any) -> int:
        plain = [getattr(argument, "value", argument) for argument in arguments]
        if name == "HcclGetRootInfo":
            code, info = pyhccl.HcclGetRootInfo()
            content = bytes(value & 0xFF for value in info.internal)
            ctypes.memmove(ctypes.addressof(arguments[0]._obj), content, len(content))
            return int(code)
        if name == "HcclCommInitRootInfo":
            size, root, rank, comm = arguments
            info = pyhccl.HcclRootInfo()
            info.internal = type(info.internal)(bytes(root._obj))
            code, comm._obj.value = pyhccl.HcclCommInitRootInfo(size, info, rank)
            return int(code)
        names = re.findall(r"(\w+): ", getattr(pyhccl, name).__doc__)
        for at, parameter in enumerate(names):
            kind = {"dataType": pyhccl.HcclDataType, "op": pyhccl.HcclReduceOp}.get(parameter)
            plain[at] = plain[at] if kind is None else kind(plain[at])
        return int(getattr(pyhccl, name)(*plain))


def half_theirs(seat: Seat, theirs: int) -> Any:
    if seat.rank == theirs:
        assert pyhccl.load_library() > 0
        hccl.library = lambda: Theirs()  # type: ignore[assignment, return-value]
    group: Any = seat.group()
    right = [exchange(group, MIXED, src, src) for src in range(2)]
    tensor = torch.tensor([1.0, 5.0], device="npu") * (seat.rank + 1)
    group.allreduce([tensor])
    right.append(tensor.tolist() == [3.0, 15.0])
    leave(group)
    return right, fake().fake_live_comms()


@pytest.mark.parametrize("theirs", [0, 1])
def test_one_communicator_is_shared_with_pyhccl(library: Path, theirs: int) -> None:
    with npus(library, half_theirs, 2, theirs) as people:
        introduce(people)
        assert results(people) == [([True] * 3, 0)] * 2
