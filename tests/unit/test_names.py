"""Wrapper segments leave the names only where a wrapper stands. Oracle: the plain module's own ``state_dict``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from twinkle_ray.errors import UnsupportedModel
from twinkle_ray.names import clean_names


class Block(nn.Module):
    """Honest submodules whose names look like wrapper segments."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Linear(3, 2)
        self._fsdp_wrapped_module = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(2, 2)})
        self.norm = nn.BatchNorm1d(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 2)


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_clean(wrapped: nn.Module, plain: list[str]) -> None:
    names = clean_names(wrapped)
    assert list(names) == [name for name in wrapped.state_dict(keep_vars=True) if name in names]
    assert list(names.values()) == plain


def test_a_plain_module_keeps_every_name():
    net = Net()
    assert clean_names(net) == {name: name for name in net.state_dict()}


def test_compiled_at_the_root_and_inside():
    plain = list(Net().state_dict())
    net = Net()
    net.module[0] = torch.compile(net.module[0], backend="eager")
    net.module[1].module = torch.compile(net.module[1].module, backend="eager")
    assert_clean(torch.compile(net, backend="eager"), plain)


def test_checkpoint_wrappers_around_each_block():
    plain = list(Net().state_dict())
    net = Net()
    net.module[0] = checkpoint_wrapper(net.module[0])
    net.module[1]._orig_mod = checkpoint_wrapper(net.module[1]._orig_mod)
    names = clean_names(net)
    assert list(names.values()) == plain
    raw = {name for name, _ in [*nn.Module.named_parameters(net), *net.named_buffers()]}
    assert set(names) == raw
    assert set(names) != set(plain)


def test_data_parallel():
    plain = list(Net().state_dict())
    assert_clean(nn.DataParallel(Net()), plain)


@pytest.mark.usefixtures("world_of_one")
def test_ddp_around_compile_around_checkpoint():
    plain = list(Net().state_dict())
    net = Net()
    net.module[0] = checkpoint_wrapper(net.module[0])
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(net, backend="eager"))
    assert list(clean_names(wrapped).values()) == plain


@pytest.mark.usefixtures("world_of_one")
def test_fsdp1_with_original_parameters():
    from torch.distributed.fsdp import FullyShardedDataParallel

    plain = list(Net().state_dict())
    net = Net()
    net.module[1] = FullyShardedDataParallel(net.module[1], use_orig_params=True, device_id=torch.device("cpu"))
    wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    assert list(clean_names(wrapped).values()) == plain


def test_a_shared_submodule_has_all_its_names():
    net = nn.Module()
    net.a = nn.Linear(2, 2)
    net.b = net.a
    assert list(clean_names(net).values()) == list(net.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_non_persistent_buffers_are_named_and_none_is_not():
    net = nn.Module()
    net.register_buffer("scratch", torch.zeros(1), persistent=False)
    net.register_buffer("unset", None)
    net.register_parameter("absent", None)
    assert clean_names(net) == {"scratch": "scratch"}


def test_a_module_that_contains_itself_is_refused():
    net = nn.Linear(1, 1)
    net.me = net
    with pytest.raises(UnsupportedModel, match="contains itself"):
        clean_names(net)
