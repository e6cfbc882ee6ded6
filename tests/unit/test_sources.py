"""What a trainer sends. Oracles: ``state_dict``, hand-written lists, and torch's own cast."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from twinkle_ray.errors import ConfigError, ManifestMismatch, UnsupportedModel
from twinkle_ray.manifest import Manifest, TensorMeta
from twinkle_ray.sources import WeightSource, collect, device_of, reject_adapters


class Net(nn.Module):
    """Tied head, persistent and scratch buffers, a strided and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("gate_bias", torch.randn(3, dtype=torch.float64))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def taken(source: WeightSource, wire: Manifest) -> dict[str, torch.Tensor]:
    with source.tensors(wire) as stream:
        return dict(zip([meta.name for meta in wire], stream, strict=True))


def test_parameters_and_persistent_buffers_in_the_order_of_state_dict():
    net = Net()
    source = WeightSource(net)
    manifest = source.manifest()
    state = net.state_dict()
    assert [meta.name for meta in manifest] == [name for name in state if name != "head.weight"]
    assert [name for meta in manifest for name in meta.aliases] == ["head.weight"]
    sent = taken(source, manifest)
    for meta in manifest:
        assert (meta.shape, meta.dtype) == (tuple(state[meta.name].shape), str(state[meta.name].dtype)[6:])
        assert sent[meta.name].is_contiguous()
        assert not sent[meta.name].requires_grad
        torch.testing.assert_close(sent[meta.name], state[meta.name], rtol=0, atol=0)
    buffers = {name for name, _ in net.named_buffers()} - {"scratch"}
    assert {meta.name for meta in manifest if meta.kind == "buffer"} == buffers


def test_memory_is_shared_where_it_can_be_and_only_there():
    net = Net()
    source = WeightSource(net)
    manifest = source.manifest()
    wire = manifest.with_dtypes("float16" if meta.name == "scale" else meta.dtype for meta in manifest)
    sent = taken(source, wire)
    assert sent["embed.weight"].data_ptr() == net.embed.weight.data_ptr()
    assert sent["turned"].data_ptr() != net.turned.data_ptr()
    assert sent["scale"].dtype == torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_one_cast_on_the_way_and_the_trainer_untouched(dtype):
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    source = WeightSource(net)
    manifest = source.manifest()
    wire = manifest.with_dtypes(dtype if meta.dtype.startswith("float") else meta.dtype for meta in manifest)
    for name, tensor in taken(source, wire).items():
        want = before[name].to(getattr(torch, dtype)) if before[name].is_floating_point() else before[name]
        assert torch.equal(tensor, want)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_views_of_one_storage_are_tied_only_if_they_are_the_same_view():
    wide = torch.arange(12.0).view(3, 4)
    net = nn.Module()
    net.left = nn.Parameter(wide[:, :2])
    net.again = nn.Parameter(wide[:, :2])
    net.right = nn.Parameter(wide[:, 2:])
    net.all = nn.Parameter(wide)
    net.turned = nn.Parameter(wide[:, :2].as_strided((3, 2), (1, 4)))
    net.bits = nn.Parameter(wide.view(torch.int32), requires_grad=False)
    net.no_rows = nn.Parameter(torch.empty(0, 2))
    net.no_rows_either = nn.Parameter(torch.empty(0, 2))
    source = WeightSource(net)
    names = [meta.names for meta in source.manifest()]
    assert names == [("left", "again"), ("right",), ("all",), ("turned",), ("bits",), ("no_rows",), ("no_rows_either",)]
    assert torch.equal(taken(source, source.manifest())["right"], wide[:, 2:])


def test_a_lazy_conjugate_is_another_tensor():
    net = nn.Module()
    net.register_buffer("z", torch.tensor([1 + 2j, 3 - 4j]))
    net.register_buffer("conjugate", net.z.conj())
    source = WeightSource(net)
    sent = taken(source, source.manifest())
    assert sent["z"].tolist() == [1 + 2j, 3 - 4j]
    assert sent["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert not sent["conjugate"].is_conj()


def test_a_shared_module_is_sent_once():
    net = nn.Module()
    net.a = nn.Linear(2, 2)
    net.b = net.a
    assert [meta.names for meta in WeightSource(net).manifest()] == [("a.weight", "b.weight"), ("a.bias", "b.bias")]


def test_wrapped_and_plain_have_one_manifest():
    plain = WeightSource(Net()).manifest()
    net = Net()
    net.norm = checkpoint_wrapper(net.norm)
    wrapped = WeightSource(torch.compile(net, backend="eager"))
    assert wrapped.manifest() == plain
    assert len(taken(wrapped, plain)) == len(plain)


def test_the_manifest_follows_the_model():
    net = Net()
    source = WeightSource(net)
    old = source.manifest()
    with torch.no_grad():
        net.scale += 1
    assert source.manifest() is old
    net.embed.weight.data = torch.randn(8, 4)
    assert {meta.name: meta.shape for meta in source.manifest()}["embed.weight"] == (8, 4)
    with pytest.raises(ManifestMismatch, match=r"embed\.weight"):
        source.tensors(old)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    assert all(meta.aliases == () for meta in source.manifest())
    net.norm.to(torch.bfloat16)
    assert {meta.dtype for meta in source.manifest()} >= {"bfloat16"}
    net.extra = nn.Linear(1, 1)
    with pytest.raises(ManifestMismatch, match="tensors"):
        source.gather_only(old)


def test_integers_are_never_cast():
    net = Net()
    source = WeightSource(net)
    wire = source.manifest().with_dtypes("float32" for _ in source.manifest())
    with pytest.raises(ManifestMismatch, match="num_batches_tracked"):
        source.tensors(wire)


class Coloured(torch.Tensor):
    pass


class Packed(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.empty(2, device="meta"), r"1 tensors are on the meta device.*net\.bad"),
        (torch.zeros(2).as_subclass(Coloured), r"net\.bad: a Coloured"),
        (torch.eye(2).to_sparse(), r"net\.bad: its layout"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), r"net\.bad: its dtype torch\.qint8"),
        (Packed(torch.zeros(2)), r"net\.bad: a Packed"),
        (nn.UninitializedParameter(), r"net\.bad: a UninitializedParameter"),
    ],
)
def test_what_is_no_plain_bytes_is_refused_by_name(tensor, match):
    root = nn.Module()
    root.net = nn.Linear(1, 1)
    if isinstance(tensor, nn.Parameter):
        root.net.register_parameter("bad", tensor)
    else:
        root.net.register_buffer("bad", tensor)
    with pytest.raises(UnsupportedModel, match=match):
        WeightSource(root).manifest()


def test_freed_storage_is_refused():
    net = nn.Linear(2, 2)
    net.weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedModel, match="weight: its storage is freed"):
        WeightSource(net).manifest()


@pytest.mark.parametrize("weights", [nn.ReLU(), lambda: iter(())])
def test_no_weights(weights):
    with pytest.raises(ConfigError, match="the trainer has no weights"):
        WeightSource(weights).manifest()


def test_an_iterator_is_not_a_source():
    with pytest.raises(ConfigError, match="list_iterator"):
        WeightSource(iter([]))


class TestNamedWeights:
    def test_is_called_anew_and_keeps_nothing(self):
        calls = []
        alive = weakref.WeakSet()

        def named_weights():
            calls.append(1)
            for index in range(4):
                # the consumer, and the loop that holds the last one
                assert len(alive) <= 2
                tensor = torch.full((2, 3), float(index)).t()
                alive.add(tensor)
                yield f"w{index}", tensor
                del tensor

        source = WeightSource(named_weights)
        manifest = source.manifest()
        assert [(meta.name, meta.shape) for meta in manifest] == [(f"w{i}", (3, 2)) for i in range(4)]
        for _ in range(2):
            assert [tensor.mean().item() for tensor in source.tensors(manifest)] == [0, 1, 2, 3]
        assert len(calls) == 3
        assert not alive

    def test_one_reused_buffer_is_not_taken_for_a_tie(self):
        buffer = torch.zeros(2)

        def named_weights():
            for index in range(3):
                yield f"w{index}", buffer.fill_(index)

        assert len(WeightSource(named_weights).manifest()) == 3  # and is refused when it is to be sent

    def test_duplicates(self):
        with pytest.raises(ConfigError, match="two tensors are named 'a'"):
            WeightSource(lambda: [("a", torch.zeros(1)), ("a", torch.zeros(1))]).manifest()

    @pytest.mark.parametrize(
        ("second", "match"),
        [
            ([("a", torch.zeros(2))], "b: agreed, but"),
            ([("a", torch.zeros(2)), ("c", torch.zeros(2))], "c: yielded where b"),
            ([("a", torch.zeros(2)), ("b", torch.zeros(3))], r"b: shape \(3,\)"),
            ([("a", torch.zeros(2)), ("b", torch.zeros(2, dtype=torch.int8))], "b: dtype torch.int8"),
            ([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(2))], "c: yielded after all 2"),
        ],
    )
    def test_a_changed_model(self, second, match):
        rounds = iter([[("a", torch.zeros(2)), ("b", torch.zeros(2))], second, second])
        source = WeightSource(lambda: next(rounds))
        manifest = source.manifest()
        with pytest.raises(ManifestMismatch, match=match):
            taken(source, manifest)
        with pytest.raises(ManifestMismatch, match=match):
            source.gather_only(manifest)

    def test_leaving_early_walks_to_the_end(self):
        walked = []

        def named_weights():
            for index in range(4):
                walked.append(index)
                yield f"w{index}", torch.zeros(1)

        source = WeightSource(named_weights)
        manifest = source.manifest()
        walked.clear()
        with source.tensors(manifest):
            pass
        assert walked == [0, 1, 2, 3]

    def test_its_own_error_comes_through(self):
        def named_weights():
            yield "a", torch.zeros(1)
            raise OSError("disk")

        with pytest.raises(OSError, match="disk"):
            taken(WeightSource(named_weights), Manifest((TensorMeta(name="a", shape=(1,), dtype="float32"),)))


def test_adapters_are_refused_where_tensors_are_received():
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(4, 4))
    reject_adapters(net)
    wrapped = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0"]))
    for module in (wrapped, wrapped.base_model.model, wrapped.base_model.model[0]):
        with pytest.raises(UnsupportedModel, match="PEFT adapters"):
            reject_adapters(module)
        with pytest.raises(UnsupportedModel, match="PEFT adapters"):
            list(collect(module))


def test_peft_and_dynamo_are_not_imported_for_it():
    code = (
        "import sys, torch; from twinkle_ray.sources import WeightSource;"
        "WeightSource(torch.nn.Linear(2, 2)).manifest();"
        "print([m for m in ('peft', 'torch._dynamo', 'torch.distributed.tensor') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert run.stdout.strip() == "[]"


def test_device():
    net = Net()
    assert device_of(net) == WeightSource(net).device() == torch.device("cpu")
    meta = torch.empty(1, device="meta")
    assert device_of([("m", meta), ("w", torch.zeros(1))]) == torch.device("cpu")
    with pytest.raises(ConfigError):
        device_of([("m", meta)])


# two trainer ranks, FSDP2 and FSDP1 on CPU


def sharded_net() -> nn.Module:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False), nn.BatchNorm1d(3), nn.Embedding(6, 3))
    net.append(nn.Linear(3, 6, bias=False))
    net[4].weight = net[3].weight
    net.one_row = nn.Parameter(torch.randn(1, 3))
    return net


def fsdp2(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    full = sharded_net().state_dict()
    net = sharded_net()
    mesh = init_device_mesh("cpu", (world,))
    for layer in net[:2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert type(net[0].weight).__name__ == "DTensor"
    source = WeightSource(net)
    manifest = source.manifest()
    assert [meta.name for meta in manifest] == [name for name in full if name != "4.weight"]
    assert source.device() == torch.device("cpu")
    half = manifest.with_dtypes("bfloat16" if meta.dtype == "float32" else meta.dtype for meta in manifest)

    digests: list[str] = [""] * world
    dist.all_gather_object(digests, manifest.digest)
    assert len(set(digests)) == 1

    def everything(wire: Manifest) -> None:
        if rank:
            source.gather_only(wire)
            return
        sent = taken(source, wire)
        for meta in wire:
            want = full[meta.name].to(getattr(torch, meta.dtype))
            assert torch.equal(sent[meta.name], want), meta.name
            assert sent[meta.name].is_contiguous()

    def fail_after(tensors: int, wire: Manifest) -> None:
        with source.tensors(wire) as stream:
            for _ in range(tensors):
                next(stream)
            raise OSError("wire")

    everything(manifest)
    everything(half)

    # rank 0 fails: before its first tensor, amid, and with an error in its hands
    for stop_after in (0, 1, 4):
        if rank:
            source.gather_only(half)
        else:
            with pytest.raises(OSError, match="wire"):
                fail_after(stop_after, half)
        dist.barrier()
        everything(manifest)

    # an optimizer steps on the shards, while the module may still show what an earlier forward pass gathered
    shards = net[0].weight
    net[0](torch.zeros(2, 4))
    net[1](torch.zeros(2, 5))
    for layer in net[:2]:
        layer.unshard()
    assert type(net[0].weight).__name__ == "Parameter"
    with torch.no_grad():
        shards.mul_(2)
    full["0.weight"] *= 2
    assert source.manifest().digest == manifest.digest
    everything(manifest)

    # a user's function over the same shards, and one that changed
    named = WeightSource(lambda: net.named_parameters())
    agreed = named.manifest()
    if rank:
        named.gather_only(agreed)
    else:
        assert all(torch.equal(tensor, full[name]) for name, tensor in taken(named, agreed).items())
    other = WeightSource(lambda: reversed(list(net.named_parameters())))
    with pytest.raises(ManifestMismatch, match="yielded where"):
        other.gather_only(agreed) if rank else taken(other, agreed)
    dist.barrier()


def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(nn.Linear(3, 5), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="FSDP1"):
        WeightSource(net).manifest()


def trainer_rank(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    fsdp1()
    fsdp2(rank, world)
    dist.destroy_process_group()


@pytest.mark.timeout(200)
def test_two_sharded_ranks(tmp_path):
    mp.spawn(trainer_rank, args=(2, str(tmp_path / "store")), nprocs=2)


def test_fsdp1_of_one_rank_sends_its_original_parameters(tmp_path):
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        plain = nn.Linear(3, 5)
        want = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        source = WeightSource(FullyShardedDataParallel(plain, use_orig_params=True, device_id=torch.device("cpu")))
        sent = taken(source, source.manifest())
        assert sent.keys() == want.keys()
        assert all(torch.equal(sent[name], want[name]) for name in want)
    finally:
        dist.destroy_process_group()


class TestOneBufferForAll:
    """A16: several tensors wait for one launch, so memory that is filled again would be sent as it is in the end."""

    def refilled(self):
        buffer = torch.empty(4)
        for i in range(3):
            yield f"w{i}", buffer.fill_(float(i))

    def test_a16_a_function_that_refills_one_buffer_is_refused(self):
        source = WeightSource(self.refilled)
        with (
            source.tensors(source.manifest()) as stream,
            pytest.raises(ConfigError, match=r"yields w1 in memory .* as w0"),
        ):
            list(stream)

    def test_a16_views_of_one_tensor_and_memory_that_was_let_go_are_sent(self):
        whole = torch.arange(12.0)

        def views():
            for i in range(3):
                yield f"view{i}", whole[4 * i : 4 * i + 4]
            for i in range(20):
                yield f"fresh{i}", torch.full((4,), float(i))

        source = WeightSource(views)
        manifest = source.manifest()
        with source.tensors(manifest) as stream:
            sent = [tensor.clone() for tensor in stream]
        assert torch.equal(torch.cat(sent[:3]), whole)
        assert [float(tensor[0]) for tensor in sent[3:]] == [float(i) for i in range(20)]
