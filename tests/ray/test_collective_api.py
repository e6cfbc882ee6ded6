"""Ray's own collective API on our groups, in actors. The oracle is numpy."""

import numpy as np
import pytest
import ray
import torch
from ray.util import collective
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

from twinkle_ray.backends import Meeting, create_group, destroy_group, register, unique_group_name
from twinkle_ray.errors import ConfigError, ManifestMismatch
from twinkle_ray.types import Deadline

pytestmark = pytest.mark.cpu("tests/ascend/test_collective_api.py has the same tests on NPUs")

WORLD = 3


class MemberBase:
    backend = "TWINKLE_GLOO"

    def __init__(self, rank):
        torch.set_num_threads(1)
        self.rank = rank

    def placed(self, tensor):
        return tensor

    def open(self, name):
        self.meeting = Meeting.open(name, self.backend)
        return self.meeting.rendezvous

    def join(self, rendezvous):
        self.name = rendezvous.group
        self.group = create_group(self.backend, WORLD, self.rank, rendezvous.group)
        self.group.connect(rendezvous, Deadline.after(20), self.meeting if self.rank == 0 else None)
        try:
            create_group(self.backend, WORLD, self.rank, rendezvous.group)
        except ConfigError as error:
            return str(error)
        return ""

    def seen(self):
        return (
            collective.get_group_handle(self.name) is self.group,
            collective.get_rank(self.name),
            collective.get_collective_group_size(self.name),
            collective.is_backend_available(self.backend),
            self.group.backend(),
        )

    def make(self, kind, seed):
        """A 4 x 6 tensor of this rank: contiguous or not, torch or numpy."""
        base = np.random.default_rng(seed).integers(1, 5, (6, 4)).astype(np.float32)
        match kind:
            case "torch":
                return self.placed(torch.from_numpy(base.T.copy()))
            case "numpy":
                return base.T.copy()
            case "torch transposed":
                return self.placed(torch.from_numpy(base.copy())).t()
            case "torch column slice":
                return self.placed(torch.from_numpy(np.concatenate([base.T, base.T], 1)))[:, 6:]
            case "numpy transposed":
                return base.copy().T
            case "numpy reversed":
                return base.T[::-1].copy()[::-1]
            case "parameter":
                return torch.nn.Parameter(self.placed(torch.from_numpy(base.T.copy())))
        raise ValueError(kind)

    def op(self, name, kind, **kwargs):
        mine = self.make(kind, self.rank)
        if name == "allgather":
            outputs = [self.make(kind, 77) for _ in range(WORLD)]
            collective.allgather(outputs, mine, self.name)
            return [plain(output) for output in outputs]
        if name == "reducescatter":
            inputs = [self.make(kind, 10 * self.rank + n) for n in range(WORLD)]
            before = [plain(item) for item in inputs]
            collective.reducescatter(mine, inputs, self.name, **kwargs)
            assert all(np.array_equal(plain(a), b) for a, b in zip(inputs, before, strict=True))
            return plain(mine)
        getattr(collective, name)(mine, group_name=self.name, **kwargs)
        return plain(mine)

    def dtypes(self):
        """Every dtype that torch has, by its bytes, from rank 1."""
        wrong = []
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int16,
            torch.uint16,
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.complex64,
            torch.int64,
        ):
            raw = self.placed(torch.arange(64, dtype=torch.uint8) % 2)
            tensor = raw.view(dtype) if self.rank == 1 else torch.zeros_like(raw).view(dtype)
            collective.broadcast(tensor, 1, self.name)
            if not torch.equal(tensor.view(torch.uint8), raw):
                wrong.append(str(dtype))
        scalar = self.placed(torch.tensor(float(self.rank)))
        collective.broadcast(scalar, 2, self.name)
        empty = self.placed(torch.zeros(0, 4))
        collective.broadcast(empty, 0, self.name)
        collective.barrier(self.name)
        return wrong, float(scalar)

    def pass_on(self):
        """A ring: what the rank before holds."""
        mine, other = self.make("torch transposed", self.rank), self.make("torch column slice", 99)
        if self.rank % 2 == 0:
            collective.send(mine, (self.rank + 1) % WORLD, self.name)
            collective.recv(other, (self.rank - 1) % WORLD, self.name)
        else:
            collective.recv(other, (self.rank - 1) % WORLD, self.name)
            collective.send(mine, (self.rank + 1) % WORLD, self.name)
        return plain(other)

    def differ(self):
        try:
            for _ in range(2):
                collective.broadcast(torch.zeros(4 + self.rank), 0, self.name)
        except Exception as error:
            return type(error)
        return None

    def leave(self):
        destroy_group(self.group)
        return collective.is_group_initialized(self.name)

    def leave_by_ray(self):
        collective.destroy_collective_group(self.name)
        return self.group._destroyed


Member = ray.remote(num_cpus=0.5)(MemberBase)


def plain(value):
    return value.detach().cpu().numpy().copy() if isinstance(value, torch.Tensor) else value.copy()


def original(seed):
    return np.random.default_rng(seed).integers(1, 5, (6, 4)).astype(np.float32).T


@pytest.fixture(scope="module")
def actors(ray_cluster):
    people = [Member.remote(rank) for rank in range(WORLD)]
    yield people
    for actor in people:
        ray.kill(actor)


def call(actors, method, *args, **kwargs):
    return ray.get([getattr(actor, method).remote(*args, **kwargs) for actor in actors], timeout=60)


def meet(actors):
    rendezvous = ray.get(actors[0].open.remote(unique_group_name("api")), timeout=60)
    return call(actors, "join", rendezvous)


@pytest.fixture
def group(actors):
    for text in meet(actors):
        assert "already" in text
    yield actors
    assert call(actors, "leave") == [False] * WORLD


KINDS = (
    "torch",
    "numpy",
    "torch transposed",
    "torch column slice",
    "numpy transposed",
    "numpy reversed",
    "parameter",
)


@pytest.fixture
def backend():
    return "TWINKLE_GLOO"


@pytest.fixture
def kinds():
    return KINDS


def test_the_group_is_one_of_rays(group, backend):
    assert call(group, "seen") == [(True, rank, WORLD, True, backend) for rank in range(WORLD)]


def test_every_operation_with_every_kind_of_tensor(group, kinds):
    originals = [original(rank) for rank in range(WORLD)]
    scattered = [sum(original(10 * rank + n) for rank in range(WORLD)) for n in range(WORLD)]
    for kind in kinds:
        for got in call(group, "op", "broadcast", kind, src_rank=1):
            np.testing.assert_array_equal(got, originals[1], err_msg=kind)
        for got in call(group, "op", "allreduce", kind):
            np.testing.assert_array_equal(got, sum(originals), err_msg=kind)
        for gathered in call(group, "op", "allgather", kind):
            np.testing.assert_array_equal(gathered, originals, err_msg=kind)
        for rank, got in enumerate(call(group, "op", "reduce", kind, dst_rank=2)):
            np.testing.assert_array_equal(got, sum(originals) if rank == 2 else originals[rank], err_msg=kind)
        for rank, got in enumerate(call(group, "op", "reducescatter", kind)):
            np.testing.assert_array_equal(got, scattered[rank], err_msg=kind)


@pytest.mark.parametrize(
    ("op", "oracle"), [(ReduceOp.PRODUCT, np.prod), (ReduceOp.MIN, np.min), (ReduceOp.MAX, np.max)]
)
def test_the_other_reductions(group, op, oracle):
    expected = oracle(np.stack([original(rank) for rank in range(WORLD)]), axis=0)
    for got in call(group, "op", "allreduce", "torch", op=op):
        np.testing.assert_array_equal(got, expected)


def test_every_dtype_and_odd_shapes(group):
    assert call(group, "dtypes") == [([], 2.0)] * WORLD


def test_send_and_recv(group):
    for rank, got in enumerate(call(group, "pass_on")):
        np.testing.assert_array_equal(got, original((rank - 1) % WORLD))


def test_unequal_sizes_are_an_error_not_a_crash(group):
    kinds = call(group, "differ")
    assert ManifestMismatch in kinds
    assert None not in kinds


def test_rays_destroy_works_too(actors):
    meet(actors)
    assert call(actors, "leave_by_ray") == [True] * WORLD


def test_registration_in_the_driver_is_idempotent(ray_cluster):
    register()
    register()
    assert collective.is_backend_available("TWINKLE_GLOO")
    assert not collective.is_backend_available("TWINKLE_NCCL")
    assert not collective.is_backend_available("TWINKLE_HCCL")
    assert _global_registry.is_registered("TWINKLE_HCCL")  # so it is known, and cannot work here


def test_a_name_that_another_package_has_taken_is_left_to_it(ray_cluster):
    class Other(BaseGroup):
        @classmethod
        def check_backend_availability(cls):
            return True

    if not _global_registry.is_registered("HCCL"):  # there is no way to take it back
        register_collective_backend("HCCL", Other)
    register()
    assert _global_registry.get("HCCL") is not _global_registry.get("TWINKLE_HCCL")
    assert issubclass(_global_registry.get("HCCL"), BaseGroup)
