# SPDX-License-Identifier: Apache-2.0
"""The memory backend with KV memory on a GPU: registered host memory, byte-exact both ways."""

import sys
import time

import numpy as np
import pytest
import torch
from device_kv import Shape, assert_round_trip, make_kv, site

from umbp.backends.base import (
    KVMemory,
    MemoryRegion,
    ObjectLayout,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerSite,
)
from umbp.backends.memory import MemoryOptions, MemoryPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PATIENCE_S = 60.0
LAYER_COUNT, BLOCK_COUNT, RANGE_BYTES = 30, 512, 24 << 10
OBJECT_BYTES = LAYER_COUNT * RANGE_BYTES
OBJECT_COUNT = 128


@pytest.fixture(params=["one allocation", "allocation per layer"])
def layers(request):
    size = BLOCK_COUNT * RANGE_BYTES
    if request.param == "one allocation":
        whole = torch.empty(LAYER_COUNT * size, dtype=torch.int8, device="cuda").random_()
        return list(whole.split(size))
    return [
        torch.empty(size, dtype=torch.int8, device="cuda").random_() for _ in range(LAYER_COUNT)
    ]


@pytest.fixture
def pool(layers):
    site = WorkerSite(
        rank=0,
        rank_count=1,
        device_type="cuda",
        device_index=torch.cuda.current_device(),
        instance="test",
        transfer_timeout_ms=int(PATIENCE_S * 1000),
    )
    options = MemoryOptions(capacity_bytes=OBJECT_COUNT * OBJECT_BYTES, transfer_threads=2)
    pool = MemoryPool(options, site)
    whole = layers[0]._base
    regions = tuple(
        MemoryRegion(tensor, tensor.data_ptr(), tensor.numel(), "cuda", site.device_index)
        for tensor in (layers if whole is None else [whole])
    )
    columns = ([layer.data_ptr() for layer in layers], [RANGE_BYTES] * LAYER_COUNT)
    layout = ObjectLayout(0, BLOCK_COUNT, *columns, [RANGE_BYTES] * LAYER_COUNT)
    pool.register(KVMemory(regions, (layout,)))
    yield pool
    pool.close(PATIENCE_S)


def run(pool, kind, keys, blocks, fence=None):
    """Runs one job and returns its seconds."""
    begun_s = time.monotonic()
    part = TransferPart(0, keys, blocks)
    getattr(pool, kind)(TransferJob(0, (part,), begun_s + PATIENCE_S, fence))
    while not (results := pool.poll()):
        assert time.monotonic() < begun_s + PATIENCE_S
        time.sleep(0.0001)
    ((outcome, reason),) = {(result.outcome, result.reason) for result in results}
    assert outcome is TransferOutcome.DONE, reason
    return time.monotonic() - begun_s


def blocks_of(layers, blocks):
    ids = torch.from_numpy(blocks).to(layers[0].device)
    return torch.stack([layer.view(BLOCK_COUNT, RANGE_BYTES)[ids] for layer in layers]).cpu()


@pytest.mark.parametrize("shape", Shape, ids=lambda shape: shape.name)
@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
def test_what_was_stored_is_loaded_into_other_blocks_and_nothing_else_changes(
    monkeypatch, shape, by_kernel
):
    if not by_kernel:
        # What is taken where Triton is not installed.
        monkeypatch.setitem(sys.modules, "umbp.backends.triton_rows", None)
    device = torch.device("cuda", torch.cuda.current_device())
    kv = make_kv(device, shape)
    options = MemoryOptions(capacity_bytes=256 << 20, transfer_threads=2)
    pool = MemoryPool(options, site(device))
    pool.register(kv.memory)
    kinds = {type(rows).__name__ for rows in pool._copier._gather._rows.values()}
    assert kinds == {"TritonRows" if by_kernel else "TorchRows"}
    try:
        assert_round_trip(pool, kv, OBJECT_COUNT)
    finally:
        pool.close(PATIENCE_S)


def test_a_store_sees_what_the_device_wrote_before_its_fence(pool, layers):
    written = torch.cuda.Event()
    torch.cuda._sleep(50_000_000)
    for layer in layers:
        layer.fill_(5)
    written.record()
    run(pool, "store", [b"a"], np.array([3]), fence=written.synchronize)
    for layer in layers:
        layer.zero_()
    torch.cuda.synchronize()
    run(pool, "load", [b"a"], np.array([4]))
    assert blocks_of(layers, np.array([4])).eq(5).all()


def test_the_pool_is_registered_with_the_driver(pool):
    assert pool._buffer.tensor.is_pinned()


def test_the_device_is_not_held_up_by_a_transfer(pool, layers):
    """Copies go to a stream of their own: one job's wait does not wait for other streams."""
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    run(pool, "store", [b"a"], np.array([0]))
    assert not busy.query()
    torch.cuda.synchronize()
