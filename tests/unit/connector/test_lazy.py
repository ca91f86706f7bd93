# SPDX-License-Identifier: Apache-2.0
"""What lazy offload takes out of vLLM's queue of free blocks, and what it leaves there."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from umbp.connector.groups import Group
from umbp.connector.lazy import LazyStores, spare_blocks, step_blocks
from umbp.connector.pins import BlockPins
from umbp.errors import UsageError
from umbp.fsm import (
    Core,
    CoreLimits,
    EpochRaised,
    LeasePart,
    LeaseSent,
    RankFailed,
    RankSucceeded,
    ReuseNeared,
    StartStore,
    TransferLease,
)

STEP = 3
"""Blocks that a step may take."""
BLOCKS = 25
REACH = BLOCKS // 4 + STEP
"""Blocks that a look goes through while nothing is being stored."""


def hash_of(block_id: int) -> bytes:
    return b"%032d" % block_id


class Memory:
    """vLLM's real block pool, a core, and what is to be tested between them.

    Attributes:
        order: Ids of the free blocks, in the order in which vLLM hands them out.
    """

    def __init__(self, **limits: Any) -> None:
        self.core = Core(CoreLimits(unit_tokens=4, **{"lazy_blocks_max": 100} | limits))
        self.pool = BlockPool(BLOCKS, True, 4)
        self.pins = BlockPins(self.pool)
        self.lazy = LazyStores(self.core, self.pool, STEP)

    @property
    def order(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.iter_blocks_after(None)]

    def compute(self, count: int, *, group: int = 0, note: bool = True) -> list[int]:
        """Has a request fill blocks and end; returns them, the first to be reused first."""
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            self.cache(block, hash_of(block.block_id), group)
        self.pool.free_blocks(blocks)
        ids = [block.block_id for block in blocks]
        if note:
            self.note(ids, group=group)
        return ids

    def cache(self, block: Any, block_hash: bytes, group: int = 0) -> None:
        key = make_block_hash_with_group_id(block_hash, group)
        self.pool._insert_block_hash(key, block, 4)

    def note(self, ids: Sequence[int], *, group: int = 0) -> None:
        self.lazy.note([LeasePart(group, tuple(map(hash_of, ids)), tuple(ids))])

    def due(self, owed: int = 0) -> list[int]:
        """Returns the blocks that must be stored, without storing them."""
        event = self.lazy.due(owed)
        return [] if event is None else ids_of(event.parts)

    def store(self) -> TransferLease:
        """Begins to store what must be stored."""
        event = self.lazy.due(0)
        assert event is not None
        (command,) = self.core.step(event, 0.0)
        assert isinstance(command, StartStore)
        self.pins.pin(command.lease)
        self.core.step(LeaseSent(command.lease.job_id), 0.0)
        return command.lease

    def end(self, lease: TransferLease, *, succeeded: bool = True) -> None:
        answer = RankSucceeded if succeeded else RankFailed
        (command,) = self.core.step(answer(lease.job_id, 0), 0.0)
        self.pins.release(command.lease)
        self.lazy.put_back(command.lease)

    def use(self, count: int) -> list[int]:
        """Has a request that goes on take blocks."""
        return [block.block_id for block in self.pool.get_new_blocks(count)]


def ids_of(parts: Iterable[LeasePart]) -> list[int]:
    return [block_id for part in parts for block_id in part.block_ids]


@pytest.fixture
def memory() -> Memory:
    """Memory in which every block holds something that was computed."""
    memory = Memory()
    assert memory.compute(BLOCKS - 1) == memory.order
    return memory


# ---------------------------------------------------------------- which blocks


def test_the_next_blocks_are_due_in_the_order_of_their_reuse(memory: Memory) -> None:
    assert memory.due() == memory.order[:REACH]


def test_blocks_that_nobody_noted_are_left() -> None:
    memory = Memory()
    memory.compute(10, note=False)
    noted = memory.compute(10)
    memory.use(BLOCKS - 1 - 10 - 3)
    assert memory.due() == noted[: REACH - 3]


def test_blocks_without_a_hash_are_left(memory: Memory) -> None:
    memory.pool.evict_blocks({memory.order[0]})
    assert memory.due() == memory.order[1:REACH]


def test_nothing_is_due_while_the_front_of_the_queue_is_unused() -> None:
    memory = Memory()
    memory.compute(BLOCKS - 1 - REACH)
    assert memory.due() == []
    assert memory.use(1) == [memory.order[0] - 1]
    assert memory.due() == [], "a mark lies between"
    memory.use(STEP - 1)
    assert memory.due() == [1, 2, 3], "the rest of the unused have not been reached"


def test_a_block_goes_under_the_hash_that_it_has_now(memory: Memory) -> None:
    """The same block, reused by somebody whose KV nobody noted."""
    block = memory.pool.blocks[memory.order[0]]
    memory.pool.evict_blocks({block.block_id})
    memory.cache(block, b"%032d" % 999)
    assert block.block_id not in memory.due()


def test_another_block_of_the_same_hash_is_left(memory: Memory) -> None:
    """Equal tokens, but computed by a life that may not have been allowed to store."""
    first, other = (memory.pool.blocks[block_id] for block_id in memory.order[:2])
    memory.pool.evict_blocks({first.block_id, other.block_id})
    memory.cache(other, hash_of(first.block_id))
    assert memory.due() == memory.order[2:REACH]


def test_a_page_is_stored_under_the_end_of_a_prompt_inside_it() -> None:
    memory = Memory()
    (page,) = memory.compute(1, note=False)
    memory.cache(memory.pool.blocks[page], b"%032d" % 500)
    memory.lazy.note([LeasePart(0, (b"%032d" % 500,), (page,))])
    memory.use(BLOCKS - 1 - STEP - 1)
    event = memory.lazy.due(0)
    assert event is not None
    assert event.parts[0].block_hashes == (b"%032d" % 500,)


def test_groups_are_told_apart() -> None:
    memory = Memory()
    memory.compute(3, group=2)
    memory.compute(BLOCKS - 1 - 3, group=0)
    event = memory.lazy.due(0)
    assert event is not None
    assert [(part.group_index, len(part.block_ids)) for part in event.parts] == [(0, 6), (2, 3)]
    assert event.parts[1].block_hashes == tuple(map(hash_of, (1, 2, 3)))


def test_a_block_of_what_was_not_computed_is_left(memory: Memory) -> None:
    """A request was given it, and preempted in the same step."""
    group = Group(0, 4, is_state=False, is_fine=False, drops_unit=False)
    memory.lazy.forget([hash_of(2), hash_of(999)], [group])
    assert memory.due() == [block for block in memory.order[:REACH] if block != 2]


# ---------------------------------------------------------------- pins


def test_what_is_being_stored_cannot_be_reused_and_goes_back_to_its_place(
    memory: Memory,
) -> None:
    order = memory.order
    lease = memory.store()
    assert ids_of(lease.parts) == order[:REACH]
    assert memory.order == order[REACH:]
    memory.end(lease)
    assert memory.order == order
    assert memory.due() == [], "what comes next is stored"


def test_what_is_on_its_way_counts_as_stored(memory: Memory) -> None:
    order = memory.order
    memory.store()
    assert memory.due() == order[REACH : REACH + STEP], "and not as far as if nothing were stored"


def test_what_was_stored_is_reused_before_what_was_not(memory: Memory) -> None:
    order = memory.order
    first = memory.store()
    memory.use(STEP)
    second = memory.store()
    memory.end(second)
    memory.end(first)
    stored = {*ids_of(first.parts), *ids_of(second.parts)}
    assert set(memory.order[: len(stored)]) == stored
    assert memory.order[len(stored) :] == [
        one for one in order if one in memory.order[len(stored) :]
    ]


def test_it_goes_to_the_front_when_its_place_was_reused(memory: Memory) -> None:
    lease = memory.store()
    memory.use(1)
    memory.end(lease)
    assert memory.order[:REACH] == ids_of(lease.parts)
    assert len(memory.order) == memory.pool.get_num_free_blocks() == BLOCKS - 2
    assert memory.use(REACH) == ids_of(lease.parts)


def test_a_store_that_failed_is_not_tried_again(memory: Memory) -> None:
    lease = memory.store()
    memory.end(lease, succeeded=False)
    assert set(memory.due()).isdisjoint(ids_of(lease.parts))


def test_a_block_that_a_request_shares_stays_in_use_when_its_store_has_ended(
    memory: Memory,
) -> None:
    lease = memory.store()
    shared = memory.pool.get_cached_block(hash_of(1), [0])
    assert shared is not None
    memory.pool.touch(shared)
    memory.end(lease)
    assert memory.pool.blocks[1].ref_cnt == 1
    assert 1 not in memory.order
    memory.pool.free_blocks(shared)
    assert memory.order[-1] == 1, "it was used just now"


# ---------------------------------------------------------------- limits


def test_so_many_stay_free_as_a_step_may_take() -> None:
    memory = Memory()
    memory.compute(BLOCKS - 1)
    memory.use(BLOCKS - 1 - STEP - 2)
    assert len(memory.due()) == 2
    assert memory.lazy.counters.lazy_blocks_left_no_room == 3
    assert memory.due(owed=2) == []


def test_blocks_that_admitted_requests_count_on_stay_free(memory: Memory) -> None:
    assert len(memory.due(owed=BLOCKS - 1 - STEP - 1)) == 1
    assert memory.due(owed=100) == []


def test_the_limit_of_pins_holds() -> None:
    memory = Memory(lazy_blocks_max=4)
    memory.compute(BLOCKS - 1)
    lease = memory.store()
    assert lease.block_count == 4
    assert memory.due() == []
    assert memory.lazy.counters.lazy_blocks_left_limit == (REACH - 4) + (REACH - 4)
    assert memory.core.counters.declined_pin_limit == 1
    memory.end(lease)
    assert memory.due() == [5, 6, 7, 8], "the others are at the front, stored"


def test_nothing_is_due_while_too_many_transfers_are_open() -> None:
    memory = Memory(open_leases_max=1)
    memory.compute(BLOCKS - 1)
    lease = memory.store()
    memory.use(STEP)
    assert memory.due() == []
    assert memory.core.counters.declined_lease_limit > 0
    memory.end(lease)
    memory.use(STEP)
    assert memory.due() == [REACH + STEP + 1, REACH + STEP + 2, REACH + STEP + 3]


# ---------------------------------------------------------------- resets


def test_a_reset_forgets_what_was_noted(memory: Memory) -> None:
    memory.core.step(EpochRaised(local_cache_kept=False), 0.0)
    assert memory.due() == []
    memory.note([5])
    assert memory.due() == [5]


def test_nothing_of_before_a_reset_is_stored(memory: Memory) -> None:
    memory.core.step(EpochRaised(local_cache_kept=True), 0.0)
    memory.note([5])
    assert memory.due() == []
    assert memory.core.counters.declined_stale_epoch == 1


# ---------------------------------------------------------------- what it costs


def test_a_queue_that_has_not_moved_is_not_looked_at_again() -> None:
    memory = Memory()
    memory.compute(10, note=False)
    memory.compute(10)
    assert memory.due() == []
    seen = memory.lazy.counters.lazy_blocks_seen
    assert seen == REACH
    memory.due()
    memory.use(STEP - 1)
    memory.due()
    assert memory.lazy.counters.lazy_blocks_seen == seen
    memory.use(1)
    memory.due()
    assert memory.lazy.counters.lazy_blocks_seen == 2 * seen


def test_a_short_queue_is_looked_at_when_it_grows() -> None:
    memory = Memory()
    memory.compute(20, note=False)
    used = memory.pool.get_new_blocks(BLOCKS - 1 - 4)
    memory.note([used[0].block_id])
    memory.due()
    seen = memory.lazy.counters.lazy_blocks_seen
    assert seen == 4
    memory.due()
    assert memory.lazy.counters.lazy_blocks_seen == seen
    memory.cache(used[0], hash_of(used[0].block_id))
    memory.pool.free_blocks(used[:1])
    assert memory.due() == [used[0].block_id]


def test_a_block_that_left_the_queue_and_came_back_is_noticed() -> None:
    memory = Memory()
    memory.compute(10, note=False)
    memory.compute(10)
    memory.use(BLOCKS - 1 - 20)
    memory.due()
    seen = memory.lazy.counters.lazy_blocks_seen
    # Preempted in the step that gave them: all of it between two looks.
    memory.pool.free_blocks(memory.pool.get_new_blocks(STEP))
    memory.due()
    assert memory.lazy.counters.lazy_blocks_seen > seen


def test_it_looks_again_some_time() -> None:
    memory = Memory()
    memory.compute(10, note=False)
    memory.compute(10)
    for _ in range(3000):
        memory.due()
    assert memory.lazy.counters.lazy_blocks_seen == 3 * REACH


def test_notes_of_blocks_that_were_reused_do_not_pile_up() -> None:
    memory = Memory()
    for _ in range(30):
        memory.compute(BLOCKS - 1)
        memory.pool.evict_blocks(set(memory.order))
        for number, block_id in enumerate(memory.order):
            memory.lazy.note([LeasePart(0, (b"%016d%016d" % (number, _),), (block_id,))])
    assert len(memory.lazy._noted) <= 2 * BLOCKS


# ---------------------------------------------------------------- sizes


def test_a_step_takes_blocks_of_every_group() -> None:
    attention = Group(0, 16, is_state=False, is_fine=False, drops_unit=False)
    state = Group(1, 64, is_state=True, is_fine=False, drops_unit=False, start_blocks=2)
    assert step_blocks([attention], 33) == 4
    assert step_blocks([attention, state, state], 64) == 9


def test_what_the_longest_request_needs_is_not_to_spare() -> None:
    def config(blocks: int) -> Any:
        specs = [
            SimpleNamespace(max_memory_usage_bytes=lambda _, size=size: size, page_size_bytes=10)
            for size in (200, 45)
        ]
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)

    def engine(watermark: float) -> Any:
        return SimpleNamespace(scheduler_config=SimpleNamespace(watermark=watermark))

    assert spare_blocks(engine(0.0), config(100)) == 100 - 1 - 21 - 6
    assert spare_blocks(engine(0.05), config(100)) == 100 - 1 - 21 - 6 - 5
    assert spare_blocks(engine(0.0), config(20)) == 0


def test_the_core_refuses_more_than_it_said() -> None:
    memory = Memory(lazy_blocks_max=2)
    ids = memory.compute(4)
    with pytest.raises(UsageError, match=r"^store 1 of free blocks: 4 blocks are declined_pin"):
        memory.core.step(ReuseNeared((LeasePart(0, (b"x",) * 4, tuple(ids)),)), 0.0)
    assert memory.core.leases == {}
