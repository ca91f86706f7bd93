# SPDX-License-Identifier: Apache-2.0
"""What the engine is told about stored KV, and when the backend is asked."""

import pytest

from umbp.errors import UsageError
from umbp.fsm import (
    DropLookup,
    EpochRaised,
    LookupAnswered,
    LookupAsked,
    LookupReply,
    RequestState,
    StartLookup,
)

from .driver import ALIVE, PROMPT, UNIT, Driver, snapshot


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_the_engine_waits_until_the_answer_is_there(driver: Driver) -> None:
    assert driver.reply() is LookupReply.ASK
    driver.ask()
    assert driver.reply() is LookupReply.WAIT
    driver.answer(4 * UNIT)
    assert driver.reply() == 4 * UNIT


def test_what_the_engine_has_meanwhile_is_not_loaded(driver: Driver) -> None:
    driver.find(4 * UNIT, local=UNIT)
    assert driver.reply(local=3 * UNIT) == UNIT
    assert driver.reply(local=5 * UNIT) == 0


def test_an_answer_from_further_on_does_not_cover_less(driver: Driver) -> None:
    driver.ask(local=2 * UNIT)
    assert driver.reply(local=3 * UNIT) is LookupReply.WAIT
    assert driver.reply(local=UNIT) is LookupReply.ASK
    driver.answer(4 * UNIT)
    assert driver.reply(local=2 * UNIT) == 2 * UNIT
    assert driver.reply(local=UNIT) is LookupReply.ASK


def test_an_old_answer_is_not_used() -> None:
    driver = Driver(answer_lifetime_s=2.0)
    driver.find(4 * UNIT)
    driver.now_s += 2.0
    assert driver.reply() == 4 * UNIT
    driver.now_s += 0.5
    assert driver.reply() is LookupReply.ASK


def test_a_skipped_lookup_is_a_miss_that_does_not_age(driver: Driver) -> None:
    assert driver.skip(local=UNIT) == []
    driver.now_s += 100.0
    assert driver.reply(local=UNIT) == 0
    assert driver.core.counters.lookups == 0


def test_skipping_forgets_what_was_found(driver: Driver) -> None:
    driver.find(4 * UNIT)
    driver.skip()
    assert driver.reply() == 0


def test_an_admitted_request_has_no_answer(driver: Driver) -> None:
    driver.find(4 * UNIT)
    driver.compute()
    assert driver.reply() is LookupReply.ASK


@pytest.mark.parametrize("again", [Driver.ask, Driver.skip])
def test_asking_again_drops_the_question_before(driver: Driver, again: object) -> None:
    (first,) = driver.ask()
    question_id = first.request.question_id
    dropped, *rest = again(driver, local=UNIT)
    assert isinstance(dropped, DropLookup)
    assert dropped.question_id == question_id
    assert driver.request().question_id != question_id
    assert [type(command) for command in rest] == [StartLookup] * (again is Driver.ask)


def test_a_new_question_puts_the_answer_before_out_of_force(driver: Driver) -> None:
    driver.find(4 * UNIT)
    driver.ask()
    assert driver.reply() is LookupReply.WAIT
    with pytest.raises(UsageError, match="but 0 to 0 were found"):
        driver.load(0, 4 * UNIT)


def test_an_answer_to_a_dropped_question_is_not_taken(driver: Driver) -> None:
    driver.ask()
    dropped = driver.request().question_id
    driver.ask(local=UNIT)
    driver.give(LookupAnswered("a", dropped, 4 * UNIT))
    assert driver.reply(local=UNIT) is LookupReply.WAIT
    assert driver.core.counters.answers_unknown == 1


def test_the_engines_newest_object_is_kept(driver: Driver) -> None:
    for source in ("first", "second"):
        driver.give(LookupAsked("a", source, 0, PROMPT, PROMPT))
        assert driver.request().source == source


@pytest.mark.parametrize("then", ["ask", "skip", "compute", "load", "reset"])
def test_what_was_found_is_kept_until_it_is_used_or_out_of_date(driver: Driver, then: str) -> None:
    driver.ask()
    driver.answer(4 * UNIT, found="what was found")
    assert driver.request().hit == "what was found"
    if then == "load":
        driver.load(0, 4 * UNIT)
    elif then == "reset":
        driver.give(EpochRaised(local_cache_kept=False))
    else:
        getattr(driver, then)()
    assert driver.request().hit is None


def test_a_silent_lookup_is_asked_again_when_an_answer_would_be_old() -> None:
    driver = Driver(lookup_timeout_s=0.5, answer_lifetime_s=2.0)
    driver.ask()
    driver.wait(0.5)
    driver.wait(2.0)
    assert driver.reply() == 0
    driver.wait(0.5)
    assert driver.reply() is LookupReply.ASK


def test_a_silent_lookup_is_a_miss() -> None:
    driver = Driver(lookup_timeout_s=0.5)
    driver.ask(local=UNIT)
    question_id = driver.request().question_id
    assert driver.wait(0.4) == []
    (dropped,) = driver.wait(0.1)
    assert dropped.question_id == question_id
    assert driver.reply(local=UNIT) == 0
    assert driver.core.counters.lookups_expired == 1


def test_asking_again_for_more_does_not_prolong_the_wait_for_ever() -> None:
    driver = Driver(lookup_timeout_s=0.5)
    driver.ask(local=2 * UNIT)
    # Each question from further back is a new one, and there are only so many blocks.
    for local in (UNIT, 0):
        driver.wait(0.4)
        assert driver.reply(local=local) is LookupReply.ASK
        driver.ask(local=local)
    driver.wait(0.5)
    assert driver.reply(local=0) == 0


def test_answers_to_no_open_question_are_counted_and_change_nothing(driver: Driver) -> None:
    driver.ask()
    question_id = driver.request().question_id
    driver.answer(UNIT)
    for name, number in (("a", question_id), ("a", question_id + 999), ("other", question_id)):
        before = snapshot(driver.core)
        assert driver.give(LookupAnswered(name, number, 4 * UNIT)) == []
        before["counters"]["answers_unknown"] += 1
        assert snapshot(driver.core) == before


def test_a_miss_is_counted(driver: Driver) -> None:
    driver.find(2 * UNIT, local=2 * UNIT)
    assert (driver.core.counters.lookup_hits, driver.core.counters.lookup_misses) == (0, 1)
    assert driver.reply(local=2 * UNIT) == 0


@pytest.mark.parametrize("state", ALIVE)
@pytest.mark.parametrize(
    ("local", "end"), [(1, PROMPT), (PROMPT, PROMPT), (2 * UNIT, 3 * UNIT - 1)]
)
def test_a_question_about_nothing_changes_nothing(
    driver: Driver, state: RequestState, local: int, end: int
) -> None:
    driver.bring(state)
    before = snapshot(driver.core)
    with pytest.raises(
        UsageError, match=f"nothing to look up from {local} to {end} in units of 16"
    ):
        driver.ask(local=local, end=end)
    assert snapshot(driver.core) == before
    assert driver.request().state is state


def test_a_refused_question_makes_no_request(driver: Driver) -> None:
    with pytest.raises(UsageError):
        driver.ask(local=PROMPT)
    assert not driver.core.requests
