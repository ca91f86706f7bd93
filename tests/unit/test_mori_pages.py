# SPDX-License-Identifier: Apache-2.0
"""A planned pool wastes little, keeps within its capacity, and always has room for one object."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp.backends.mori_pages import (
    PAGE_ALIGNMENT,
    WASTE_MAX,
    PoolPlan,
    choose_page_bytes,
    pages_of,
    plan_pool,
)
from umbp.errors import BackendError

KIB = 1024
MIB = 1024 * KIB


def plan(
    capacity_bytes: int,
    *object_sizes: int,
    page_bytes: int | None = None,
    high: float = 0.95,
    low: float = 0.9,
) -> PoolPlan:
    return plan_pool(
        capacity_bytes,
        object_sizes,
        page_bytes=page_bytes,
        high_watermark=high,
        low_watermark=low,
    )


def used_pages_after_put(used_pages: int, pool: PoolPlan) -> int:
    """What MORI does at the end of a put call, with objects of one page."""
    if used_pages < pool.high_watermark * pool.page_count:
        return used_pages
    return math.floor(pool.low_watermark * pool.page_count)


@pytest.mark.parametrize("object_bytes", [1, 100, 1000, 2048, 64 * KIB, 720 * KIB, 64 * MIB])
def test_one_object_size_is_one_page(object_bytes: int) -> None:
    page_bytes = choose_page_bytes([object_bytes])
    assert pages_of(object_bytes, page_bytes) == 1
    assert page_bytes <= object_bytes * (1 + WASTE_MAX)


def test_the_page_may_be_the_size_of_the_smaller_object() -> None:
    # 13 pages hold the larger object and waste 2.5 %.
    assert choose_page_bytes([19472, 1536]) == 1536


def test_pages_of_large_objects_are_aligned() -> None:
    assert choose_page_bytes([720 * KIB + 1]) % PAGE_ALIGNMENT == 0


@given(st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=4))
def test_no_object_wastes_more_than_allowed(object_sizes: list[int]) -> None:
    page_bytes = choose_page_bytes(object_sizes)
    for object_bytes in object_sizes:
        taken = pages_of(object_bytes, page_bytes) * page_bytes
        assert object_bytes <= taken <= object_bytes * (1 + WASTE_MAX)


def test_default_watermarks_leave_a_twentieth_free() -> None:
    pool = plan(100 * MIB, 1 * MIB)
    assert (pool.page_count, pool.high_pages, pool.low_pages, pool.room_pages) == (100, 95, 90, 6)
    assert pool.objects_per_put(1 * MIB) == 6


def test_watermarks_fall_until_the_largest_object_has_room() -> None:
    pool = plan(16 * MIB, 7 * MIB, page_bytes=1 * MIB)
    assert pool.room_pages == 7
    assert pool.objects_per_put(7 * MIB) == 1


def test_one_object_is_kept_while_the_next_is_written() -> None:
    pool = plan(2 * MIB, 1 * MIB)
    assert (pool.room_pages, pool.low_pages) == (1, 1)


def test_a_pool_too_small_for_two_objects_is_refused_with_the_size_to_give() -> None:
    with pytest.raises(BackendError, match=r"pool of 1500000 bytes .* to 2097152 per rank$"):
        plan(1_500_000, 1 * MIB)


@given(
    capacity_bytes=st.integers(2 * 64 * KIB, 1 << 40),
    object_bytes=st.integers(1 * KIB, 64 * KIB),
    low=st.floats(0.01, 0.99),
    gap=st.floats(0.001, 0.9),
)
def test_any_watermarks_keep_the_promises(
    capacity_bytes: int, object_bytes: int, low: float, gap: float
) -> None:
    pool = plan(capacity_bytes, object_bytes, low=low, high=min(1.0, low + gap))
    assert pool.capacity_bytes <= capacity_bytes
    assert 0 < pool.low_watermark < pool.high_watermark <= 1
    assert pool.objects_per_put(object_bytes) >= 1
    # The fractions mean exactly these page counts to MORI, on both sides of the mark.
    assert used_pages_after_put(pool.high_pages - 1, pool) == pool.high_pages - 1
    assert used_pages_after_put(pool.high_pages, pool) == pool.low_pages
    assert pool.high_pages - 1 + pool.room_pages == pool.page_count
