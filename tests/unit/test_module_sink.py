"""A torch module takes in a sync. Oracles: ``state_dict``, torch's own cast, hashlib over numpy's bytes."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from twinkle_ray.errors import ManifestMismatch, SyncError, UnsupportedModel
from twinkle_ray.manifest import Manifest, TensorMeta, agree_dtypes
from twinkle_ray.sinks import LoadReport, ModuleSink
from twinkle_ray.sources import WeightSource

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, *, seed: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 4))
        self.register_buffer("gate_bias", torch.randn(3))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def sync(trainer: nn.Module, sink: ModuleSink) -> tuple[Manifest, LoadReport]:
    """What the endpoint does, without a wire."""
    source = WeightSource(trainer)
    manifest = source.manifest()
    agreement = sink.agree(manifest)
    assert agreement.problems == ()
    wire = manifest.with_dtypes(agree_dtypes(manifest, [agreement.dtypes]))
    sink.begin(wire)
    with source.tensors(wire) as stream:
        for meta, tensor in zip(wire, stream, strict=True):
            buffer = sink.buffer(meta, CPU)
            assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
            assert buffer.is_contiguous()
            buffer.copy_(tensor)
            sink.ready([(meta, buffer)])
    return wire, sink.finish()


def assert_equal(receiver: nn.Module, trainer: nn.Module) -> None:
    want = trainer.state_dict()
    got = receiver.state_dict()
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name].to(tensor.dtype)), name


def test_every_persistent_tensor_in_place():
    trainer, receiver = Net(seed=1), Net(seed=2)
    pointers = {name: tensor.data_ptr() for name, tensor in receiver.state_dict().items()}
    scratch = receiver.scratch.clone()
    wire, report = sync(trainer, ModuleSink(receiver))
    assert_equal(receiver, trainer)
    assert {name: tensor.data_ptr() for name, tensor in receiver.state_dict().items()} == pointers
    assert torch.equal(receiver.scratch, scratch)
    assert (report.path, report.tensors, report.nbytes, report.direct_bytes) == (
        "in place",
        len(wire),
        wire.nbytes,
        wire.nbytes,
    )
    assert receiver.proj.weight.requires_grad


def test_each_tensor_arrives_in_the_receivers_dtype():
    trainer, receiver = Net(seed=1), Net(seed=2)
    receiver.proj.bfloat16()
    wire, report = sync(trainer, ModuleSink(receiver))
    assert receiver.proj.weight.dtype == torch.bfloat16
    assert_equal(receiver, trainer)
    assert report.direct_bytes == wire.nbytes


def test_a_wire_in_another_dtype_is_cast_once():
    receiver = Net(seed=2).bfloat16()
    trainer = Net(seed=1)
    source, sink = WeightSource(trainer), ModuleSink(receiver)
    wire = source.manifest()  # fp32: another receiver wants it so
    sink.begin(wire)
    with source.tensors(wire) as stream:
        tensors = list(zip(wire, stream, strict=True))
    filled = [(meta, sink.buffer(meta, CPU).copy_(tensor)) for meta, tensor in tensors]
    sink.ready(filled)
    report = sink.finish()
    assert report.direct_bytes == trainer.norm.num_batches_tracked.nbytes
    assert_equal(receiver, trainer)


def test_strided_and_inference_receivers():
    trainer = nn.Linear(4, 3)
    receiver = nn.Linear(4, 3)
    receiver.weight = nn.Parameter(torch.zeros(4, 3).t())
    _, report = sync(trainer, ModuleSink(receiver))
    assert_equal(receiver, trainer)
    assert report.direct_bytes == trainer.bias.nbytes
    with torch.inference_mode():
        receiver = nn.Linear(4, 3)
        receiver.weight = nn.Parameter(torch.zeros(4, 3).t(), requires_grad=False)
    sync(trainer, ModuleSink(receiver))
    assert_equal(receiver, trainer)


def test_wrapped_on_either_side():
    trainer, receiver = Net(seed=1), Net(seed=2)
    plain = Net(seed=1)
    trainer.proj = checkpoint_wrapper(trainer.proj)
    sync(torch.compile(trainer, backend="eager"), ModuleSink(receiver))
    assert_equal(receiver, plain)
    receiver = Net(seed=2)
    sync(plain, ModuleSink(torch.compile(receiver, backend="eager")))
    assert_equal(receiver, plain)


class TestTied:
    def test_tied_fills_both_of_an_untied_receiver(self):
        trainer, receiver = Net(seed=1), Net(seed=2, tied=False)
        wire, _ = sync(trainer, ModuleSink(receiver))
        assert sum("head.weight" in meta.names for meta in wire) == 1
        assert torch.equal(receiver.head.weight, trainer.embed.weight)
        assert torch.equal(receiver.embed.weight, trainer.embed.weight)
        assert receiver.head.weight.data_ptr() != receiver.embed.weight.data_ptr()

    def test_both_in_their_own_dtypes(self):
        trainer, receiver = Net(seed=1), Net(seed=2, tied=False)
        receiver.head.bfloat16()
        sync(trainer, ModuleSink(receiver))
        assert torch.equal(receiver.head.weight, trainer.embed.weight.bfloat16())
        assert torch.equal(receiver.embed.weight, trainer.embed.weight)

    def test_untied_does_not_fit_a_tied_receiver(self):
        manifest = WeightSource(Net(seed=1, tied=False)).manifest()
        problems = ModuleSink(Net(seed=2)).agree(manifest).problems
        assert problems == ("head.weight: two different tensors for one tied weight, the other is embed.weight",)

    @pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
    def test_either_name_fills_a_tied_receiver(self, name):
        receiver = nn.ModuleDict({"embed": nn.Embedding(2, 2), "head": nn.Linear(2, 2, bias=False)})
        receiver["head"].weight = receiver["embed"].weight
        manifest = Manifest((TensorMeta(name=name, shape=(2, 2), dtype="float32"),))
        assert ModuleSink(receiver).agree(manifest).problems == ()

    def test_an_alias_that_the_receiver_lacks_is_no_matter(self):
        manifest = Manifest((TensorMeta(name="gone", shape=(2,), dtype="float32", aliases=("bias", "also.gone")),))
        receiver = nn.Module()
        receiver.bias = nn.Parameter(torch.zeros(2))
        assert ModuleSink(receiver).agree(manifest).problems == ()


def test_everything_that_does_not_fit_is_told_at_once():
    manifest = Manifest(
        (
            TensorMeta(name="weight", shape=(3, 2), dtype="float32"),
            TensorMeta(name="steps", shape=(), dtype="float32"),
            TensorMeta(name="scratch", shape=(1,), dtype="float32"),
            TensorMeta(name="strange", shape=(1,), dtype="float32"),
        )
    )
    receiver = nn.Linear(3, 2)
    receiver.register_buffer("steps", torch.tensor(0))
    receiver.register_buffer("scratch", torch.zeros(1), persistent=False)
    before = {name: tensor.clone() for name, tensor in receiver.state_dict().items()}
    sink = ModuleSink(receiver)
    agreement = sink.agree(manifest)
    assert agreement.dtypes == ("float32", "int64", None, None)
    assert [text.split(":")[0] for text in agreement.unknown] == ["scratch", "strange"]
    assert agreement.missing == ("bias",)
    assert agreement.mismatched == (
        "weight: shape (3, 2) from the trainer, (2, 3) held as weight",
        "steps: float32 from the trainer cannot be cast to int64 held as steps",
    )
    with pytest.raises(ManifestMismatch) as caught:
        sink.begin(manifest)
    assert caught.value.problems == agreement.problems
    assert all(torch.equal(tensor, before[name]) for name, tensor in receiver.state_dict().items())


def test_a_sync_that_is_not_whole():
    trainer, sink = nn.Linear(2, 2), ModuleSink(nn.Linear(2, 2))
    wire = WeightSource(trainer).manifest()
    with pytest.raises(SyncError):
        sink.finish()
    sink.begin(wire)
    first = wire.tensors[0]
    sink.ready([(first, sink.buffer(first, CPU))])
    with pytest.raises(SyncError, match="1 tensors never came: bias"):
        sink.finish()
    sink.abandon()
    sync(trainer, sink)


def test_a_buffer_elsewhere_is_its_own():
    receiver = nn.Linear(2, 2)
    sink = ModuleSink(receiver)
    wire = WeightSource(receiver).manifest()
    sink.begin(wire)
    assert sink.buffer(wire.tensors[0], torch.device("meta")).device.type == "meta"
    assert sink.buffer(wire.tensors[0], torch.device("cpu", 0)).data_ptr() == receiver.weight.data_ptr()
    half = Manifest(wire.tensors).with_dtypes(["bfloat16", "bfloat16"])
    sink.begin(half)
    one, two = (sink.buffer(half.tensors[0], CPU) for _ in range(2))
    assert one.data_ptr() != two.data_ptr()


def test_pieces_are_what_is_held():
    receiver = Net(seed=2, tied=False)
    receiver.proj.weight = nn.Parameter(torch.randn(4, 4).t())
    manifest = WeightSource(Net(seed=1)).manifest()
    sink = ModuleSink(receiver)
    pieces, absent = sink.pieces(manifest, None)
    assert absent == []
    state = receiver.state_dict()
    for piece in pieces:
        assert piece.size == piece.shape == tuple(state[piece.name].shape)
    held = {(piece.name, piece.sha256) for piece in pieces}
    for name, tensor in state.items():
        known_as = "embed.weight" if name == "head.weight" else name
        assert (known_as, hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()) in held
    pieces, absent = sink.pieces(manifest, ["scale", "head.weight", "nowhere"])
    assert sorted(piece.name for piece in pieces) == ["embed.weight", "embed.weight", "scale"]
    assert absent == ["nowhere"]
    del receiver.scale
    assert sink.pieces(manifest, ["scale"]) == ([], ["scale"])


def test_facts():
    sink = ModuleSink(nn.Linear(2, 3))
    assert sink.device == CPU
    assert sink.describe() == {"kind": "module", "device": "cpu", "tensors": 2, "nbytes": 36}


def test_sharded_and_empty_receivers_are_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    manifest = WeightSource(nn.Linear(2, 2)).manifest()
    with pytest.raises(UnsupportedModel, match="meta device"):
        ModuleSink(nn.Linear(2, 2, device="meta")).agree(manifest)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        receiver = nn.Linear(2, 2)
        fully_shard(receiver, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedModel, match="weight: the receiving module is sharded"):
            ModuleSink(receiver).agree(manifest)
    finally:
        dist.destroy_process_group()
