# SPDX-License-Identifier: Apache-2.0
"""Copies objects between KV memory on a device and a pool in host memory.

One copy per range keeps a fast link idle. So the device itself gathers objects into a small
buffer of its own, at the speed of its memory, and its copy engine moves the buffer to the pool;
a load goes the other way round. Host memory is read and written in place, once.

Measured on one H200 with 256 blocks of 30 ranges of 24 KiB: 4 GB/s with one asynchronous copy per
range, 46 to 48 GB/s this way with one allocation, 13 to 17 with one allocation per layer.
"""

import math
import threading
from typing import Any, Final

import attrs
import numpy as np
import torch

from umbp.backends.base import Int64Array, KVMemory, ObjectLayout
from umbp.backends.layout_columns import (
    merge_adjacent,
    neighbour_runs,
    region_indices,
    split_evenly,
)

STAGING_BYTES: Final = 16 << 20
"""Device memory that each transfer thread takes, or one object if that is more. Long enough that
starting a copy costs nothing beside the copy, and short enough not to be missed by the model."""

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


class DeviceCopier:
    """Copies on a stream of its own per thread, and returns once the bytes have arrived.

    Args:
        memory: KV memory, on one device.
        pool: uint8[bytes] ``torch.Tensor`` in host memory.

    Raises:
        BackendError: A layout reaches outside of KV memory.
    """

    def __init__(self, memory: KVMemory, pool: Any) -> None:
        self._pool = pool
        self._device = memory.regions[0].tensor.device
        self._groups = {
            layout.group_index: _open_group(memory, layout) for layout in memory.layouts
        }
        largest = max(group.object_bytes for group in self._groups.values())
        self._staging_bytes = max(STAGING_BYTES, largest)
        self._of_thread = threading.local()

    def store(self, group_index: int, block_ids: Int64Array, offsets: Int64Array) -> None:
        """See ``Copier.store``."""
        self._copy(self._groups[group_index], block_ids, offsets, into_pool=True)

    def load(self, group_index: int, block_ids: Int64Array, offsets: Int64Array) -> None:
        """See ``Copier.load``."""
        self._copy(self._groups[group_index], block_ids, offsets, into_pool=False)

    def _copy(
        self, group: _Group, block_ids: Int64Array, offsets: Int64Array, *, into_pool: bool
    ) -> None:
        stream, staging = self._stream_and_staging()
        count_max = self._staging_bytes // group.object_bytes
        with torch.inference_mode(), stream:
            try:
                numbers = [self._row_numbers(group, run, block_ids) for run in group.runs]
                # The stream runs all of this in order, so the buffer can be used again at once.
                for first in range(0, len(offsets), count_max):
                    part = slice(first, min(first + count_max, len(offsets)))
                    staged = staging[: (part.stop - first) * group.object_bytes]
                    chosen = [of_run[part].reshape(-1) for of_run in numbers]
                    if into_pool:
                        _gather(group, chosen, staged)
                    self._move(group, staged, offsets[part], into_pool=into_pool)
                    if not into_pool:
                        _scatter(group, chosen, staged)
            finally:
                # Also after an error: what was queued still uses KV memory and the pool.
                stream.synchronize()

    def _move(self, group: _Group, staged: Any, offsets: Int64Array, *, into_pool: bool) -> None:
        """Queues the copies between a buffer of whole objects and their places in the pool."""
        size = group.object_bytes
        for first, last in neighbour_runs(offsets, size, len(offsets)):
            begin = int(offsets[first])
            stored = self._pool[begin : begin + (last - first) * size]
            buffered = staged[first * size : last * size]
            if into_pool:
                stored.copy_(buffered, non_blocking=True)
            else:
                buffered.copy_(stored, non_blocking=True)

    def _row_numbers(self, group: _Group, run: _Run, block_ids: Int64Array) -> Any:
        """Returns int64[objects, rows of the run], on the device."""
        numbers = (run.layout.addresses(block_ids) - run.address) // group.element_bytes
        return torch.from_numpy(numbers).to(self._device)

    def _stream_and_staging(self) -> tuple[Any, Any]:
        mine = self._of_thread
        if not hasattr(mine, "stream"):
            stream = torch.Stream(device=self._device)
            with torch.inference_mode(), stream:
                mine.staging = torch.empty(
                    self._staging_bytes, dtype=torch.uint8, device=self._device
                )
            mine.stream = stream
        return mine.stream, mine.staging


def _gather(group: _Group, numbers: list[Any], staged: Any) -> None:
    """Fills a buffer of whole objects from KV memory."""
    objects = _as_rows(group, staged)
    if len(group.runs) == 1:
        torch.index_select(group.runs[0].table, 0, numbers[0], out=objects.flatten(0, 1))
        return
    pieces = [
        run.table.index_select(0, chosen).unflatten(0, (len(objects), -1))
        for run, chosen in zip(group.runs, numbers, strict=True)
    ]
    torch.cat(pieces, dim=1, out=objects)


def _scatter(group: _Group, numbers: list[Any], staged: Any) -> None:
    """Writes a buffer of whole objects to KV memory."""
    objects = _as_rows(group, staged)
    counts = [len(run.layout.range_bytes) for run in group.runs]
    for run, chosen, piece in zip(group.runs, numbers, objects.split(counts, dim=1), strict=True):
        run.table.index_copy_(0, chosen, piece.flatten(0, 1))


def _as_rows(group: _Group, staged: Any) -> Any:
    """Views a buffer of whole objects as elements[objects, rows, row]."""
    elements = staged.view(_ELEMENT_TYPES[group.element_bytes])
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
