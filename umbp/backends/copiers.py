# SPDX-License-Identifier: Apache-2.0
"""Copies objects between KV memory and a pool, many ranges by one call.

An object is contiguous in the pool and scattered over many ranges in KV memory. What is slow is
not the bytes but the calls: one per range. Worse, a call that releases the GIL gives it to a busy
thread, which keeps it for 5 ms (``sys.getswitchinterval``). Measured with 256 blocks of 30 ranges
of 24 KiB, and a second thread that only computes, on two shared cores: 8.4 s with one
``memmove`` per range, 0.05 s with the single calls below.

All copiers therefore see KV memory as a table whose row ``i`` begins at its element ``i``, so that
rows overlap. To copy a range is then to select a row, and one call selects many. Every range must
be as long as a row, which ``split_evenly`` sees to.

torch writes in inference mode: vLLM may have allocated its tensors in it, and torch refuses to
write such tensors outside of it.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch

from umbp.backends.base import Arrival, Int64Array, KVMemory, ObjectLayout
from umbp.backends.layout_columns import (
    merge_adjacent,
    neighbour_runs,
    region_indices,
    split_evenly,
)

_ROWS_PER_CALL_MAX: Final = 1 << 16
"""Bounds the array of row numbers when a layout can only be split into very short rows."""


Announce: TypeAlias = Callable[[Arrival], None]
"""Takes what a device has to wait for before it reads what a load brings."""


class Copier(Protocol):
    """Moves objects of one worker. Thread-safe; the objects of two calls must be distinct."""

    def store(self, group_index: int, block_ids: Int64Array, offsets: Int64Array) -> None:
        """Copies KV memory into the pool.

        Args:
            group_index: Index of the KV cache group.
            block_ids: int64[objects], ids in KV memory.
            offsets: int64[objects], where each object lies in the pool.
        """

    def load(
        self,
        group_index: int,
        block_ids: Int64Array,
        offsets: Int64Array,
        announce: Announce | None = None,
    ) -> None:
        """Copies the pool into KV memory.

        Args:
            group_index: Index of the KV cache group.
            block_ids: int64[objects], ids in KV memory.
            offsets: int64[objects], where each object lies in the pool.
            announce: Called at most once, when all copies are queued on a device, and the last of
                them are still to come.
        """


class HostCopier:
    """Copies between KV memory and a pool in the same host memory, with nothing in between.

    Its table has a row at each byte of the whole span of addresses. What lies between two
    allocations is in the span too and never touched, since every row that is selected is a piece
    of a range, and ranges are checked to be in an allocation.

    Args:
        memory: KV memory, on a CPU.
        pool: uint8[bytes] ``torch.Tensor``.

    Raises:
        BackendError: A layout reaches outside of KV memory.
    """

    def __init__(self, memory: KVMemory, pool: Any) -> None:
        self._memory = memory  # Keeps the tensors that own the addresses alive.
        self._pool = pool
        self._begin = min(region.address for region in memory.regions)
        end = max(region.address + region.size_bytes for region in memory.regions)
        self._span_bytes = end - self._begin
        self._span: Any = (ctypes.c_uint8 * self._span_bytes).from_address(self._begin)
        self._layouts: dict[int, ObjectLayout] = {}
        for layout in memory.layouts:
            region_indices(memory, layout)
            self._layouts[layout.group_index] = split_evenly(merge_adjacent(layout))

    def store(self, group_index: int, block_ids: Int64Array, offsets: Int64Array) -> None:
        """See ``Copier.store``."""
        layout = self._layouts[group_index]
        row_bytes = int(layout.range_bytes[0])
        span = torch.frombuffer(self._span, dtype=torch.uint8)
        rows = span.as_strided((self._span_bytes - row_bytes + 1, row_bytes), (1, 1))
        for first, last in self._runs(layout, offsets):
            targets = self._pool_slice(layout, offsets[first:last]).view(-1, row_bytes)
            numbers = torch.from_numpy(self._row_numbers(layout, block_ids[first:last]))
            with torch.inference_mode():
                torch.index_select(rows, 0, numbers, out=targets)

    def load(
        self,
        group_index: int,
        block_ids: Int64Array,
        offsets: Int64Array,
        announce: Announce | None = None,
    ) -> None:
        """See ``Copier.load``; nothing is queued, so nothing is announced."""
        layout = self._layouts[group_index]
        row_bytes = int(layout.range_bytes[0])
        # numpy and not torch, whose index_copy_ takes half as long again. A row is one element of
        # an opaque type, because numpy moves an element by one memcpy.
        row = np.dtype((np.void, row_bytes))
        rows: Any = np.ndarray((self._span_bytes - row_bytes + 1,), row, self._span, strides=(1,))
        for first, last in self._runs(layout, offsets):
            sources = self._pool_slice(layout, offsets[first:last]).numpy().view(row)
            rows[self._row_numbers(layout, block_ids[first:last])] = sources

    def _runs(self, layout: ObjectLayout, offsets: Int64Array) -> Any:
        count_max = max(1, _ROWS_PER_CALL_MAX // len(layout.range_bytes))
        return neighbour_runs(offsets, layout.object_bytes, count_max)

    def _pool_slice(self, layout: ObjectLayout, offsets: Int64Array) -> Any:
        begin = int(offsets[0])
        return self._pool[begin : begin + len(offsets) * layout.object_bytes]

    def _row_numbers(self, layout: ObjectLayout, block_ids: Int64Array) -> Int64Array:
        return (layout.addresses(block_ids) - self._begin).reshape(-1)
