# SPDX-License-Identifier: Apache-2.0
"""Arena: extents never overlap, reuse is exact, and all space comes back."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbp.backends.arena import Arena
from umbp.errors import UsageError


def test_sizes_are_rounded_up_and_offsets_aligned():
    arena = Arena(1000, alignment_bytes=64)
    assert arena.rounded(1) == 64
    assert arena.rounded(64) == 64
    assert [arena.allocate(65), arena.allocate(1)] == [0, 128]
    assert arena.used_bytes == 192


def test_no_extent_reaches_beyond_the_capacity():
    arena = Arena(200)
    assert [arena.allocate(64) for _ in range(4)] == [0, 64, 128, None]
    assert Arena(63).allocate(1) is None


def test_extents_of_one_size_are_reused_in_the_order_in_which_they_were_freed():
    arena = Arena(64 * 4)
    offsets = [arena.allocate(64) for _ in range(4)]
    for offset in (offsets[2], offsets[0], offsets[3]):
        arena.free(offset)
    assert [arena.allocate(50) for _ in range(4)] == [128, 0, 192, None]


def test_freed_neighbours_make_room_for_a_longer_extent():
    arena = Arena(64 * 4)
    offsets = [arena.allocate(64) for _ in range(4)]
    arena.free(offsets[0])
    arena.free(offsets[2])
    assert arena.allocate(128) is None
    arena.free(offsets[1])
    assert arena.allocate(192) == 0


def test_a_longer_extent_is_divided():
    arena = Arena(64 * 4)
    whole = arena.allocate(256)
    arena.free(whole)
    assert sorted(arena.allocate(64) for _ in range(4)) == [0, 64, 128, 192]
    assert arena.allocate(64) is None


def test_space_freed_at_the_end_can_be_used_by_any_size():
    arena = Arena(64 * 4)
    offsets = [arena.allocate(64) for _ in range(3)]
    arena.free(offsets[1])
    arena.free(offsets[2])
    assert arena.allocate(192) == 64


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_not_positive_is_refused(size):
    with pytest.raises(UsageError, match=str(size)):
        Arena(64).allocate(size)


def test_a_double_free_is_refused():
    arena = Arena(128)
    offset = arena.allocate(64)
    arena.free(offset)
    for wrong in (offset, 1):
        with pytest.raises(UsageError, match=f"offset {wrong}"):
            arena.free(wrong)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of allocations and frees, against a list of intervals."""

    CAPACITY = 64 * 40 + 17

    def __init__(self):
        super().__init__()
        self.arena = Arena(self.CAPACITY)
        self.extents = {}

    @rule(size=st.sampled_from([1, 64, 100, 300, 1000]) | st.integers(1, 3000))
    def allocate(self, size):
        rounded = self.arena.rounded(size)
        offset = self.arena.allocate(size)
        if offset is None:
            assert self.longest_gap() < rounded
            return
        self.add(offset, rounded)

    @rule(size=st.sampled_from([64, 100, 300]), count=st.integers(0, 9))
    def allocate_many(self, size, count):
        rounded = self.arena.rounded(size)
        offsets = self.arena.allocate_many(size, count)
        assert len(offsets) <= count
        for offset in offsets:
            self.add(offset, rounded)
        if len(offsets) < count:
            assert self.longest_gap() < rounded

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.extents)))
        self.arena.free(offset)
        del self.extents[offset]

    @invariant()
    def counts_what_is_allocated(self):
        assert self.arena.used_bytes == sum(self.extents.values())

    def teardown(self):
        for offset in self.extents:
            self.arena.free(offset)
        assert self.arena.used_bytes == 0
        assert self.arena.allocate(64 * 40) == 0

    def add(self, offset, rounded):
        assert offset % 64 == 0
        assert 0 <= offset <= self.CAPACITY - rounded
        for other, other_size in self.extents.items():
            assert offset + rounded <= other or other + other_size <= offset
        self.extents[offset] = rounded

    def longest_gap(self):
        edges = [(0, 0), *sorted(self.extents.items()), (self.CAPACITY, 0)]
        pairs = itertools.pairwise(edges)
        return max(after - (offset + size) for (offset, size), (after, _) in pairs)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(deadline=None)
