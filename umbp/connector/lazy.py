# SPDX-License-Identifier: Apache-2.0
"""Lazy offload: what is computed stays in KV memory, and is stored when that is about to reuse it.

vLLM keeps the blocks that no request uses in a queue, in the order in which it will hand them out
again. Blocks near the front of it whose store was put off are stored now: they are pinned, which
takes them out of the queue and keeps their hash, so that a request may share them meanwhile; and
once every rank has answered they go back to their place.

Nothing here knows what the backend holds. What is noted is a block whose store was put off: the
block, and the hash that it was computed for. It is stored only while vLLM, too, says that this
block has this hash; a note that nobody can use any more costs a miss at most.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)

from umbp.connector.groups import Group
from umbp.fsm import Core, LeasePart, ReuseNeared, TransferLease

_STEPS_AHEAD: Final = 4
"""Steps that a store may take before the blocks that are stored already run out."""

_SHARE: Final = 4
"""At most one block in so many is kept stored and free."""

_QUIET_STEPS_MAX: Final = 1024
"""Steps that may go by without a look at the queue. A block without a hash that leaves it and comes
back within one step is not noticed otherwise."""


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

    It keeps so many blocks at the front of the queue, or on their way back to it, that need not be
    stored any more, as some steps may take. What is on its way counts: to look beyond it would pin
    more and more while stores are slow, and leave to the next steps what is used more often.

    Args:
        core: The lifecycle.
        block_pool: vLLM's ``BlockPool``.
        step_blocks: Blocks that one step may take.

    Attributes:
        counters: What was looked at, and what was left there.
    """

    def __init__(self, core: Core, block_pool: Any, step_blocks: int) -> None:
        self._core = core
        self._pool = block_pool
        self._step = step_blocks
        share = block_pool.num_gpu_blocks // _SHARE
        self._target = max(step_blocks, min(_STEPS_AHEAD * step_blocks, share))
        self._epoch = core.epoch
        # By vLLM's hash with its group: the block that was computed for it.
        self._noted: dict[bytes, int] = {}
        # The queue is as it was, as far as that matters, while this block has not been handed out;
        # its hash was this one.
        self._mark: Any = None
        self._mark_hash: bytes | None = None
        # The last block of the queue, where the last look has reached it.
        self._last: Any = None
        # The first block that the last look did not reach, or left.
        self._beyond: Any = None
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

    def forget(self, block_hashes: Sequence[bytes], groups: Iterable[Group]) -> None:
        """Forgets blocks that may have a hash again and not what it stands for.

        Under a policy of priorities vLLM preempts requests that the very step was to compute. Their
        blocks keep hashes in its prefix cache of what is then not computed.

        Args:
            block_hashes: Block hashes of what a preempted request has not computed.
            groups: The KV cache groups.
        """
        for group in groups:
            for block_hash in block_hashes:
                self._noted.pop(make_block_hash_with_group_id(block_hash, group.index), None)

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
            # The next look must not pass them over, nor may what is stored be reused after them.
            self._mark = None
            self._beyond = self._pool.blocks[found[room][1]]
        if room <= 0:
            return None
        return ReuseNeared(self._parts(found[:room]))

    def put_back(self, lease: TransferLease) -> None:
        """Puts blocks that are free again where they were in the queue: before what is not stored.

        vLLM has put them at its end, as if they had been used just now.
        """
        queue, beyond = self._pool.free_block_queue, self._beyond
        blocks = [self._pool.blocks[block] for part in lease.parts for block in part.block_ids]
        free = [block for block in blocks if not block.ref_cnt and block.block_hash is not None]
        for block in free:
            queue.remove(block)
        if beyond is None or beyond.ref_cnt or beyond.prev_free_block is None:
            queue.prepend_n(free)
            return
        before = beyond.prev_free_block
        for block in free:
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, beyond.prev_free_block = beyond, before
        queue.num_free_blocks += len(free)

    # ------------------------------------------------------------ the queue

    def _is_quiet(self) -> bool:
        """Says whether the queue is as it was, as far as that matters. A hint."""
        mark = self._mark
        queue = self._pool.free_block_queue
        if (
            mark is not None
            and not mark.ref_cnt
            and mark.block_hash == self._mark_hash
            and (self._last is None or queue.fake_free_list_tail.prev_free_block is self._last)
            and self._quiet_steps < _QUIET_STEPS_MAX
        ):
            self._quiet_steps += 1
            return True
        self._quiet_steps = 0
        return False

    def _look(self) -> list[tuple[bytes, int]]:
        """Returns (hash with group, block id) of what is to be stored, in order of reuse.

        It looks further by what one step may take, so that it need not look in every step.
        """
        depth = max(self._step, self._target + self._step - self._core.pinned_blocks)
        queue = self._pool.free_block_queue
        blocks = list(itertools.islice(queue.iter_blocks_after(None), depth))
        found, stored = [], 0
        self._mark = None
        for block in blocks:
            key = self._noted_hash(block)
            if key is not None:
                found.append((key, block.block_id))
                continue
            stored += 1
            if stored == self._step:
                self._mark, self._mark_hash = block, block.block_hash
        beyond = blocks[-1].next_free_block if blocks else queue.fake_free_list_tail
        is_whole = beyond is queue.fake_free_list_tail
        self._beyond = None if is_whole else beyond
        self._last = beyond.prev_free_block if is_whole else None
        self.counters.lazy_blocks_seen += len(blocks)
        return found

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
        free = int(self._pool.get_num_free_blocks()) - owed_blocks - self._step
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
