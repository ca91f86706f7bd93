# SPDX-License-Identifier: Apache-2.0
"""A load that cannot fail any more: the request goes on, and the blocks stay held until its end."""

import pytest

from umbp.fsm import (
    Command,
    LeaseState,
    PinBlocks,
    RankArriving,
    RankStalled,
    ReleasePins,
    RequestState,
    TransferLease,
)

from .driver import Driver


def arrive(driver: Driver, lease: TransferLease, rank: int = 0) -> list[Command]:
    return driver.give(RankArriving(lease.job_id, rank))


def test_the_request_goes_on_from_the_restored_tokens_and_its_blocks_are_held() -> None:
    driver = Driver()
    lease = driver.loading()
    (command,) = arrive(driver, lease)
    assert isinstance(command, PinBlocks)
    assert lease.state is LeaseState.IN_FLIGHT
    assert driver.core.pinned_blocks == lease.block_count == 4
    request = driver.request()
    assert (request.state, request.planned_tokens) == (RequestState.RUNNING, lease.end_tokens)
    assert (request.load_job_id, request.load_barred) == (None, False)
    assert driver.core.counters.tokens_restored == 0
    (command,) = driver.succeed(lease)
    assert isinstance(command, ReleasePins)
    assert (driver.core.pinned_blocks, driver.core.leases) == (0, {})
    assert request.state is RequestState.RUNNING
    counters = driver.core.counters
    assert (counters.loads_arriving, counters.loads_settled, counters.loads_failed) == (1, 1, 0)
    assert counters.tokens_restored == lease.end_tokens


def test_it_goes_on_when_the_last_rank_has_said_so_in_whatever_way() -> None:
    driver = Driver(rank_count=3)
    lease = driver.loading()
    arrive(driver, lease, 0)
    driver.succeed(lease, 1)
    assert driver.request().state is RequestState.LOADING
    assert arrive(driver, lease, 2) == []
    assert driver.request().state is RequestState.RUNNING
    assert driver.core.pinned_blocks == 4
    assert driver.succeed(lease, 0) == []
    assert driver.core.pinned_blocks == 4
    driver.succeed(lease, 2)
    assert driver.core.pinned_blocks == 0


@pytest.mark.parametrize("first", ["arrives", "fails"])
def test_a_request_of_which_another_rank_failed_is_computed(first: str) -> None:
    driver = Driver(rank_count=2)
    lease = driver.loading()
    if first == "arrives":
        arrive(driver, lease, 0)
        driver.fail(lease, 1)
    else:
        driver.fail(lease, 1)
        arrive(driver, lease, 0)
    assert driver.request().state is RequestState.LOOKUP
    assert not driver.core.may_lookup("a")
    assert driver.core.pinned_blocks == 4
    driver.skip()
    driver.compute()
    driver.succeed(lease, 0)
    assert driver.core.pinned_blocks == 0
    # What vLLM took for failed, nobody has read.
    assert not driver.request().store_barred
    assert driver.core.counters.loads_failed == 1


def test_a_request_of_which_another_rank_stalled_is_computed() -> None:
    driver = Driver(rank_count=2)
    lease = driver.loading()
    arrive(driver, lease, 0)
    assert driver.give(RankStalled(lease.job_id, 1)) == []
    assert driver.request().state is RequestState.LOOKUP
    driver.succeed(lease, 0)
    assert driver.core.pinned_blocks == 4
    driver.fail(lease, 1)
    assert driver.core.pinned_blocks == 0


@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_a_request_that_is_gone_leaves_its_load_holding_the_blocks(end: str) -> None:
    driver = Driver()
    lease = driver.loading()
    arrive(driver, lease)
    request = driver.request()
    driver.finish() if end == "finish" else driver.preempt()
    assert driver.core.pinned_blocks == 4
    driver.succeed(lease)
    assert driver.core.pinned_blocks == 0
    assert request.state is (RequestState.FINISHED if end == "finish" else RequestState.PREEMPTED)


def test_a_promise_that_is_broken_ends_the_stores_of_all_lives() -> None:
    driver = Driver()
    lease = driver.loading()
    arrive(driver, lease)
    driver.fail(lease)
    assert driver.request().store_barred
    assert driver.core.filling == {}
    assert driver.core.pinned_blocks == 0


def test_a_second_report_and_one_after_the_answer_are_counted_and_change_nothing() -> None:
    driver = Driver(rank_count=2)
    lease = driver.loading()
    arrive(driver, lease, 0)
    assert arrive(driver, lease, 0) == []
    assert driver.give(RankStalled(lease.job_id, 0)) == []
    driver.succeed(lease, 0)
    assert arrive(driver, lease, 0) == []
    assert driver.core.counters.answers_unknown == 3
    assert driver.core.counters.loads_arriving == 1
