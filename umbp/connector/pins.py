# SPDX-License-Identifier: Apache-2.0
"""What umbp does to vLLM's block pool: it pins blocks, and takes wrong ones out of the cache."""

from collections.abc import Iterable
from typing import Any

from umbp.fsm import TransferLease


class BlockPins:
    """Holds the source blocks of stores through vLLM's reference counts.

    vLLM cannot hand a block to anyone else while it has a reference, whatever happens to the
    request: preemption, abort, the end of a sliding window.

    Args:
        block_pool: vLLM's ``BlockPool``.
    """

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool

    def pin(self, lease: TransferLease) -> None:
        """Adds one reference to each block of a lease."""
        self._pool.touch(self._blocks(lease))

    def release(self, lease: TransferLease) -> None:
        """Drops one reference from each block of a lease, the last block first.

        vLLM evicts in the order in which blocks are freed, and wants the tail of a prefix gone
        before its head.
        """
        self._pool.free_blocks(reversed(self._blocks(lease)))

    def holds_alone(self, lease: TransferLease) -> bool:
        """Says whether some block of a lease would be free if the lease were released."""
        return any(block.ref_cnt == 1 for block in self._blocks(lease))

    def any_in_use(self) -> bool:
        """Says whether any block is in use, by whomever; vLLM's null block always is."""
        return bool(self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() > 1)

    def uncache(self, block_hashes: Iterable[bytes], group_index: int) -> None:
        """Takes all blocks with these hashes out of vLLM's prefix cache; their users keep them."""
        for block_hash in block_hashes:
            # More than one block may have the same content.
            while found := self._pool.get_cached_block(block_hash, [group_index]):
                self._pool.evict_blocks({block.block_id for block in found})

    def _blocks(self, lease: TransferLease) -> list[Any]:
        # A lease names no block twice within a group, groups share one space of ids, and null
        # blocks are in no lease.
        blocks = self._pool.blocks
        return [blocks[block_id] for part in lease.parts for block_id in part.block_ids]
