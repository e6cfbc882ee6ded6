"""The loops of both ends: what they launch, when they wait, how much they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.digest import bytes_view
from twinkle_ray.endpoint import Operation
from twinkle_ray.errors import SyncError
from twinkle_ray.sinks import ModuleSink
from twinkle_ray.sources import WeightSource
from twinkle_ray.transfer import receive, send
from twinkle_ray.types import Deadline

BUCKET = 64


class Wire:
    """A group of one end; what a sender launches, a receiver of the same ``bytes`` gets when it settles."""

    device_type = "cpu"
    rank = 0

    def __init__(self, content: deque[bytes] | None = None) -> None:
        self.content = content
        self.sent: deque[bytes] = deque()
        self.flying: deque[Any] = deque()
        self.said: list[str] = []

    def rally(self) -> None:
        self.said.append("rally")

    def assemble(self, deadline: Deadline) -> None:
        self.rally()

    def broadcast_many(self, views: list[torch.Tensor], src: int = 0) -> None:
        self.said.append("launch")
        self.flying.append(views)

    def flush(self) -> None:
        self.said.append("flush")

    def settle(self, deadline: Deadline, leave: int) -> None:
        self.said.append(f"settle {leave}")
        while len(self.flying) > leave:
            for view in self.flying.popleft():
                if self.content is None:
                    self.sent.append(bytes_view(view).numpy().tobytes())
                else:
                    view.copy_(torch.frombuffer(bytearray(self.content.popleft()), dtype=torch.uint8))

    def synchronize(self, deadline: Deadline) -> None:
        self.settle(deadline, 0)
        self.said[-1] = "synchronize"

    @property
    def most_under_way(self) -> int:
        now = most = 0
        for word in self.said:
            now = now + 1 if word == "launch" else int(word[7:]) if word.startswith("settle") else now
            most = max(most, now)
        return most


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=dtype) for _ in range(6)))


def operation() -> Operation:
    return Operation("transfer", Deadline.after(10.0))


def sent(source: WeightSource, **dtypes: Any) -> tuple[Wire, Any, Operation]:
    wire = Wire()
    manifest = source.manifest()
    if dtypes:
        manifest = manifest.with_dtypes([dtypes["dtype"]] * len(manifest))
    work = operation()
    with source.tensors(manifest) as tensors:
        send(cast(SyncGroup, wire), tensors, manifest, BUCKET, work)
    return wire, manifest, work


def test_parameters_are_launched_one_after_the_other_at_both_ends() -> None:
    trainer, rollout = net(), net()
    wire, manifest, work = sent(WeightSource(trainer))
    assert wire.said[:7] == ["rally", *["launch"] * 6]
    assert wire.said[-1] == "synchronize"
    assert (work.step, work.steps) == (6, 6)
    end = Wire(wire.sent)
    work = operation()
    report = receive(cast(SyncGroup, end), ModuleSink(rollout), manifest, BUCKET, work)
    assert end.said[:9] == ["rally", "synchronize", *["launch"] * 6, "flush"]
    assert (work.step, work.steps, work.touched) == (6, 6, True)
    assert report.direct_bytes == report.nbytes == manifest.nbytes
    for one, other in zip(trainer.parameters(), rollout.parameters(), strict=True):
        assert torch.equal(one, other)


def test_at_most_two_staged_chunks_are_under_way() -> None:
    trainer, rollout = net(), net()
    wire, manifest, work = sent(WeightSource(lambda: iter(trainer.state_dict().items())))
    assert wire.most_under_way == 2
    assert work.step == 6
    rollout.double()
    end = Wire(wire.sent)
    report = receive(cast(SyncGroup, end), ModuleSink(rollout), manifest, BUCKET, operation())
    assert end.most_under_way == 2
    assert report.direct_bytes == 0
    for one, other in zip(trainer.parameters(), rollout.parameters(), strict=True):
        assert torch.equal(one.double(), other)


@pytest.mark.parametrize("rows", [[5, 3] * 8, [5, 40, 3, 3, 1, 5, 33, 2]], ids=["small", "some larger than a bucket"])
def test_a06_a_sender_holds_two_buckets_and_the_largest_of_what_it_gathers(rows: list[int]) -> None:
    """However slow the receivers are: nothing lands but what the sender waits for."""
    living: list[tuple[StorageWeakRef, int]] = []
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for index, count in enumerate(rows):
            whole = torch.full((count, 8), index, dtype=torch.uint8)
            living.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
            most = max(most, sum(nbytes for ref, nbytes in living if not ref.expired()))
            yield f"w{index}", whole
            del whole

    wire, manifest, _ = sent(WeightSource(gathered))
    assert b"".join(wire.sent) == b"".join(bytes([index]) * 8 * count for index, count in enumerate(rows))
    assert max(meta.nbytes for meta in manifest) == 8 * max(rows)
    assert BUCKET < most <= 2 * BUCKET + 8 * max(rows)


def test_cast_tensors_are_staged() -> None:
    assert sent(WeightSource(net()), dtype="bfloat16")[0].most_under_way == 2


def test_who_fails_before_its_first_chunk_has_not_come_to_the_barrier() -> None:
    manifest = WeightSource(net()).manifest()

    def nothing() -> Iterator[torch.Tensor]:
        raise KeyError("tensor 0 is not there")
        yield torch.zeros(1)

    wire = Wire()
    with pytest.raises(KeyError):
        send(cast(SyncGroup, wire), nothing(), manifest, BUCKET, operation())
    assert wire.said == []


def test_a_receiver_has_touched_nothing_before_all_have_come() -> None:
    class Lost(Wire):
        def synchronize(self, deadline: Deadline) -> None:
            raise SyncError("rank 0 gave up")

    rollout = net()
    before = {name: value.clone() for name, value in rollout.state_dict().items()}
    work = operation()
    with pytest.raises(SyncError, match="gave up"):
        receive(cast(SyncGroup, Lost()), ModuleSink(rollout), WeightSource(net()).manifest(), BUCKET, work)
    assert not work.touched
    assert all(torch.equal(value, before[name]) for name, value in rollout.state_dict().items())
