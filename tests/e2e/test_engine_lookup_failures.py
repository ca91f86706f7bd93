# SPDX-License-Identifier: Apache-2.0
"""A lookup that goes wrong is a miss: the prompt is computed, in bounded time."""

import pytest
from engine import EngineSettings, full_blocks, prompt
from engine_process import EngineProcess

TOKENS = prompt(205, seed=140)
COVERED = full_blocks(205)
MODES = {"lookup_in_step": False, "lookup_in_queue": True}


@pytest.fixture(params=MODES)
def settings(request: pytest.FixtureRequest) -> EngineSettings:
    """An engine that does not wait for long."""
    options = {"lookup_async": MODES[request.param], "lookup_timeout_ms": 1500}
    return EngineSettings(backend="faulty", options=options)


def test_a_silent_lookup_is_a_miss_at_its_deadline(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    before = engine.counters()
    engine.set_faults(hold_lookups=True)
    missed = engine.answer(TOKENS)
    after = engine.counters()
    assert (missed.local_tokens, missed.external_tokens) == (0, 0)
    assert missed.tokens == cold.tokens
    assert after["lookups_expired"] - before["lookups_expired"] == 1

    # The answer that comes too late is for nobody; the next question gets its own.
    engine.set_faults()
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert restored.external_tokens == COVERED
    assert restored.tokens == cold.tokens


def test_a_lookup_that_fails_is_a_miss(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults(failing_lookups=True)
    missed = engine.answer(TOKENS)
    assert (missed.local_tokens, missed.external_tokens) == (0, 0)
    assert missed.tokens == cold.tokens
    engine.set_faults()
    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == COVERED
