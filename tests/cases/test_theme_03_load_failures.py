# SPDX-License-Identifier: Apache-2.0
"""Loads that fail, and what the engine does then."""

import time

import pytest
from connector.bench import Bench
from connector.fakes import FakeRequest, block_hash, step_output
from scheduler_rig import MakeRig

from umbp.backends.base import TransferJob, TransferOutcome, TransferPart, WorkerSite
from umbp.backends.memory import MemoryOptions, MemoryPool
from umbp.connector.metadata import RankAnswer, WorkerMetadata
from umbp.testing.kv_memory import GroupShape, KVShape, make_kv_memory

PATIENCE_S = 30.0
PROMPT = list(range(100, 150))


def test_case_3_1_object_that_is_listed_and_dead_is_loaded_once_per_request(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    cold = rig.serve("a", PROMPT, outputs=3)
    rig.pool.evict_all()
    rig.pool.claims_all = True
    for number in range(3):
        rig.forget_local()
        assert rig.serve(f"b{number}", PROMPT, outputs=3) == cold
        assert len(rig.pool.loads) == number + 1
    rig.check_at_rest()


def test_case_3_1_quarantine_holds_for_everyone_until_its_time_is_over() -> None:
    bench = Bench(quarantine_s=30.0)
    bench.store_hashes(3)
    first = FakeRequest.of("a", 100)
    table = bench.admit(first)
    (load,) = bench.idle_step().loads
    failed = [block_hash(index) for index in range(3)]
    bench.answer(load.job_id, succeeded=False, failed_hashes=failed)
    assert bench.side.matched_tokens(first, 0) == (0, False)
    bench.side.admitted(first, (table,), 0)
    (store,) = bench.run_prompt(first, table).stores
    bench.answer(store.job_id)
    # It was stored anew; a pool that keeps the dead copy would still list that one.
    bench.now_s = 29.9
    assert bench.side.matched_tokens(FakeRequest.of("b", 100), 0) == (0, False)
    bench.now_s = 30.1
    assert bench.side.matched_tokens(FakeRequest.of("c", 100), 0) == (48, True)


def test_case_3_1_load_that_was_not_attempted_is_no_reason_for_quarantine() -> None:
    bench = Bench(quarantine_s=30.0)
    bench.store_hashes(3)
    bench.admit(FakeRequest.of("a", 100))
    (load,) = bench.idle_step().loads
    failed = [block_hash(index) for index in range(3)]
    bench.answer(load.job_id, succeeded=False, attempted=False, failed_hashes=failed)
    assert bench.side.matched_tokens(FakeRequest.of("b", 100), 0) == (48, True)


@pytest.mark.parametrize("load_async", [True, False])
@pytest.mark.parametrize("failing", [1, 2, 4])
def test_case_3_3_sharers_of_a_load_that_fails_read_nothing_wrong(
    make_rig: MakeRig, load_async: bool, failing: int
) -> None:
    rig = make_rig(load_async=load_async, step_tokens=256)
    prompts = [
        [*range(100 * pair, 100 * pair + 50), 500 + own] for pair in (1, 2) for own in (0, 1)
    ]
    cold = [rig.serve(f"cold {index}", prompt, outputs=4) for index, prompt in enumerate(prompts)]
    rig.forget_local()
    rig.pool.failing_loads = failing
    requests = [rig.add(f"warm {index}", prompt, outputs=4) for index, prompt in enumerate(prompts)]
    rig.run()
    assert [list(request.output_token_ids) for request in requests] == cold
    assert rig.pool.loads
    rig.check_at_rest()


def test_case_3_3_sharer_waits_for_a_load_of_its_step_and_finds_nothing_that_failed() -> None:
    bench = Bench(load_async=False)
    bench.store_hashes(2)
    owner, sharer = FakeRequest.of("a", 52), FakeRequest.of("b", 100)
    table = bench.admit(owner)
    # vLLM lists the blocks of the load, and what the step computes from them, at once.
    bench.pool.cached = {block_hash(index): [table[index]] for index in range(3)}
    assert bench.side.matched_tokens(sharer, 32) == (None, False)
    (load,) = bench.side.step_metadata(step_output({"a": 20}, {"a": table})).loads
    bench.answer(load.job_id, succeeded=False)
    assert not any(bench.pool.cached.values())
    assert bench.side.matched_tokens(sharer, 0) == (32, False)


@pytest.mark.parametrize("missing", [0, 1])
def test_case_3_5_load_that_lacks_an_object_of_one_group_moves_nothing(missing: int) -> None:
    site = WorkerSite(0, 1, "cpu", None, "cases", int(PATIENCE_S * 1000))
    pool = MemoryPool(MemoryOptions(capacity_bytes=1 << 16), site)
    kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (512,)), GroupShape(1, (192,))], block_count=8)
    pool.register(kv.memory)
    names = ([b"a0", b"a1"], [b"b0", b"b1"])
    for group in (0, 1):
        for block in (0, 1):
            kv.fill(group, block, seed=2 * group + block)

    def run(job: TransferJob, start: str) -> TransferOutcome:
        getattr(pool, start)(job)
        while not (results := pool.poll()):
            assert time.monotonic() < job.deadline_s
        return results[0].outcome

    deadline_s = time.monotonic() + PATIENCE_S
    for group in (0, 1):
        # One object of one group was evicted on its own.
        count = 1 if group == missing else 2
        part = TransferPart(group, tuple(names[group][:count]), list(range(count)))
        assert run(TransferJob(group, (part,), deadline_s), "store") is TransferOutcome.DONE
    before = kv.snapshot()
    parts = tuple(TransferPart(group, tuple(names[group]), [4, 5]) for group in (0, 1))
    assert run(TransferJob(9, parts, deadline_s), "load") is TransferOutcome.FAILED
    assert kv.snapshot() == before
    pool.close(PATIENCE_S)


@pytest.mark.parametrize("bad_rank", range(3))
def test_case_3_5_one_rank_that_fails_fails_the_load(bad_rank: int) -> None:
    bench = Bench(ranks=3)
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    bench.admit(request)
    (load,) = bench.idle_step().loads
    for rank in range(3):
        answer = RankAnswer(load.job_id, rank, rank != bad_rank)
        bench.side.take_worker_answers(WorkerMetadata([answer]))
    assert bench.core.counters.loads_failed == 1
    assert bench.core.counters.tokens_restored == 0
    assert bench.side.matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("load_async", [True, False])
def test_case_3_7_hit_that_is_evicted_before_it_is_loaded_is_computed_once(
    make_rig: MakeRig, load_async: bool
) -> None:
    rig = make_rig(load_async=load_async)
    cold = rig.serve("a", PROMPT, outputs=3)
    rig.forget_local()
    connector = rig.scheduler.connector
    admitted = connector.update_state_after_alloc

    def evict_and_admit(*arguments: object) -> None:
        rig.pool.evict_all()
        admitted(*arguments)

    connector.update_state_after_alloc = evict_and_admit
    assert rig.serve("b", PROMPT, outputs=3) == cold
    assert len(rig.pool.loads) == 1
    assert rig.side.counters()["loads_failed"] == 1
    rig.check_at_rest()
