"""Which parameters of an engine a manifest leaves without a value."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from twinkle_ray.manifest import TensorMeta
from twinkle_ray.vllm.placement import _Recorder


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.weight_scale = nn.Parameter(torch.ones(1))


class Attention(nn.Module):
    """As in vLLM: scales that few checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = nn.Parameter(torch.ones(()))
        self.v_scale = nn.Parameter(torch.ones(()))


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.proj = Linear()
        self.norm = nn.LayerNorm(4)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def uncovered(names: list[str], *, relaid: bool) -> set[str]:
    engine = Engine()
    shapes = {name: tuple(value.shape) for name, value in engine.named_parameters()}
    recorder = _Recorder(engine)
    recorder.try_all([(name, name, TensorMeta(name=name, shape=shapes[name], dtype="float32")) for name in names])
    return set(recorder.uncovered(relaid))


SENT = ["proj.weight", "proj.weight_scale", "norm.weight", "norm.bias"]


def test_scales_of_attention_need_not_be_sent_to_a_quantised_engine() -> None:
    assert uncovered(SENT, relaid=True) == set()
    assert uncovered(SENT, relaid=False) == {"attn.k_scale", "attn.v_scale"}


def test_whoever_sends_one_of_them_sends_them_all() -> None:
    assert uncovered([*SENT, "attn.k_scale"], relaid=True) == {"attn.v_scale"}


def test_a_scale_beside_a_weight_is_missed_and_so_is_all_that_is_no_scalar() -> None:
    assert uncovered(["proj.weight"], relaid=True) == {"proj.weight_scale", "norm.weight", "norm.bias"}
