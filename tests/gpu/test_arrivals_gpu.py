# SPDX-License-Identifier: Apache-2.0
"""Loads that are announced while their last bytes are on their way to a GPU.

The device must wait for them, whoever reads them on whatever stream, and the caller must not.
"""

import time

import numpy as np
import pytest
import torch
from device_kv import BLOCK_COUNT, PATIENCE_S, Shape, keys, make_kv, run, site

from umbp.backends import device_copier
from umbp.backends.base import JobResult, TransferJob, TransferOutcome, TransferPart
from umbp.backends.memory import MemoryOptions, MemoryPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OBJECT_COUNT = BLOCK_COUNT // 2
CAPACITY_BYTES = 512 << 20


@pytest.fixture(params=[Shape.WHOLE, Shape.PER_LAYER, Shape.GROUPS], ids=lambda shape: shape.name)
def stored(request, monkeypatch):
    """A pool with objects of each group, and KV memory that is zero again."""
    monkeypatch.setattr(device_copier, "STAGING_BYTES", 4 << 20)
    device = torch.device("cuda", torch.cuda.current_device())
    kv = make_kv(device, request.param)
    pool = MemoryPool(
        MemoryOptions(capacity_bytes=CAPACITY_BYTES, transfer_threads=2), site(device)
    )
    pool.register(kv.memory)
    content, parts = {}, []
    for layout in kv.memory.layouts:
        group, count = layout.group_index, min(OBJECT_COUNT, layout.block_count)
        blocks = np.random.default_rng(group).permutation(layout.block_count)[:count]
        content[group] = [kv.fill(group, block, block) for block in blocks.tolist()]
        parts.append(TransferPart(group, keys(group, count), blocks))
    torch.cuda.synchronize()
    assert run(pool, "store", parts).outcome is TransferOutcome.DONE
    kv.wipe()
    torch.cuda.synchronize()
    yield pool, kv, parts, content
    pool.close(PATIENCE_S)


def next_result(pool: MemoryPool) -> JobResult:
    """Asks without a pause, as a thread that has something to submit."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not (results := pool.poll()):
        assert time.monotonic() < give_up_s
    (result,) = results
    return result


def begin(pool: MemoryPool, *parts: TransferPart) -> None:
    pool.load(TransferJob(1, parts, time.monotonic() + PATIENCE_S, None, may_arrive=True))


@pytest.mark.parametrize("stream", ["default", "own"])
def test_what_waits_for_an_arrival_reads_every_byte(stored, stream):
    pool, kv, parts, content = stored
    part = parts[0]
    reader = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    begin(pool, part)
    result = next_result(pool)
    assert (result.outcome, result.job_id) == (TransferOutcome.ARRIVING, 1)
    with torch.cuda.stream(reader):
        result.arrival.wait()
        copies = [region.tensor.clone() for region in kv.memory.regions]
    reader.synchronize()
    # Before the pool has said that it has ended.
    kv.wipe()
    torch.cuda.synchronize()
    assert next_result(pool).outcome is TransferOutcome.DONE
    assert kv.is_wiped()
    for region, copy in zip(kv.memory.regions, copies, strict=True):
        region.tensor.copy_(copy)
    assert [kv.read(0, block) for block in part.block_ids.tolist()] == content[0]
    result.arrival.wait()  # Also when it is long over.


def test_the_caller_is_not_held_up(stored):
    pool, _, parts, _ = stored
    begin(pool, parts[0])
    result = next_result(pool)
    busy = torch.cuda.Event()
    torch.cuda._sleep(500_000_000)
    busy.record()
    result.arrival.wait()
    assert not busy.query()
    torch.cuda.synchronize()
    assert next_result(pool).outcome is TransferOutcome.DONE


def test_a_load_is_announced_when_no_more_than_its_tail_is_to_come(stored, monkeypatch):
    """The device waits for so much at most."""
    pool, kv, parts, _ = stored
    object_bytes = kv.memory.layout(0).object_bytes
    monkeypatch.setattr(device_copier, "ARRIVAL_BYTES", 8 * object_bytes)
    begin(pool, parts[0])
    result = next_result(pool)
    assert result.outcome is TransferOutcome.ARRIVING
    blocks = parts[0].block_ids[: OBJECT_COUNT - 8 - (4 << 20) // object_bytes]
    first = kv.memory.regions[0].tensor
    # On a stream of its own, which waits for nothing: all but the tail is there.
    with torch.cuda.stream(torch.cuda.Stream()):
        base = int(kv.memory.layout(0).base_addresses[0]) - kv.memory.regions[0].address
        stride = int(kv.memory.layout(0).block_strides[0])
        size = int(kv.memory.layout(0).range_bytes[0])
        places = torch.from_numpy(base + blocks[:, None] * stride + np.arange(size)).cuda()
        there = first[places].view(len(blocks), size).any(dim=1).cpu()
    assert bool(there.all())
    assert next_result(pool).outcome is TransferOutcome.DONE


def test_a_load_of_several_groups_is_not_announced(stored):
    pool, _, parts, _ = stored
    if len(parts) == 1:
        pytest.skip("one group")
    begin(pool, *parts)
    assert next_result(pool).outcome is TransferOutcome.DONE
    assert run(pool, "load", parts[:1]).outcome is TransferOutcome.DONE
