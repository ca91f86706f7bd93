# SPDX-License-Identifier: Apache-2.0
"""Rewrites an ``ObjectLayout`` into one that says the same and is cheaper to copy by."""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from umbp.backends.base import Int64Array, KVMemory, ObjectLayout
from umbp.errors import BackendError


def merge_adjacent(layout: ObjectLayout) -> ObjectLayout:
    """Joins ranges that follow one another in every block, in memory as in the object."""
    base, stride = layout.base_addresses, layout.block_strides
    ends = base + layout.range_bytes
    begins = np.ones(len(base), dtype=bool)
    begins[1:] = (base[1:] != ends[:-1]) | (stride[1:] != stride[:-1])
    first = np.flatnonzero(begins)
    return ObjectLayout(
        group_index=layout.group_index,
        block_count=layout.block_count,
        base_addresses=base[first],
        block_strides=stride[first],
        range_bytes=np.add.reduceat(layout.range_bytes, first),
    )


PIECE_BYTES_MAX: Final = 1 << 16
"""Addresses have 47 bits, so an array with a piece at each of them has less than 2**63 bytes."""


def split_evenly(layout: ObjectLayout, piece_bytes_max: int = PIECE_BYTES_MAX) -> ObjectLayout:
    """Splits ranges into the longest pieces, up to a limit, that all have one length."""
    common_bytes = math.gcd(*layout.range_bytes.tolist())
    divisor = -(-common_bytes // piece_bytes_max)
    while common_bytes % divisor:
        divisor += 1
    piece_bytes = common_bytes // divisor
    piece_counts = layout.range_bytes // piece_bytes
    piece_count = int(piece_counts.sum())
    index_in_range = np.arange(piece_count) - np.repeat(
        np.cumsum(piece_counts) - piece_counts, piece_counts
    )
    return ObjectLayout(
        group_index=layout.group_index,
        block_count=layout.block_count,
        base_addresses=np.repeat(layout.base_addresses, piece_counts)
        + index_in_range * piece_bytes,
        block_strides=np.repeat(layout.block_strides, piece_counts),
        range_bytes=np.full(piece_count, piece_bytes),
    )


def region_indices(memory: KVMemory, layout: ObjectLayout) -> Int64Array:
    """Finds the allocation that holds each range in all blocks.

    Returns:
        int64[ranges], indices into ``memory.regions``.

    Raises:
        BackendError: A range is empty, or reaches outside of every allocation.
    """
    if layout.block_count < 1 or not len(layout.range_bytes) or layout.range_bytes.min() < 1:
        raise BackendError(f"group {layout.group_index} has no blocks, no ranges or an empty range")
    reach = (layout.block_count - 1) * layout.block_strides
    first = np.minimum(layout.base_addresses, layout.base_addresses + reach)
    end = np.maximum(layout.base_addresses, layout.base_addresses + reach) + layout.range_bytes
    begin_of = np.array([region.address for region in memory.regions], dtype=np.int64)
    size_of = np.array([region.size_bytes for region in memory.regions], dtype=np.int64)
    end_of = begin_of + size_of
    inside = (begin_of[None, :] <= first[:, None]) & (end[:, None] <= end_of[None, :])
    if not inside.any(axis=1).all():
        outside = int(np.flatnonzero(~inside.any(axis=1))[0])
        raise BackendError(
            f"range {outside} of group {layout.group_index} reaches outside of KV memory: bytes "
            f"{first[outside]} to {end[outside]}"
        )
    indices: Int64Array = inside.argmax(axis=1).astype(np.int64)
    return indices


def neighbour_runs(offsets: Int64Array, object_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts objects into runs that follow one another in the pool, so that one call copies each.

    Args:
        offsets: int64[objects], where each object lies in the pool.
        object_bytes: Size of each.

    Yields:
        First index and index after the last.
    """
    ends = np.flatnonzero(np.diff(offsets) != object_bytes) + 1
    first = 0
    for end in (*ends.tolist(), len(offsets)):
        if first < end:
            yield first, end
        first = end


def cut(object_count: int, count_max: int) -> Iterator[slice]:
    """Cuts objects into slices of ``count_max`` at most, and of one where that is less."""
    step = max(1, count_max)
    for first in range(0, object_count, step):
        yield slice(first, min(first + step, object_count))
