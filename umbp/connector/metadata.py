# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side and the workers' sides tell each other, once per step.

Plain values only (numbers, strings, bytes, lists of such), so that they survive vLLM's message
queue, its msgpack encoder, and whatever takes their place. Blocks travel as two columns: hashes
joined, and ids as int32; 36 bytes a block with SHA-256.

The worker is told what to move and nothing else: not which state a request is in, nor why.
"""

import struct
from collections.abc import Sequence

import attrs
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from umbp.backends.base import Int64Array
from umbp.fsm import TransferLease


def pack_ids(block_ids: Sequence[int]) -> bytes:
    """Packs block ids as int32, which is what vLLM's own block tables hold."""
    # A third of what numpy needs to read a tuple.
    return struct.pack(f"={len(block_ids)}i", *block_ids)


def unpack_ids(packed: bytes) -> Int64Array:
    """Returns int64[blocks]."""
    return np.frombuffer(packed, dtype=np.int32).astype(np.int64)


@attrs.define
class PlanPart:
    """The blocks of one KV cache group in a transfer.

    Attributes:
        group_index: Index of the group.
        hash_bytes: Length of one block hash.
        hashes: Block hashes, joined.
        block_ids: int32[blocks], packed.
    """

    group_index: int
    hash_bytes: int
    hashes: bytes
    block_ids: bytes


@attrs.define
class TransferPlan:
    """One load or store, the same for every rank.

    Attributes:
        job_id: Unique among the transfers of this engine.
        request_id: The request that waits for a load; names it in logs for a store. Empty for a
            store of no request.
        epoch: Epoch of the keys.
        parts: The blocks.
        synchronous: A load that this step's forward pass reads.
    """

    job_id: int
    request_id: str
    epoch: int
    parts: list[PlanPart]
    synchronous: bool = False


def plan_of(lease: TransferLease) -> TransferPlan:
    """Says what the workers have to know of a transfer."""
    parts = [
        PlanPart(
            part.group_index,
            len(part.block_hashes[0]),
            b"".join(part.block_hashes),
            pack_ids(part.block_ids),
        )
        for part in lease.parts
    ]
    return TransferPlan(lease.job_id, lease.request_id, lease.epoch, parts, lease.synchronous)


@attrs.define
class StepMetadata(KVConnectorMetadata):
    """From the scheduler's side to every worker, once per step.

    Attributes:
        epoch: The present epoch: loads of an earlier one are not to be reported as good.
        loads: Transfers into KV memory to begin in this step.
        stores: Transfers out of KV memory to begin after this step's forward pass.
        cancels: Jobs to end early.
        refused: Loads that vLLM counts on and that must fail at once, untried.
        is_idle: Nothing is computed in this step.
    """

    epoch: int
    loads: list[TransferPlan] = attrs.field(factory=list)
    stores: list[TransferPlan] = attrs.field(factory=list)
    cancels: list[int] = attrs.field(factory=list)
    refused: list[TransferPlan] = attrs.field(factory=list)
    is_idle: bool = False


@attrs.define
class RankAnswer:
    """How one job ended on one rank. The rank no longer touches the job's blocks.

    Or, before that and at most once, of an asynchronous load whose end the rank has reported to
    vLLM, and whose blocks it may still write: that it failed, because the rank cannot end it
    (``stalled``), or that it has ended well, because it will have before anything reads the blocks
    (``arriving``).

    Attributes:
        job_id: The job.
        rank: The rank.
        succeeded: Whether all of it was done.
        attempted: Whether it had begun; always true when it succeeded.
        bytes_moved: Bytes that were copied.
        failed_hashes: Block hashes of the objects that failed.
        reason: One short line for a log.
        stalled: Not an end, and no success: the rank may still write.
        arriving: Not an end, and a success: the rank still writes.
    """

    job_id: int
    rank: int
    succeeded: bool
    attempted: bool = True
    bytes_moved: int = 0
    failed_hashes: list[bytes] = attrs.field(factory=list)
    reason: str = ""
    stalled: bool = False
    arriving: bool = False


@attrs.define
class RankEvictions:
    """Objects that a rank had and has no more, told only where vLLM publishes KV events.

    Attributes:
        rank: The rank.
        keys: Their keys. What the rank has stored and then lost is told with the answer to that
            store or after it, never before.
    """

    rank: int
    keys: list[bytes]


@attrs.define
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler's side: the answers of one step, and what is gone."""

    answers: list[RankAnswer]
    evictions: list[RankEvictions] = attrs.field(factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Joins the answers of two workers."""
        if not isinstance(other, WorkerMetadata):
            raise TypeError(f"cannot join answers with {type(other).__name__}")
        return WorkerMetadata(self.answers + other.answers, self.evictions + other.evictions)
