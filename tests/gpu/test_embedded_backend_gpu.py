# SPDX-License-Identifier: Apache-2.0
"""The embedded backend with KV memory on a GPU: byte-exact both ways, and in the right order."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_kv import (
    BLOCK_COUNT,
    LAYER_COUNT,
    PATIENCE_S,
    RANGE_BYTES,
    DeviceKV,
    Shape,
    assert_round_trip,
    keys,
    make_kv,
    run,
    site,
)

from umbp.backends.base import TransferOutcome, TransferPart
from umbp.backends.embedded import EmbeddedBackend, EmbeddedOptions, EmbeddedPool
from umbp.backends.mori_library import MoriLibrary
from umbp.backends.staged_transfers import SLOT_BYTES, SLOTS_PER_RING, StagedTransfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OBJECT_BYTES = LAYER_COUNT * RANGE_BYTES
OBJECT_COUNT = 64
"""Of the first group: 45 MiB, more than two slots."""
THREADS = 2
DONE = TransferOutcome.DONE


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


Open = Callable[..., EmbeddedPool]


@pytest.fixture
def open_pool(mori: MoriLibrary, device: torch.device) -> Iterator[Open]:
    """Opens pools that hold all objects of a test; closes them at the end."""
    pools: list[EmbeddedPool] = []

    def open_one(kv: DeviceKV, **options: Any) -> EmbeddedPool:
        chosen = EmbeddedOptions(
            capacity_bytes=4 * OBJECT_COUNT * OBJECT_BYTES, transfer_threads=THREADS, **options
        )
        pool = EmbeddedBackend.open_worker(chosen, site(device))
        pools.append(pool)
        pool.register(kv.memory)
        return pool

    yield open_one
    for pool in pools:
        pool.close(PATIENCE_S)


@pytest.mark.parametrize("shape", Shape, ids=lambda shape: shape.name)
@pytest.mark.parametrize("device_staging", [None, True, False])
def test_what_was_stored_is_loaded_into_other_blocks_and_nothing_else_changes(
    open_pool: Open, device: torch.device, shape: Shape, device_staging: bool | None
) -> None:
    kv = make_kv(device, shape)
    assert_round_trip(open_pool(kv, device_staging=device_staging), kv, OBJECT_COUNT)


def test_a_store_sees_what_the_device_wrote_before_its_fence(
    open_pool: Open, device: torch.device
) -> None:
    kv = make_kv(device, Shape.PER_LAYER)
    pool = open_pool(kv)
    for value in (5, 6, 7):
        written = torch.cuda.Event()
        torch.cuda._sleep(50_000_000)
        for region in kv.memory.regions:
            region.tensor.fill_(value)
        written.record()
        part = TransferPart(0, [b"%d" % value], [3])
        assert run(pool, "store", [part], fence=written.synchronize).outcome is DONE
        kv.wipe()
        torch.cuda.synchronize()
        assert run(pool, "load", [TransferPart(0, part.keys, [4])]).outcome is DONE
        assert kv.read(0, 4) == bytes([value]) * OBJECT_BYTES


def test_a_load_that_is_done_is_seen_by_every_stream(open_pool: Open, device: torch.device) -> None:
    kv = make_kv(device, Shape.PER_LAYER)
    pool = open_pool(kv)
    content = [kv.fill(0, block, seed=block) for block in range(OBJECT_COUNT)]
    torch.cuda.synchronize()
    blocks = np.arange(OBJECT_COUNT)
    assert run(pool, "store", [TransferPart(0, keys(0, OBJECT_COUNT), blocks)]).outcome is DONE
    for round_index in range(5):
        kv.wipe()
        torch.cuda.synchronize()
        order = np.random.default_rng(round_index).permutation(BLOCK_COUNT)[:OBJECT_COUNT]
        assert run(pool, "load", [TransferPart(0, keys(0, OBJECT_COUNT), order)]).outcome is DONE
        with torch.cuda.stream(torch.cuda.Stream()):
            last = kv.read(0, int(order[-1]))
        assert last == content[-1]


@pytest.mark.parametrize("kind", ["store", "load"])
def test_the_device_is_not_held_up_by_a_transfer(
    open_pool: Open, device: torch.device, kind: str
) -> None:
    """Neither gathering nor MORI's copies wait for the stream on which the model computes."""
    kv = make_kv(device, Shape.WHOLE)
    pool = open_pool(kv)
    part = TransferPart(0, keys(0, OBJECT_COUNT), np.arange(OBJECT_COUNT))
    assert run(pool, "store", [part]).outcome is DONE
    assert run(pool, "load", [part]).outcome is DONE
    other = part if kind == "load" else TransferPart(0, [b"another"], [0])
    busy = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)
    busy.record()
    assert run(pool, kind, [other]).outcome is DONE
    assert not busy.query()
    torch.cuda.synchronize()


def test_missing_objects_are_named_and_leave_their_blocks_alone(
    open_pool: Open, device: torch.device
) -> None:
    kv = make_kv(device, Shape.PER_LAYER)
    pool = open_pool(kv)
    content = [kv.fill(0, block, seed=block) for block in range(10)]
    torch.cuda.synchronize()
    assert run(pool, "store", [TransferPart(0, [b"a", b"c"], [0, 2])]).outcome is DONE
    result = run(pool, "load", [TransferPart(0, [b"a", b"b", b"c"], [7, 8, 9])])
    assert (result.outcome, result.failed_keys) == (TransferOutcome.FAILED, (b"b",))
    assert [kv.read(0, block) for block in (7, 8, 9)] == [content[0], content[8], content[2]]


def test_on_an_nvidia_gpu_objects_are_gathered_in_a_bounded_part_of_its_memory(
    open_pool: Open, device: torch.device, mori: MoriLibrary
) -> None:
    if not mori.is_on_cuda:
        pytest.skip("needs native/hip_cuda")
    pool = open_pool(make_kv(device, Shape.PER_LAYER))
    assert pool._opened is not None
    transfers = pool._opened.transfers
    assert isinstance(transfers, StagedTransfers)
    (ring,) = transfers.regions
    assert ring.size_bytes == THREADS * SLOTS_PER_RING * SLOT_BYTES
    assert ring.tensor.device == device
    assert os.environ["UMBP_DRAM_GATHER_KERNEL"] == "0"
