# SPDX-License-Identifier: Apache-2.0
"""Who gets what is stored: requests with the same salt, and never one that must not read caches."""

from engine import full_blocks, prompt
from engine_process import EngineProcess

TOKENS = prompt(205, seed=200)
COVERED = full_blocks(205)


def test_only_requests_with_the_same_salt_share(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS, salt="one tenant")
    for salt, shared in (("another tenant", 0), (None, 0), ("one tenant", COVERED)):
        assert engine.reset_local()
        answer = engine.answer(TOKENS, salt=salt)
        assert answer.external_tokens == shared, salt
        assert answer.tokens == cold.tokens
    # Each has stored its own.
    for salt in ("another tenant", None):
        assert engine.reset_local()
        assert engine.answer(TOKENS, salt=salt).external_tokens == COVERED


def test_prompt_logprobs_are_never_looked_up(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    lookups = engine.counters()["lookups"]
    computed = engine.answer(TOKENS, prompt_logprobs=1)
    assert engine.counters()["lookups"] == lookups
    assert (computed.local_tokens, computed.external_tokens) == (0, 0)
    assert computed.tokens == cold.tokens
    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == COVERED
    assert engine.counters()["lookups"] == lookups + 1
