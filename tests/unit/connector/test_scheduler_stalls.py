# SPDX-License-Identifier: Apache-2.0
"""Loads that a rank cannot end yet: what vLLM takes back is nobody else's until it does."""

from umbp.connector.metadata import RankAnswer, WorkerMetadata

from .bench import Bench
from .fakes import FakeRequest


def test_a_stalled_load_holds_its_blocks_when_vllm_takes_them_back() -> None:
    bench = Bench(ranks=2)
    bench.store_hashes(2)
    request = FakeRequest.of("a", 40)
    table = bench.admit(request)
    (plan,) = bench.idle_step().loads
    stalled = RankAnswer(plan.job_id, 1, False, stalled=True)
    bench.side.take_worker_answers(WorkerMetadata([RankAnswer(plan.job_id, 0, True), stalled]))
    bench.pool.free(table)
    assert [bench.pool.blocks[b].ref_cnt for b in table] == [1, 1, 0]
    assert bench.side.has_open_transfers()
    bench.side.take_worker_answers(WorkerMetadata([RankAnswer(plan.job_id, 1, True)]))
    assert [bench.pool.blocks[b].ref_cnt for b in table] == [0, 0, 0]
    assert not bench.side.has_open_transfers()


def test_an_arriving_load_holds_its_blocks_when_vllm_frees_them() -> None:
    bench = Bench()
    bench.store_hashes(2)
    request = FakeRequest.of("a", 40)
    table = bench.admit(request)
    (plan,) = bench.idle_step().loads
    arriving = RankAnswer(plan.job_id, 0, True, arriving=True)
    bench.side.take_worker_answers(WorkerMetadata([arriving]))
    bench.pool.free(table)
    assert [bench.pool.blocks[b].ref_cnt for b in table] == [1, 1, 0]
    assert bench.side.has_open_transfers()
    # The last bytes are there in a moment, which preempting a request would take longer than.
    assert bench.side.may_free_blocks_soon()
    bench.side.take_worker_answers(WorkerMetadata([RankAnswer(plan.job_id, 0, True)]))
    assert not bench.side.may_free_blocks_soon()
    assert [bench.pool.blocks[b].ref_cnt for b in table] == [0, 0, 0]
    assert not bench.side.has_open_transfers()
    assert bench.side.counters()["loads_arriving"] == 1
