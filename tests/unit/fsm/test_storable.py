# SPDX-License-Identifier: Apache-2.0
"""Which tokens are stored when."""

import pytest

from umbp.errors import UsageError
from umbp.fsm import LeaseState, LookupSkipped, RankStalled, RequestState

from .driver import PROMPT, UNIT, Driver, snapshot


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.run()
    return driver


@pytest.mark.parametrize(
    ("computed", "span"),
    [
        (0, None),
        (UNIT - 1, None),
        (UNIT, (0, UNIT)),
        (UNIT + 1, (0, UNIT)),
        (3 * UNIT - 1, (0, 2 * UNIT)),
        (PROMPT, (0, PROMPT)),
        (PROMPT + 5 * UNIT, (0, PROMPT)),
    ],
)
def test_whole_blocks_that_are_computed_are_stored(driver: Driver, computed: int, span) -> None:
    assert driver.core.storable(driver.request(), computed) == span


def test_a_block_is_stored_once(driver: Driver) -> None:
    request = driver.request()
    driver.fill(0, 2 * UNIT)
    assert driver.core.storable(request, 2 * UNIT) is None
    assert driver.core.storable(request, 3 * UNIT) == (2 * UNIT, 3 * UNIT)


def test_a_part_of_a_block_at_the_end_is_not_stored() -> None:
    driver = Driver()
    driver.give(LookupSkipped("a", None, 0, 0, 3 * UNIT - 1))
    driver.compute()
    assert driver.core.storable(driver.request(), 100 * UNIT) == (0, 2 * UNIT)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 2 * UNIT + 1), (UNIT, 2 * UNIT), (0, 0), (0, PROMPT + UNIT)]
)
def test_only_what_is_storable_is_stored(driver: Driver, begin: int, end: int) -> None:
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match=f"tokens {begin} to {end} are not storable now"):
        driver.fill(begin, end)
    assert snapshot(driver.core) == before


# ---------------------------------------------------------------- declines


def decline_by_sync_load() -> Driver:
    driver = Driver()
    driver.find(UNIT, "b")
    driver.load(0, UNIT, "b", synchronous=True)
    return driver


def decline_by_lease_limit() -> Driver:
    driver = Driver(open_leases_max=2)
    driver.bring(RequestState.RUNNING, "b")
    driver.bring(RequestState.LOADING, "c")
    return driver


def decline_by_pin_limit() -> Driver:
    driver = Driver(pinned_blocks_max=1)
    driver.bring(RequestState.RUNNING, "b")
    return driver


DECLINES = pytest.mark.parametrize(
    ("make", "counter"),
    [
        (decline_by_sync_load, "declined_sync_load"),
        (decline_by_lease_limit, "declined_lease_limit"),
        (decline_by_pin_limit, "declined_pin_limit"),
    ],
    ids=["sync load", "leases", "pins"],
)


@DECLINES
def test_a_decline_is_counted_and_the_store_is_due_again(make, counter: str) -> None:
    driver = make()
    driver.run()
    request = driver.request()
    assert driver.core.storable(request, UNIT) is None
    assert driver.core.storable(request, UNIT) is None
    counted = driver.core.counters.as_dict()
    assert {name: n for name, n in counted.items() if name.startswith("declined")} == {
        name: 2 if name == counter else 0 for name in counted if name.startswith("declined")
    }
    for lease in list(driver.core.leases.values()):
        driver.succeed(lease if lease.state is LeaseState.IN_FLIGHT else driver.send(lease))
    assert driver.core.storable(request, UNIT) == (0, UNIT)


@DECLINES
def test_a_store_that_would_be_declined_is_refused_and_not_counted(make, counter: str) -> None:
    driver = make()
    driver.run()
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match="not storable now"):
        driver.fill(0, UNIT)
    assert snapshot(driver.core) == before


@pytest.mark.parametrize("blocks", [2, 3, 4, 10])
def test_stores_pin_as_many_blocks_as_the_limit_and_the_rest_comes_later(blocks: int) -> None:
    driver = Driver(pinned_blocks_max=4)
    driver.bring(RequestState.RUNNING, "b")
    driver.run()
    end = min(blocks, 3) * UNIT
    assert driver.core.storable(driver.request(), blocks * UNIT) == (0, end)
    store = driver.send(driver.fill(0, end))
    if blocks > 2:
        assert driver.core.storable(driver.request(), 10 * UNIT) is None
    driver.succeed(store)
    assert driver.core.storable(driver.request(), 10 * UNIT) == (end, end + 3 * UNIT)


def test_a_stalled_load_may_leave_nothing_to_pin() -> None:
    driver = Driver(pinned_blocks_max=3)
    load = driver.bring(RequestState.LOADING, "b")
    driver.give(RankStalled(load.job_id, 0))
    driver.run()
    assert driver.core.pinned_blocks == 4
    assert driver.core.storable(driver.request(), UNIT) is None


def test_just_as_many_transfers_may_be_open_as_the_limit() -> None:
    driver = Driver(open_leases_max=2)
    driver.run()
    for at in range(2):
        assert driver.core.storable(driver.request(), PROMPT)
        driver.fill(at * UNIT, (at + 1) * UNIT)
    assert driver.core.storable(driver.request(), PROMPT) is None


def test_loads_are_not_declined() -> None:
    driver = Driver(open_leases_max=1, pinned_blocks_max=1)
    driver.bring(RequestState.RUNNING, "b")
    driver.bring(RequestState.LOADING, "a")
    assert len(driver.core.leases) == 2


# ---------------------------------------------------------------- filling


def test_filling_holds_what_may_still_have_blocks_to_store(driver: Driver) -> None:
    request = driver.request()
    assert driver.core.filling == {"a": request}
    driver.fill(0, PROMPT - UNIT)
    assert driver.core.filling == {"a": request}
    driver.fill(PROMPT - UNIT, PROMPT)
    assert driver.core.filling == {}


def test_a_request_of_which_nothing_is_to_be_stored_does_not_fill() -> None:
    driver = Driver()
    driver.give(LookupSkipped("a", None, 0, 0, UNIT - 1))
    driver.compute()
    assert not driver.core.filling


def test_a_request_fills_once_its_load_has_ended() -> None:
    driver = Driver()
    load = driver.bring(RequestState.LOADING)
    assert not driver.core.filling
    driver.succeed(load)
    assert driver.core.filling == {"a": driver.request()}


def test_a_request_fills_during_its_synchronous_load() -> None:
    driver = Driver()
    driver.find(UNIT)
    driver.load(0, UNIT, synchronous=True)
    assert driver.core.filling == {"a": driver.request()}


@pytest.mark.parametrize("leave", ["preempt", "finish", "ask"])
def test_a_life_that_ends_does_not_fill(driver: Driver, leave: str) -> None:
    getattr(driver, leave)()
    assert not driver.core.filling


def test_what_the_engine_knows_already_is_not_stored(driver: Driver) -> None:
    driver.compute(3 * UNIT)
    assert driver.core.storable(driver.request(), 4 * UNIT) == (3 * UNIT, 4 * UNIT)
    driver.compute(PROMPT)
    assert not driver.core.filling
