"""Which GPUs are joined by NVLink, asked of a double of NVIDIA's management library."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from twinkle_ray.backends import nvml


class Library:
    """Four GPUs of which the first three are joined; as Ray's binding, it takes and gives str or bytes."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    joined = frozenset({0, 1, 2})

    def __init__(self, names: Any = str) -> None:
        self.names = [names(f"GPU-{number}{number}-abc") for number in range(4)]
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for number, name in enumerate(self.names):
            if uuid == (name if isinstance(name, str) else name.decode()):
                return number
        raise LookupError("Not Found")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        return self.names[handle]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        assert kind == self.NVML_P2P_CAPS_INDEX_NVLINK
        assert one != other
        return 0 if {one, other} <= self.joined else 5


@pytest.mark.parametrize("names", [str, str.encode])
def test_the_others_that_are_joined_by_their_names(names: Any) -> None:
    library = Library(names)
    assert nvml._linked(library, "11-abc") == ("00-abc", "22-abc")
    assert nvml._linked(library, "33-abc") == ()
    assert library.open == 0


def test_what_cannot_be_told_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    with pytest.raises(LookupError):
        nvml._linked(library, "MIG-5")
    assert library.open == 0
    nvml.linked.cache_clear()
    monkeypatch.setattr(nvml.importlib, "import_module", lambda name: library)
    assert nvml.linked("MIG-5") == ()  # a part of a GPU
    assert nvml.linked("00-abc") == ("11-abc", "22-abc")
    nvml.linked.cache_clear()


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_P2P_DISABLE", "", False),
        ("NCCL_P2P_LEVEL", "LOC", True),
        ("NCCL_P2P_LEVEL", "NVL", False),
    ],
)
def test_what_keeps_nccl_from_it_keeps_us_from_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, off: bool
) -> None:
    from twinkle_ray.backends import nccl

    monkeypatch.setattr(nccl.NcclGroup, "identity", lambda device: "00-abc")
    monkeypatch.setattr(nccl, "linked", lambda device: ("11-abc",))
    monkeypatch.setattr(nccl, "cuda_exportable", lambda device, tensors: True)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.delenv("NCCL_P2P_LEVEL", raising=False)
    device: Any = torch.device("cuda:0")
    assert (nccl.NcclGroup.linked(device), nccl.NcclGroup.shareable(device, [])) == (("11-abc",), True)
    monkeypatch.setenv(name, value)
    assert nccl.NcclGroup.linked(device) == (() if off else ("11-abc",))
    assert nccl.NcclGroup.shareable(device, []) is not off


def test_without_a_driver_there_are_no_links(caplog: pytest.LogCaptureFixture) -> None:
    nvml.linked.cache_clear()
    with caplog.at_level(logging.DEBUG):
        assert nvml.linked("00-abc") == ()
    assert "cannot be told: NVML Shared Library Not Found" in caplog.text  # by the real binding
    nvml.linked.cache_clear()


def test_rays_binding_has_what_is_asked_of_it() -> None:
    from ray._private.thirdparty import pynvml

    missing = [name for name in dir(Library) if name.startswith(("nvml", "NVML")) and not hasattr(pynvml, name)]
    assert missing == []
    assert (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK) == (2, 0)
