# SPDX-License-Identifier: Apache-2.0
"""PoolOptions: how much a rank gets, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.backends.host_limits import MemoryLimits
from umbp.backends.pool_options import DEFAULT_TOTAL_CAPACITY_BYTES, PoolOptions
from umbp.errors import ConfigError
from umbp.options import parse_options

PLENTY = MemoryLimits(total_bytes=1 << 50, available_bytes=1 << 50)


def parse(**raw):
    (options,) = parse_options(raw, PoolOptions)
    return options


@settings(deadline=None)
@given(st.integers(1, 1 << 45), st.integers(1, 1024))
def test_the_sum_over_ranks_never_exceeds_the_total(total, ranks):
    options = PoolOptions(total_capacity_bytes=total)
    if total < ranks:
        with pytest.raises(ConfigError, match=f"total_capacity_bytes is {total}"):
            options.resolve_capacity_bytes(ranks, PLENTY)
        return
    capacity = options.resolve_capacity_bytes(ranks, PLENTY)
    assert capacity > 0
    assert total - ranks < capacity * ranks <= total


def test_capacity_per_rank_is_taken_as_it_is():
    assert PoolOptions(capacity_bytes=1000).resolve_capacity_bytes(8, PLENTY) == 1000


def test_the_default_is_shared_by_the_ranks():
    assert parse().resolve_capacity_bytes(4, PLENTY) == DEFAULT_TOTAL_CAPACITY_BYTES // 4


def test_both_capacities_are_refused():
    with pytest.raises(ConfigError) as caught:
        parse(capacity_bytes=1, total_capacity_bytes=2)
    assert str(caught.value) == (
        "option capacity_bytes is 1 and option total_capacity_bytes is 2; remove one of them"
    )


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        (
            {"total_capacity_bytes": 3000},
            "option total_capacity_bytes is 3000, 1500 bytes for each of 2 ranks, but 1000 bytes "
            "are available; set it to at most 1000",
        ),
        (
            {"capacity_bytes": 1001},
            "option capacity_bytes is 1001, 1001 bytes for each of 2 ranks, but 1000 bytes are "
            "available; set it to at most 500",
        ),
        (
            {"capacity_bytes": 1000},
            "option capacity_bytes is 1000, 1000 bytes for each of 2 ranks, but this machine has "
            "1999 bytes in all; set it to at most 500",
        ),
    ],
)
def test_more_than_there_is_is_refused_by_name(given_options, message):
    limits = MemoryLimits(total_bytes=1999, available_bytes=1000)
    with pytest.raises(ConfigError) as caught:
        PoolOptions(**given_options).resolve_capacity_bytes(2, limits)
    assert str(caught.value) == message


def test_what_a_refusal_recommends_is_accepted():
    limits = MemoryLimits(total_bytes=1999, available_bytes=1000)
    assert PoolOptions(capacity_bytes=500).resolve_capacity_bytes(2, limits) == 500
    assert PoolOptions(total_capacity_bytes=1000).resolve_capacity_bytes(2, limits) == 500


def test_a_system_that_does_not_tell_refuses_nothing(monkeypatch):
    monkeypatch.setattr("umbp.backends.pool_options.memory_limits", lambda: None)
    assert PoolOptions(capacity_bytes=1 << 60).resolve_capacity_bytes(1) == 1 << 60


def test_this_system_is_asked_by_default():
    with pytest.raises(ConfigError, match="available"):
        PoolOptions(capacity_bytes=1 << 60).resolve_capacity_bytes(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_capacity_bytes", 0),
        ("capacity_bytes", -1),
        ("transfer_threads", 0),
        ("transfer_threads", 17),
        ("queue_limit", 0),
        ("numa_node", -1),
        ("prefault", 1),
        ("capacity_bytes", "4 GiB"),
    ],
)
def test_a_value_out_of_range_or_type_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        parse(**{name: value})
