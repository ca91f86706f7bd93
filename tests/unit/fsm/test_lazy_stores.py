# SPDX-License-Identifier: Apache-2.0
"""Stores that are put off, and stores of blocks that no request uses."""

import pytest

from umbp.errors import UsageError
from umbp.fsm import (
    BlocksDeferred,
    CancelTransfer,
    EpochRaised,
    LeaseKind,
    LeasePart,
    LeaseState,
    ReleasePins,
    RequestState,
    ReuseNeared,
    StartStore,
    TransferLease,
)

from .driver import PROMPT, UNIT, Driver, snapshot


def free(count: int) -> tuple[LeasePart, ...]:
    return (LeasePart(0, (b"hash",) * count, tuple(range(100, 100 + count))),)


def near(driver: Driver, count: int = 3) -> TransferLease:
    (command,) = driver.give(ReuseNeared(free(count)))
    assert isinstance(command, StartStore)
    return command.lease


@pytest.fixture
def driver() -> Driver:
    return Driver(lazy_blocks_max=8, rank_count=2, transfer_timeout_s=10.0)


# ---------------------------------------------------------------- put off


def test_what_is_put_off_is_neither_pinned_nor_stored_later_by_its_life(driver: Driver) -> None:
    driver.run()
    assert driver.core.filled_span(driver.request(), 3 * UNIT) == (0, 3 * UNIT)
    assert driver.give(BlocksDeferred("a", 0, 3 * UNIT)) == []
    assert driver.core.pinned_blocks == 0
    assert driver.core.counters.tokens_deferred == 3 * UNIT
    assert driver.core.storable(driver.request(), PROMPT) == (3 * UNIT, PROMPT)
    driver.give(BlocksDeferred("a", 3 * UNIT, PROMPT))
    assert not driver.core.filling


@pytest.mark.parametrize(
    ("begin", "end"), [(UNIT, 2 * UNIT), (0, 0), (0, UNIT + 1), (0, PROMPT + UNIT)]
)
def test_only_what_could_be_stored_is_put_off(driver: Driver, begin: int, end: int) -> None:
    driver.run()
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match=f"the store of tokens {begin} to {end} cannot wait"):
        driver.give(BlocksDeferred("a", begin, end))
    assert snapshot(driver.core) == before


def test_nothing_is_put_off_where_nothing_is_stored_later() -> None:
    driver = Driver()
    driver.run()
    assert not driver.core.may_defer()
    with pytest.raises(UsageError, match="cannot wait"):
        driver.give(BlocksDeferred("a", 0, UNIT))


def test_nothing_is_put_off_while_the_cache_holds_kv_from_before_a_reset(driver: Driver) -> None:
    driver.give(EpochRaised(local_cache_kept=True))
    driver.run()
    assert not driver.core.may_defer()
    driver.fill(0, UNIT)
    driver.give(EpochRaised(local_cache_kept=False))
    assert driver.core.may_defer()


# ---------------------------------------------------------------- of no request


def test_free_blocks_are_held_until_every_rank_has_answered(driver: Driver) -> None:
    lease = driver.send(near(driver))
    assert (lease.request, lease.kind, lease.block_count) == (None, LeaseKind.STORE, 3)
    assert driver.core.pinned_blocks == 3
    assert driver.succeed(lease, 0) == []
    (released,) = driver.succeed(lease, 1)
    assert isinstance(released, ReleasePins)
    assert released.lease is lease
    assert (driver.core.pinned_blocks, len(driver.core.leases)) == (0, 0)
    counters = driver.core.counters
    assert (counters.lazy_stores_started, counters.lazy_blocks_stored) == (1, 3)
    assert (counters.stores_started, counters.stores_settled) == (1, 1)


def test_a_failed_store_of_free_blocks_gives_them_back_and_touches_no_request(
    driver: Driver,
) -> None:
    driver.bring(RequestState.RUNNING)
    lease = driver.send(near(driver))
    before = driver.request().open_leases
    driver.fail(lease, 0)
    (released,) = driver.succeed(lease, 1)
    assert isinstance(released, ReleasePins)
    assert driver.request().open_leases == before
    assert driver.core.counters.lazy_blocks_stored == 0


@pytest.mark.parametrize("kept", [False, True])
def test_a_reset_gives_nothing_back(driver: Driver, kept: bool) -> None:
    lease = driver.send(near(driver))
    assert driver.give(EpochRaised(kept)) == []
    assert driver.core.pinned_blocks == 3
    assert lease.epoch != driver.core.epoch
    driver.succeed(lease, 0)
    driver.succeed(lease, 1)
    assert driver.core.pinned_blocks == 0


def test_a_silent_store_is_cancelled_again_and_again_and_keeps_its_blocks(driver: Driver) -> None:
    lease = driver.send(near(driver))
    for _ in range(3):
        (command,) = driver.wait(10.0)
        assert isinstance(command, CancelTransfer)
        assert (lease.state, driver.core.pinned_blocks) == (LeaseState.STALLED, 3)


def test_a_store_that_no_worker_heard_of_gives_its_blocks_back_at_its_deadline(
    driver: Driver,
) -> None:
    near(driver)
    (command,) = driver.wait(10.0)
    assert isinstance(command, ReleasePins)
    assert not driver.core.leases


def test_pins_of_all_stores_count_towards_the_limit(driver: Driver) -> None:
    driver.run()
    driver.fill(0, 6 * UNIT)
    assert driver.core.lazy_room() == 2
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match=r"^store \d+ of free blocks: 3 blocks are declined_pin"):
        driver.give(ReuseNeared(free(3)))
    assert snapshot(driver.core) == before
    near(driver, 2)
    assert driver.core.lazy_room() == 0
    assert driver.core.counters.declined_pin_limit == 1


@pytest.mark.parametrize("parts", [(), (LeasePart(0, (b"a",), (1, 2)),)])
def test_free_blocks_have_hashes(driver: Driver, parts: tuple[LeasePart, ...]) -> None:
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match="of free blocks: "):
        driver.give(ReuseNeared(parts))
    assert snapshot(driver.core) == before
