# SPDX-License-Identifier: Apache-2.0
"""Hands out extents of one address range; pure bookkeeping, it never touches memory.

A pool holds objects of very few sizes, one per KV cache group, and frees them in about the order
in which it allocated them. So freed extents wait in one queue per size, first in, first out:
reuse costs O(1), and neighbours that were freed one after the other are handed out as neighbours
again, which lets a transfer copy them in one call. Only when a size finds no room are freed
neighbours joined, in O(n log n).
"""

from collections import deque
from typing import Final

import attrs

from umbp.errors import UsageError

DEFAULT_ALIGNMENT_BYTES: Final = 64
"""One cache line, so that no two objects share one."""


@attrs.define(eq=False)
class Arena:
    """Allocates offsets in ``[0, capacity_bytes)``. Not thread-safe.

    Every size is rounded up to ``alignment_bytes``; so is every offset, by consequence.

    Invariants: extents never overlap; allocated and free extents cover ``[0, frontier)`` exactly.
    """

    capacity_bytes: int
    alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES
    _frontier: int = attrs.field(default=0, init=False)
    """Nothing at or above it is in use or in a queue."""
    _allocated: dict[int, int] = attrs.field(factory=dict, init=False)
    """Size by offset."""
    _free: dict[int, deque[int]] = attrs.field(factory=dict, init=False)
    """Offsets by size; no queue is empty."""
    _used_bytes: int = attrs.field(default=0, init=False)
    _joinable: bool = attrs.field(default=False, init=False)
    """Whether an extent was freed since neighbours were last joined."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated extents, rounding included."""
        return self._used_bytes

    def rounded(self, size_bytes: int) -> int:
        """Returns what an extent of this size takes."""
        return -(-size_bytes // self.alignment_bytes) * self.alignment_bytes

    def allocate(self, size_bytes: int) -> int | None:
        """Takes an extent.

        Returns:
            Its offset; None when no free extent is long enough.

        Raises:
            UsageError: The size is not positive.
        """
        if size_bytes <= 0:
            raise UsageError(f"an extent of {size_bytes} bytes cannot be allocated")
        size = self.rounded(size_bytes)
        if self._used_bytes + size > self.capacity_bytes:
            return None
        offset = self._take(size)
        if offset is None and self._joinable:
            self._join_neighbours()
            offset = self._take(size)
        if offset is not None:
            self._allocated[offset] = size
            self._used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Gives an extent back.

        Raises:
            UsageError: No extent begins there.
        """
        size = self._allocated.pop(offset, None)
        if size is None:
            raise UsageError(f"no extent is allocated at offset {offset}")
        self._used_bytes -= size
        self._add_free(offset, size)
        self._joinable = True

    def _add_free(self, offset: int, size: int) -> None:
        self._free.setdefault(size, deque()).append(offset)

    def _pop_free(self, size: int) -> int:
        queue = self._free[size]
        offset = queue.popleft()
        if not queue:
            del self._free[size]
        return offset

    def _take(self, size: int) -> int | None:
        """Finds room: an extent of this very size, untouched space, a part of a longer extent."""
        if size in self._free:
            return self._pop_free(size)
        if self._frontier + size <= self.capacity_bytes:
            offset = self._frontier
            self._frontier += size
            return offset
        longer = min((free for free in self._free if free > size), default=None)
        if longer is None:
            return None
        offset = self._pop_free(longer)
        self._add_free(offset + size, longer - size)
        return offset

    def _join_neighbours(self) -> None:
        extents = sorted((offset, size) for size, queue in self._free.items() for offset in queue)
        self._free.clear()
        self._joinable = False
        joined: list[tuple[int, int]] = []
        for offset, size in extents:
            if joined and sum(joined[-1]) == offset:
                begin, joined_size = joined.pop()
                joined.append((begin, joined_size + size))
            else:
                joined.append((offset, size))
        if joined and sum(joined[-1]) == self._frontier:
            self._frontier = joined.pop()[0]
        for offset, size in joined:
            self._add_free(offset, size)
