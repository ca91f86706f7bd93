# SPDX-License-Identifier: Apache-2.0
"""Plans a MORI pool in pages: page size, watermarks, and the room that every put finds.

MORI 1.2.4 rounds each object up to whole pages, and a put never evicts to make room for itself: it
needs free pages beforehand. Eviction runs at the end of a put call that leaves the pool at or above
the high watermark, and frees the least recently loaded objects down to the low one. A put that does
not fit therefore fails, frees nothing, and would fail for ever. Measured on its wheel:

* used pages >= high * pages triggers; used pages <= low * pages ends.
* So between calls at most ``high_pages - 1`` pages are used, and ``room_pages`` are free.

Puts of at most ``room_pages`` at a time always succeed, and umbp never sends more.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from umbp.errors import BackendError

WASTE_MAX: Final = 0.05
"""How much larger than an object its pages may be, as a share of the object."""

PAGE_ALIGNMENT: Final = 256
"""Bytes; what HIP aligns its own allocations to. A multiple keeps every object aligned alike."""


@attrs.frozen
class PoolPlan:
    """One pool, in pages.

    Attributes:
        page_bytes: Size of a page.
        page_count: Number of pages.
        high_pages: Used pages that make a put evict.
        low_pages: Used pages at which eviction ends.
    """

    page_bytes: int
    page_count: int
    high_pages: int
    low_pages: int

    @property
    def capacity_bytes(self) -> int:
        """Size of the pool, whole pages."""
        return self.page_bytes * self.page_count

    @property
    def room_pages(self) -> int:
        """Pages that are free before every put call."""
        return self.page_count - self.high_pages + 1

    @property
    def high_watermark(self) -> float:
        """The fraction that stands for ``high_pages``, clear of rounding."""
        return (self.high_pages - 0.25) / self.page_count

    @property
    def low_watermark(self) -> float:
        """The fraction that stands for ``low_pages``, clear of rounding."""
        return (self.low_pages + 0.25) / self.page_count

    def objects_per_put(self, object_bytes: int) -> int:
        """How many objects of one size one put call may carry, at least 1."""
        return self.room_pages // pages_of(object_bytes, self.page_bytes)


def pages_of(object_bytes: int, page_bytes: int) -> int:
    """How many pages an object takes."""
    return -(-object_bytes // page_bytes)


def choose_page_bytes(object_sizes: Sequence[int]) -> int:
    """Chooses a large page with which no object wastes more than ``WASTE_MAX``.

    Large pages keep objects in one piece, which is one copy per range instead of several. With one
    object size the page is that size, but for alignment.

    Args:
        object_sizes: Bytes, at least one, all positive.
    """
    return next(
        page_bytes
        for page_bytes in _page_candidates(object_sizes)
        if all(_waste(size, page_bytes) <= WASTE_MAX for size in object_sizes)
    )


def plan_pool(
    capacity_bytes: int,
    object_sizes: Sequence[int],
    *,
    page_bytes: int | None,
    high_watermark: float,
    low_watermark: float,
) -> PoolPlan:
    """Plans a pool for objects of the given sizes.

    Both watermarks are lowered as far as the largest object needs, so that it always finds room.

    Args:
        capacity_bytes: What the pool may take.
        object_sizes: Bytes, at least one, all positive.
        page_bytes: Size of a page; None chooses one.
        high_watermark: Fraction of the pool that makes a put evict.
        low_watermark: Fraction of the pool at which eviction ends.

    Raises:
        BackendError: The pool cannot hold one object and have room for the next.
    """
    page_bytes = page_bytes or choose_page_bytes(object_sizes)
    page_count = capacity_bytes // page_bytes
    largest_pages = pages_of(max(object_sizes), page_bytes)
    if page_count < 2 * largest_pages:
        raise BackendError(
            f"a pool of {capacity_bytes} bytes per rank has no room for two objects of "
            f"{max(object_sizes)} bytes in pages of {page_bytes}, which MORI needs; raise option "
            f"total_capacity_bytes or capacity_bytes, to {2 * largest_pages * page_bytes} per rank"
        )
    high_pages = min(math.ceil(high_watermark * page_count), page_count - largest_pages + 1)
    high_pages = max(high_pages, largest_pages + 1)
    low_pages = max(min(int(low_watermark * page_count), high_pages - 1), largest_pages)
    return PoolPlan(page_bytes, page_count, high_pages, low_pages)


def _page_candidates(object_sizes: Sequence[int]) -> Iterator[int]:
    """Yields pages that some object fills exactly, but for alignment, large ones first.

    The last one wastes less than a twentieth of any object, so one is always good.
    """
    descending = sorted(set(object_sizes), reverse=True)
    # Tiny objects go without alignment.
    for alignment in (PAGE_ALIGNMENT, 1):
        for page_count, object_bytes in itertools.product(range(1, 21), descending):
            page_bytes = -(-object_bytes // page_count)
            yield -(-page_bytes // alignment) * alignment


def _waste(object_bytes: int, page_bytes: int) -> float:
    return pages_of(object_bytes, page_bytes) * page_bytes / object_bytes - 1
