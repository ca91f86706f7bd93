# SPDX-License-Identifier: Apache-2.0
"""Boundaries that the engine hands off are stored beside the blocks that fill."""

import pytest

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import (
    BoundaryOffered,
    EpochRaised,
    LeaseKind,
    LeasePart,
    ReleasePins,
    RequestState,
    StartStore,
    TransferLease,
)

from .driver import PROMPT, UNIT, Driver, snapshot

BOUNDARY = 2 * UNIT


def blocks(count: int) -> tuple[LeasePart, ...]:
    return (LeasePart(1, (b"state",) * count, tuple(range(count))),)


def offer(driver: Driver, count: int = 1, name: str = "a") -> TransferLease:
    (command,) = driver.give(BoundaryOffered(name, BOUNDARY, BOUNDARY, blocks(count)))
    assert isinstance(command, StartStore)
    return command.lease


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.run()
    return driver


def test_a_boundary_is_pinned_until_all_ranks_have_answered(driver: Driver) -> None:
    assert driver.core.may_store_boundary(driver.request(), 3)
    lease = driver.send(offer(driver, 3))
    assert (lease.kind, lease.block_count) == (LeaseKind.STORE, 3)
    assert (lease.begin_tokens, lease.end_tokens) == (BOUNDARY, BOUNDARY)
    assert driver.core.pinned_blocks == 3
    driver.finish()
    (released,) = driver.succeed(lease)
    assert isinstance(released, ReleasePins)
    assert driver.core.pinned_blocks == 0
    assert lease.request.state is RequestState.FINISHED


def test_a_boundary_does_not_stand_for_the_blocks_before_it(driver: Driver) -> None:
    offer(driver)
    assert driver.core.storable(driver.request(), PROMPT) == (0, PROMPT)
    driver.fill(0, PROMPT)
    assert not driver.core.filling
    # Nor do blocks that were stored stand for the boundary.
    offer(driver)


def test_a_boundary_mentions_its_request() -> None:
    driver = Driver(idle_timeout_s=100.0, transfer_timeout_s=1000.0)
    driver.run()
    driver.wait(60.0)
    offer(driver)
    driver.wait(60.0)
    assert driver.request().state is RequestState.RUNNING


@pytest.mark.parametrize(
    "state", [RequestState.LOOKUP, RequestState.LOADING, RequestState.PREEMPTED]
)
def test_only_what_runs_reaches_a_boundary(state: RequestState) -> None:
    driver = Driver()
    driver.bring(state)
    assert not driver.core.may_store_boundary(driver.request(), 1)
    assert driver.core.counters.declined_boundary == 1
    before = snapshot(driver.core)
    with pytest.raises(
        IllegalTransition, match=f"BoundaryOffered is illegal in state {state.name}"
    ):
        offer(driver)
    assert snapshot(driver.core) == before


def stale() -> Driver:
    driver = Driver()
    driver.run()
    driver.give(EpochRaised(local_cache_kept=False))
    return driver


def barred() -> Driver:
    driver = Driver()
    driver.give(EpochRaised(local_cache_kept=True))
    driver.run(computed=UNIT)
    return driver


def loading_synchronously() -> Driver:
    driver = Driver()
    driver.run()
    driver.find(UNIT, "b")
    driver.load(0, UNIT, "b", synchronous=True)
    return driver


def out_of_leases() -> Driver:
    driver = Driver(open_leases_max=1)
    driver.run()
    driver.fill(0, UNIT)
    return driver


def out_of_pins() -> Driver:
    driver = Driver(pinned_blocks_max=2)
    driver.run()
    driver.fill(0, 2 * UNIT)
    return driver


@pytest.mark.parametrize(
    ("make", "counter"),
    [
        (stale, "declined_boundary"),
        (barred, "declined_boundary"),
        (loading_synchronously, "declined_sync_load"),
        (out_of_leases, "declined_lease_limit"),
        (out_of_pins, "declined_pin_limit"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_boundary_that_cannot_be_stored_is_counted_when_asked_and_refused(
    make, counter: str
) -> None:
    driver = make()
    counted = getattr(driver.core.counters, counter)
    assert not driver.core.may_store_boundary(driver.request(), 1)
    assert getattr(driver.core.counters, counter) == counted + 1
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match=f"boundary {BOUNDARY} is {counter}"):
        offer(driver)
    assert snapshot(driver.core) == before


def test_a_boundary_may_pin_just_what_is_left() -> None:
    driver = Driver(pinned_blocks_max=3)
    driver.run()
    driver.fill(0, UNIT)
    assert not driver.core.may_store_boundary(driver.request(), 3)
    assert driver.core.may_store_boundary(driver.request(), 2)
    offer(driver, 2)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "no blocks for tokens 32 to 32"),
        ((LeasePart(1, (), ()),), "0 blocks and 0 hashes of group 1"),
        ((LeasePart(1, (b"a", b"b"), (5,)),), "1 blocks and 2 hashes of group 1"),
    ],
)
def test_a_boundary_has_a_hash_for_each_block(driver: Driver, parts, words: str) -> None:
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match=words):
        driver.give(BoundaryOffered("a", BOUNDARY, BOUNDARY, parts))
    assert snapshot(driver.core) == before


@pytest.mark.parametrize(("blocks_per_unit", "storable"), [(1.0, 4), (1.25, 4), (1.3, 3), (2.0, 2)])
def test_stores_count_the_blocks_of_all_groups(blocks_per_unit: float, storable: int) -> None:
    driver = Driver(pinned_blocks_max=5, blocks_per_unit=blocks_per_unit)
    driver.run()
    request = driver.request()
    assert driver.core.storable(request, storable * UNIT) == (0, storable * UNIT)
    most = 5 if blocks_per_unit == 1.0 else storable
    assert driver.core.storable(request, 10 * UNIT) == (0, most * UNIT)
