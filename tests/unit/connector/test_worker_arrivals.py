# SPDX-License-Identifier: Apache-2.0
"""Loads that vLLM takes for ended while their last bytes are on their way."""

import pytest

from umbp.backends.base import JobResult, TransferOutcome
from umbp.connector.metadata import RankAnswer, StepMetadata
from umbp.connector.worker import WorkerSide
from umbp.errors import BackendStalled

from .fakes import FakeSharedEpoch
from .worker_bench import KEYS, RANK, FakeWorkerPool, plan, step

IDLE = StepMetadata(0, is_idle=True)


class CountedArrival:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


class ArrivingPool(FakeWorkerPool):
    """A pool that is told when a load arrives."""

    def arrive(self, job_id: int) -> CountedArrival:
        arrival = CountedArrival()
        self.results.append(JobResult(job_id, TransferOutcome.ARRIVING, arrival=arrival))
        return arrival


def make(
    *, may_arrive: bool = True, shared_epoch: FakeSharedEpoch | None = None
) -> tuple[WorkerSide, ArrivingPool]:
    pool = ArrivingPool()
    side = WorkerSide(
        pool,
        keyspace=KEYS,
        rank=RANK,
        timeout_ms=5000,
        loads_may_arrive=may_arrive,
        shared_epoch=shared_epoch,
    )
    return side, pool


def begin(side: WorkerSide, pool: ArrivingPool) -> CountedArrival:
    """Begins a load, which is reported in an idle step."""
    step(side, StepMetadata(0, loads=[plan(1)], is_idle=True))
    arrival = pool.arrive(1)
    received, failed, answers = step(side, IDLE)
    assert (received, failed) == ({"request-1"}, set())
    assert answers == [RankAnswer(1, RANK, True, arriving=True)]
    return arrival


def test_the_next_step_has_the_device_wait_and_the_end_is_reported_to_nobody_but_umbp() -> None:
    side, pool = make()
    arrival = begin(side, pool)
    assert step(side, IDLE) == (set(), set(), [])
    # An idle step reads nothing, and the load goes on beside the preparation of the next.
    assert arrival.waits == 0
    side.take_metadata(StepMetadata(0))
    assert arrival.waits == 1
    pool.end(1, TransferOutcome.DONE)
    received, failed, (answer,) = step(side, StepMetadata(0))
    assert (received, failed) == (set(), set())
    assert (answer.succeeded, answer.arriving) == (True, False)
    assert step(side, StepMetadata(0)) == (set(), set(), [])


def test_what_computes_beside_a_load_does_not_wait_for_it() -> None:
    side, pool = make()
    step(side, StepMetadata(0, loads=[plan(1)]))
    arrival = pool.arrive(1)
    assert step(side, StepMetadata(0)) == (set(), set(), [])
    assert step(side, StepMetadata(0)) == (set(), set(), [])
    assert arrival.waits == 0
    # Once nothing else is computed, it is reported.
    assert step(side, IDLE)[0] == {"request-1"}


def test_a_load_that_has_ended_is_answered_once() -> None:
    side, pool = make()
    step(side, StepMetadata(0, loads=[plan(1)], is_idle=True))
    pool.arrive(1)
    pool.end(1, TransferOutcome.DONE)
    received, _, (answer,) = step(side, IDLE)
    assert (received, answer.arriving) == ({"request-1"}, False)


def test_a_load_that_fails_after_all_before_it_was_reported_is_a_failed_load() -> None:
    side, pool = make()
    step(side, StepMetadata(0, loads=[plan(1)]))
    pool.arrive(1)
    step(side, StepMetadata(0))
    pool.end(1, TransferOutcome.FAILED)
    received, failed, _ = step(side, StepMetadata(0))
    assert received == failed == {"request-1"}


@pytest.mark.parametrize("outcome", [TransferOutcome.FAILED, TransferOutcome.NOT_ATTEMPTED])
def test_a_load_that_fails_after_it_was_reported_ends_the_engine(outcome: TransferOutcome) -> None:
    side, pool = make()
    begin(side, pool)
    pool.end(1, outcome)
    with pytest.raises(BackendStalled, match="was sure to end well and did not"):
        side.poll()


def test_a_load_from_before_a_reset_is_not_reported() -> None:
    side, pool = make()
    step(side, StepMetadata(0, loads=[plan(1)], is_idle=True))
    pool.arrive(1)
    assert step(side, StepMetadata(1, is_idle=True)) == (set(), set(), [])
    pool.end(1, TransferOutcome.DONE)
    received, failed, _ = step(side, StepMetadata(1, is_idle=True))
    assert received == failed == {"request-1"}


def test_a_load_that_was_reported_before_a_reset_has_ended_well() -> None:
    side, pool = make()
    begin(side, pool)
    pool.end(1, TransferOutcome.DONE)
    received, _, (answer,) = step(side, StepMetadata(1))
    assert (received, answer.succeeded) == (set(), True)


def test_a_stalled_load_that_arrives_was_reported_already() -> None:
    side, pool = make()
    step(side, StepMetadata(0, loads=[plan(1)], is_idle=True))
    pool.end(1, TransferOutcome.STALLED)
    step(side, IDLE)
    arrival = pool.arrive(1)
    assert step(side, IDLE) == (set(), set(), [])
    pool.end(1, TransferOutcome.FAILED)
    assert not step(side, StepMetadata(0))[2][0].succeeded
    assert arrival.waits == 0


def test_stores_of_an_idle_step_come_after_it_too() -> None:
    side, pool = make()
    arrival = begin(side, pool)
    step(side, StepMetadata(0, stores=[plan(2)], is_idle=True))
    assert arrival.waits == 1


@pytest.mark.parametrize("may_arrive", [True, False])
def test_only_loads_between_steps_may_arrive_and_only_where_the_model_lets_them(
    may_arrive: bool,
) -> None:
    side, pool = make(may_arrive=may_arrive)
    pool.ends_at_once = TransferOutcome.DONE
    loads = [plan(1), plan(2, synchronous=True)]
    step(side, StepMetadata(0, loads=loads, stores=[plan(3)]))
    assert [pool.jobs[job_id].may_arrive for job_id in (1, 2, 3)] == [may_arrive, False, False]
