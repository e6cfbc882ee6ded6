"""Receivers that hold slices of tensors: each gets its own in place, and all see the same wire."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.wire import Feed, deliver, raw
from twinkle_ray import transfer
from twinkle_ray.backends.base import SyncGroup
from twinkle_ray.endpoint import Operation
from twinkle_ray.errors import SyncAborted, SyncError
from twinkle_ray.landing import Copy, Landing, Range, lay
from twinkle_ray.manifest import Manifest, TensorMeta, agree_cuts
from twinkle_ray.plan import Chunk, plan_chunks
from twinkle_ray.sinks import LoadReport, ModuleSink
from twinkle_ray.types import Deadline
from twinkle_ray.vllm.loading import EngineSink
from twinkle_ray.vllm.placement import Destination, slices

CPU = torch.device("cpu")
TP = 4
SHAPES = {
    "embed": (5, 4),  # padded to eight rows: the last worker holds padding only
    "q": (8, 4),
    "k": (4, 4),  # two heads for four workers
    "o": (4, 8),  # columns
    "norm": (4,),
    "gate_up": (16, 4),  # one tensor, of which a worker holds two ranges
    "bias": (8,),
    "stacked": (2, 8, 4),  # experts
    "short": (8, 4),  # held in another dtype
}
MANIFEST = Manifest(tuple(TensorMeta(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()))
NOT_IN_PLACE = {"o", "short"}
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(tensor_parallel_size=TP, pipeline_parallel_size=1),
    model_config=SimpleNamespace(quantization=None),
)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of vLLM as recording and loading ask for."""
    config, platforms = types.ModuleType("vllm.config"), types.ModuleType("vllm.platforms")
    config.set_current_vllm_config = lambda _: contextlib.nullcontext()  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False)  # type: ignore[attr-defined]
    for name, module in (("vllm", types.ModuleType("vllm")), ("vllm.config", config), ("vllm.platforms", platforms)):
        monkeypatch.setitem(sys.modules, name, module)


class Worker(nn.Module):
    """One of four workers, with loaders like vLLM's. ``lie`` changes what the loader really does."""

    def __init__(self, rank: int, lie: Callable[[Worker], None] | None = None) -> None:
        super().__init__()
        self.rank, self.lie = rank, lie
        held = {"embed": (2, 4), "qk": (4, 4), "o": (4, 2), "norm": (4,), "gate_up": (4, 4), "bias": (2,)}
        held |= {"stacked": (2, 2, 4)}
        for name, shape in held.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.full(shape, 3.0), requires_grad=False)
            self.add_module(name, module)
        self.short = nn.Module()
        self.short.weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        r = self.rank
        for name, value in weights:
            data = {n: p.data for n, p in self.named_parameters()}
            if name == "embed":
                mine = value[2 * r : 2 * r + 2]
                data["embed.weight"][: len(mine)].copy_(mine)
                data["embed.weight"][len(mine) :].fill_(0)
            elif name == "q":
                data["qk.weight"].narrow(0, 0, 2).copy_(value.narrow(0, 2 * r, 2))
            elif name == "k":
                data["qk.weight"].narrow(0, 2, 2).copy_(value.narrow(0, 2 * (r // 2), 2))
            elif name == "o":
                data["o.weight"].copy_(value.narrow(1, 2 * r, 2))
            elif name == "gate_up":
                for part in range(2):
                    data["gate_up.weight"].narrow(0, 2 * part, 2).copy_(value.narrow(0, 8 * part + 2 * r, 2))
            elif name == "stacked":
                for expert in range(2):
                    data["stacked.weight"][expert].copy_(value[expert].narrow(0, 2 * r, 2))
            elif name == "norm":
                data["norm.weight"].copy_(value)
            else:
                data[f"{name}.weight"].copy_(value.narrow(0, 2 * r, 2))
            if self.lie is not None and not value.is_meta:
                self.lie(self)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()} | {"norm": torch.ones(4)}


def sink_of(worker: nn.Module) -> EngineSink:
    return EngineSink(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: worker), vllm_config=CONFIG))


def assert_holds(worker: Worker, tensors: dict[str, torch.Tensor]) -> None:
    wanted = Worker(worker.rank)
    wanted.load_weights(tensors.items())
    for (name, held), other in zip(worker.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(held, other), f"worker {worker.rank}: {name}"


def agreed(sinks: Sequence[EngineSink]) -> Manifest:
    return MANIFEST.with_cuts(agree_cuts(MANIFEST, [sink.agree(MANIFEST).cuts for sink in sinks]))


def share(report: LoadReport) -> set[str]:
    """Which tensors did not come straight, found by their sizes."""
    missing = report.nbytes - report.direct_bytes
    sizes = {meta.name: meta.nbytes for meta in MANIFEST}
    assert missing == sum(sizes[name] for name in NOT_IN_PLACE)
    return NOT_IN_PLACE


@pytest.mark.parametrize("bucket_size", [16, 32, 36, 48, 64, 100, 128, 1 << 20])
def test_each_of_four_workers_gets_its_rows_in_place(bucket_size: int) -> None:
    workers = [Worker(rank) for rank in range(TP)]
    sinks = [sink_of(worker) for worker in workers]
    wire = agreed(sinks)
    places = [[p.data_ptr() for p in worker.parameters()] for worker in workers]
    for seed in range(3):
        tensors = checkpoint(seed)
        for worker, sink in zip(workers, sinks, strict=True):
            report = deliver(sink, wire, tensors, bucket_size)
            assert_holds(worker, tensors)
            assert share(report)
            assert report.path == "in place"
            assert ("proof" in report.seconds) == (seed == 0)
    assert [[p.data_ptr() for p in worker.parameters()] for worker in workers] == places


def test_all_ranks_launch_the_same_sizes() -> None:
    sinks = [sink_of(Worker(rank)) for rank in range(TP)]
    wire, tensors = agreed(sinks), checkpoint(0)
    launched = []
    for sink in sinks:
        feed: Any = Feed(tensors.values())
        transfer.receive(cast(SyncGroup, feed), sink, wire, 100, Operation("transfer", Deadline.after(10.0)))
        launched.append(feed.launched)

    class Sender(Feed):
        def settle(self, deadline: Deadline, leave: int) -> None:
            while len(self.under_way) > leave:
                for view, content in self.under_way.popleft():
                    assert raw(view) == content, "not the bytes in their order"

    sender: Any = Sender(tensors.values())
    transfer.send(cast(SyncGroup, sender), iter(tensors.values()), wire, 100, Operation("t", Deadline.after(10.0)))
    assert launched == [sender.launched] * TP


def test_a_rollout_that_holds_whole_tensors_takes_the_cuts_of_others_in_place() -> None:
    wire = agreed([sink_of(Worker(rank)) for rank in range(TP)])
    module = nn.ParameterDict({n: nn.Parameter(torch.zeros(s), requires_grad=False) for n, s in SHAPES.items()})
    sink, tensors = ModuleSink(module), checkpoint(3)
    assert sink.agree(wire).problems == ()
    report = deliver(sink, wire, tensors, 100)
    assert report.direct_bytes == report.nbytes == wire.nbytes
    assert all(torch.equal(module[name], tensors[name]) for name in SHAPES)


def test_what_each_worker_wants_is_where_its_slices_begin_and_end() -> None:
    wanted = [dict(zip(SHAPES, sink_of(Worker(rank)).agree(MANIFEST).cuts, strict=True)) for rank in range(TP)]
    assert [cuts["embed"] for cuts in wanted] == [(8,), (8, 16), (16,), ()]
    assert [cuts["k"] for cuts in wanted] == [(8,), (8,), (8,), (8,)]  # two workers hold the same head
    assert wanted[1]["gate_up"] == (8, 16, 40, 48)
    assert wanted[3]["stacked"] == (24, 32, 56)
    assert all(cuts["o"] == cuts["norm"] == () for cuts in wanted)


@pytest.mark.parametrize(
    ("bucket_size", "direct"),
    [(1 << 20, {"norm"}), (64, {"norm", "embed"})],  # the last row of the embedding lies behind the bucket's end
)
def test_a_wire_without_cuts_is_received_whole(bucket_size: int, direct: set[str]) -> None:
    worker = Worker(2)
    sink = sink_of(worker)
    sink.agree(MANIFEST)
    report = deliver(sink, MANIFEST, checkpoint(1), bucket_size)
    assert_holds(worker, checkpoint(1))
    assert report.direct_bytes == sum(meta.nbytes for meta in MANIFEST if meta.name in direct)
    assert report.path == "in place"


def test_other_cuts_need_no_other_proof() -> None:
    worker = Worker(1)
    sink = sink_of(worker)
    assert "proof" in deliver(sink, agreed([sink]), checkpoint(0), 64).seconds
    others = [sink_of(Worker(rank)) for rank in range(TP)]
    report = deliver(sink, agreed([sink, *others]), checkpoint(1), 64)
    assert "proof" not in report.seconds
    assert share(report)
    assert_holds(worker, checkpoint(1))


def test_cuts_of_what_the_proof_then_refuses_do_no_harm() -> None:
    def once_more(worker: Worker) -> None:
        worker.qk.weight.data[0, 0] = 0.25

    worker = Worker(1, once_more)
    sink = sink_of(worker)
    wire = agreed([sink, *(sink_of(Worker(rank)) for rank in (0, 2, 3))])
    report = deliver(sink, wire, checkpoint(0), 1 << 20)
    wanted = Worker(1, once_more)
    wanted.load_weights(checkpoint(0).items())
    for held, other in zip(worker.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(held, other)
    refused = {"q", "k", *NOT_IN_PLACE}
    assert report.nbytes - report.direct_bytes == sum(meta.nbytes for meta in MANIFEST if meta.name in refused)
    assert report.path == "in place, load_weights"


@pytest.mark.parametrize("fail_at", [1, 3, 6])
def test_a_failure_in_mid_transfer_is_healed_by_the_next_sync(fail_at: int) -> None:
    worker = Worker(1)
    sink = sink_of(worker)
    wire = agreed([sink])
    deliver(sink, wire, checkpoint(0), 64)
    operation = Operation("transfer", Deadline.after(10.0))
    with pytest.raises(SyncError, match="the wire broke"):
        deliver(sink, wire, checkpoint(1), 64, fail_at=fail_at, operation=operation)
    assert operation.touched
    deliver(sink, wire, checkpoint(1), 64)
    assert_holds(worker, checkpoint(1))


def test_a_sync_that_was_given_up_writes_no_slice() -> None:
    worker = Worker(1)
    sink = sink_of(worker)
    wire = agreed([sink])
    deliver(sink, wire, checkpoint(0), 64)
    operation = Operation("transfer", Deadline.after(10.0))
    operation.end(error=SyncAborted("given up"))
    with pytest.raises(SyncAborted):
        deliver(sink, wire, checkpoint(1), 64, operation=operation)
    assert_holds(worker, checkpoint(0))


class Held:
    """A sink of given ranges and copies that counts what it is asked for."""

    in_place = False
    live = True
    device = CPU
    empty = staticmethod(torch.empty)

    def __init__(self, ranges: list[Sequence[Range] | None], copies: dict[int, list[Copy]] | None = None) -> None:
        self.ranges, self.copies = ranges, copies
        self.content: dict[str, bytes] = {}

    def begin(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def arm(self, touch: Callable[[], None]) -> None: ...

    def landing(self, plan: Sequence[Chunk], device: torch.device) -> Landing:
        return lay(self.manifest, plan, self.ranges, self.copies)

    def buffer(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        return self.empty(meta.shape, dtype=torch.uint8)

    def ready(self, tensors: Sequence[tuple[TensorMeta, torch.Tensor]]) -> None:
        self.content |= {meta.name: raw(tensor) for meta, tensor in tensors}

    def finish(self) -> LoadReport:
        return LoadReport(path="", tensors=0, nbytes=0, direct_bytes=0)

    def abandon(self) -> None: ...


class Meter:
    """Stands for ``torch`` where memory is made: the most that lived at one time."""

    def __init__(self) -> None:
        self.living: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = torch.empty(*args, **kwargs)
        self.living.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        self.living = [(ref, nbytes) for ref, nbytes in self.living if not ref.expired()]
        self.most = max(self.most, sum(nbytes for _, nbytes in self.living))
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize(
    ("sizes", "dropped", "copied"),
    [
        ([320] * 12, set(), set()),  # loaded, a few per bucket
        ([320] * 12, set(), set(range(12))),  # copied
        ([320] * 12, {0, 1, 2, 6}, set()),  # a bucket's worth that is dropped
        ([320] * 12, {0, 1, 2, 6}, set(range(12))),
        ([320, 3200, 320, 320, 2400, 3200, 320, 960], {7}, set()),  # some larger than a bucket
        ([320, 3200, 320, 320, 2400, 3200, 320, 960], {1}, set(range(8))),
    ],
)
def test_staging_holds_two_buckets_and_the_largest_tensor(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], dropped: set[int], copied: set[int]
) -> None:
    bucket_size = 960
    manifest = Manifest(tuple(TensorMeta(name=str(i), shape=(n,), dtype="uint8") for i, n in enumerate(sizes)))
    tensors = {str(i): torch.randint(0, 255, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    dests = {i: torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes) if i in copied}
    sink: Any = Held(
        [() if i in dropped else None for i in range(len(sizes))],
        {i: [Copy(dest, tuple(dest.shape), (1,), 0)] for i, dest in dests.items()},
    )
    meter = Meter()
    monkeypatch.setattr(transfer, "torch", meter)
    sink.empty = meter.empty
    deliver(sink, manifest, tensors, bucket_size)
    large = [n for i, n in enumerate(sizes) if n > bucket_size and i not in dropped]
    assert 0 < meter.most <= 2 * bucket_size + max(large, default=0)
    for i, n in enumerate(sizes):
        if i in copied and n <= bucket_size and i not in dropped:
            assert raw(dests[i]) == raw(tensors[str(i)])
        elif i not in dropped:
            assert sink.content[str(i)] == raw(tensors[str(i)])
        else:
            assert str(i) not in sink.content


def test_a_slot_takes_tensors_of_several_dtypes() -> None:
    torch.manual_seed(0)
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.randn(4, 6, dtype=torch.float64),
        "c": torch.randn(5).bfloat16(),
    }
    manifest = Manifest(
        tuple(TensorMeta(name=n, shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for n, t in tensors.items())
    ).with_cuts([(1,), (7,), ()])
    turned, half = torch.zeros(6, 4, dtype=torch.float64), torch.zeros(4, 3)
    whole = [torch.zeros(3, dtype=torch.uint8), torch.zeros(5)]
    copies = {
        0: [Copy(whole[0], (3,), (1,), 0)],
        1: [Copy(turned, (6, 4), (1, 6), 0), Copy(half, (4, 3), (6, 1), 3)],
        2: [Copy(whole[1], (5,), (1,), 0)],
    }
    sink: Any = Held([None] * 3, copies)
    deliver(sink, manifest, tensors, 1 << 10)
    assert torch.equal(turned, tensors["b"].t())
    assert torch.equal(half, tensors["b"][:, 3:].float())
    assert torch.equal(whole[0], tensors["a"])
    assert torch.equal(whole[1], tensors["c"].float())
    assert sink.content == {}


def test_a_segment_that_is_half_wanted_makes_its_tensor_whole() -> None:
    manifest = Manifest((TensorMeta(name="w", shape=(8,), dtype="uint8", cuts=(3,)),))
    live = torch.zeros(4, dtype=torch.uint8)
    for start, staged in ((3, False), (4, True), (2, True)):
        stop = 8 if start > 2 else 3
        view = live[: stop - start] if stop - start <= 4 else torch.zeros(stop - start, dtype=torch.uint8)
        landing = lay(manifest, plan_chunks(manifest, 64), [[Range(start, stop, view)]])
        assert (0 in landing.staged) == staged
        assert landing.live != staged


def destination(dest: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Destination:
    return Destination(dest, size, stride, offset, False)


class TestSlices:
    live = torch.zeros(8, 4)

    def held(self, *destinations: Destination) -> list[tuple[int, int, int]] | None:
        found = slices(destinations)
        return None if found is None else [(s.start, s.stop, s.live.storage_offset()) for s in found]

    def test_rows_are_a_run_and_columns_are_none(self) -> None:
        assert self.held(destination(self.live[2:4], (2, 4), (4, 1), 16)) == [(16, 24, 8)]
        assert self.held(destination(self.live[2:4], (2, 4), (8, 1), 16)) is None
        assert self.held(destination(self.live[:, :2], (8, 2), (2, 1), 0)) is None
        assert self.held(destination(self.live[2:3], (1, 4), (99, 1), 4)) == [(4, 8, 8)]

    def test_neighbours_on_both_sides_are_one(self) -> None:
        one, other = self.live[2:4], self.live[4:6]
        assert self.held(destination(other, (2, 4), (4, 1), 8), destination(one, (2, 4), (4, 1), 0)) == [(0, 16, 8)]
        assert self.held(destination(one, (2, 4), (4, 1), 8), destination(other, (2, 4), (4, 1), 0)) == [
            (0, 8, 16),
            (8, 16, 8),
        ]

    def test_a_tied_place_counts_once_and_two_places_for_one_element_are_none(self) -> None:
        one = destination(self.live[2:4], (2, 4), (4, 1), 0)
        assert self.held(one, one) == [(0, 8, 8)]
        assert self.held(one, destination(self.live[4:6], (2, 4), (4, 1), 0)) is None
        assert self.held(one, destination(self.live[4:6], (2, 4), (4, 1), 4)) is None

    def test_what_holds_nothing_is_no_run(self) -> None:
        assert self.held(destination(self.live[8:], (0, 4), (4, 1), 20)) == []


def test_the_pieces_of_a_scratch_buffer_are_aligned_and_apart() -> None:
    manifest = Manifest((TensorMeta(name="w", shape=(50,), dtype="uint8", cuts=(7, 16, 33)),))
    (step,) = lay(manifest, plan_chunks(manifest, 64), [()]).steps
    views: list[torch.Tensor] = [torch.empty(0)] * 4
    scratch = torch.zeros(step.scratch.nbytes, dtype=torch.uint8)
    step.scratch.cut(scratch, views)
    assert [view.numel() for view in views] == [7, 9, 17, 17]
    assert [(view.data_ptr() - scratch.data_ptr()) % 16 for view in views] == [0] * 4
    ends = deque(view.data_ptr() + view.numel() for view in views)
    assert all(ends.popleft() <= view.data_ptr() for view in views[1:])
