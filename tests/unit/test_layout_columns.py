# SPDX-License-Identifier: Apache-2.0
"""Rewritten layouts name the same bytes in the same order, in fewer or in equal ranges."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.backends.base import KVMemory, MemoryRegion, ObjectLayout
from umbp.backends.layout_columns import (
    PIECE_BYTES_MAX,
    cut,
    merge_adjacent,
    neighbour_runs,
    region_indices,
    split_evenly,
)
from umbp.errors import BackendError


def layout(*columns, block_count=3):
    base_addresses, block_strides, range_bytes = zip(*columns, strict=True)
    return ObjectLayout(0, block_count, base_addresses, block_strides, range_bytes)


def byte_addresses(of, block_id):
    """Lists the address of every byte of an object, in order."""
    starts = of.addresses(np.array([block_id]))[0].tolist()
    sizes = of.range_bytes.tolist()
    return [start + i for start, size in zip(starts, sizes, strict=True) for i in range(size)]


columns = st.tuples(st.integers(0, 60), st.integers(1, 3), st.integers(1, 12))


@settings(deadline=None)
@given(st.lists(columns, min_size=1, max_size=8), st.integers(0, 2))
def test_no_byte_changes_place(rows, block_id):
    whole = layout(*rows)
    merged = merge_adjacent(whole)
    pieces = split_evenly(merged)
    expected = byte_addresses(whole, block_id)
    assert byte_addresses(merged, block_id) == expected
    assert byte_addresses(pieces, block_id) == expected
    assert len(set(pieces.range_bytes.tolist())) == 1


def test_ranges_that_follow_one_another_are_merged():
    merged = merge_adjacent(layout((0, 100, 10), (10, 100, 20), (40, 100, 5), (45, 100, 5)))
    assert merged.base_addresses.tolist() == [0, 40]
    assert merged.range_bytes.tolist() == [30, 10]


def test_ranges_with_other_strides_are_not_merged():
    whole = layout((0, 100, 10), (10, 50, 20))
    assert merge_adjacent(whole).range_bytes.tolist() == [10, 20]


def test_pieces_are_as_long_as_they_can_be():
    assert split_evenly(layout((0, 100, 24), (50, 100, 36))).range_bytes.tolist() == [12] * 5
    assert split_evenly(layout((0, 100, 24))).range_bytes.tolist() == [24]


MEMORY = KVMemory(
    (MemoryRegion(None, 1000, 100, "cpu", None), MemoryRegion(None, 5000, 300, "cpu", None)), ()
)


def test_pieces_have_a_longest_length():
    pieces = split_evenly(layout((0, 1 << 20, 3 * PIECE_BYTES_MAX + 6)))
    assert len(set(pieces.range_bytes.tolist())) == 1
    assert pieces.object_bytes == 3 * PIECE_BYTES_MAX + 6
    assert PIECE_BYTES_MAX // 3 < pieces.range_bytes[0] <= PIECE_BYTES_MAX


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=20, unique=True), st.integers(1, 9))
def test_runs_cover_all_objects_and_are_neighbours(slots, size):
    offsets = np.array(slots, dtype=np.int64) * size
    runs = list(neighbour_runs(offsets, size))
    assert [index for run in runs for index in range(*run)] == list(range(len(slots)))
    for first, last in runs:
        assert last - first > 0
        assert (np.diff(offsets[first:last]) == size).all()
    joinable = [
        run for run, (after, _) in itertools.pairwise(runs) if slots[after] == slots[after - 1] + 1
    ]
    assert not joinable


@given(st.integers(0, 20), st.integers(0, 25))
def test_slices_cover_all_objects_and_are_as_long_as_they_may_be(object_count, count_max):
    parts = list(cut(object_count, count_max))
    assert [index for part in parts for index in range(part.start, part.stop)] == list(
        range(object_count)
    )
    lengths = [part.stop - part.start for part in parts]
    assert all(length == max(1, count_max) for length in lengths[:-1])
    assert all(0 < length <= max(1, count_max) for length in lengths)


def test_each_range_is_found_in_the_allocation_that_holds_all_its_blocks():
    whole = layout((5000, 100, 100), (1010, 30, 30), (1000, 10, 10))
    assert region_indices(MEMORY, whole).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "column",
    [
        (999, 10, 10),
        (1071, 10, 10),
        (5000, 101, 100),
        (1050, 2000, 10),
        (5150, -100, 100),
        (1000, 10, 0),
    ],
    ids=["before", "behind", "last block", "between", "backwards", "empty"],
)
def test_a_range_outside_of_every_allocation_is_refused(column):
    with pytest.raises(BackendError, match="group 0"):
        region_indices(MEMORY, layout((1000, 10, 10), column))


def test_a_layout_without_blocks_is_refused():
    with pytest.raises(BackendError, match="group 0"):
        region_indices(MEMORY, layout((1000, 10, 10), block_count=0))
