# SPDX-License-Identifier: Apache-2.0
"""Lazy offload: what is computed stays in KV memory, and is stored when that is about to reuse it.

vLLM keeps the blocks that no request uses in a queue, in the order in which it will hand them out
again. Blocks near the front of it whose store was put off are stored now: they are pinned, which
takes them out of the queue and keeps their hash, so that a request may share them meanwhile; and
once every rank has answered they go back to the front.

Nothing here knows what the backend holds. What is noted is a block whose store was put off: the
block, and the hash that it was computed for. It is stored only while vLLM, too, says that this
block has this hash; a note that nobody can use any more costs a miss at most.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)

from umbp.connector.groups import Group
from umbp.fsm import Core, LeasePart, ReuseNeared

_QUIET_STEPS_MAX: Final = 32
"""Steps that may go by without a look at the queue. A block that leaves it and comes back within
one step is not noticed otherwise."""


def step_blocks(groups: Iterable[Group], step_tokens: int) -> int:
    """Returns how many blocks one step may take out of vLLM's queue.

    An estimate: a step of many short requests takes more, and a load takes its blocks at once.

    Args:
        groups: The KV cache groups.
        step_tokens: Tokens that a step computes at most.
    """
    return sum(
        group.start_blocks if group.is_state else -(-step_tokens // group.block_tokens) + 1
        for group in groups
    )


def spare_blocks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Returns how many blocks may be pinned while the longest request still finds all it needs.

    vLLM waits with a request that finds too few free blocks; were they pinned by a store that does
    not end, it would wait for ever.
    """
    blocks = int(kv_cache_config.num_blocks)
    # The null block, and what vLLM wants to be free still when it admits a request.
    needed = 1 + int(vllm_config.scheduler_config.watermark * blocks)
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        needed += -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) + 1
    return max(0, blocks - needed)


@attrs.define
class LazyCounters:
    """Counters that only rise.

    Attributes:
        lazy_blocks_seen: Free blocks looked at.
        lazy_blocks_left_no_room: Blocks that a look found and left, because too few would be free.
        lazy_blocks_left_limit: Blocks that a look found and left, because of a limit of the core.
    """

    lazy_blocks_seen: int = 0
    lazy_blocks_left_no_room: int = 0
    lazy_blocks_left_limit: int = 0


class LazyStores:
    """Blocks whose store was put off, and a watch over vLLM's queue of free blocks.

    Args:
        core: The lifecycle.
        block_pool: vLLM's ``BlockPool``.
        ahead_blocks: Blocks that one step may take.

    Attributes:
        counters: What was looked at, and what was left there.
    """

    def __init__(self, core: Core, block_pool: Any, ahead_blocks: int) -> None:
        self._core = core
        self._pool = block_pool
        self._ahead = ahead_blocks
        self._epoch = core.epoch
        # By vLLM's hash with its group: the block that was computed for it.
        self._noted: dict[bytes, int] = {}
        # A block that lies behind at least ``ahead`` others that need not be stored. While it is
        # free, so do they.
        self._mark: Any = None
        # The last block of the queue, where the last look has reached it.
        self._last: Any = None
        self._quiet_steps = 0
        self.counters = LazyCounters()

    def note(self, parts: Iterable[LeasePart]) -> None:
        """Takes note of blocks whose store is put off."""
        self._follow_epoch()
        for part in parts:
            for block_hash, block_id in zip(part.block_hashes, part.block_ids, strict=True):
                key = make_block_hash_with_group_id(block_hash, part.group_index)
                self._noted[key] = block_id
        if len(self._noted) > 2 * self._pool.num_gpu_blocks:
            self._drop_dead_notes()

    def due(self, owed_blocks: int) -> ReuseNeared | None:
        """Returns the blocks that must be stored now, lest the next steps reuse them unstored.

        Args:
            owed_blocks: Free blocks that admitted requests count on.
        """
        self._follow_epoch()
        if not self._noted or self._is_quiet():
            return None
        found = self._look()
        if not found:
            return None
        room = self._room(owed_blocks, len(found))
        if room < len(found):
            # The next look must not pass them over.
            self._mark = None
        if room <= 0:
            return None
        return ReuseNeared(self._parts(found[:room]))

    # ------------------------------------------------------------ the queue

    def _is_quiet(self) -> bool:
        """Says whether the queue is as it was, as far as that matters. A hint."""
        mark = self._mark
        queue = self._pool.free_block_queue
        if (
            mark is not None
            and not mark.ref_cnt
            and (self._last is None or queue.fake_free_list_tail.prev_free_block is self._last)
            and self._quiet_steps < _QUIET_STEPS_MAX
        ):
            self._quiet_steps += 1
            return True
        self._quiet_steps = 0
        return False

    def _look(self) -> list[tuple[bytes, int]]:
        """Returns (hash with group, block id) of what is to be stored, in order of reuse.

        It looks twice as far as one step may reach, so that it need not look again in every step.
        """
        found, count, block = [], 0, None
        self._mark = None
        for count, block in enumerate(self._first_free(2 * self._ahead), 1):
            if count == self._ahead:
                self._mark = block
            key = self._noted_hash(block)
            if key is not None:
                found.append((key, block.block_id))
        self._last = block if count < 2 * self._ahead else None
        self.counters.lazy_blocks_seen += count
        return found

    def _first_free(self, count: int) -> Iterator[Any]:
        return itertools.islice(self._pool.free_block_queue.iter_blocks_after(None), count)

    def _noted_hash(self, block: Any) -> bytes | None:
        """Returns the hash that this block has now and that it was noted for, if any."""
        noted, block_id = self._noted, block.block_id
        key: bytes | None = block.block_hash
        if key is None:
            return None
        if noted.get(key) == block_id:
            return key
        # A page may also be known by the end of a prompt inside it.
        for other in self._pool.cached_block_hashes_by_block.get(block_id, ()):
            if noted.get(other) == block_id:
                return bytes(other)
        return None

    def _room(self, owed_blocks: int, wanted: int) -> int:
        """Returns how many of the blocks that are wanted may be stored; counts those that not."""
        free = int(self._pool.get_num_free_blocks()) - owed_blocks - self._ahead
        limit = self._core.lazy_room()
        room = max(0, min(free, limit))
        if room < wanted and limit <= free:
            self.counters.lazy_blocks_left_limit += wanted - room
        elif room < wanted:
            self.counters.lazy_blocks_left_no_room += wanted - room
        return room

    def _parts(self, found: Sequence[tuple[bytes, int]]) -> tuple[LeasePart, ...]:
        by_group: dict[int, dict[bytes, int]] = {}
        for key, block_id in found:
            del self._noted[key]
            group_index = get_group_id(key)
            by_group.setdefault(group_index, {})[get_block_hash(key)] = block_id
        return tuple(
            LeasePart(index, tuple(blocks), tuple(blocks.values()))
            for index, blocks in sorted(by_group.items())
        )

    # ------------------------------------------------------------ notes

    def _follow_epoch(self) -> None:
        """Forgets everything when the store was reset: what was computed before is not stored."""
        if self._core.epoch != self._epoch:
            self._epoch = self._core.epoch
            self._noted.clear()

    def _drop_dead_notes(self) -> None:
        """Forgets blocks that vLLM has reused: there are never more than it has hashes."""
        blocks, others = self._pool.blocks, self._pool.cached_block_hashes_by_block
        self._noted = {
            key: block_id
            for key, block_id in self._noted.items()
            if blocks[block_id].block_hash == key or key in others.get(block_id, ())
        }
