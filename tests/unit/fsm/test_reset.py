# SPDX-License-Identifier: Apache-2.0
"""A reset: nothing stored before it is found, and nothing computed before it is stored."""

import pytest

from umbp.errors import UsageError
from umbp.fsm import (
    DropLookup,
    EpochRaised,
    LeaseState,
    LookupReply,
    ReleasePins,
    RequestState,
)

from .driver import PROMPT, UNIT, Driver, snapshot


@pytest.fixture
def driver() -> Driver:
    return Driver()


def reset(driver: Driver, *, kept: bool = False) -> list[object]:
    return list(driver.give(EpochRaised(local_cache_kept=kept)))


def test_an_open_question_is_dropped(driver: Driver) -> None:
    driver.ask()
    question_id = driver.request().question_id
    (dropped,) = reset(driver)
    assert isinstance(dropped, DropLookup)
    assert dropped.question_id == question_id
    assert driver.reply() is LookupReply.ASK


def test_what_was_found_is_not_loaded(driver: Driver) -> None:
    driver.find(4 * UNIT)
    assert reset(driver) == []
    assert driver.reply() is LookupReply.ASK
    with pytest.raises(UsageError, match="but 0 to 0 were found"):
        driver.load(0, 4 * UNIT)


def test_a_request_that_was_not_admitted_belongs_to_the_new_epoch(driver: Driver) -> None:
    driver.find(4 * UNIT)
    reset(driver)
    assert driver.request().epoch == driver.core.epoch == 1
    driver.compute()
    assert driver.fill(0, UNIT).epoch == 1


@pytest.mark.parametrize(
    "state",
    [RequestState.LOADING, RequestState.RUNNING, RequestState.PREEMPTED, RequestState.STORING],
)
def test_transfers_go_on_and_keep_their_blocks(driver: Driver, state: RequestState) -> None:
    lease = driver.bring(state)
    pinned = driver.core.pinned_blocks
    assert reset(driver) == []
    assert lease.request.state is state
    assert lease.state is LeaseState.IN_FLIGHT
    assert lease.epoch == 0
    assert driver.core.pinned_blocks == pinned
    released = driver.succeed(lease)
    assert [type(command) for command in released] == [ReleasePins] * pinned
    assert driver.core.pinned_blocks == 0
    assert not driver.core.leases


@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.RUNNING])
def test_a_life_from_before_stores_nothing_more(driver: Driver, state: RequestState) -> None:
    lease = driver.bring(state)
    could_store = len(driver.core.filling)
    reset(driver)
    assert not driver.core.filling
    driver.succeed(lease)
    driver.compute(4 * UNIT)
    request = driver.request()
    assert request.epoch == 0
    assert not driver.core.filling
    assert driver.core.storable(request, PROMPT) is None
    assert driver.core.counters.declined_stale_epoch == could_store
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match="tokens 64 to 80 are not storable now"):
        driver.fill(4 * UNIT, 5 * UNIT)
    assert snapshot(driver.core) == before


@pytest.mark.parametrize(
    "state", [RequestState.LOADING, RequestState.RUNNING, RequestState.PREEMPTED]
)
def test_the_life_after_it_stores_again(driver: Driver, state: RequestState) -> None:
    driver.bring(state)
    reset(driver)
    driver.run()
    assert driver.request().epoch == 1
    assert driver.core.storable(driver.request(), PROMPT) == (0, PROMPT)


def test_a_load_that_fails_after_it_leaves_the_old_epoch_to_the_life(driver: Driver) -> None:
    load = driver.bring(RequestState.LOADING)
    reset(driver)
    driver.fail(load)
    driver.compute()
    assert driver.core.storable(driver.request(), PROMPT) is None
    driver.preempt()
    driver.run()
    assert driver.core.storable(driver.request(), PROMPT) == (0, PROMPT)


def test_each_reset_is_a_new_epoch(driver: Driver) -> None:
    for epoch in (1, 2, 3):
        reset(driver)
        assert driver.core.epoch == driver.core.counters.epochs_raised == epoch


# ---------------------------------------------------------------- an engine cache that was kept


@pytest.mark.parametrize("loads", [True, False])
def test_what_may_share_old_kv_is_not_stored(driver: Driver, loads: bool) -> None:
    reset(driver, kept=True)
    driver.find(4 * UNIT, local=UNIT)
    if loads:
        driver.succeed(driver.send(driver.load(UNIT, 4 * UNIT)))
    driver.compute(UNIT)
    assert driver.core.storable(driver.request(), PROMPT) is None
    assert not driver.core.filling
    assert driver.core.counters.declined_barred == 1


def test_what_shares_nothing_is_stored(driver: Driver) -> None:
    reset(driver, kept=True)
    driver.run()
    assert driver.core.storable(driver.request(), PROMPT) == (0, PROMPT)


def test_restored_tokens_are_not_the_engines_own(driver: Driver) -> None:
    reset(driver, kept=True)
    driver.succeed(driver.bring(RequestState.LOADING))
    driver.compute(4 * UNIT)
    assert driver.core.storable(driver.request(), PROMPT) == (4 * UNIT, PROMPT)
    assert driver.core.counters.declined_barred == 0


def test_a_life_is_barred_once(driver: Driver) -> None:
    reset(driver, kept=True)
    driver.find(4 * UNIT, local=UNIT)
    driver.fail(driver.send(driver.load(UNIT, 4 * UNIT)))
    driver.compute(UNIT)
    driver.compute(2 * UNIT)
    assert driver.core.counters.declined_barred == 1


def test_a_later_reset_that_empties_the_cache_lifts_it(driver: Driver) -> None:
    reset(driver, kept=True)
    reset(driver, kept=False)
    driver.run(computed=UNIT)
    assert driver.core.storable(driver.request(), PROMPT) == (UNIT, PROMPT)
