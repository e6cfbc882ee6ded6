"""What one worker process makes of what is announced to it in band, and of an adapter that nobody comes for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from twinkle_ray import worker
from twinkle_ray.endpoint import Operation
from twinkle_ray.errors import ConfigError, SyncAborted, SyncError, TwinkleRayError, WireError
from twinkle_ray.manifest import Manifest, TensorMeta
from twinkle_ray.module_adapters import ModuleAdapters
from twinkle_ray.sinks import LoadReport, ModuleSink
from twinkle_ray.types import Deadline, OpState
from twinkle_ray.worker import WorkerSide, unpack_status

MODULE = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
BASE = {"manifest": [["0.weight", [4, 4], "float32", "parameter", []]], "kind": "plain", "base_id": "b"}
PARTS = [
    [f"base_model.model.0.lora_{half}.weight", shape, "float32", "parameter", []]
    for half, shape in (
        ("A", [2, 4]),
        ("B", [4, 2]),
    )
]
ADAPTER = {"name": "one", "config": {"r": 2}, "manifest": PARTS, "base_id": "b", "digest": "d", "wire": "w"}


class Group:
    group_name = "group"
    rank = 1
    failure = None

    def rally(self) -> None: ...

    def abort(self, reason: str) -> None: ...


def side() -> WorkerSide:
    adapters = ModuleAdapters(MODULE)
    made = WorkerSide(ModuleSink(MODULE), lambda: adapters)
    made.endpoint.group = Group()  # type: ignore[assignment]
    return made


def announced(monkeypatch: pytest.MonkeyPatch, content: Any, *held: Any) -> BaseException | None:
    """The error with which such a sync ends."""
    monkeypatch.setattr(worker, "receive_frame", lambda *args: content)
    made = side()
    made.receive_announced(5.0, *held)
    status = unpack_status(made.poll(5.0))
    assert status.state is OpState.FAILED
    return status.error


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"bucket_size": 8},
        {"bucket_size": 0, "base": BASE},
        {"bucket_size": -1, "base": BASE},
        {"bucket_size": "8", "base": BASE},
        {"bucket_size": True, "base": BASE},
        {"bucket_size": 8, "base": []},
        {"bucket_size": 8, "base": {}},
        {"bucket_size": 8, "base": {**BASE, "kind": "odd"}},
        {"bucket_size": 8, "base": {**BASE, "kind": ["plain"]}},
        {"bucket_size": 8, "base": {**BASE, "base_id": None}},
        {"bucket_size": 8, "base": {**BASE, "manifest": None}},
        {"bucket_size": 8, "base": {**BASE, "manifest": BASE["manifest"] * 2}},
        {"bucket_size": 8, "adapter": "one"},
        {"bucket_size": 8, "adapter": {}},
        {"bucket_size": 8, "adapter": {**ADAPTER, "name": 1}},
        {"bucket_size": 8, "adapter": {**ADAPTER, "name": ""}},
        {"bucket_size": 8, "adapter": {**ADAPTER, "base_id": None}},
        {"bucket_size": 8, "adapter": {**ADAPTER, "manifest": {}}},
        {"bucket_size": 8, "adapter": {**ADAPTER, "config": "r=2"}},
    ],
)
def test_an_announcement_that_no_sender_makes_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    error = announced(monkeypatch, content, "b")
    assert isinstance(error, TwinkleRayError)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "held", "kind", "text"),
    [
        ({"base": {**BASE, "kind": "merged"}}, ("b", ["t"]), ConfigError, "holds 't', which belongs to the plain base"),
        ({"adapter": ADAPTER}, ("b", ["one"], ["one"]), ConfigError, "'one' was attached from a directory"),
        ({"adapter": ADAPTER}, (None,), SyncError, "does not hold the plain base"),
        ({"adapter": ADAPTER}, ("other",), SyncError, "does not hold the plain base"),
    ],
)
def test_what_does_not_go_beside_what_is_held_is_refused(
    monkeypatch: pytest.MonkeyPatch, content: Any, held: Any, kind: Any, text: str
) -> None:
    error = announced(monkeypatch, {"bucket_size": 8, **content}, *held)
    assert isinstance(error, kind)
    assert text in str(error)


def test_a_configuration_that_no_adapter_has_is_a_wire_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise ValueError("invalid literal")

    monkeypatch.setattr(ModuleAdapters, "check", fail)
    error = announced(monkeypatch, {"bucket_size": 8, "adapter": ADAPTER}, "b")
    assert isinstance(error, WireError)
    assert "adapter 'one' cannot be read (ValueError: invalid literal)" in str(error)


@pytest.mark.parametrize("late", [False, True])
def test_an_adapter_that_was_given_up_is_not_kept(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    made = side()
    operation = Operation("transfer", Deadline.after(5.0))

    def arrive(group: Any, sink: Any, *args: Any, **kwargs: Any) -> LoadReport:
        sink.tensors = {"a": torch.ones(4)}
        if late:
            operation.end(error=SyncAborted("told"))
        return LoadReport(path="staged", tensors=1, nbytes=16, direct_bytes=0)

    monkeypatch.setattr(worker, "receive", arrive)
    manifest = Manifest((TensorMeta(name="a", shape=(4,), dtype="float32"),))
    made._receive(operation, Group(), None, manifest, 8)  # type: ignore[arg-type]
    assert bool(made._received) is not late
    made.abort("another worker failed")
    assert not made._received
