# SPDX-License-Identifier: Apache-2.0
"""Uses the backend ``dict`` by name: store, lookup over a socket, load into other blocks.

Run with a directory for the socket as the only argument.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch

from umbp.backends.base import (
    JobResult,
    KVMemory,
    LookupPart,
    LookupQuestion,
    MemoryRegion,
    ObjectLayout,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerPool,
    WorkerSite,
)
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_server import LookupServer
from umbp.backends.registry import find_backend
from umbp.backends.socket_path import socket_path
from umbp.keys import KeySpace

BLOCK_BYTES = 64
BLOCK_COUNT = 4
SPACE = KeySpace(bytes(16))
HASHES = [b"hash0001", b"hash0002", b"hash0003"]


def finish(
    pool: WorkerPool,
    start: Callable[[TransferJob], None],
    job_id: int,
    keys: Sequence[bytes],
    block_ids: list[int],
) -> JobResult:
    """Runs one job of group 0 to its end."""
    start(TransferJob(job_id, (TransferPart(0, keys, block_ids),), time.monotonic() + 60))
    while not (results := pool.poll()):
        time.sleep(0.001)
    return results[0]


def look_up(pool: WorkerPool, directory: str) -> list[bool]:
    """Asks for all hashes as the scheduler does."""
    path = socket_path(directory, namespace=SPACE.namespace, dp_index=0, instance="", rank=0)
    server = LookupServer(pool.contains, keyspace=SPACE, rank=0, path=path)
    client = SocketLookupClient([path], namespace=SPACE.namespace, lookup_timeout_ms=1000)
    client.ask(LookupQuestion(1, 1, (LookupPart(0, 8, b"".join(HASHES)),)))
    (answer,) = client.answers(60)
    client.close()
    server.close()
    assert answer.present is not None, answer.reason
    present: list[bool] = answer.present[0].tolist()
    return present


def main(directory: str) -> None:
    """Stores two blocks, and restores them elsewhere."""
    backend = find_backend("dict")
    assert backend.pool_in_worker
    pool = backend.open_worker(backend.options_type(), WorkerSite(0, 1, "cpu", None, "t", 60_000))
    assert isinstance(pool, WorkerPool)

    # Two ranges in each block, of 16 and 8 bytes, with a gap between them.
    memory = torch.randint(1, 100, (BLOCK_COUNT * BLOCK_BYTES,), dtype=torch.int8)
    region = MemoryRegion(memory, memory.data_ptr(), memory.numel(), "cpu", None)
    begins, strides = [region.address, region.address + 48], [BLOCK_BYTES, BLOCK_BYTES]
    pool.register(KVMemory((region,), (ObjectLayout(0, BLOCK_COUNT, begins, strides, [16, 8]),)))

    keys = SPACE.keys(HASHES, epoch=1, group_index=0, rank=0)
    before = memory.clone().view(BLOCK_COUNT, BLOCK_BYTES)
    result = finish(pool, pool.store, 1, keys[:2], [3, 1])
    assert result == JobResult(1, TransferOutcome.DONE, bytes_moved=48), result
    assert look_up(pool, directory) == [True, True, False]

    memory.zero_()
    result = finish(pool, pool.load, 2, keys[:2], [0, 3])
    assert result == JobResult(2, TransferOutcome.DONE, bytes_moved=48), result
    expected = torch.zeros_like(before)
    for target, source in ((0, 3), (3, 1)):
        expected[target, :16] = before[source, :16]
        expected[target, 48:56] = before[source, 48:56]
    assert torch.equal(memory.view(BLOCK_COUNT, BLOCK_BYTES), expected)

    result = finish(pool, pool.load, 3, keys, [0, 1, 2])
    assert result.outcome is TransferOutcome.FAILED, result
    assert result.failed_keys == (keys[2],)
    pool.close(10)
    sys.stdout.write("stored, found and restored\n")


main(sys.argv[1])
