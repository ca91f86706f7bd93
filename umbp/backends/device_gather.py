# SPDX-License-Identifier: Apache-2.0
"""Gathers objects from KV memory into one buffer, and scatters a buffer into KV memory.

Both run on the device that holds KV memory, at the speed of its memory: a range is a row of a
table over its allocation, and one call moves many rows (``umbp.backends.copiers`` says how). What
is queued here runs on the current stream; the caller waits for it.
"""

import math
from typing import Any, Final

import attrs
import numpy as np
import torch

from umbp.backends.base import Int64Array, KVMemory, ObjectLayout
from umbp.backends.layout_columns import merge_adjacent, region_indices, split_evenly

_ELEMENT_TYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen(eq=False)
class _Run:
    """Rows that follow one another in an object and lie in the same allocation.

    Attributes:
        table: elements[rows, row], the allocation as overlapping rows.
        layout: The ranges that are these rows, one each.
        address: Address of row 0.
    """

    table: Any
    layout: ObjectLayout
    address: int


@attrs.frozen(eq=False)
class _Group:
    object_bytes: int
    row_bytes: int
    element_bytes: int
    runs: tuple[_Run, ...]


@attrs.frozen(eq=False)
class Blocks:
    """Blocks of one group, where ``DeviceGather`` finds them.

    Attributes:
        group: Layout of the group.
        row_numbers: For every run of the group int64[objects, rows of the run], on the device.
    """

    group: _Group
    row_numbers: tuple[Any, ...]


class DeviceGather:
    """Gathers and scatters the objects of every group. Thread-safe; keeps nothing between calls.

    Every method is called in inference mode, because torch refuses to write tensors outside of it
    that were allocated in it, as vLLM may have done.

    Args:
        memory: KV memory, on one device.

    Raises:
        BackendError: A layout reaches outside of KV memory.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._device = memory.regions[0].tensor.device
        self._groups = {
            layout.group_index: _open_group(memory, layout) for layout in memory.layouts
        }

    def object_bytes(self, group_index: int) -> int:
        """Returns the size of one object of a group."""
        return self._groups[group_index].object_bytes

    @property
    def object_bytes_max(self) -> int:
        """Size of the largest object of all groups."""
        return max(group.object_bytes for group in self._groups.values())

    def locate(self, group_index: int, block_ids: Int64Array) -> Blocks:
        """Brings to the device what it needs to find blocks.

        Args:
            group_index: Index of the KV cache group.
            block_ids: int64[objects], ids in KV memory.
        """
        group = self._groups[group_index]
        return Blocks(group, tuple(self._row_numbers(group, run, block_ids) for run in group.runs))

    def gather(self, blocks: Blocks, part: slice, staging: Any) -> None:
        """Queues the copies from some of the blocks into a buffer.

        Args:
            blocks: Where they are.
            part: Which of them, with a step of 1.
            staging: uint8[bytes] ``torch.Tensor`` on the device, exactly as long as the objects.
        """
        group, numbers = blocks.group, _chosen(blocks, part)
        objects = _as_rows(group, staging)
        if len(group.runs) == 1:
            torch.index_select(group.runs[0].table, 0, numbers[0], out=objects.flatten(0, 1))
            return
        pieces = [
            run.table.index_select(0, chosen).unflatten(0, (len(objects), -1))
            for run, chosen in zip(group.runs, numbers, strict=True)
        ]
        torch.cat(pieces, dim=1, out=objects)

    def scatter(self, blocks: Blocks, part: slice, staging: Any) -> None:
        """Queues the copies from a buffer into some of the blocks; see ``gather``."""
        group, numbers = blocks.group, _chosen(blocks, part)
        pieces = _as_rows(group, staging).split(
            [len(run.layout.range_bytes) for run in group.runs], dim=1
        )
        for run, chosen, piece in zip(group.runs, numbers, pieces, strict=True):
            run.table.index_copy_(0, chosen, piece.flatten(0, 1))

    def _row_numbers(self, group: _Group, run: _Run, block_ids: Int64Array) -> Any:
        numbers = (run.layout.addresses(block_ids) - run.address) // group.element_bytes
        return torch.from_numpy(numbers).to(self._device)


def _chosen(blocks: Blocks, part: slice) -> list[Any]:
    """Returns for every run int64[objects * rows of the run], the rows of some blocks."""
    return [of_run[part].reshape(-1) for of_run in blocks.row_numbers]


def _as_rows(group: _Group, staging: Any) -> Any:
    """Views a buffer of whole objects as elements[objects, rows, row]."""
    elements = staging.view(_ELEMENT_TYPES[group.element_bytes])
    row_elements = group.row_bytes // group.element_bytes
    return elements.view(-1, group.object_bytes // group.row_bytes, row_elements)


def _open_group(memory: KVMemory, whole: ObjectLayout) -> _Group:
    layout = split_evenly(merge_adjacent(whole))
    regions = region_indices(memory, layout)
    row_bytes = int(layout.range_bytes[0])
    element_bytes = math.gcd(
        8,
        row_bytes,
        *layout.base_addresses.tolist(),
        *layout.block_strides.tolist(),
        *(memory.regions[index].address for index in regions),
        *(memory.regions[index].tensor.storage_offset() for index in regions),
    )
    cuts = (np.flatnonzero(np.diff(regions)) + 1).tolist()
    runs = []
    for first, last in zip((0, *cuts), (*cuts, len(regions)), strict=True):
        region = memory.regions[regions[first]]
        whole_elements = region.size_bytes // element_bytes * element_bytes
        elements = region.tensor[:whole_elements].view(_ELEMENT_TYPES[element_bytes])
        row_elements = row_bytes // element_bytes
        table = elements.as_strided((len(elements) - row_elements + 1, row_elements), (1, 1))
        part = ObjectLayout(
            group_index=layout.group_index,
            block_count=layout.block_count,
            base_addresses=layout.base_addresses[first:last],
            block_strides=layout.block_strides[first:last],
            range_bytes=layout.range_bytes[first:last],
        )
        runs.append(_Run(table, part, region.address))
    return _Group(layout.object_bytes, row_bytes, element_bytes, tuple(runs))
