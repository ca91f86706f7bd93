# SPDX-License-Identifier: Apache-2.0
"""A pool that holds a part of what is stored: what is gone is computed, what is there is right."""

import pytest
from engine import EngineSettings, full_blocks, prompt
from engine_process import EngineProcess

OBJECT_BYTES = 64 << 10
"""One block of the tiny model: 32 tokens, 4 layers, keys and values of 2 heads of 32 float32."""
PROMPTS = [prompt(200, seed=230 + index) for index in range(6)]


@pytest.fixture
def settings(backend: str) -> EngineSettings:
    """An engine with room for a little more than three of the six prompts."""
    return EngineSettings(backend=backend, options={"total_capacity_bytes": 20 * OBJECT_BYTES})


def test_output_is_the_same_whatever_was_evicted(engine: EngineProcess) -> None:
    cold = [engine.answer(tokens).tokens for tokens in PROMPTS]
    for _ in range(3):
        for tokens, expected in zip(PROMPTS, cold, strict=True):
            assert engine.reset_local()
            answer = engine.answer(tokens)
            assert answer.tokens == expected
            assert answer.external_tokens <= full_blocks(200)
    # The one that was stored last is there.
    assert engine.reset_local()
    assert engine.answer(PROMPTS[-1]).external_tokens == full_blocks(200)


def test_a_prompt_larger_than_the_pool(engine: EngineProcess) -> None:
    tokens = prompt(900, seed=240)
    cold = engine.answer(tokens)
    for _ in range(2):
        assert engine.reset_local()
        answer = engine.answer(tokens)
        assert answer.tokens == cold.tokens
        assert answer.external_tokens <= 20 * 32
