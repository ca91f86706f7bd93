# SPDX-License-Identifier: Apache-2.0
"""Aborts, preemptions, resets and other requests while transfers are in flight.

Transfers are held by the backend for as long as the test wants. Meanwhile vLLM hands out every
block that it may, and nothing may be read from, or written to, a block that is someone else's. The
``engine`` fixture checks after each test that no block, pin, transfer or request is left.
"""

import pytest
from engine import BLOCK_TOKENS, Engine, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines

TOKENS = prompt(205, seed=150)
COVERED = full_blocks(205)
OTHERS = [prompt(480, seed=160 + index) for index in range(5)]
"""More blocks than the pool has, a few of them at a time."""


@pytest.fixture
def settings() -> EngineSettings:
    """An engine whose lookups, loads and stores can be held."""
    return EngineSettings(backend="faulty", options={"lookup_async": True})


def small(**options: int) -> EngineSettings:
    """Settings of an engine with 19 blocks."""
    arguments = {"num_gpu_blocks_override": 20, "max_model_len": 512}
    return EngineSettings(backend="faulty", options=options, arguments=arguments)


def assert_restored(engine: EngineProcess, cold: tuple[int, ...]) -> None:
    """Checks that the prompt is restored as it should be."""
    engine.settle()
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert restored.external_tokens == COVERED
    assert restored.tokens == cold


def others_alone(engine: EngineProcess) -> list[tuple[int, ...]]:
    """Returns the output of the other prompts when nothing is in flight."""
    outputs = [engine.answer(tokens).tokens for tokens in OTHERS]
    assert engine.reset_all()
    return outputs


# ---------------------------------------------------------------- aborts


def test_abort_while_the_lookup_is_out(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS).tokens
    assert engine.reset_local()
    engine.set_faults(hold_lookups=True)
    request_id = engine.submit(TOKENS)
    engine.step(3)
    assert engine.state(request_id) == "WAITING"
    engine.abort(request_id)
    engine.step(3)
    assert engine.state(request_id) == "GONE"
    engine.set_faults()
    assert_restored(engine, cold)


def test_abort_while_loading(engine: EngineProcess) -> None:
    expected = others_alone(engine)
    cold = engine.answer(TOKENS).tokens
    assert engine.reset_local()
    engine.set_faults(hold_loads=True)
    request_id = engine.submit(TOKENS)
    engine.run(step_until_loads, 1)
    engine.abort(request_id)
    engine.step(3)
    # The load may still write: its blocks are nobody else's, however many others need some.
    assert not engine.run(is_idle)
    assert [engine.run(answer_beside, tokens) for tokens in OTHERS[:3]] == expected[:3]
    running = engine.submit(OTHERS[3])
    engine.step(9)
    engine.change_faults(hold_loads=False)
    (beside,) = engine.finish(running)
    assert beside.tokens == expected[3]
    assert_restored(engine, cold)


@pytest.mark.parametrize("steps", [1, 2, 4, 12])
def test_abort_while_computing(engine: EngineProcess, steps: int) -> None:
    # The prompt takes four steps.
    cold = engine.answer(TOKENS).tokens
    assert engine.reset_all()
    request_id = engine.submit(TOKENS)
    engine.run(step_until_running, request_id)
    engine.step(steps - 1)
    assert engine.state(request_id) == "RUNNING"
    engine.abort(request_id)
    engine.settle()
    assert engine.reset_local()
    again = engine.answer(TOKENS)
    assert again.tokens == cold
    # What had been computed is stored all the same, but never more than that.
    assert again.external_tokens <= min(COVERED, steps * 64)


def test_abort_with_stores_in_flight(engine: EngineProcess) -> None:
    expected = others_alone(engine)
    cold = engine.answer(TOKENS).tokens
    assert engine.reset_all()
    engine.set_faults(hold_stores=True)
    request_id = engine.submit(TOKENS)
    engine.run(step_until_running, request_id)
    engine.step(5)
    engine.abort(request_id)
    assert [engine.run(answer_beside, tokens) for tokens in OTHERS] == expected
    engine.set_faults()
    assert_restored(engine, cold)


# ---------------------------------------------------------------- blocks of stores in flight


def test_blocks_of_stores_in_flight_are_pinned_after_the_request_has_ended(
    engine: EngineProcess,
) -> None:
    expected = others_alone(engine)
    engine.set_faults(hold_stores=True)
    (cold,) = engine.finish(engine.submit(TOKENS))
    assert engine.counters()["blocks_pinned"] == COVERED // BLOCK_TOKENS
    assert not engine.run(is_idle)
    assert not engine.reset_local()
    # Every other block is used again, and again.
    assert [engine.run(answer_beside, tokens) for tokens in OTHERS] == expected
    assert engine.counters()["declined_pin_limit"] > 0
    engine.set_faults()
    assert_restored(engine, cold.tokens)


def test_preemption_with_stores_in_flight(engines: Engines) -> None:
    settings = small(max_pinned_percent=100)
    engine = engines.shared(settings)
    prompts = [prompt(100, seed=170 + index) for index in range(4)]
    cold = [engine.answer(tokens, max_tokens=100).tokens for tokens in prompts]
    assert engine.reset_all()
    engine.set_faults(hold_stores=True)
    answers = engine.run(preempt_with_stores_held, prompts)
    assert answers == cold
    assert engine.reset_local()
    restored = engine.generate(prompts, max_tokens=100)
    assert [answer.external_tokens for answer in restored] == [96] * 4
    assert [answer.tokens for answer in restored] == cold
    assert engines.release(settings) == []


def test_requests_wait_for_pinned_blocks_instead_of_being_preempted(engines: Engines) -> None:
    settings = small(max_pinned_percent=100)
    engine = engines.shared(settings)
    short, new = prompt(100, seed=180), prompt(200, seed=181)
    cold = [engine.answer(tokens, max_tokens=60).tokens for tokens in (short, new)]
    assert engine.reset_all()
    preemptions = engine.counters()["preemptions"]
    engine.set_faults(hold_stores=True)
    engine.finish(engine.submit(OTHERS[0], max_tokens=1))
    # Of 19 blocks 15 are pinned: the first request runs until it needs a fifth, the second waits.
    running = engine.submit(short, max_tokens=60)
    waiting = engine.submit(new, max_tokens=60)
    engine.step(80)
    assert engine.state(running) == "RUNNING"
    assert engine.state(waiting) == "WAITING"
    assert engine.token_count(running) == 4 * BLOCK_TOKENS - 100 + 1
    engine.set_faults()
    assert [answer.tokens for answer in engine.finish(running, waiting)] == cold
    assert engine.counters()["preemptions"] == preemptions
    assert engines.release(settings) == []


# ---------------------------------------------------------------- resets


def test_reset_while_the_lookup_is_out(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS).tokens
    assert engine.reset_local()
    engine.set_faults(hold_lookups=True)
    request_id = engine.submit(TOKENS)
    engine.step(3)
    assert engine.reset_all()
    engine.set_faults()
    (computed,) = engine.finish(request_id)
    # The answer to the first question is for an epoch that is over.
    assert (computed.external_tokens, computed.tokens) == (0, cold)
    assert engine.faults()[0]["loads"] == 0
    assert_restored(engine, cold)


def test_reset_with_stores_in_flight(engine: EngineProcess) -> None:
    engine.set_faults(hold_stores=True)
    (cold,) = engine.finish(engine.submit(TOKENS))
    # vLLM cannot empty its own cache while blocks are pinned, and says so.
    assert not engine.reset_all()
    engine.set_faults()
    engine.settle()
    assert engine.reset_local()
    missed = engine.answer(TOKENS)
    assert (missed.external_tokens, missed.tokens) == (0, cold.tokens)
    assert_restored(engine, cold.tokens)


def test_reset_with_a_load_in_flight(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS).tokens
    assert engine.reset_local()
    engine.set_faults(hold_loads=True)
    request_id = engine.submit(TOKENS)
    engine.run(step_until_loads, 1)
    before = engine.counters()
    assert not engine.reset_all()
    engine.set_faults()
    (computed,) = engine.finish(request_id)
    assert computed.tokens == cold
    # What it brought was from before the reset, and was not used.
    assert engine.counters()["loads_failed"] - before["loads_failed"] == 1
    assert engine.counters()["tokens_restored"] == before["tokens_restored"]


# ---------------------------------------------------------------- in the engine's process


def is_idle(engine: Engine) -> bool:
    """Says whether the scheduler would be left alone."""
    return not engine.scheduler.has_requests()


def answer_beside(engine: Engine, tokens: list[int]) -> tuple[int, ...]:
    """Answers a prompt and does not wait for transfers."""
    (answer,) = engine.finish(engine.submit(tokens))
    return answer.tokens


def step_until_running(engine: Engine, request_id: str) -> None:
    """Steps until the first chunk of a prompt is computed."""
    engine.step_until(lambda engine: engine.state(request_id) == "RUNNING")


def step_until_loads(engine: Engine, count: int) -> None:
    """Steps until the pool was asked for so many loads."""
    engine.step_until(lambda engine: engine.faults()[0]["loads"] == count)


def preempt_with_stores_held(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Runs prompts with stores held until one is preempted, and then to the end."""
    request_ids = [engine.submit(tokens, max_tokens=100) for tokens in prompts]
    before = engine.counters()["preemptions"]
    engine.step_until(lambda engine: engine.counters()["preemptions"] > before)
    assert engine.counters()["blocks_pinned"] > 0
    engine.step(20)
    engine.set_faults()
    answers = engine.finish(*request_ids)
    engine.settle()
    return [answer.tokens for answer in answers]
