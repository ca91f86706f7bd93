# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong with a load, the output is the one of a computed prompt.

A failed load is tried once for each request, which is then computed; the engine lives on, and the
next request for the same prompt is restored.
"""

import pytest
from engine import Engine, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines

TOKENS = prompt(205, seed=100)
COVERED = full_blocks(205)
MODES = {"load_between_steps": True, "load_in_step": False}


@pytest.fixture(params=MODES)
def settings(request: pytest.FixtureRequest) -> EngineSettings:
    """An engine whose backend goes wrong on demand."""
    return EngineSettings(backend="faulty", options={"load_async": MODES[request.param]})


def loads(engine: EngineProcess) -> int:
    """Returns how many loads the pool was asked for since faults were set."""
    (faults,) = engine.faults()
    count: int = faults["loads"]
    return count


@pytest.mark.parametrize("failure", ["whole", "part", "not_attempted", "raise"])
def test_a_failed_load_is_computed_and_not_tried_again(engine: EngineProcess, failure: str) -> None:
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    before = engine.counters()
    engine.set_faults(failing_loads=None, failure=failure)
    computed = engine.answer(TOKENS)
    after = engine.counters()

    assert computed.tokens == cold.tokens
    assert loads(engine) == 1
    assert after["loads_failed"] - before["loads_failed"] == 1
    untried = after["loads_not_attempted"] - before["loads_not_attempted"]
    assert untried == (failure in ("not_attempted", "raise"))

    # It was this request's failure alone: the next one is restored.
    engine.set_faults()
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert restored.external_tokens == COVERED
    assert restored.tokens == cold.tokens


def test_each_request_pays_for_one_failed_load(engine: EngineProcess) -> None:
    prompts = [prompt(100, seed=110 + index) for index in range(4)]
    cold = engine.generate(prompts)
    assert engine.reset_local()
    engine.set_faults(failing_loads=None)
    computed = engine.generate(prompts)
    assert [answer.tokens for answer in computed] == [answer.tokens for answer in cold]
    assert loads(engine) == len(prompts)


@pytest.mark.parametrize("failure", ["whole", "part"])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_requests_with_one_prefix_when_some_of_their_loads_fail(
    engine: EngineProcess, failing: int, failure: str
) -> None:
    prefixes = [prompt(130, seed=120), prompt(130, seed=121)]
    prompts = [prefixes[index % 2] + prompt(10 + index, seed=130 + index) for index in range(4)]
    cold = [engine.answer(tokens).tokens for tokens in prompts]
    assert engine.reset_local()
    engine.set_faults(failing_loads=failing, failure=failure)
    assert [answer.tokens for answer in engine.generate(prompts)] == cold

    # Nothing wrong was stored or kept on the way, either.
    assert [answer.tokens for answer in engine.generate(prompts)] == cold
    assert engine.reset_local()
    assert [answer.tokens for answer in engine.generate(prompts)] == cold


@pytest.mark.parametrize("failure", ["whole", "part"])
def test_nobody_reads_the_blocks_of_a_failed_load_in_the_step(
    engines: Engines, failure: str
) -> None:
    # Chunks are short, so that the first request needs many steps to compute the prefix again.
    settings = EngineSettings(
        backend="faulty",
        options={"load_async": False},
        arguments={"long_prefill_token_threshold": 32},
    )
    engine = engines.shared(settings)
    prefix = prompt(193, seed=122)
    prompts = [prefix + prompt(length, seed=length) for length in (5, 70, 40, 100)]
    cold = [engine.answer(tokens).tokens for tokens in prompts]
    assert engine.reset_all()
    engine.answer(prefix)
    assert engine.reset_local()
    engine.set_faults(failing_loads=1, failure=failure)
    assert [answer.tokens for answer in engine.generate(prompts)] == cold
    assert engine.reset_local()
    assert [answer.tokens for answer in engine.generate(prompts)] == cold
    assert engines.release(settings) == []


def test_an_abort_after_a_failed_load_leaves_nothing_wrong_behind(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS).tokens
    assert engine.reset_local()
    engine.set_faults(failing_loads=1)
    before = engine.counters()["loads_failed"]
    request_id = engine.submit(TOKENS)
    engine.run(step_until_load_failed, before)
    engine.abort(request_id)
    engine.settle()
    # vLLM's own prefix cache is as it was left.
    again = engine.answer(TOKENS)
    assert again.tokens == cold
    assert again.external_tokens == COVERED


def step_until_load_failed(engine: Engine, before: int) -> None:
    """Steps until one more load has failed; in the engine's process."""
    engine.step_until(lambda engine: engine.counters()["loads_failed"] > before)


def test_a_lookup_that_claims_too_much_costs_one_load(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS)
    assert engine.reset_all()
    engine.set_faults(claim_all=True)
    computed = engine.answer(TOKENS)
    assert computed.tokens == cold.tokens
    assert loads(engine) == 1

    # After a failed load in the step, that request is not stored, but the next one is.
    engine.set_faults()
    for _ in range(2):
        assert engine.reset_local()
        restored = engine.answer(TOKENS)
        assert restored.tokens == cold.tokens
    assert restored.external_tokens == COVERED


def test_a_store_that_fails_is_a_miss_later(engine: EngineProcess) -> None:
    engine.set_faults(failing_stores=True)
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults()
    missed = engine.answer(TOKENS)
    assert (missed.local_tokens, missed.external_tokens) == (0, 0)
    assert missed.tokens == cold.tokens
    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == COVERED


def test_in_quarantine_nobody_tries_again(engines: Engines) -> None:
    options = {"load_failure_quarantine_ms": 600_000}
    settings = EngineSettings(backend="faulty", options=options)
    engine = engines.shared(settings)
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    # The second half of the blocks cannot be read.
    engine.set_faults(failing_loads=1, failure="part")
    assert engine.answer(TOKENS).tokens == cold.tokens
    assert engine.reset_local()
    shorter = engine.answer(TOKENS)
    assert shorter.external_tokens == COVERED // 2
    assert shorter.tokens == cold.tokens
    assert loads(engine) == 2
    assert engines.release(settings) == []


@pytest.mark.parametrize("load_async", MODES.values(), ids=MODES)
def test_a_load_that_never_ends_is_given_up_at_its_deadline(
    engines: Engines, load_async: bool
) -> None:
    options = {"load_async": load_async, "timeout_ms": 3000}
    engine = engines.start(EngineSettings(backend="faulty", options=options))
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults(hold_loads=True)
    assert engine.answer(TOKENS).tokens == cold.tokens
    assert engine.counters()["loads_failed"] == 1
    engine.set_faults()
    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == COVERED
    assert engine.unrest() == []
    engine.close()
