"""``HCCLCheckpointEngine``, driven by hand, each rank in a process with a simulated NPU."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from tests.ascend.simulator import IMPATIENT, fake, npus, patient
from tests.ascend.test_hccl_group import buried
from tests.payload import facts, payload
from tests.unit.members import Member, Seat, results
from twinkle_ray.checkpoint_engine import HCCLCheckpointEngine
from twinkle_ray.errors import SyncAborted, SyncError, SyncTimeout

BUCKET = 64 << 10
SYNCS = 20


def joined(seat: Seat, engine: HCCLCheckpointEngine, world_size: int) -> None:
    engine.is_master = seat.rank == 0
    metadata = engine.prepare()
    if seat.rank == 0:
        seat.say(metadata)
    metadata = metadata or seat.hear()
    engine.init_process_group(seat.rank, world_size, master_metadata=metadata)
    assert engine.prepare() == (metadata if seat.rank == 0 else {})
    engine.init_process_group(seat.rank, world_size, master_metadata=metadata)  # in the group that stands


def introduce(people: list[Member]) -> None:
    metadata = people[0].hear()
    for member in people[1:]:
        member.say(metadata)


async def received(engine: HCCLCheckpointEngine) -> list[Any]:
    kept = [(name, tensor) async for name, tensor in engine.receive_weights()]
    assert {tensor.device.type for _, tensor in kept} == {"npu"}
    return [facts(name, tensor) for name, tensor in kept]


def sync(seat: Seat, engine: HCCLCheckpointEngine, seed: int) -> bool:
    tensors = payload(BUCKET, seed, tiny=200)
    if seat.rank == 0:
        asyncio.run(engine.send_weights((name, tensor.to("npu")) for name, tensor in tensors))
        return True
    return asyncio.run(received(engine)) == [facts(name, tensor) for name, tensor in tensors]


def many(seat: Seat) -> Any:
    engine = HCCLCheckpointEngine(BUCKET, timeout=60)
    joined(seat, engine, 4)
    right = [sync(seat, engine, seed) for seed in range(SYNCS)]
    made = fake().fake_calls(b"HcclCommInitRootInfo")
    engine.finalize()
    engine.finalize()
    return right, made, fake().fake_live_comms()


def test_every_kind_of_tensor_in_twenty_syncs_over_one_communicator(library: Path) -> None:
    with npus(library, many, 4) as people:
        introduce(people)
        assert results(people, 90) == [([True] * SYNCS, 1, 0)] * 4


def failing(call: Any) -> tuple[Any, str, float]:
    began = time.monotonic()
    try:
        call()
    except SyncError as error:
        return type(error), str(error), time.monotonic() - began
    raise AssertionError("it did not fail")


def absent_at_the_door(seat: Seat) -> Any:
    engine = HCCLCheckpointEngine(timeout=60)
    said = failing(lambda: joined(seat, engine, 3))
    engine.finalize()
    return (*said, buried())


def test_a_rank_that_does_not_join_is_named_when_the_handshake_is_over(library: Path) -> None:
    with npus(library, absent_at_the_door, 2, TWINKLE_CKPT_HCCL_META_TIMEOUT_S="1") as people:
        introduce(people)
        for kind, text, took, nothing_left in results(people):
            assert kind is SyncTimeout
            assert text.startswith("rank 2 of 3 did not come within 1.0 s")
            assert 0.8 < took < 2.0
            assert nothing_left


def absent_from_the_transfer(seat: Seat) -> Any:
    engine = HCCLCheckpointEngine(BUCKET, timeout=60)
    joined(seat, engine, 3)
    if seat.rank == 2:
        time.sleep(2.0)
        said: Any = None
    else:
        said = failing(lambda: sync(seat, engine, 0))
    engine.finalize()
    nothing_left = buried()
    patient()
    del os.environ["TWINKLE_CKPT_HCCL_META_TIMEOUT_S"]
    engine = HCCLCheckpointEngine(BUCKET, timeout=60)
    joined(seat, engine, 3)
    right = sync(seat, engine, 1)
    engine.finalize()
    return said, nothing_left, right, buried()


def test_a_rank_that_does_not_come_to_a_transfer_ends_it_before_anything_is_sent(library: Path) -> None:
    with npus(library, absent_from_the_transfer, 3, TWINKLE_CKPT_HCCL_META_TIMEOUT_S="1", **IMPATIENT) as people:
        introduce(people)
        introduce(people)
        ends = results(people, 60)
    for (kind, text, took), *_ in ends[:2]:
        assert kind in (SyncTimeout, SyncAborted)
        assert "TWINKLE_CKPT_HCCL_META_TIMEOUT_S" in text or "waited 1.0 s" in text
        assert 0.8 < took < 2.0
    assert "TWINKLE_CKPT_HCCL_META_TIMEOUT_S" in " ".join(text for (_, text, _), *_ in ends[:2])
    assert [well for _, *well in ends] == [[True] * 3] * 3
