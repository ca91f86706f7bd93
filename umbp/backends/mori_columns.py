# SPDX-License-Identifier: Apache-2.0
"""Turns block ids into the lists that MORI's ranged calls take.

A ranged call takes, per object, a list of pointers, of lengths and of offsets inside the object.
Everything but the pointers is the same for every object of a group, so it is computed once; the
pointers come out of numpy as one matrix and become lists in one call (building them range by range
in Python costs more than MORI's own work on them).

MORI follows a pointer wherever it leads, and a wrong one ends the process. So the whole layout is
checked against KV memory once, and the block ids of every part against the layout.
"""

from umbp.backends.base import Int64Array, KVMemory, ObjectLayout, TransferPart
from umbp.backends.layout_columns import merge_adjacent, region_indices
from umbp.errors import BackendError, UsageError


def group_columns(memory: KVMemory) -> dict[int, "GroupColumns"]:
    """Makes the columns of every group, by group index.

    Raises:
        BackendError: There is no group, or a layout has no bytes or leaves KV memory.
    """
    if not memory.layouts:
        raise BackendError("KV memory has no layout")
    for layout in memory.layouts:
        region_indices(memory, layout)
    return {layout.group_index: GroupColumns(layout) for layout in memory.layouts}


class GroupColumns:
    """The ranges of one group's objects, as lists.

    Attributes:
        object_bytes: Size of one object.
        range_count: Ranges per object, after those that touch were merged.
    """

    def __init__(self, layout: ObjectLayout) -> None:
        self._layout = merge_adjacent(layout)
        self._lengths: list[int] = self._layout.range_bytes.tolist()
        self._offsets: list[int] = self._layout.range_offsets.tolist()
        self.object_bytes = self._layout.object_bytes
        self.range_count = len(self._lengths)

    def check(self, part: TransferPart) -> None:
        """Refuses what would make MORI read or write outside KV memory.

        Raises:
            UsageError: A block id is out of range, or keys and block ids differ in number.
        """
        block_ids, block_count = part.block_ids, self._layout.block_count
        if block_ids.shape != (len(part.keys),):
            raise UsageError(f"{len(part.keys)} keys for block ids of shape {block_ids.shape}")
        outside = block_ids[(block_ids < 0) | (block_ids >= block_count)]
        if outside.size:
            raise UsageError(
                f"block {outside[0]} of group {part.group_index} is outside 0..{block_count - 1}"
            )

    def pointers(self, block_ids: Int64Array) -> list[list[int]]:
        """Addresses of every range of every block, [blocks][ranges]."""
        pointers: list[list[int]] = self._layout.addresses(block_ids).tolist()
        return pointers

    def lengths(self, object_count: int) -> list[list[int]]:
        """Lengths of every range, [object_count][ranges]."""
        return [self._lengths] * object_count

    def offsets(self, object_count: int) -> list[list[int]]:
        """Where every range begins inside its object, [object_count][ranges]."""
        return [self._offsets] * object_count
