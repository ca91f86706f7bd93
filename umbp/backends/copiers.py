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

In host memory numpy selects, on the calling thread alone. torch would share the call among OpenMP
threads, and the model computes with those: of a second team of them there are more than cores, and
then no OpenMP thread of the process spins any more while it waits for its next work. Measured on
two cores: 6.4 ms a step of a tiny model instead of 3.0, also while nothing was copied.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from umbp.backends.base import Arrival, Int64Array, KVMemory, ObjectLayout
from umbp.backends.layout_columns import cut, merge_adjacent, region_indices, split_evenly

_ROW_BYTES_MAX: Final = 1 << 12
_CALL_BYTES_MAX: Final = 1 << 24
_CALL_ROWS_MAX: Final = 1 << 16
"""What one call moves, one object at least, and so the memory that it may take. numpy keeps the GIL
over 500 rows and fewer: half a millisecond with rows of this length, and full calls have more."""


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
            self._layouts[layout.group_index] = split_evenly(
                merge_adjacent(layout), piece_bytes_max=_ROW_BYTES_MAX
            )

    def store(self, group_index: int, block_ids: Int64Array, offsets: Int64Array) -> None:
        """See ``Copier.store``."""
        layout = self._layouts[group_index]
        kv_rows, pool_rows = self._tables(layout)
        for part in _calls(layout, len(offsets)):
            in_pool = _pool_numbers(layout, offsets[part])
            pool_rows[in_pool] = kv_rows[self._kv_numbers(layout, block_ids[part])]

    def load(
        self,
        group_index: int,
        block_ids: Int64Array,
        offsets: Int64Array,
        announce: Announce | None = None,
    ) -> None:
        """See ``Copier.load``; nothing is queued, so nothing is announced."""
        layout = self._layouts[group_index]
        kv_rows, pool_rows = self._tables(layout)
        for part in _calls(layout, len(offsets)):
            in_pool = _pool_numbers(layout, offsets[part])
            kv_rows[self._kv_numbers(layout, block_ids[part])] = pool_rows[in_pool]

    def _tables(self, layout: ObjectLayout) -> tuple[Any, Any]:
        """Returns row[addresses] of the span and of the pool."""
        row_bytes = int(layout.range_bytes[0])
        return (
            _overlapping_rows(self._span, self._span_bytes, row_bytes),
            _overlapping_rows(self._pool.numpy(), self._pool.numel(), row_bytes),
        )

    def _kv_numbers(self, layout: ObjectLayout, block_ids: Int64Array) -> Int64Array:
        return (layout.addresses(block_ids) - self._begin).reshape(-1)


def _overlapping_rows(buffer: Any, size_bytes: int, row_bytes: int) -> Any:
    # A row is one element of an opaque type, because numpy moves an element by one memcpy.
    row = np.dtype((np.void, row_bytes))
    return np.ndarray((size_bytes - row_bytes + 1,), row, buffer, strides=(1,))


def _calls(layout: ObjectLayout, object_count: int) -> Iterator[slice]:
    """Cuts objects into what one call moves."""
    in_bytes = _CALL_BYTES_MAX // layout.object_bytes
    in_rows = _CALL_ROWS_MAX // len(layout.range_bytes)
    return cut(object_count, min(in_bytes, in_rows))


def _pool_numbers(layout: ObjectLayout, offsets: Int64Array) -> Int64Array | slice:
    """Returns the rows of objects in the pool; neighbours as a slice, which copies nothing."""
    row_bytes, size = int(layout.range_bytes[0]), layout.object_bytes
    if (np.diff(offsets) == size).all():
        begin = int(offsets[0])
        return slice(begin, begin + len(offsets) * size - row_bytes + 1, row_bytes)
    in_object = np.arange(0, size, row_bytes)
    return (offsets[:, None] + in_object[None, :]).reshape(-1)
