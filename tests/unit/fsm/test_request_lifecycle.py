# SPDX-License-Identifier: Apache-2.0
"""The life of a request, from its lookup to its end."""

import math

import pytest

from umbp.errors import IllegalTransition
from umbp.fsm import (
    DropLookup,
    LeaseState,
    ReleasePins,
    RequestState,
    StartLookup,
)

from .driver import ALIVE, PROMPT, UNIT, Driver, snapshot


@pytest.fixture
def driver() -> Driver:
    return Driver()


# ---------------------------------------------------------------- the whole way


def test_what_is_found_is_loaded_and_the_rest_is_stored(driver: Driver) -> None:
    (asked,) = driver.ask(local=UNIT, end=PROMPT - 1)
    assert isinstance(asked, StartLookup)
    assert (asked.begin_tokens, asked.end_tokens) == (UNIT, PROMPT - UNIT)
    request = driver.request()
    assert asked.request is request
    assert driver.answer(4 * UNIT) == []
    load = driver.send(driver.load(UNIT, 4 * UNIT))
    assert request.state is RequestState.LOADING
    assert driver.succeed(load) == []
    assert request.state is RequestState.RUNNING
    store = driver.send(driver.fill(4 * UNIT, PROMPT))
    assert driver.finish() == []
    assert request.state is RequestState.STORING
    (released,) = driver.succeed(store)
    assert isinstance(released, ReleasePins)
    assert released.lease is store
    assert request.state is RequestState.FINISHED
    counters = driver.core.counters
    assert (counters.tokens_restored, counters.tokens_stored) == (3 * UNIT, 6 * UNIT)
    assert (counters.lookups, counters.lookup_hits, counters.lookup_misses) == (1, 1, 0)


def test_nothing_is_left_of_a_request_that_ended(driver: Driver) -> None:
    request = driver.bring(RequestState.STORING).request
    driver.succeed(next(iter(driver.core.leases.values())))
    assert request.deadline_s == math.inf
    assert not driver.core.requests
    assert not driver.core.leases
    assert not driver.core.filling
    assert driver.core.pinned_blocks == 0


# ---------------------------------------------------------------- preemption


def test_a_store_of_an_earlier_life_goes_on_while_a_new_one_loads(driver: Driver) -> None:
    driver.run()
    first_life = driver.request().generation
    store = driver.send(driver.fill(0, 4 * UNIT))
    assert driver.preempt() == []
    assert driver.core.pinned_blocks == 4
    driver.find(4 * UNIT)
    request = driver.request()
    assert request.generation != first_life
    assert store.generation == first_life
    load = driver.send(driver.load(0, 2 * UNIT))
    assert load.generation == request.generation
    assert request.open_leases == 2
    (released,) = driver.succeed(store)
    assert isinstance(released, ReleasePins)
    assert request.state is RequestState.LOADING
    driver.succeed(load)
    assert request.state is RequestState.RUNNING
    assert request.open_leases == 0


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_load_of_an_earlier_life_does_not_end_the_wait_of_a_new_one(
    driver: Driver, succeeds: bool
) -> None:
    old = driver.bring(RequestState.LOADING)
    driver.preempt()
    driver.find(3 * UNIT)
    new = driver.send(driver.load(0, 3 * UNIT))
    before = attrs_of(driver)
    driver.succeed(old) if succeeds else driver.fail(old)
    assert attrs_of(driver) == before | {"open_leases": 1}
    driver.succeed(new)
    assert driver.request().state is RequestState.RUNNING
    assert driver.core.may_lookup("a")


def attrs_of(driver: Driver) -> dict[str, object]:
    (fields,) = snapshot(driver.core)["contexts"].values()
    return fields


@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.RUNNING])
@pytest.mark.parametrize("again", [Driver.ask, Driver.skip])
def test_a_question_of_an_admitted_life_says_that_it_was_preempted(
    driver: Driver, state: RequestState, again: object
) -> None:
    lease = driver.bring(state)
    generation = driver.request().generation
    again(driver)
    request = driver.request()
    assert request.state is RequestState.LOOKUP
    assert request.generation != generation
    assert not driver.core.filling
    assert driver.core.counters.preemptions == 1
    driver.succeed(lease)
    assert request.state is RequestState.LOOKUP
    assert request.open_leases == 0


def test_a_new_life_stores_from_where_it_begins_to_compute(driver: Driver) -> None:
    driver.run()
    driver.fill(0, 2 * UNIT)
    driver.preempt()
    assert driver.core.storable(driver.request(), PROMPT) is None
    driver.run(computed=UNIT)
    # What the first life counted does not count for the second: 40 tokens fill two blocks.
    assert driver.core.storable(driver.request(), 40) == (UNIT, 2 * UNIT)
    assert driver.core.storable(driver.request(), 3 * UNIT) == (UNIT, 3 * UNIT)


def test_a_life_that_begins_inside_a_block_stores_that_block(driver: Driver) -> None:
    driver.skip(local=UNIT)
    driver.compute(UNIT + 3)
    assert driver.core.storable(driver.request(), 3 * UNIT) == (UNIT, 3 * UNIT)


def test_lives_are_numbered_uniquely(driver: Driver) -> None:
    seen = set()
    for name in ("a", "b"):
        for _ in range(3):
            driver.run(name=name)
            seen.add(driver.request(name).generation)
            seen.add(driver.fill(0, UNIT, name).job_id)
            driver.preempt(name)
    assert len(seen) == 12


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("state", ALIVE)
def test_a_request_may_end_in_any_state(driver: Driver, state: RequestState) -> None:
    lease = driver.bring(state)
    request = driver.request()
    driver.finish()
    assert not driver.core.requests
    assert not driver.core.filling
    if lease is not None:
        # Its blocks stay held until the workers have answered.
        assert request.state is RequestState.STORING
        assert lease.state is LeaseState.IN_FLIGHT
        released = driver.succeed(lease)
        assert [type(command) for command in released] == [ReleasePins] * len(released)
        assert len(released) == (state is not RequestState.LOADING)
    assert request.state is RequestState.FINISHED
    assert request.question_id is None
    assert driver.core.pinned_blocks == 0


def test_the_end_drops_the_open_question(driver: Driver) -> None:
    driver.ask()
    (dropped,) = driver.finish()
    assert isinstance(dropped, DropLookup)


def test_computing_at_once_drops_the_open_question(driver: Driver) -> None:
    driver.ask()
    (dropped,) = driver.compute()
    assert isinstance(dropped, DropLookup)
    assert driver.request().question_id is None


def test_a_request_ends_with_its_last_transfer(driver: Driver) -> None:
    driver.run()
    request = driver.request()
    first = driver.send(driver.fill(0, UNIT))
    second = driver.send(driver.fill(UNIT, 2 * UNIT))
    driver.finish()
    driver.succeed(second)
    assert request.state is RequestState.STORING
    driver.fail(first)
    assert request.state is RequestState.FINISHED


def test_an_id_may_be_used_again_while_transfers_of_its_last_request_are_open(
    driver: Driver,
) -> None:
    store = driver.bring(RequestState.STORING)
    driver.bring(RequestState.RUNNING)
    new = driver.request()
    assert store.request is not new
    driver.succeed(store)
    assert store.request.state is RequestState.FINISHED
    assert driver.request() is new
    assert new.state is RequestState.RUNNING
    assert driver.core.filling == {"a": new}


@pytest.mark.parametrize(
    "state", [RequestState.LOOKUP, RequestState.RUNNING, RequestState.PREEMPTED]
)
def test_a_request_that_is_never_mentioned_again_is_dropped(state: RequestState) -> None:
    driver = Driver(idle_timeout_s=100.0, lookup_timeout_s=0.5)
    lease = driver.bring(state)
    request = driver.request()
    if lease is not None:
        driver.succeed(lease)
    driver.wait(0.5)
    driver.wait(99.0)
    assert driver.core.requests
    driver.wait(1.0)
    assert request.state is RequestState.FINISHED
    assert not driver.core.requests
    assert not driver.core.filling
    assert driver.core.counters.requests_forgotten == 1


def test_a_forgotten_request_keeps_its_pins_until_the_workers_answer() -> None:
    driver = Driver(idle_timeout_s=100.0, transfer_timeout_s=1000.0)
    store = driver.bring(RequestState.RUNNING)
    assert driver.wait(100.0) == []
    assert store.request.state is RequestState.STORING
    assert driver.core.pinned_blocks == 1
    driver.succeed(store)
    assert store.request.state is RequestState.FINISHED


@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.STORING])
def test_a_request_waits_for_its_transfer_however_long_it_takes(state: RequestState) -> None:
    driver = Driver(transfer_timeout_s=1.0, idle_timeout_s=2.0)
    lease = driver.bring(state)
    for _ in range(20):
        driver.wait(1.0)
        assert lease.request.state is state
        assert lease.request.deadline_s == driver.now_s + 1.0
    driver.succeed(lease)
    assert lease.request.state is not state


# ---------------------------------------------------------------- what is illegal


@pytest.mark.parametrize(
    ("state", "act"),
    [
        (RequestState.LOOKUP, "preempt"),
        (RequestState.PREEMPTED, "preempt"),
        (RequestState.LOADING, "compute"),
        (RequestState.PREEMPTED, "compute"),
    ],
)
def test_illegal_events_change_nothing(driver: Driver, state: RequestState, act: str) -> None:
    driver.bring(state)
    before = snapshot(driver.core)
    with pytest.raises(IllegalTransition) as raised:
        getattr(driver, act)()
    assert snapshot(driver.core) == before
    assert raised.value.state == state.name
    assert raised.value.subject == driver.request().identity


@pytest.mark.parametrize(
    "state", [RequestState.LOADING, RequestState.RUNNING, RequestState.PREEMPTED]
)
def test_a_load_is_admitted_only_after_a_lookup(driver: Driver, state: RequestState) -> None:
    driver.bring(state)
    before = snapshot(driver.core)
    with pytest.raises(
        IllegalTransition, match=f"event LoadAdmitted is illegal in state {state.name}"
    ):
        driver.load(0, UNIT)
    assert snapshot(driver.core) == before


@pytest.mark.parametrize(
    "state", [RequestState.LOOKUP, RequestState.LOADING, RequestState.PREEMPTED]
)
def test_nothing_is_stored_unless_it_runs(driver: Driver, state: RequestState) -> None:
    driver.bring(state)
    before = snapshot(driver.core)
    with pytest.raises(
        IllegalTransition, match=f"event BlocksFilled is illegal in state {state.name}"
    ):
        driver.fill(0, UNIT)
    assert snapshot(driver.core) == before


@pytest.mark.parametrize("act", ["compute", "preempt", "finish"])
def test_a_request_that_was_never_asked_for_is_unknown(driver: Driver, act: str) -> None:
    with pytest.raises(
        IllegalTransition, match=r"^request a: event \w+ is illegal in state UNKNOWN$"
    ):
        getattr(driver, act)()


def test_a_request_ends_once(driver: Driver) -> None:
    driver.bring(RequestState.STORING)
    with pytest.raises(IllegalTransition, match="RequestFinished is illegal in state UNKNOWN"):
        driver.finish()
