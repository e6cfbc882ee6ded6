"""Ray's own collective API on HCCL groups, in actors: the tests of ``tests/ray``, each actor with a simulated NPU."""

from __future__ import annotations

import pytest
import ray

from tests.ray.conftest import npu_runtime_env
from tests.ray.test_collective_api import (
    KINDS,
    WORLD,
    MemberBase,
    test_every_dtype_and_odd_shapes,
    test_every_operation_with_every_kind_of_tensor,
    test_rays_destroy_works_too,
    test_send_and_recv,
    test_the_group_is_one_of_rays,
    test_the_other_reductions,
)
from tests.ray.test_collective_api import group as group

__all__ = [
    "test_every_dtype_and_odd_shapes",
    "test_every_operation_with_every_kind_of_tensor",
    "test_rays_destroy_works_too",
    "test_send_and_recv",
    "test_the_group_is_one_of_rays",
    "test_the_other_reductions",
]


class NpuMember(MemberBase):
    backend = "TWINKLE_HCCL"

    def __init__(self, rank):
        super().__init__(rank)
        import torch_npu  # noqa: F401

    def placed(self, tensor):
        return tensor.to("npu")


@pytest.fixture(scope="module")
def actors(ray_cluster, root, library):
    kind = ray.remote(resources={"NPU": 1}, runtime_env=npu_runtime_env(root, library))(NpuMember)
    people = [kind.remote(rank) for rank in range(WORLD)]
    yield people
    for actor in people:
        ray.kill(actor)


@pytest.fixture
def backend():
    return "TWINKLE_HCCL"


@pytest.fixture
def kinds():
    return [kind for kind in KINDS if not kind.startswith("numpy")]
