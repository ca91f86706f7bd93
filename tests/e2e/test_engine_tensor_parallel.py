# SPDX-License-Identifier: Apache-2.0
"""Two workers, each with half of the heads of every block and a pool of its own."""

import os
from typing import Any

import engine_worker
import pytest
from engine import EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines

TOKENS = prompt(205, seed=180)
COVERED = full_blocks(205)


def two_workers(backend: str) -> EngineSettings:
    """Settings of an engine with two worker processes, each on a core if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    return EngineSettings(
        backend=backend,
        arguments={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        environment={"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    )


# ``faulty`` is ``memory`` until faults are set, and saves the start of one more engine.
BACKENDS = pytest.mark.parametrize(
    "backend",
    ["faulty", pytest.param("embedded", marks=pytest.mark.mori)],
    indirect=True,
    scope="module",
)


@pytest.fixture
def settings(backend: str) -> EngineSettings:
    """An engine with two workers."""
    return two_workers(backend)


@BACKENDS
@pytest.mark.parametrize("token_count", [95, 96, 97, 300])
def test_cold_cached_and_restored_output_are_equal(engine: EngineProcess, token_count: int) -> None:
    tokens = prompt(token_count, seed=181)
    cold = engine.answer(tokens)
    cached = engine.answer(tokens)
    assert engine.reset_local()
    restored = engine.answer(tokens)
    assert (cold.local_tokens, cold.external_tokens) == (0, 0)
    assert cached.local_tokens == restored.external_tokens == full_blocks(token_count)
    assert cold.tokens == cached.tokens == restored.tokens


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_does_not_have_is_a_miss(engines: Engines, rank: int) -> None:
    settings = two_workers("faulty")
    engine = engines.shared(settings)
    cold = engine.answer(TOKENS)
    assert engine.reset_all()
    engine.set_faults(rank=rank, failing_stores=True)
    engine.answer(TOKENS)
    engine.set_faults()
    assert engine.reset_local()
    missed = engine.answer(TOKENS)
    assert (missed.external_tokens, missed.tokens) == (0, cold.tokens)
    assert [faults["loads"] for faults in engine.faults()] == [0, 0]
    # The rank that had them keeps them, the other one has them now.
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)
    assert engines.release(settings) == []


@pytest.mark.parametrize("failure", ["whole", "part", "raise"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed(
    engines: Engines, rank: int, failure: str
) -> None:
    settings = two_workers("faulty")
    engine = engines.shared(settings)
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults(rank=rank, failing_loads=None, failure=failure)
    computed = engine.answer(TOKENS)
    assert computed.tokens == cold.tokens
    assert [faults["loads"] for faults in engine.faults()] == [1, 1]
    engine.set_faults()
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)
    assert engines.release(settings) == []


def test_a_load_ends_when_the_slower_rank_has_ended_it(engines: Engines) -> None:
    settings = two_workers("faulty")
    engine = engines.shared(settings)
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults(rank=1, hold_loads=True)
    request_id = engine.submit(TOKENS)
    engine.step(20)
    assert engine.state(request_id) == "WAITING_FOR_REMOTE_KVS"
    engine.set_faults()
    (restored,) = engine.finish(request_id)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)
    assert engines.release(settings) == []


@pytest.mark.parametrize("rank", [0, 1, None])
def test_each_rank_waits_for_what_it_has_announced(engines: Engines, rank: int | None) -> None:
    settings = two_workers("faulty")
    engine = engines.shared(settings)
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    before = engine.counters()
    engine.set_faults(rank=rank, late_loads=True)
    restored = engine.answer(TOKENS)
    after = engine.counters()
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)
    assert after["loads_arriving"] == before["loads_arriving"] + 1
    assert engines.release(settings) == []


def test_each_rank_stores_its_own_half(engines: Engines) -> None:
    settings = two_workers("faulty")
    engine = engines.shared(settings)
    engine.answer(TOKENS)
    assert engine.reset_all()
    sizes = engine.workers(_pool_numbers)
    engine.answer(prompt(97, seed=182))
    grown = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in zip(sizes, engine.workers(_pool_numbers), strict=True)
    ]
    (objects, size), other = grown
    assert objects == 3
    assert other == (objects, size)
    assert engines.release(settings) == []


def _pool_numbers(_: Any) -> tuple[int, int]:
    stats = engine_worker.worker_pool().stats()
    assert stats.object_count is not None
    assert stats.used_bytes is not None
    return stats.object_count, stats.used_bytes
