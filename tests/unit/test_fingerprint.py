"""Every change of a module tree that a sync must notice changes its fingerprint; a training step does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from twinkle_ray.errors import ManifestMismatch, UnsupportedModel
from twinkle_ray.fingerprint import Fingerprint
from twinkle_ray.sources import WeightSource


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.bare = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def resized(net: Net) -> None:
    net.embed = nn.Embedding(7, 4)


def equal_in_its_place(net: Net) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())


def moved_elsewhere(net: Net) -> None:
    net.head.weight.data = net.head.weight.data.clone()


def cast(net: Net) -> None:
    net.half()


def tied(net: Net) -> None:
    net.head.weight = net.embed.weight


def tied_by_memory(net: Net) -> None:
    net.head.weight.data = net.embed.weight.data


def renamed(net: Net) -> None:
    net.head._parameters["w"] = net.head._parameters.pop("weight")


def pruned(net: Net) -> None:
    prune.identity(net.head, "weight")


def grown(net: Net) -> None:
    net.layers.append(nn.Linear(4, 4))


def shrunk(net: Net) -> None:
    del net.layers[2]


def swapped(net: Net) -> None:
    net.layers[0], net.layers[1] = net.layers[1], net.layers[0]


def wrapped(net: Net) -> None:
    net.head = nn.Sequential(net.head)  # type: ignore[assignment]


def with_a_bias(net: Net) -> None:
    net.bare.bias = nn.Parameter(torch.zeros(4))


def without_a_bias(net: Net) -> None:
    net.layers[0].bias = None


def with_a_buffer(net: Net) -> None:
    net.head.register_buffer("scale", torch.ones(1))


def with_a_child(net: Net) -> None:
    net.head.add_module("adapter", nn.Linear(2, 2))


def persistent_now(net: Net) -> None:
    net._non_persistent_buffers_set.discard("scratch")


CHANGES: list[Callable[[Net], None]] = [
    resized,
    equal_in_its_place,
    moved_elsewhere,
    cast,
    tied,
    tied_by_memory,
    renamed,
    pruned,
    grown,
    shrunk,
    swapped,
    wrapped,
    with_a_bias,
    without_a_bias,
    with_a_buffer,
    with_a_child,
    persistent_now,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_tree_is_seen_and_sent_as_it_is_now(change: Callable[[Net], None]) -> None:
    net = Net()
    fingerprint, source = Fingerprint(net), WeightSource(net)
    before = source.manifest()
    change(net)
    assert not fingerprint.holds()
    expected = net.state_dict()
    now = source.manifest()
    sent = dict(zip((meta.name for meta in now), source.tensors(now), strict=True))
    assert {name for meta in now for name in meta.names} == set(expected)
    for name, value in sent.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name])
    if now != before:
        with pytest.raises(ManifestMismatch):
            source.tensors(before, before.digest)


def test_training_changes_no_fingerprint_and_what_is_sent_is_of_after_the_step() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    fingerprint, source = Fingerprint(net), WeightSource(net)
    wire = source.manifest()
    net.head(net.norm(net.embed(torch.tensor([1, 2, 3])))).sum().backward()
    optimizer.step()
    net.requires_grad_(False).eval()
    assert fingerprint.holds()
    assert source.manifest() is wire
    expected = list(net.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(source.tensors(wire), expected, strict=True))


def test_another_view_of_the_same_memory_is_caught_when_it_is_sent() -> None:
    net = Net()
    source = WeightSource(net)
    wire = source.manifest()
    net.embed.weight.data = net.embed.weight.data.view(4, 6)
    with pytest.raises(ManifestMismatch, match=r"embed\.weight"):
        list(source.tensors(wire))


def test_a_transposed_view_of_the_same_memory_is_sent_by_its_elements() -> None:
    net = nn.Linear(4, 4, bias=False)
    source = WeightSource(net)
    wire = source.manifest()
    net.weight.data = net.weight.data.t()
    (sent,) = source.tensors(wire)
    assert torch.equal(sent, net.weight.detach())
    assert sent.is_contiguous()


def test_freed_memory_is_refused() -> None:
    net = Net()
    source = WeightSource(net)
    source.manifest()
    net.head.weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedModel, match="freed"):
        source.manifest()
