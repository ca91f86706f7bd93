# SPDX-License-Identifier: Apache-2.0
"""Columns are lists in MORI's shape, and name no byte outside KV memory."""

from collections.abc import Sequence

import numpy as np
import pytest

from umbp.backends.base import KVMemory, MemoryRegion, ObjectLayout, TransferPart
from umbp.backends.mori_columns import GroupColumns, group_columns
from umbp.errors import BackendError, UsageError


def layout(
    *ranges: tuple[int, int, int], block_count: int = 4, group_index: int = 0
) -> ObjectLayout:
    """Makes a layout of (base address, block stride, length)."""
    bases, strides, lengths = zip(*ranges, strict=True) if ranges else ((), (), ())
    return ObjectLayout(group_index, block_count, bases, strides, lengths)


def region(address: int, size_bytes: int) -> MemoryRegion:
    return MemoryRegion(None, address, size_bytes, "cpu", None)


def part(block_ids: Sequence[int], key_count: int | None = None) -> TransferPart:
    count = len(block_ids) if key_count is None else key_count
    return TransferPart(0, [bytes([index]) for index in range(count)], np.array(block_ids))


def test_ranges_that_touch_are_joined() -> None:
    columns = GroupColumns(layout((1000, 64, 16), (1016, 64, 16), (5000, 64, 8), (5008, 64, 24)))
    assert columns.range_count == 2
    assert columns.object_bytes == 64
    assert columns.pointers(np.array([0, 3])) == [[1000, 5000], [1192, 5192]]
    assert columns.lengths(2) == [[32, 32], [32, 32]]
    assert columns.offsets(2) == [[0, 32], [0, 32]]


def test_ranges_with_other_strides_are_not_joined() -> None:
    assert GroupColumns(layout((1000, 16, 16), (1016, 32, 16))).range_count == 2


def test_ranges_in_the_other_order_are_not_joined() -> None:
    assert GroupColumns(layout((1016, 64, 16), (1000, 64, 16))).range_count == 2


@pytest.mark.parametrize("block_ids", [[4], [-1], [0, 1, 400]])
def test_a_block_outside_kv_memory_is_refused(block_ids: list[int]) -> None:
    with pytest.raises(UsageError, match=rf"block {block_ids[-1]} of group 0 is outside 0\.\.3"):
        GroupColumns(layout((1000, 64, 16))).check(part(block_ids))


def test_keys_and_blocks_of_different_number_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2 keys for block ids of shape \(3,\)"):
        GroupColumns(layout((1000, 64, 16))).check(part([0, 1, 2], key_count=2))


def test_every_group_has_columns() -> None:
    layouts = (layout((1000, 64, 64), (2000, 64, 64)), layout((1032, 64, 32), group_index=1))
    columns = group_columns(KVMemory((region(1000, 256), region(2000, 256)), layouts))
    assert {index: group.object_bytes for index, group in columns.items()} == {0: 128, 1: 32}


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ((), "no layout"),
        ((layout((1000, 64, 0)),), "group 0 has no blocks, no ranges or an empty range"),
        ((layout((1000, 64, 65)),), "group 0 reaches outside of KV memory"),
    ],
)
def test_memory_that_holds_no_objects_is_refused(
    layouts: tuple[ObjectLayout, ...], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        group_columns(KVMemory((region(1000, 256),), layouts))
