# SPDX-License-Identifier: Apache-2.0
"""Hands out extents of one address range; pure bookkeeping, it never touches memory.

A pool holds objects of very few sizes, one per KV cache group, and frees them in about the order
in which it allocated them. So freed extents wait in one queue per size, first in, first out:
reuse costs O(1), and neighbours that were freed one after the other are handed out as neighbours
again, which lets a transfer copy them in one call. Only when a size finds no room are freed
neighbours joined, in O(n log n).
"""

from collections import deque
from collections.abc import Sequence
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
        return next(iter(self.allocate_many(size_bytes, 1)), None)

    def allocate_many(self, size_bytes: int, count: int) -> list[int]:
        """Takes extents of one size, as many as there is room for.

        Args:
            size_bytes: Size of each.
            count: How many are wanted.

        Returns:
            Their offsets, ``count`` at most.

        Raises:
            UsageError: The size is not positive.
        """
        if size_bytes <= 0:
            raise UsageError(f"an extent of {size_bytes} bytes cannot be allocated")
        size = self.rounded(size_bytes)
        wanted = min(count, (self.capacity_bytes - self._used_bytes) // size)
        offsets: list[int] = []
        while len(offsets) < wanted:
            taken = self._take(size, wanted - len(offsets))
            if not taken:
                if not self._joinable:
                    break
                self._join_neighbours()
            offsets += taken
        self._allocated.update(dict.fromkeys(offsets, size))
        self._used_bytes += size * len(offsets)
        return offsets

    def free(self, offset: int) -> None:
        """Gives an extent back.

        Raises:
            UsageError: No extent begins there.
        """
        self.free_many((offset,))

    def free_many(self, offsets: Sequence[int]) -> None:
        """Gives extents back, which are handed out again in this order.

        Raises:
            UsageError: No extent begins at one of the offsets; those before it are free.
        """
        for offset in offsets:
            size = self._allocated.pop(offset, None)
            if size is None:
                raise UsageError(f"no extent is allocated at offset {offset}")
            self._used_bytes -= size
            self._add_free(offset, size)
        self._joinable = True

    def _add_free(self, offset: int, size: int) -> None:
        self._free.setdefault(size, deque()).append(offset)

    def _pop_free(self, size: int, count_max: int) -> list[int]:
        queue = self._free[size]
        if count_max >= len(queue):
            return list(self._free.pop(size))
        return [queue.popleft() for _ in range(count_max)]

    def _take(self, size: int, count_max: int) -> list[int]:
        """Finds room: extents of this very size, untouched space, a part of a longer extent.

        Returns what the first of these has, which may be less than is wanted.
        """
        if size in self._free:
            return self._pop_free(size, count_max)
        begin = self._frontier
        untouched = min(count_max, (self.capacity_bytes - begin) // size)
        if untouched > 0:
            self._frontier = begin + untouched * size
            return list(range(begin, self._frontier, size))
        longer = min((free for free in self._free if free > size), default=None)
        if longer is None:
            return []
        (offset,) = self._pop_free(longer, 1)
        self._add_free(offset + size, longer - size)
        return [offset]

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
