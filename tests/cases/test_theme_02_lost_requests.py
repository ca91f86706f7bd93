# SPDX-License-Identifier: Apache-2.0
"""Aborts, lost requests, hangs, and completions that come twice or never."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from connector.bench import Bench
from connector.fakes import FakeRequest, block_hash, step_output
from connector.worker_bench import make_side, step
from scheduler_rig import MakeRig

from umbp.backends.base import (
    JobResult,
    LookupPart,
    LookupQuestion,
    TransferJob,
    TransferOutcome,
)
from umbp.backends.job_runner import JobRunner, TransferKind
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.socket_path import socket_path
from umbp.connector.metadata import StepMetadata, WorkerMetadata
from umbp.errors import BackendStalled
from umbp.fsm import RequestState

NAMESPACE = bytes(range(16))
PATIENCE_S = 30.0
PROMPT = list(range(100, 150))

SERVER = """
import sys
from pathlib import Path
from umbp.backends.lookup_server import LookupServer
from umbp.keys import KeySpace

server = LookupServer(
    lambda keys: [True] * len(keys), keyspace=KeySpace(bytes(range(16))), rank=0,
    path=Path(sys.argv[1]),
)
print("ready", flush=True)
sys.stdin.read()
server.close()
"""


def test_case_2_2_load_that_is_never_answered_is_cancelled_and_reported_once() -> None:
    bench = Bench(transfer_timeout_s=30.0)
    worker, pool = make_side(rank=0)
    bench.store_hashes(3)
    bench.admit(FakeRequest.of("a", 100))
    metadata = bench.idle_step()
    (load,) = metadata.loads
    assert step(worker, metadata) == (set(), set(), [])
    bench.now_s = 31.0
    metadata = bench.idle_step()
    assert metadata.cancels == [load.job_id]
    # The backend may still write: asking for the end is not the end.
    assert step(worker, metadata) == (set(), set(), [])
    assert pool.calls[-1] == ("cancel", load.job_id)
    assert bench.core.requests["a"].state is RequestState.LOADING
    pool.end(load.job_id, TransferOutcome.NOT_ATTEMPTED)
    received, failed, answers = step(worker, StepMetadata(0))
    assert received == failed == {"a"}
    bench.side.take_worker_answers(WorkerMetadata(answers))
    assert bench.core.requests["a"].state is RequestState.LOOKUP
    pool.end(load.job_id, TransferOutcome.DONE)
    assert step(worker, StepMetadata(0)) == (set(), set(), [])
    assert not bench.side.has_open_transfers()


def test_case_2_2_load_that_cannot_be_ended_frees_its_request_and_not_its_blocks() -> None:
    bench = Bench()
    worker, pool = make_side(rank=0)
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    table = bench.admit(request)
    metadata = bench.idle_step()
    (load,) = metadata.loads
    step(worker, metadata)
    pool.end(load.job_id, TransferOutcome.STALLED)
    received, failed, answers = step(worker, StepMetadata(0))
    assert received == failed == {"a"}
    bench.side.take_worker_answers(WorkerMetadata(answers))
    # vLLM takes the blocks back; those that may still be written are given to nobody.
    bench.pool.free(table)
    assert [bench.pool.blocks[block].ref_cnt for block in table[:4]] == [1, 1, 1, 0]
    pool.end(load.job_id, TransferOutcome.DONE)
    received, failed, answers = step(worker, StepMetadata(0))
    assert received == failed == set()
    bench.side.take_worker_answers(WorkerMetadata(answers))
    assert [bench.pool.blocks[block].ref_cnt for block in table] == [0] * 7
    assert not bench.side.has_open_transfers()


def test_case_2_2_load_that_is_aborted_keeps_its_blocks_until_it_has_ended(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.serve("a", PROMPT)
    rig.forget_local()
    rig.pool.holds_loads = True
    rig.add("b", PROMPT)
    rig.step()
    free = rig.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    while_loading = free()
    rig.abort("b")
    for _ in range(5):
        rig.step()
        assert free() == while_loading
        # The engine goes on stepping, or the answer would never be fetched.
        assert rig.scheduler.has_requests()
    rig.pool.release()
    rig.run()
    rig.check_at_rest()


@pytest.mark.parametrize("seed", range(10))
def test_case_2_4_no_order_of_ends_reports_a_request_that_is_gone(
    make_rig: MakeRig, seed: int
) -> None:
    """vLLM asserts that each reported request exists; the rig, that failures are receptions."""
    choose = random.Random(seed)
    rig = make_rig(blocks=24, asynchronous=seed % 2 == 1)
    for number in range(12):
        begin = 100 * choose.randrange(3)
        tokens = range(begin, begin + choose.randrange(20, 90))
        rig.add(f"r{number}", tokens, outputs=choose.randrange(1, 5))
        for _ in range(choose.randrange(4)):
            action = choose.randrange(8)
            if action == 0:
                rig.abort(f"r{choose.randrange(number + 1)}")
            elif action == 1:
                rig.pool.holds_loads = rig.pool.holds_stores = True
            elif action == 2:
                rig.pool.release()
            elif action == 3:
                rig.pool.failing_loads = 1
            elif action == 4:
                rig.pool.is_mute = not rig.pool.is_mute
            elif action == 5:
                rig.scheduler.reset_prefix_cache()
            rig.step()
    rig.pool.is_mute = False
    rig.pool.release()
    rig.run()
    rig.check_at_rest()


def test_case_2_6_lookup_without_an_answer_is_a_miss_in_time_and_delays_nobody() -> None:
    bench = Bench(lookup_async=True)
    bench.store_hashes(3)
    first, second = FakeRequest.of("a", 100), FakeRequest.of("b", 100)
    bench.lookups.is_silent = True
    assert bench.side.matched_tokens(first, 0) == (None, False)
    (unanswered,) = bench.lookups.questions
    bench.lookups.questions.clear()
    bench.lookups.is_silent = False
    bench.now_s = 0.05
    bench.idle_step()
    assert bench.side.matched_tokens(second, 0) == (48, True)
    bench.idle_step()
    assert bench.side.matched_tokens(first, 0) == (None, False)
    bench.now_s = bench.core.limits.lookup_timeout_s + 0.001
    bench.idle_step()
    assert bench.side.matched_tokens(first, 0) == (0, False)
    assert bench.lookups.forgotten == [unanswered.question_id]
    assert bench.core.counters.lookups == 2


@pytest.mark.parametrize("load_async", [True, False])
def test_case_2_8_failed_load_of_the_only_request_is_computed_without_other_traffic(
    make_rig: MakeRig, load_async: bool
) -> None:
    rig = make_rig(load_async=load_async)
    cold = rig.serve("a", PROMPT, outputs=3)
    rig.forget_local()
    rig.pool.failing_loads = 1
    request = rig.add("b", PROMPT, outputs=3)
    # Load, failure, computation, and two more tokens; each engine step follows the one before
    # because there is a reason to.
    assert rig.run() <= 8
    assert list(request.output_token_ids) == cold
    assert len(rig.pool.loads) == 1
    rig.check_at_rest()


def test_case_2_8_engine_without_requests_goes_on_until_its_stores_are_answered(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.pool.holds_stores = True
    request = rig.add("a", PROMPT)
    while not request.is_finished():
        rig.step()
    for _ in range(5):
        rig.step()
        assert rig.scheduler.has_requests()
    rig.pool.release()
    rig.run()
    rig.check_at_rest()


def test_case_2_10_stopped_process_is_a_miss_in_time(tmp_path: Path) -> None:
    path = socket_path(tmp_path, namespace=NAMESPACE, dp_index=0, instance="", rank=0)
    client = SocketLookupClient([path], namespace=NAMESPACE, lookup_timeout_ms=50)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(question_id: int) -> None:
        client.ask(LookupQuestion(question_id, 0, (LookupPart(0, 32, block_hash(0)),)))

    try:
        assert process.stdout.readline() == b"ready\n"
        ask(1)
        assert client.answers(PATIENCE_S)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # Until all of its threads have stopped.
        ask(2)
        # Comes back by itself; were it not bounded, the test would not end.
        assert client.answers(0.1) == []
        client.forget(2)
        process.send_signal(signal.SIGCONT)
        ask(3)
        (answer,) = client.answers(PATIENCE_S)
        assert answer.question_id == 3
        assert answer.present is not None
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        process.wait()
        process.stdout.close()
        client.close()


@pytest.mark.parametrize("kind", list(TransferKind))
def test_case_2_10_native_call_that_never_returns_stops_the_engine(kind: TransferKind) -> None:
    """Neither load nor store may be given up: the memory may still be written."""
    now_s = 0.0
    begun, leave = threading.Event(), threading.Event()

    def run(_: TransferKind, job: TransferJob) -> JobResult:
        begun.set()
        leave.wait(PATIENCE_S)
        return JobResult(job.job_id, TransferOutcome.DONE)

    runner = JobRunner(
        run, thread_count=1, queue_limit=4, timeout_ms=1000, name="case", clock=lambda: now_s
    )
    runner.submit(kind, TransferJob(1, (), 10.0))
    assert begun.wait(PATIENCE_S)
    now_s = 0.9
    assert runner.poll() == []
    now_s = 1.1
    with pytest.raises(BackendStalled, match=f"{kind.value} job 1"):
        runner.poll()
    leave.set()
    assert runner.close(PATIENCE_S)


def test_case_2_12_request_with_the_id_of_one_that_ends_in_the_same_step_gets_its_load() -> None:
    bench = Bench()
    bench.store_hashes(3)
    old = FakeRequest.of("x", 52)
    old.block_hashes = [bytes([255, index]).ljust(32) for index in range(3)]
    table = bench.admit(old)
    (store,) = bench.run_prompt(old, table).stores
    bench.side.finished(old, (table,))
    bench.pool.free(table)
    new = FakeRequest.of("x", 100)
    fresh = bench.admit(new)
    metadata = bench.side.step_metadata(step_output({}, finished=["x"]))
    (load,) = metadata.loads
    assert load.request_id == "x"
    # The answers of the old one touch the new one not at all.
    bench.answer(store.job_id)
    assert bench.core.requests["x"].state is RequestState.LOADING
    bench.answer(load.job_id)
    assert bench.core.requests["x"].state is RequestState.RUNNING
    assert [bench.pool.blocks[block].ref_cnt for block in fresh[:3]] == [1, 1, 1]
    assert bench.core.pinned_blocks == 0


def test_case_2_12_second_request_of_a_live_id_takes_nothing_from_the_first() -> None:
    """vLLM itself refuses a second request of a live id; here nothing is mixed up either."""
    bench = Bench()
    first, second = FakeRequest.of("x", 52), FakeRequest.of("x", 52)
    second.block_hashes = [bytes([255, index]).ljust(32) for index in range(3)]
    table = bench.admit(first)
    (old,) = bench.run_prompt(first, table).stores
    other = bench.admit(second)
    (new,) = bench.run_prompt(second, other).stores
    assert old.parts[0].hashes != new.parts[0].hashes
    bench.side.finished(second, (other,))
    bench.answer(old.job_id)
    assert [bench.pool.blocks[block].ref_cnt for block in other[:3]] == [2, 2, 2]
    bench.answer(new.job_id)
    bench.pool.free(table)
    bench.pool.free(other)
    assert bench.core.pinned_blocks == 0
    assert bench.pool.get_num_free_blocks() == bench.pool.num_gpu_blocks - 1


def test_case_2_14_engine_serves_on_while_lookups_are_dead_and_after(make_rig: MakeRig) -> None:
    rig = make_rig(lookup_timeout_ms=100)
    cold = rig.serve("a", PROMPT, outputs=3)
    expired = rig.side.counters()["lookups_expired"]
    rig.stop_lookups()
    rig.forget_local()
    assert rig.serve("b", PROMPT, outputs=3) == cold
    assert rig.side.counters()["tokens_restored"] == 0
    assert rig.side.counters()["lookups_expired"] == expired + 1
    rig.start_lookups()
    rig.forget_local()
    give_up_s = time.monotonic() + PATIENCE_S
    number = 0
    # The next question after the restart connects anew.
    while rig.side.counters()["tokens_restored"] == 0:
        assert time.monotonic() < give_up_s
        assert rig.serve(f"c{number}", PROMPT, outputs=3) == cold
        rig.forget_local()
        number += 1
    rig.check_at_rest()
