# SPDX-License-Identifier: Apache-2.0
"""What tests do inside a worker. Each function is called with vLLM's worker as first argument."""

import gc
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import attrs

from umbp.backends.base import TransferJob, TransferOutcome, TransferPart, WorkerPool
from umbp.keys import PREFIX_BYTES, KeySpace, split_prefix

REPORT_VARIABLE: Final = "UMBP_TEST_REPORT"
"""Names the file into which ``SpyConnector`` reports."""

_TIMEOUT_S: Final = 30.0
_JOB_ID: Final = 1 << 40
"""Above every job that an engine of a test comes to."""


def overwrite_kv_memory(worker: Any, seed: int = 7) -> None:
    """Fills all KV memory with finite noise, so that nothing can be read from stale blocks."""
    import torch

    overwritten = set()
    for cache in worker.model_runner.kv_caches:
        # On a GPU recurrent state is a list of tensors over one allocation, as layers may be.
        for tensor in cache if isinstance(cache, list | tuple) else (cache,):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in overwritten:
                continue
            overwritten.add(storage.data_ptr())
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat.set_(storage)
            generator = torch.Generator(flat.device).manual_seed(seed + len(overwritten))
            for piece in flat.split(1 << 26):
                noise = torch.randn(piece.shape, generator=generator, device=piece.device)
                piece.copy_(noise * 3)


def change_byte(worker: Any, block_id: int, layer_index: int, token_index: int) -> None:
    """Changes one byte of a block: the exponent of one number, which is about 1 otherwise."""
    import torch

    cache = worker.model_runner.kv_caches[layer_index]
    assert cache.dtype is torch.float32
    cache[block_id, 0, token_index, :1].view(torch.uint8)[-1] = 0x47  # 2**15 and more


def zero_block(worker: Any, block_id: int) -> None:
    """Zeroes one block in all layers."""
    for cache in worker.model_runner.kv_caches:
        cache[block_id].zero_()


def layer_count(worker: Any) -> int:
    """Returns the number of layers with KV."""
    return len(worker.model_runner.kv_caches)


def store_objects(
    worker: Any, hashes: Sequence[bytes], block_ids: Sequence[int], epoch: int
) -> bool:
    """Stores blocks of KV memory under the keys of an epoch, past the connector."""
    from umbp.connector.namespace import digest

    connector = _connector()
    keyspace = KeySpace(digest(connector.manifest))
    keys = keyspace.keys(hashes, epoch=epoch, group_index=0, rank=worker.rank)
    pool = worker_pool()
    part = TransferPart(0, keys, block_ids)
    pool.store(TransferJob(_JOB_ID + epoch, (part,), time.monotonic() + _TIMEOUT_S))
    deadline = time.monotonic() + _TIMEOUT_S
    while not (results := pool.poll()):
        assert time.monotonic() < deadline, "the pool never answered"
        time.sleep(0.001)
    return results[0].outcome is TransferOutcome.DONE


def set_faults(worker: Any, changes: dict[str, Any], rank: int | None) -> None:
    """Has the ``faulty`` pool begin anew: no counts, and these faults or, on another rank, none."""
    from faulty_backend import FAULTS, Faults

    concerned = rank is None or worker.rank == rank
    fresh = attrs.asdict(Faults(**changes) if concerned else Faults())
    for name, value in fresh.items():
        setattr(FAULTS, name, value)


def change_faults(_: Any, changes: dict[str, Any]) -> None:
    """Changes these faults of the ``faulty`` pool and leaves the others and the counts."""
    from faulty_backend import FAULTS

    for name, value in changes.items():
        setattr(FAULTS, name, value)


def read_faults(_: Any) -> dict[str, Any]:
    """Returns the faults and counts of the ``faulty`` pool."""
    from faulty_backend import FAULTS

    return attrs.asdict(FAULTS)


def describe_process(_: Any = None) -> dict[str, Any]:
    """Says what a process has of the things that belong into a worker alone."""
    # vLLM hides what it has made at the start from the collector.
    gc.unfreeze()
    return {
        "process_id": os.getpid(),
        "imported_mori": any(name.partition(".")[0] == "mori" for name in sys.modules),
        "pools": sum(map(_is_pool, gc.get_objects())),
    }


def _is_pool(thing: Any) -> bool:
    # By module first: asking any object for a pool's methods would run its properties.
    return str(type(thing).__module__).startswith("umbp.") and isinstance(thing, WorkerPool)


def worker_pool() -> WorkerPool:
    """Returns the pool of this worker."""
    pool: WorkerPool = _connector().worker_side._pool
    return pool


def held_hashes(_: Any, epoch: int) -> set[Any]:
    """Returns what the ``memory`` pool holds under an epoch, by hash, as KV events tell it."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    pool: Any = worker_pool()
    keys = [key for key in list(pool._index._objects) if split_prefix(key)[0] == epoch]
    return {maybe_convert_block_hash(key[PREFIX_BYTES:]) for key in keys}


def _connector() -> Any:
    """Returns the connector; under vLLM's ``MultiConnector``, the first one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return getattr(connector, "sub_connectors", [connector])[0]
