# SPDX-License-Identifier: Apache-2.0
"""Loads, asynchronous and synchronous, and what their failure means."""

import pytest

from umbp.errors import UsageError
from umbp.fsm import (
    LeasePart,
    LoadAdmitted,
    LookupReply,
    RequestState,
    TransferLease,
)

from .driver import PROMPT, UNIT, Driver, snapshot


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 2 * UNIT), (UNIT, 5 * UNIT), (2 * UNIT, 2 * UNIT), (3 * UNIT, 2 * UNIT)],
    ids=["before", "beyond", "empty", "backwards"],
)
def test_only_what_was_found_is_loaded(driver: Driver, begin: int, end: int) -> None:
    driver.find(4 * UNIT, local=UNIT)
    before = snapshot(driver.core)
    with pytest.raises(
        UsageError, match=f"load of tokens {begin} to {end}, but 16 to 64 were found"
    ):
        driver.load(begin, end)
    assert snapshot(driver.core) == before


def test_nothing_is_loaded_before_the_answer(driver: Driver) -> None:
    driver.ask()
    with pytest.raises(UsageError, match="but 0 to 0 were found"):
        driver.load(0, UNIT)


@pytest.mark.parametrize(
    ("end", "part", "words"),
    [
        (2 * UNIT, LeasePart(0, (b"a",), (1, 2)), "2 blocks and 1 hashes of group 0"),
        (2 * UNIT, LeasePart(0, (b"a", b"b"), (1,)), "1 blocks and 2 hashes of group 0"),
        (2 * UNIT, LeasePart(3, (), ()), "0 blocks and 0 hashes of group 3"),
        (2 * UNIT - 1, LeasePart(0, (b"a", b"b"), (1, 2)), "no whole number of units"),
    ],
)
def test_a_load_needs_a_hash_for_each_block_and_whole_units(
    driver: Driver, end: int, part: LeasePart, words: str
) -> None:
    driver.find(4 * UNIT)
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match=words):
        driver.give(LoadAdmitted("a", 0, end, (part,), False))
    assert snapshot(driver.core) == before


def test_a_load_of_nothing_is_refused(driver: Driver) -> None:
    driver.find(4 * UNIT)
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match="no blocks for tokens 0 to 32"):
        driver.give(LoadAdmitted("a", 0, 2 * UNIT, (), False))
    assert snapshot(driver.core) == before


def test_a_failed_load_bars_its_request_and_no_other(driver: Driver) -> None:
    driver.bring(RequestState.LOADING, "b")
    load = driver.bring(RequestState.LOADING, "a")
    driver.fail(load)
    assert driver.request().state is RequestState.LOOKUP
    assert not driver.core.may_lookup("a")
    assert driver.core.may_lookup("b")
    assert driver.core.may_lookup("unknown")
    assert driver.reply() is LookupReply.ASK
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match="give LookupSkipped"):
        driver.ask()
    assert snapshot(driver.core) == before
    driver.skip()
    assert driver.reply() == 0


def test_a_request_stays_barred_over_preemption(driver: Driver) -> None:
    driver.fail(driver.bring(RequestState.LOADING))
    driver.run()
    driver.preempt()
    driver.skip()
    assert not driver.core.may_lookup("a")


def test_what_a_failed_load_did_not_bring_is_computed_and_stored(driver: Driver) -> None:
    driver.fail(driver.bring(RequestState.LOADING))
    driver.run()
    assert driver.core.storable(driver.request(), PROMPT) == (0, PROMPT)


def test_a_load_that_ended_is_not_waited_for(driver: Driver) -> None:
    load = driver.bring(RequestState.LOADING)
    assert driver.request().load_job_id == load.job_id
    driver.succeed(load)
    assert driver.request().load_job_id is None
    driver.bring(RequestState.LOADING, "b")
    driver.preempt("b")
    assert driver.request("b").load_job_id is None


def test_what_was_stored_is_not_stored_again_when_the_engine_knows_less(driver: Driver) -> None:
    driver.run()
    driver.fill(0, 4 * UNIT)
    driver.compute(UNIT)
    assert driver.core.storable(driver.request(), PROMPT) == (4 * UNIT, PROMPT)


def test_what_was_restored_is_not_stored_again(driver: Driver) -> None:
    driver.succeed(driver.bring(RequestState.LOADING))
    driver.compute(4 * UNIT)
    assert driver.core.storable(driver.request(), PROMPT) == (4 * UNIT, PROMPT)


# ---------------------------------------------------------------- synchronous loads


def sync_load(driver: Driver, name: str = "a") -> TransferLease:
    driver.find(4 * UNIT, name)
    return driver.send(driver.load(0, 4 * UNIT, name, synchronous=True))


def test_no_store_is_planned_while_a_synchronous_load_is_open(driver: Driver) -> None:
    driver.run(name="b")
    load = sync_load(driver)
    assert driver.core.storable(driver.request("b"), UNIT) is None
    assert driver.core.counters.declined_sync_load == 1
    driver.succeed(load)
    assert driver.core.storable(driver.request("b"), UNIT) == (0, UNIT)
    assert driver.core.storable(driver.request("a"), 5 * UNIT) == (4 * UNIT, 5 * UNIT)


@pytest.mark.parametrize("meanwhile", ["nothing", "preempt", "finish", "ask"])
def test_a_failed_synchronous_load_bars_every_life(driver: Driver, meanwhile: str) -> None:
    for name in ("b", "c"):
        driver.run(name=name)
    load = sync_load(driver)
    if meanwhile != "nothing":
        getattr(driver, meanwhile)()
    driver.fail(load)
    for name in ("b", "c"):
        assert driver.core.storable(driver.request(name), PROMPT) is None
        driver.preempt(name)
        driver.run(name=name)
        # A life that begins after the failure shares nothing that was not filled.
        assert driver.core.storable(driver.request(name), PROMPT) == (0, PROMPT)
    assert driver.core.sync_loads == 0


def test_a_failed_synchronous_load_lets_its_request_run(driver: Driver) -> None:
    load = sync_load(driver)
    driver.fail(load)
    assert driver.request().state is RequestState.RUNNING
    assert not driver.core.may_lookup("a")
    assert not driver.core.filling
    # It was the only life that could still store.
    assert driver.core.counters.declined_barred == 1


def test_a_failed_asynchronous_load_bars_no_other_store(driver: Driver) -> None:
    driver.run(name="b")
    driver.fail(driver.bring(RequestState.LOADING))
    assert driver.core.storable(driver.request("b"), UNIT) == (0, UNIT)
