# SPDX-License-Identifier: Apache-2.0
"""With ``save_decode_cache`` the next turn of a chat is restored with the answer of the last."""

import pytest
from engine import EngineSettings, prompt
from engine_process import EngineProcess, Engines

PROMPT = prompt(100, seed=80)


@pytest.fixture
def settings(backend: str) -> EngineSettings:
    """An engine that stores what decoding computes."""
    return EngineSettings(backend=backend, options={"save_decode_cache": True})


@pytest.mark.parametrize(
    ("answer_tokens", "stored_tokens"),
    [
        (28, 96),  # 127 tokens with KV: the last token of an answer never has any
        (29, 128),
        (60, 128),
        (61, 160),
        (200, 288),
    ],
)
def test_next_turn_restores_the_last_answer(
    engine: EngineProcess, answer_tokens: int, stored_tokens: int
) -> None:
    first = engine.answer(PROMPT, max_tokens=answer_tokens)
    next_turn = [*PROMPT, *first.tokens, *prompt(40, seed=81)]
    assert engine.reset_local()
    restored = engine.answer(next_turn)
    assert (restored.local_tokens, restored.external_tokens) == (0, stored_tokens)
    assert engine.reset_all()
    cold = engine.answer(next_turn)
    assert cold.external_tokens == 0
    assert restored.tokens == cold.tokens


def test_without_the_option_only_prompts_are_stored(engines: Engines, backend: str) -> None:
    settings = EngineSettings(backend=backend)
    engine = engines.shared(settings)
    first = engine.answer(PROMPT, max_tokens=61)
    assert engine.reset_local()
    restored = engine.answer([*PROMPT, *first.tokens, *prompt(40, seed=81)])
    assert restored.external_tokens == 96
    assert engines.release(settings) == []
