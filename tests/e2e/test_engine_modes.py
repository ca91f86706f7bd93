# SPDX-License-Identifier: Apache-2.0
"""Restores are right in every mode of looking up, loading and storing."""

from typing import Any

import pytest
from engine import BLOCK_TOKENS, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess

MODES: dict[str, dict[str, Any]] = {
    "load_in_step": {"load_async": False},
    "lookup_in_queue": {"lookup_async": True},
    "load_in_step_lookup_in_queue": {"load_async": False, "lookup_async": True},
}


@pytest.fixture(params=MODES)
def settings(request: pytest.FixtureRequest, backend: str) -> EngineSettings:
    """An engine in one of the modes; the default mode has the other modules."""
    return EngineSettings(backend=backend, options=MODES[request.param])


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_restored_output_equals_cold_output(engine: EngineProcess, offset: int) -> None:
    token_count = 5 * BLOCK_TOKENS + offset
    tokens = prompt(token_count, seed=70)
    cold = engine.answer(tokens)
    assert engine.reset_local()
    restored = engine.answer(tokens)
    assert (cold.external_tokens, restored.external_tokens) == (0, full_blocks(token_count))
    assert restored.tokens == cold.tokens


def test_concurrent_restores_equal_cold_output(engine: EngineProcess) -> None:
    prefix = prompt(130, seed=71)
    prompts = [prefix + prompt(length, seed=length) for length in (1, 40, 90, 150)]
    cold = engine.generate(prompts)
    assert engine.reset_local()
    restored = engine.generate(prompts)
    assert [answer.tokens for answer in restored] == [answer.tokens for answer in cold]
    for tokens, answer in zip(prompts, restored, strict=True):
        assert answer.local_tokens + answer.external_tokens == full_blocks(len(tokens))
    assert engine.counters()["loads_failed"] == 0
