# SPDX-License-Identifier: Apache-2.0
"""JobRunner: order, bounds, and one answer for each job."""

import threading
import time

import attrs
import pytest

from umbp.backends.base import JobResult, TransferJob, TransferOutcome, TransferPart
from umbp.backends.job_runner import (
    MAX_LOADS_BEFORE_STORE,
    JobRunner,
    StallPolicy,
    TransferKind,
)
from umbp.errors import BackendStalled, UsageError

PATIENCE_S = 30.0
FAR_S = 1e12
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE
DONE = TransferOutcome.DONE
FAILED = TransferOutcome.FAILED
NOT_ATTEMPTED = TransferOutcome.NOT_ATTEMPTED
STALLED = TransferOutcome.STALLED


def job(job_id, *, deadline_s=FAR_S, fence=None, keys=()):
    parts = (TransferPart(0, keys, range(len(keys))),) if keys else ()
    return TransferJob(job_id, parts, deadline_s, fence)


@attrs.define
class Bench:
    """A runner whose first job, number 0, is held back inside ``run`` until ``release``."""

    now_s: float = 0.0
    begun: list = attrs.field(factory=list)
    thread_names: set = attrs.field(factory=set)
    held: threading.Event = attrs.field(factory=threading.Event)
    free: threading.Event = attrs.field(factory=threading.Event)
    error: Exception | None = None

    def run(self, kind, started):
        self.begun.append((kind, started.job_id))
        self.thread_names.add(threading.current_thread().name)
        if started.job_id == 0:
            self.held.set()
            assert self.free.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return JobResult(started.job_id, DONE)

    def runner(self, **changes):
        settings = {"thread_count": 1, "queue_limit": 64, "timeout_ms": 1000, "name": "test"}
        return JobRunner(self.run, clock=lambda: self.now_s, **(settings | changes))

    def busy_runner(self, **changes):
        runner = self.runner(**changes)
        runner.submit(LOAD, job(0))
        assert self.held.wait(PATIENCE_S)
        return runner


def answers(runner, count):
    """Polls until ``count`` results are there, and a little longer for one too many."""
    results = []
    give_up_s = time.monotonic() + PATIENCE_S
    while len(results) < count and time.monotonic() < give_up_s:
        results += runner.poll()
        time.sleep(0.001)
    time.sleep(0.01)
    results += runner.poll()
    assert len(results) == count
    return {result.job_id: result for result in results}


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.free.set()


def test_loads_go_first_and_each_kind_in_order(bench):
    runner = bench.busy_runner()
    for job_id in (1, 2):
        runner.submit(STORE, job(job_id))
    for job_id in (3, 4):
        runner.submit(LOAD, job(job_id))
    bench.free.set()
    answers(runner, 5)
    assert bench.begun[1:] == [(LOAD, 3), (LOAD, 4), (STORE, 1), (STORE, 2)]


def test_a_store_waits_for_a_bounded_number_of_loads(bench):
    runner = bench.busy_runner()
    runner.submit(STORE, job(1000))
    runner.submit(STORE, job(1001))
    for job_id in range(1, 30):
        runner.submit(LOAD, job(job_id))
    bench.free.set()
    answers(runner, 32)
    kinds = [kind for kind, _ in bench.begun[1:]]
    first = kinds.index(STORE)
    assert first == MAX_LOADS_BEFORE_STORE
    assert kinds[first + 1 :].index(STORE) == MAX_LOADS_BEFORE_STORE


def test_a_full_queue_is_answered_not_attempted(bench):
    runner = bench.busy_runner(queue_limit=2)
    runner.submit(LOAD, job(1))
    runner.submit(STORE, job(2))
    runner.submit(STORE, job(3))
    (refused,) = runner.poll()
    assert (refused.job_id, refused.outcome) == (3, NOT_ATTEMPTED)
    assert refused.reason == "queue full (2 jobs)"
    bench.free.set()
    results = answers(runner, 3)
    assert all(result.outcome is DONE for result in results.values())


def test_cancel_takes_only_a_waiting_job(bench):
    runner = bench.busy_runner()
    runner.submit(LOAD, job(1))
    runner.submit(STORE, job(2))
    for job_id in (0, 1, 2, 2, 99):
        runner.cancel(job_id)
    bench.free.set()
    results = answers(runner, 3)
    assert results[0].outcome is DONE
    assert {results[1].outcome, results[2].outcome} == {NOT_ATTEMPTED}
    assert results[1].reason == "cancelled"
    assert bench.begun == [(LOAD, 0)]


def test_a_job_past_its_deadline_is_not_begun_nor_its_fence_called(bench):
    fenced = []
    runner = bench.busy_runner(timeout_ms=10_000)
    runner.submit(LOAD, job(1, deadline_s=5.0, fence=lambda: fenced.append(1)))
    runner.submit(LOAD, job(2, deadline_s=6.0, fence=lambda: fenced.append(2)))
    bench.now_s = 6.0
    bench.free.set()
    results = answers(runner, 3)
    assert (results[1].outcome, results[1].reason) == (NOT_ATTEMPTED, "deadline passed")
    assert results[2].outcome is DONE
    assert fenced == [2]


def test_the_fence_is_called_on_the_thread_that_runs_before_run(bench):
    seen = []
    runner = bench.runner()
    runner.submit(
        STORE,
        job(1, fence=lambda: seen.append((threading.current_thread().name, len(bench.begun)))),
    )
    answers(runner, 1)
    assert seen == [(next(iter(bench.thread_names)), 0)]
    assert seen[0][0] != threading.current_thread().name


@pytest.mark.parametrize("where", ["fence", "run"])
def test_an_exception_fails_the_job_with_all_its_keys(bench, where):
    def fence():
        raise OSError("the device\n is  gone")

    bench.error = OSError("the device\n is  gone")
    runner = bench.runner()
    runner.submit(STORE, job(1, fence=fence if where == "fence" else None, keys=[b"a", b"b"]))
    result = answers(runner, 1)[1]
    assert result.outcome is FAILED
    assert result.failed_keys == (b"a", b"b")
    assert result.reason == "OSError: the device is gone"
    assert bool(bench.begun) == (where == "run")
    bench.error = None
    runner.submit(STORE, job(2))
    assert answers(runner, 1)[2].outcome is DONE


def test_a_job_that_runs_too_long_is_reported_as_stalled_and_its_result_still_comes(bench):
    runner = bench.busy_runner(timeout_ms=1500)
    bench.now_s = 1.5
    assert runner.poll() == []
    bench.now_s = 2.5
    runner.submit(LOAD, job(1))
    runner.cancel(1)
    for _ in range(2):
        with pytest.raises(BackendStalled) as caught:
            runner.poll()
        assert str(caught.value) == (
            "load job 0 has run for 2.5 s, longer than 1500 ms; its memory stays in use and the "
            "engine must stop"
        )
    bench.free.set()
    assert runner.close(PATIENCE_S)
    assert set(answers(runner, 2)) == {0, 1}


def test_a_stall_may_be_news_and_nothing_is_begun_until_the_call_returns(bench):
    runner = bench.busy_runner(timeout_ms=1500, on_stall=StallPolicy.REPORT)
    runner.submit(STORE, job(1))
    bench.now_s = 2.5
    news = answers(runner, 2)
    assert (news[0].outcome, news[1].outcome) == (STALLED, NOT_ATTEMPTED)
    assert news[0].reason == "load job 0 has run for 2.5 s, longer than 1500 ms"
    assert runner.is_stalled
    runner.submit(LOAD, job(2))
    assert answers(runner, 1)[2].reason == "another transfer has stalled"
    bench.free.set()
    assert answers(runner, 1)[0].outcome is DONE
    assert not runner.is_stalled
    runner.submit(LOAD, job(3))
    assert answers(runner, 1)[3].outcome is DONE


def test_close_does_not_wait_for_a_stalled_call(bench):
    runner = bench.busy_runner(on_stall=StallPolicy.REPORT)
    bench.now_s = 2.5
    assert answers(runner, 1)[0].outcome is STALLED
    began_s = time.monotonic()
    assert not runner.close(PATIENCE_S)
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_time_in_the_fence_does_not_count_as_a_stall(bench):
    at_fence, leave = threading.Event(), threading.Event()

    def fence():
        at_fence.set()
        assert leave.wait(PATIENCE_S)

    runner = bench.runner(timeout_ms=1000)
    runner.submit(STORE, job(0, fence=fence))
    assert at_fence.wait(PATIENCE_S)
    bench.now_s = 100.0
    assert runner.poll() == []
    leave.set()
    assert bench.held.wait(PATIENCE_S)
    assert runner.poll() == []
    bench.now_s = 102.0
    with pytest.raises(BackendStalled):
        runner.poll()


def test_close_drops_waiting_jobs_and_says_whether_threads_ended(bench):
    runner = bench.busy_runner()
    runner.submit(LOAD, job(1))
    runner.submit(STORE, job(2))
    assert not runner.close(0.01)
    runner.submit(LOAD, job(3))
    results = answers(runner, 3)
    assert {(result.outcome, result.reason) for result in results.values()} == {
        (NOT_ATTEMPTED, "closed")
    }
    bench.free.set()
    assert runner.close(PATIENCE_S)
    assert runner.close(PATIENCE_S)
    assert answers(runner, 1)[0].outcome is DONE
    assert bench.begun == [(LOAD, 0)]


def test_threads_start_with_the_first_job_and_end_with_close(bench):
    def count():
        return sum(thread.name.startswith("lazy") for thread in threading.enumerate())

    runner = bench.runner(name="lazy", thread_count=3)
    assert count() == 0
    runner.submit(LOAD, job(1))
    assert count() == 3
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("lazy"))
    assert runner.close(PATIENCE_S)
    assert count() == 0


def test_a_runner_that_was_never_used_closes(bench):
    runner = bench.runner()
    assert runner.close(0.0)
    runner.submit(LOAD, job(1))
    assert answers(runner, 1)[1].outcome is NOT_ATTEMPTED


def test_no_thread_to_be_had_is_an_answer_and_the_next_job_tries_again(bench, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    runner = bench.runner()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        runner.submit(LOAD, job(1))
    (refused,) = runner.poll()
    assert (refused.outcome, refused.reason) == (NOT_ATTEMPTED, "no thread could be started")
    runner.submit(LOAD, job(2))
    assert answers(runner, 1)[2].outcome is DONE


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_an_id_in_use_is_refused(bench, state):
    runner = bench.busy_runner()
    runner.submit(STORE, job(1))
    with pytest.raises(UsageError, match=f"job . is already {state}"):
        runner.submit(LOAD, job(0 if state == "running" else 1))
    bench.free.set()
    answers(runner, 2)


def test_many_threads_answer_each_job_once(bench):
    runner = bench.runner(thread_count=8, queue_limit=10_000)
    for job_id in range(1, 2001):
        runner.submit(LOAD if job_id % 3 else STORE, job(job_id))
        if job_id % 7 == 0:
            runner.cancel(job_id - 3)
    results = answers(runner, 2000)
    ended = {job_id for job_id, result in results.items() if result.outcome is DONE}
    assert ended == {job_id for _, job_id in bench.begun}
    assert len(bench.begun) == len(ended)


def test_wait_returns_when_a_result_has_come_or_the_time_has_passed():
    bench = Bench()
    runner = bench.busy_runner()
    runner.wait(0.01)
    assert runner.poll() == []
    waiting = threading.Thread(target=runner.wait, args=(PATIENCE_S,))
    waiting.start()
    bench.free.set()
    waiting.join(PATIENCE_S / 2)
    assert not waiting.is_alive()
    runner.wait(PATIENCE_S)
    assert [result.job_id for result in runner.poll()] == [0]
    # What was returned is nothing to wait for any more.
    begun_s = time.monotonic()
    runner.wait(0.01)
    assert time.monotonic() - begun_s >= 0.01


def test_a_load_that_is_announced_is_news_before_its_end(bench):
    runner = bench.busy_runner()
    arrival = object()
    runner.announce(0, arrival)
    (news,) = runner.poll()
    assert (news.outcome, news.job_id, news.arrival) == (TransferOutcome.ARRIVING, 0, arrival)
    assert runner.is_open(0)
    bench.free.set()
    runner.wait(PATIENCE_S)
    assert [result.outcome for result in runner.poll()] == [DONE]
