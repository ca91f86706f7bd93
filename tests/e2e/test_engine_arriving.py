# SPDX-License-Identifier: Apache-2.0
"""Loads that vLLM takes for ended while no byte of them has been moved.

The backend moves them when the step that is about to read them has the device wait, as late as it
may. Whoever reads their blocks before reads noise, and whoever is given them has them overwritten.
"""

import pytest
from engine import BLOCK_TOKENS, Engine, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess

TOKENS = prompt(205, seed=310)
COVERED = full_blocks(205)
OTHERS = [prompt(480, seed=320 + index) for index in range(4)]
"""More blocks than the engine has."""


@pytest.fixture
def settings() -> EngineSettings:
    """An engine whose loads can be late."""
    return EngineSettings(backend="faulty", options={"lookup_async": True})


def arrived(engine: EngineProcess) -> int:
    """Returns how many loads were announced so far."""
    count: int = engine.counters()["loads_arriving"]
    return count


def begin(engine: EngineProcess) -> tuple[str, tuple[int, ...]]:
    """Has the prompt stored and lost, and asked for until vLLM takes its load for ended.

    Returns:
        The request, and its right answer.
    """
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults(late_loads=True)
    before = arrived(engine)
    request_id = engine.submit(TOKENS)
    engine.run(step_until_arrived, before + 1)
    assert engine.counters()["blocks_pinned"] == COVERED // BLOCK_TOKENS
    return request_id, cold.tokens


def test_the_step_that_reads_it_waits_for_it(engine: EngineProcess) -> None:
    request_id, cold = begin(engine)
    (restored,) = engine.finish(request_id)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold)
    engine.settle()
    counters = engine.counters()
    assert (counters["blocks_pinned"], counters["leases_open"]) == (0, 0)
    assert counters["loads_failed"] == counters["events_refused"] == 0


def test_who_shares_its_blocks_waits_for_it_too(engine: EngineProcess) -> None:
    request_id, cold = begin(engine)
    longer = TOKENS[:COVERED] + prompt(40, seed=311)
    sharing = engine.submit(longer)
    restored, shared = engine.finish(request_id, sharing)
    assert restored.tokens == cold
    assert shared.local_tokens == COVERED
    engine.settle()
    assert engine.reset_all()
    assert engine.answer(longer).tokens == shared.tokens


def test_blocks_of_an_aborted_request_are_nobody_elses_until_it_has_ended(
    engine: EngineProcess,
) -> None:
    expected = [engine.answer(tokens).tokens for tokens in OTHERS]
    assert engine.reset_all()
    request_id, cold = begin(engine)
    engine.abort(request_id)
    # No step computes, so nothing waits for the load, and its blocks stay in use.
    engine.step(5)
    assert engine.counters()["blocks_pinned"] == COVERED // BLOCK_TOKENS
    assert [engine.answer(tokens).tokens for tokens in OTHERS] == expected
    engine.set_faults()
    engine.settle()
    assert engine.counters()["blocks_pinned"] == 0
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold)


def test_a_reset_cannot_empty_the_cache_before_it_has_ended(engine: EngineProcess) -> None:
    request_id, cold = begin(engine)
    assert not engine.reset_all()
    (restored,) = engine.finish(request_id)
    assert restored.tokens == cold
    engine.set_faults()
    engine.settle()
    assert engine.reset_all()
    computed = engine.answer(TOKENS)
    assert (computed.local_tokens, computed.external_tokens, computed.tokens) == (0, 0, cold)


def test_beside_a_running_request_a_load_is_not_announced(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    before = arrived(engine)
    engine.set_faults(late_loads=True)
    running = engine.submit(OTHERS[0], max_tokens=60)
    engine.step(12)
    loading = engine.submit(TOKENS)
    engine.step(12)
    assert engine.state(loading) == "WAITING_FOR_REMOTE_KVS"
    assert arrived(engine) == before
    engine.change_faults(late_loads=False)
    beside, restored = engine.finish(running, loading)
    assert restored.tokens == cold.tokens
    engine.settle()
    assert engine.reset_all()
    assert engine.answer(OTHERS[0], max_tokens=60).tokens == beside.tokens


def step_until_arrived(engine: Engine, count: int) -> None:
    engine.step_until(_has_arrived, count)


def _has_arrived(engine: Engine, count: int) -> bool:
    return engine.counters()["loads_arriving"] == count
