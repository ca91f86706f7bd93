# SPDX-License-Identifier: Apache-2.0
"""The life of a transfer: only the answers of all ranks end it, and it is released once."""

import itertools
import math

import pytest

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import (
    BlocksFilled,
    CancelTransfer,
    EpochRaised,
    LeaseKind,
    LeaseSent,
    LeaseState,
    RankSucceeded,
    ReleasePins,
    RequestFinished,
    RequestState,
    TransferLease,
)
from umbp.fsm.events import LeaseExpired

from .driver import UNIT, Driver, parts, snapshot

HASHES = (b"first", b"second")


@pytest.fixture
def driver() -> Driver:
    return Driver()


def store_of(driver: Driver, blocks: int = 1) -> TransferLease:
    driver.run()
    return driver.fill(0, blocks * UNIT)


def load_of(driver: Driver, *, synchronous: bool = False) -> TransferLease:
    driver.find(4 * UNIT)
    return driver.load(0, 4 * UNIT, synchronous=synchronous)


LEASES = pytest.mark.parametrize("make", [store_of, load_of])


# ---------------------------------------------------------------- opening and sending


def test_a_lease_says_what_it_moves_and_for_whom(driver: Driver) -> None:
    store = store_of(driver, blocks=3)
    request = driver.request()
    assert (store.kind, store.begin_tokens, store.end_tokens) == (LeaseKind.STORE, 0, 3 * UNIT)
    assert (store.request, store.generation) == (request, request.generation)
    assert store.block_count == 3
    assert store.state is LeaseState.SUBMITTED
    assert store.identity == f"store {store.job_id} of request a (life {request.generation})"
    assert driver.core.leases == {store.job_id: store}


def test_every_block_of_every_group_is_counted(driver: Driver) -> None:
    driver.run()
    (command,) = driver.give(BlocksFilled("a", 0, 3 * UNIT, parts(0, 3 * UNIT, groups=2)))
    assert command.lease.block_count == driver.core.pinned_blocks == 6
    driver.succeed(driver.send(command.lease))
    assert driver.core.pinned_blocks == 0


@LEASES
def test_a_lease_is_sent_once(driver: Driver, make) -> None:
    lease = driver.send(make(driver))
    assert lease.state is LeaseState.IN_FLIGHT
    before = snapshot(driver.core)
    with pytest.raises(IllegalTransition) as raised:
        driver.give(LeaseSent(lease.job_id))
    assert snapshot(driver.core) == before
    assert (raised.value.subject, raised.value.state, raised.value.event) == (
        lease.identity,
        "IN_FLIGHT",
        "LeaseSent",
    )


def test_only_an_open_transfer_is_sent(driver: Driver) -> None:
    lease = driver.bring(RequestState.RUNNING)
    driver.succeed(lease)
    with pytest.raises(UsageError, match=f"^transfer {lease.job_id} is not open$"):
        driver.give(LeaseSent(lease.job_id))


# ---------------------------------------------------------------- answers


@LEASES
@pytest.mark.parametrize("answer", [Driver.succeed, Driver.fail])
def test_nobody_answers_for_what_was_not_sent(driver: Driver, make, answer) -> None:
    lease = make(driver)
    before = snapshot(driver.core)
    with pytest.raises(IllegalTransition, match="is illegal in state SUBMITTED"):
        answer(driver, lease)
    assert snapshot(driver.core) == before


@pytest.mark.parametrize("failing", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_all_ranks_must_answer_and_one_failure_fails_all(order, failing) -> None:
    driver = Driver(rank_count=3)
    store = driver.send(store_of(driver))
    for index, rank in enumerate(order):
        assert store.state is LeaseState.IN_FLIGHT
        assert driver.core.pinned_blocks == 1
        released = (driver.fail if rank in failing else driver.succeed)(store, rank)
        assert [type(command) for command in released] == [ReleasePins] * (index == 2)
    assert store.state is LeaseState.RELEASED
    assert store.deadline_s == math.inf
    counters = driver.core.counters
    assert (counters.stores_settled, counters.stores_failed) == (not failing, bool(failing))
    assert counters.tokens_stored == (0 if failing else UNIT)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_load_that_one_rank_could_not_do_has_failed(rank: int) -> None:
    driver = Driver(rank_count=3)
    load = driver.send(load_of(driver))
    driver.fail(load, rank)
    for other in {0, 1, 2} - {rank}:
        assert driver.request().state is RequestState.LOADING
        driver.succeed(load, other)
    assert driver.request().state is RequestState.LOOKUP
    counters = driver.core.counters
    assert (counters.loads_settled, counters.loads_failed, counters.tokens_restored) == (0, 1, 0)


@pytest.mark.parametrize("again", [Driver.succeed, Driver.fail])
@pytest.mark.parametrize("rank", [0, 2, 7], ids=["twice", "no such rank", "far off"])
def test_answers_that_nobody_waits_for_are_counted_and_change_nothing(rank: int, again) -> None:
    driver = Driver(rank_count=2)
    store = driver.send(store_of(driver))
    driver.succeed(store, 0)
    before = snapshot(driver.core)
    assert again(driver, store, rank) == []
    before["counters"]["answers_unknown"] += 1
    assert snapshot(driver.core) == before


@LEASES
@pytest.mark.parametrize("again", [Driver.succeed, Driver.fail])
def test_an_answer_after_the_end_releases_nothing_twice(driver: Driver, make, again) -> None:
    lease = driver.send(make(driver))
    driver.succeed(lease)
    before = snapshot(driver.core)
    assert again(driver, lease) == []
    before["counters"]["answers_unknown"] += 1
    assert snapshot(driver.core) == before
    assert lease.state is LeaseState.RELEASED


def test_loads_pin_nothing(driver: Driver) -> None:
    load = driver.send(load_of(driver))
    assert driver.core.pinned_blocks == 0
    assert driver.succeed(load) == []


# ---------------------------------------------------------------- deadlines


@LEASES
def test_a_silent_transfer_is_cancelled_again_and_again_and_keeps_its_blocks(make) -> None:
    driver = Driver(transfer_timeout_s=10.0)
    lease = driver.send(make(driver))
    pinned = driver.core.pinned_blocks
    for round_index in range(3):
        assert driver.wait(9.5) == []
        (cancel,) = driver.wait(0.5)
        assert isinstance(cancel, CancelTransfer)
        assert cancel.lease is lease
        assert lease.state is LeaseState.STALLED
        assert driver.core.pinned_blocks == pinned
        assert driver.core.counters.leases_stalled == round_index + 1
    driver.fail(lease)
    assert lease.state is LeaseState.RELEASED
    assert driver.core.pinned_blocks == 0
    assert driver.wait(1000.0) == []


def test_the_clock_of_a_transfer_starts_when_it_is_sent() -> None:
    driver = Driver(transfer_timeout_s=10.0)
    lease = store_of(driver)
    driver.wait(8.0)
    driver.send(lease)
    assert driver.wait(9.5) == []
    assert len(driver.wait(0.5)) == 1


def test_one_answer_does_not_start_the_clock_anew() -> None:
    driver = Driver(transfer_timeout_s=10.0, rank_count=2)
    lease = driver.send(store_of(driver))
    driver.wait(8.0)
    driver.succeed(lease, 0)
    assert len(driver.wait(2.0)) == 1


def test_a_stalled_transfer_may_still_succeed() -> None:
    driver = Driver(transfer_timeout_s=10.0, rank_count=2)
    store = driver.send(store_of(driver))
    driver.wait(10.0)
    assert driver.succeed(store, 1) == []
    assert store.state is LeaseState.STALLED
    (released,) = driver.succeed(store, 0)
    assert isinstance(released, ReleasePins)
    assert driver.core.counters.stores_settled == 1


def test_a_store_that_was_never_sent_is_given_up() -> None:
    driver = Driver(transfer_timeout_s=10.0)
    store = store_of(driver)
    (released,) = driver.wait(10.0)
    assert isinstance(released, ReleasePins)
    assert released.lease is store
    assert store.state is LeaseState.RELEASED
    assert driver.request().state is RequestState.RUNNING
    # No rank ever knew of it, so none has failed to do it.
    assert driver.core.counters.stores_failed == 0
    with pytest.raises(UsageError, match="is not open"):
        driver.send(store)


@pytest.mark.parametrize(
    ("synchronous", "state"), [(False, RequestState.LOOKUP), (True, RequestState.RUNNING)]
)
def test_a_load_that_was_never_sent_has_failed(synchronous: bool, state: RequestState) -> None:
    driver = Driver(transfer_timeout_s=10.0)
    load_of(driver, synchronous=synchronous)
    assert driver.wait(10.0) == []
    assert driver.request().state is state
    assert not driver.core.may_lookup("a")
    assert driver.core.sync_loads == 0


@LEASES
@pytest.mark.parametrize("meanwhile", ["preempt", "finish", "reset"])
def test_only_answers_release(driver: Driver, make, meanwhile: str) -> None:
    lease = driver.send(make(driver))
    pinned = driver.core.pinned_blocks
    if meanwhile == "reset":
        driver.give(EpochRaised(local_cache_kept=True))
    else:
        getattr(driver, meanwhile)()
    assert lease.state is LeaseState.IN_FLIGHT
    assert driver.core.pinned_blocks == pinned
    assert list(driver.core.leases) == [lease.job_id]


def test_a_request_counts_its_open_transfers(driver: Driver) -> None:
    driver.run()
    request = driver.request()
    leases = [driver.send(driver.fill(at * UNIT, (at + 1) * UNIT)) for at in range(3)]
    driver.preempt()
    for left, lease in zip((2, 1, 0), leases, strict=True):
        assert request.open_leases == left + 1
        driver.succeed(lease)
        assert request.open_leases == left


# ---------------------------------------------------------------- what failures say


@pytest.mark.parametrize("attempts", [(True, True), (True, False), (False, False)], ids=str)
def test_a_load_was_not_attempted_if_no_rank_had_begun(attempts: tuple[bool, bool]) -> None:
    driver = Driver(rank_count=2, quarantine_s=60.0)
    load = driver.send(load_of(driver))
    for rank, attempted in enumerate(attempts):
        driver.fail(load, rank, attempted=attempted, hashes=HASHES)
    assert driver.core.counters.loads_not_attempted == (not any(attempts))
    # What nobody tried to read says nothing about the objects.
    assert len(driver.core.quarantine) == (2 if any(attempts) else 0)


def test_objects_that_could_not_be_read_are_in_quarantine() -> None:
    driver = Driver(quarantine_s=60.0)
    load = driver.send(load_of(driver))
    driver.now_s = 5.0
    driver.fail(load, hashes=HASHES)
    assert driver.core.quarantine.listed([b"other", *HASHES], 64.0) == set(HASHES)
    assert driver.core.quarantine.listed([b"other", *HASHES], 65.0) == set()


def test_a_failed_store_puts_nothing_in_quarantine() -> None:
    driver = Driver(quarantine_s=60.0)
    driver.fail(driver.send(store_of(driver)), hashes=HASHES)
    assert len(driver.core.quarantine) == 0


def test_a_failure_from_before_a_reset_says_nothing_about_what_is_stored_now() -> None:
    driver = Driver(quarantine_s=60.0)
    load = driver.send(load_of(driver))
    driver.give(EpochRaised(local_cache_kept=False))
    driver.fail(load, hashes=HASHES)
    assert len(driver.core.quarantine) == 0


def test_a_reset_empties_the_quarantine() -> None:
    driver = Driver(quarantine_s=60.0)
    driver.fail(driver.send(load_of(driver)), hashes=HASHES)
    driver.give(EpochRaised(local_cache_kept=False))
    assert len(driver.core.quarantine) == 0


# ---------------------------------------------------------------- what step takes


def test_what_the_core_derives_is_not_taken_from_outside(driver: Driver) -> None:
    driver.bring(RequestState.RUNNING)
    before = snapshot(driver.core)
    with pytest.raises(UsageError, match=r"^LeaseExpired is not an event from outside$"):
        driver.give(LeaseExpired())
    assert snapshot(driver.core) == before


def test_a_refused_event_leaves_no_command_behind(driver: Driver) -> None:
    lease = driver.bring(RequestState.RUNNING)
    for event in (LeaseSent(lease.job_id), RequestFinished("other")):
        with pytest.raises(IllegalTransition):
            driver.give(event)
    assert len(driver.give(RankSucceeded(lease.job_id, 0))) == 1


def test_counters_have_names(driver: Driver) -> None:
    driver.succeed(driver.send(store_of(driver, blocks=2)))
    counted = {name: n for name, n in driver.core.counters.as_dict().items() if n}
    assert counted == {"stores_started": 1, "stores_settled": 1, "tokens_stored": 2 * UNIT}
