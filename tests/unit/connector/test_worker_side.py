# SPDX-License-Identifier: Apache-2.0
"""The worker's side against a pool that is told what to answer, one rule a test."""

import numpy as np
import pytest

from umbp.backends.base import TransferOutcome
from umbp.connector.metadata import RankAnswer, StepMetadata
from umbp.connector.worker import WorkerSide
from umbp.errors import BackendStalled

from .fakes import FakeSharedEpoch, block_hash
from .worker_bench import KEYS, RANK, FakeWorkerPool, make_side, plan, step


def test_keys_carry_namespace_epoch_group_and_rank() -> None:
    side, pool = make_side()
    step(side, StepMetadata(7, loads=[plan(1, epoch=7)]))
    (part,) = pool.jobs[1].parts
    assert part.keys == KEYS.keys([block_hash(0), block_hash(1)], epoch=7, group_index=0, rank=RANK)
    assert part.block_ids.tolist() == [1, 101]
    assert part.block_ids.dtype == np.int64


def test_finished_load_is_reported_once() -> None:
    side, pool = make_side()
    assert step(side, StepMetadata(0, loads=[plan(1)])) == (set(), set(), [])
    pool.end(1, TransferOutcome.DONE)
    received, failed, answers = step(side, StepMetadata(0))
    assert (received, failed) == ({"request-1"}, set())
    assert answers == [RankAnswer(1, RANK, True, True, 11, [], "why")]
    assert step(side, StepMetadata(0)) == (set(), set(), [])


def test_failed_load_is_received_and_failed_and_names_hashes() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, loads=[plan(1)]))
    pool.end(1, TransferOutcome.FAILED, [pool.jobs[1].parts[0].keys[1]])
    received, failed, (answer,) = step(side, StepMetadata(0))
    assert received == failed == {"request-1"}
    assert not answer.succeeded
    assert answer.attempted
    assert answer.failed_hashes == [block_hash(1)]
    assert side.take_error_blocks() == set()


class WaitingPool(FakeWorkerPool):
    """A pool that is asked to wait, and has an answer afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.end(1, TransferOutcome.DONE)


def test_a_step_that_computes_nothing_waits_for_an_open_transfer_at_most_a_millisecond() -> None:
    pool = WaitingPool()
    side = WorkerSide(pool, keyspace=KEYS, rank=RANK, timeout_ms=5000)
    step(side, StepMetadata(0, is_idle=True))
    step(side, StepMetadata(0, loads=[plan(1)]))
    assert pool.waits == []
    received, _, _ = step(side, StepMetadata(0, is_idle=True))
    assert (received, pool.waits) == ({"request-1"}, [0.001])
    step(side, StepMetadata(0, is_idle=True))
    assert pool.waits == [0.001]


def test_a_step_without_open_transfers_leaves_the_pool_alone() -> None:
    side, pool = make_side()
    pool.is_stalled = True
    assert step(side, StepMetadata(0)) == (set(), set(), [])
    step(side, StepMetadata(0, is_idle=True))
    with pytest.raises(BackendStalled):
        step(side, StepMetadata(0, stores=[plan(1)]))


def test_store_is_answered_and_never_reported_as_received() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, stores=[plan(1)]))
    pool.end(1, TransferOutcome.FAILED)
    received, failed, (answer,) = step(side, StepMetadata(0))
    assert (received, failed, answer.succeeded) == (set(), set(), False)


def test_each_store_is_handed_over_once_also_when_the_hook_is_called_again() -> None:
    side, pool = make_side()
    side.take_metadata(StepMetadata(0, stores=[plan(1)]))
    side.start_stores()
    side.start_stores()
    assert pool.calls == [("store", 1)]


def test_store_of_a_step_that_was_cut_short_is_answered_as_not_attempted() -> None:
    side, pool = make_side()
    side.take_metadata(StepMetadata(0, loads=[plan(2)], stores=[plan(1)]))
    received, failed, answers = step(side, StepMetadata(0))
    assert pool.calls == []
    assert {(a.job_id, a.succeeded, a.attempted) for a in answers} == {
        (1, False, False),
        (2, False, False),
    }
    assert received == failed == {"request-2"}


def test_synchronous_load_is_waited_for_and_its_failure_names_blocks() -> None:
    side, pool = make_side()
    pool.ends_at_once = TransferOutcome.FAILED
    received, failed, (answer,) = step(side, StepMetadata(0, loads=[plan(1, synchronous=True)]))
    assert (received, failed) == (set(), set())
    assert not answer.succeeded
    assert side.take_error_blocks() == {1, 101}
    assert side.take_error_blocks() == set()


def test_synchronous_load_that_succeeds_reports_no_blocks() -> None:
    side, pool = make_side()
    pool.ends_at_once = TransferOutcome.DONE
    _, _, (answer,) = step(side, StepMetadata(0, loads=[plan(1, synchronous=True)]))
    assert answer.succeeded
    assert side.take_error_blocks() == set()


def test_load_that_a_reset_overtook_is_a_failure() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, loads=[plan(1)]))
    side.take_metadata(StepMetadata(1))
    pool.end(1, TransferOutcome.DONE)
    received, failed = side.poll()
    assert received == failed == {"request-1"}


def test_store_that_a_reset_overtook_still_counts_as_done() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, stores=[plan(1)]))
    pool.end(1, TransferOutcome.DONE)
    _, _, (answer,) = step(side, StepMetadata(1))
    assert answer.succeeded


def test_refused_load_fails_without_touching_the_pool() -> None:
    side, pool = make_side()
    received, failed, (answer,) = step(side, StepMetadata(0, refused=[plan(1)]))
    assert received == failed == {"request-1"}
    assert not answer.attempted
    assert pool.calls == []


def test_refused_synchronous_load_names_its_blocks() -> None:
    side, _ = make_side()
    step(side, StepMetadata(0, refused=[plan(1, synchronous=True)]))
    assert side.take_error_blocks() == {1, 101}


def test_pool_that_refuses_a_job_is_answered_for() -> None:
    side, pool = make_side()
    pool.refuses = True
    received, failed, answers = step(side, StepMetadata(0, loads=[plan(1)], stores=[plan(2)]))
    assert received == failed == {"request-1"}
    assert [(a.job_id, a.attempted, a.reason) for a in answers] == [
        (1, False, "gone"),
        (2, False, "gone"),
    ]


def test_cancel_reaches_the_pool_and_the_job_ends_by_its_answer() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, stores=[plan(1)]))
    assert step(side, StepMetadata(0, cancels=[1])) == (set(), set(), [])
    assert pool.calls[-1] == ("cancel", 1)
    pool.end(1, TransferOutcome.NOT_ATTEMPTED)
    _, _, (answer,) = step(side, StepMetadata(0))
    assert (answer.succeeded, answer.attempted) == (False, False)


def test_unknown_answer_of_a_backend_is_not_passed_on() -> None:
    side, pool = make_side()
    pool.end(99, TransferOutcome.DONE)
    assert step(side, StepMetadata(0)) == (set(), set(), [])


def test_stalled_native_call_stops_the_engine() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, loads=[plan(1)]))
    pool.is_stalled = True
    with pytest.raises(BackendStalled):
        side.poll()


def test_fence_is_made_after_the_work_it_waits_for_and_once_a_batch() -> None:
    made: list[str] = []

    def make_fence() -> "object":
        made.append("fence")
        return lambda: None

    pool = FakeWorkerPool()
    side = WorkerSide(
        pool,
        keyspace=KEYS,
        rank=0,
        timeout_ms=1000,
        make_fence=make_fence,  # type: ignore[arg-type]
    )
    step(side, StepMetadata(0, stores=[plan(1), plan(2)]))
    assert made == ["fence"]
    assert pool.jobs[1].fence is pool.jobs[2].fence
    step(side, StepMetadata(0))
    assert made == ["fence"]


def test_a_stalled_load_is_reported_as_failed_at_once_and_answered_when_it_ends() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, loads=[plan(1)]))
    pool.end(1, TransferOutcome.STALLED)
    received, failed, answers = step(side, StepMetadata(0))
    assert received == failed == {"request-1"}
    assert answers == [RankAnswer(1, RANK, False, reason="why", stalled=True)]
    pool.end(1, TransferOutcome.DONE)
    received, failed, (answer,) = step(side, StepMetadata(0))
    assert (received, failed) == (set(), set())
    assert (answer.succeeded, answer.stalled) == (True, False)
    assert step(side, StepMetadata(0)) == (set(), set(), [])


def test_a_stalled_store_is_answered_when_it_ends() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, stores=[plan(1)]))
    pool.end(1, TransferOutcome.STALLED)
    assert step(side, StepMetadata(0)) == (set(), set(), [])
    pool.end(1, TransferOutcome.FAILED)
    received, _, (answer,) = step(side, StepMetadata(0))
    assert (received, answer.succeeded) == (set(), False)


def test_a_forward_pass_cannot_go_on_without_its_stalled_load() -> None:
    side, pool = make_side()
    pool.ends_at_once = TransferOutcome.STALLED
    side.take_metadata(StepMetadata(0, loads=[plan(1, synchronous=True)]))
    with pytest.raises(BackendStalled, match="why, and a forward pass waits for it"):
        side.start_loads()


def test_a_load_that_another_engine_has_reset_meanwhile_has_failed() -> None:
    shared = FakeSharedEpoch(7)
    side, pool = make_side(shared)
    step(side, StepMetadata(7, loads=[plan(1, epoch=7), plan(2, epoch=7)]))
    pool.end(1, TransferOutcome.DONE)
    assert step(side, StepMetadata(7))[:2] == ({"request-1"}, set())
    shared.advance()
    pool.end(2, TransferOutcome.DONE)
    assert step(side, StepMetadata(7))[:2] == ({"request-2"}, {"request-2"})


def test_a_pool_that_cannot_say_what_has_ended_is_asked_again() -> None:
    side, pool = make_side()
    step(side, StepMetadata(0, loads=[plan(1)]))
    pool.is_broken = True
    assert step(side, StepMetadata(0, cancels=[1])) == (set(), set(), [])
    pool.is_broken = False
    pool.end(1, TransferOutcome.DONE)
    assert step(side, StepMetadata(0))[0] == {"request-1"}


def test_a_synchronous_load_that_is_never_answered_ends_the_engine() -> None:
    now_s = [0.0]

    def sleep(_: float) -> None:
        now_s[0] += 1.0

    side = WorkerSide(
        FakeWorkerPool(),
        keyspace=KEYS,
        rank=RANK,
        timeout_ms=5000,
        clock=lambda: now_s[0],
        sleep=sleep,
    )
    side.take_metadata(StepMetadata(0, loads=[plan(1, synchronous=True)]))
    with pytest.raises(BackendStalled, match="has not answered 1 loads that a forward pass waits"):
        side.start_loads()
    assert 11.0 <= now_s[0] <= 13.0
