# SPDX-License-Identifier: Apache-2.0
"""A load that a rank cannot end: the request goes on, and the blocks stay held until it does."""

import pytest

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import (
    Command,
    LeaseState,
    PinBlocks,
    RankStalled,
    ReleasePins,
    RequestState,
    TransferLease,
)

from .driver import UNIT, Driver, snapshot


def stall(driver: Driver, lease: TransferLease, rank: int = 0) -> list[Command]:
    return driver.give(RankStalled(lease.job_id, rank))


def test_the_request_is_computed_and_its_blocks_are_held_until_the_answer() -> None:
    driver = Driver()
    lease = driver.loading()
    (command,) = stall(driver, lease)
    assert isinstance(command, PinBlocks)
    assert lease.state is LeaseState.STALLED
    assert driver.core.pinned_blocks == lease.block_count == 4
    assert driver.request().state is RequestState.LOOKUP
    assert not driver.core.may_lookup("a")
    driver.skip()
    driver.compute()
    assert driver.request().state is RequestState.RUNNING
    (command,) = driver.succeed(lease)
    assert isinstance(command, ReleasePins)
    assert (driver.core.pinned_blocks, driver.core.leases) == (0, {})
    assert driver.request().state is RequestState.RUNNING
    counters = driver.core.counters
    assert (counters.loads_stalled, counters.loads_failed, counters.loads_settled) == (1, 1, 0)


def test_blocks_are_pinned_once_however_many_ranks_stall() -> None:
    driver = Driver(rank_count=3)
    lease = driver.loading()
    (command,) = stall(driver, lease, 2)
    assert isinstance(command, PinBlocks)
    assert command.lease is lease
    assert stall(driver, lease, 0) == []
    assert driver.core.pinned_blocks == 4
    assert driver.fail(lease, 2) == []
    # The engine has not heard from rank 1.
    assert driver.request().state is RequestState.LOADING
    assert driver.succeed(lease, 1) == []
    assert driver.request().state is RequestState.LOOKUP
    (command,) = driver.succeed(lease, 0)
    assert isinstance(command, ReleasePins)
    assert driver.core.pinned_blocks == 0


def test_a_rank_that_ends_after_all_has_still_failed() -> None:
    driver = Driver(rank_count=2)
    lease = driver.loading()
    stall(driver, lease, 0)
    driver.succeed(lease, 0)
    assert driver.request().state is RequestState.LOADING
    (command,) = driver.succeed(lease, 1)
    assert isinstance(command, ReleasePins)
    assert driver.request().state is RequestState.LOOKUP
    assert driver.core.counters.loads_failed == 1
    assert driver.core.counters.tokens_restored == 0


@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_a_request_that_is_gone_leaves_its_load_holding_the_blocks(end: str) -> None:
    driver = Driver()
    lease = driver.loading()
    request = driver.request()
    driver.finish() if end == "finish" else driver.preempt()
    state = request.state
    stall(driver, lease)
    assert request.state is state
    assert driver.core.pinned_blocks == 4
    driver.fail(lease)
    assert driver.core.pinned_blocks == 0
    assert request.state is (RequestState.FINISHED if end == "finish" else state)


def test_a_second_report_and_one_after_the_answer_are_counted_and_change_nothing() -> None:
    driver = Driver(rank_count=2)
    lease = driver.loading()
    stall(driver, lease, 0)
    driver.succeed(lease, 0)
    pinned = driver.core.pinned_blocks
    assert stall(driver, lease, 0) == []
    assert stall(driver, lease, 5) == []
    assert (driver.core.pinned_blocks, driver.core.counters.answers_unknown) == (pinned, 2)


def test_only_an_asynchronous_load_can_be_left() -> None:
    driver = Driver()
    driver.find(4 * UNIT)
    load = driver.load(0, 4 * UNIT, synchronous=True)
    driver.send(load)
    store_driver = Driver()
    store = store_driver.bring(RequestState.RUNNING)
    assert store is not None
    for one, lease in ((driver, load), (store_driver, store)):
        before = snapshot(one.core)
        with pytest.raises(UsageError, match="cannot be left to a rank that has not ended it"):
            stall(one, lease)
        assert snapshot(one.core) == before


def test_what_no_worker_knows_of_has_not_stalled() -> None:
    driver = Driver()
    driver.find(4 * UNIT)
    load = driver.load(0, 4 * UNIT)
    with pytest.raises(IllegalTransition):
        stall(driver, load)
