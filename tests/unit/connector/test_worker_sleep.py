# SPDX-License-Identifier: Apache-2.0
"""The worker's side when vLLM unmaps KV memory and maps it again: nothing touches it meanwhile."""

import pytest

from umbp.backends.base import TransferOutcome
from umbp.connector.metadata import StepMetadata
from umbp.connector.worker import WorkerSide
from umbp.errors import BackendStalled

from .worker_bench import KEYS, RANK, FakeWorkerPool, make_side, plan, step


class PoolThatEndsWhenCancelled(FakeWorkerPool):
    """Answers a job some polls after it was cancelled."""

    def __init__(self, polls: int) -> None:
        super().__init__()
        self.polls = polls

    def poll(self):  # type: ignore[no-untyped-def]
        if any(call == "cancel" for call, _ in self.calls):
            self.polls -= 1
            if self.polls == 0:
                for job_id in self.jobs:
                    self.end(job_id, TransferOutcome.NOT_ATTEMPTED)
        return super().poll()


def side_of(pool: FakeWorkerPool, timeout_ms: int = 5000) -> WorkerSide:
    """A side whose clock moves only while it sleeps between polls."""
    now_s = [0.0]

    def sleep(duration_s: float) -> None:
        now_s[0] += duration_s

    return WorkerSide(
        pool,
        keyspace=KEYS,
        rank=RANK,
        timeout_ms=timeout_ms,
        clock=lambda: now_s[0],
        sleep=sleep,
    )


def test_sleep_waits_for_the_end_of_every_transfer_and_tells_of_it_later() -> None:
    pool = PoolThatEndsWhenCancelled(polls=3)
    side = side_of(pool)
    side.take_metadata(StepMetadata(1, loads=[plan(1, epoch=1)], stores=[plan(2, epoch=1)]))
    side.start_loads()
    side.start_stores()
    side.fall_asleep()
    assert side.open_jobs == 0
    assert pool.polls == 0
    assert pool.calls == [("load", 1), ("store", 2), ("cancel", 1), ("cancel", 2)]
    side.wake_up()
    received, failed, answers = step(side, StepMetadata(2))
    assert received == failed == {"request-1"}
    assert {(answer.job_id, answer.succeeded) for answer in answers} == {(1, False), (2, False)}


def test_plan_that_was_not_handed_over_is_not_begun_after_the_sleep() -> None:
    side, pool = make_side()
    side.take_metadata(StepMetadata(1, stores=[plan(1, epoch=1)]))
    side.fall_asleep()
    side.wake_up()
    side.start_stores()
    assert pool.calls == []


def test_sleep_is_refused_while_a_transfer_does_not_end() -> None:
    pool = PoolThatEndsWhenCancelled(polls=10**9)
    side = side_of(pool, timeout_ms=20)
    side.take_metadata(StepMetadata(1, stores=[plan(1, epoch=1)]))
    side.start_stores()
    with pytest.raises(BackendStalled, match="1 transfers of KV memory that is to be unmapped"):
        side.fall_asleep()
    assert not side.is_asleep
    assert side.open_jobs == 1


def test_nothing_is_begun_during_the_sleep_and_everything_is_answered() -> None:
    side, pool = make_side()
    side.fall_asleep()
    loads = [plan(1), plan(2, synchronous=True)]
    received, failed, answers = step(side, StepMetadata(0, loads=loads, stores=[plan(3)]))
    assert pool.calls == []
    assert received == failed == {"request-1"}
    assert side.take_error_blocks() == {2, 102}
    assert {(answer.job_id, answer.attempted) for answer in answers} == {
        (1, False),
        (2, False),
        (3, False),
    }
    assert {answer.reason for answer in answers} == {"the engine sleeps"}


@pytest.mark.parametrize(
    ("step_epoch", "plan_epoch", "is_begun"),
    [
        # vLLM has not reset the store: what is there may be of other weights.
        (4, 4, False),
        # Planned before the reset, handed over after it: its blocks have lost their content.
        (5, 4, False),
        (6, 5, False),
        (5, 5, True),
    ],
)
def test_only_what_was_planned_after_the_sleep_is_begun(
    step_epoch: int, plan_epoch: int, is_begun: bool
) -> None:
    side, pool = make_side()
    step(side, StepMetadata(4))
    side.fall_asleep()
    side.wake_up()
    _, _, answers = step(side, StepMetadata(step_epoch, stores=[plan(1, epoch=plan_epoch)]))
    assert pool.calls == ([("store", 1)] if is_begun else [])
    assert [answer.reason for answer in answers] == (
        [] if is_begun else ["planned before the engine slept"]
    )
