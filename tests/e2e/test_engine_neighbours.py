# SPDX-License-Identifier: Apache-2.0
"""Two engines of one model on one host, at the same time and one after the other."""

import pytest
from engine import EngineSettings, full_blocks, prompt
from engine_process import EngineError, Engines

TOKENS = prompt(205, seed=190)
COVERED = full_blocks(205)


def named(backend: str, lookup_instance: str) -> EngineSettings:
    """Settings of an engine with a name; the empty one is the default."""
    return EngineSettings(backend=backend, options={"lookup_instance": lookup_instance})


def test_a_second_engine_without_a_name_is_refused(engines: Engines, backend: str) -> None:
    first = engines.start(named(backend, ""))
    with pytest.raises(EngineError, match="lookup_instance") as refused:
        engines.start(named(backend, ""))
    assert refused.value.kind == "ConfigError"
    assert "\n" not in refused.value.message
    assert str(first.process_id) in refused.value.message
    # The first one does not notice.
    cold = first.answer(TOKENS)
    assert first.reset_local()
    restored = first.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)
    first.close()


def test_a_second_engine_with_a_name_is_apart(engines: Engines, backend: str) -> None:
    first = engines.start(named(backend, ""))
    second = engines.start(named(backend, "second"))
    cold = first.answer(TOKENS)
    missed = second.answer(TOKENS)
    assert (missed.external_tokens, missed.tokens) == (0, cold.tokens)
    assert second.reset_all()
    # A reset of one engine is none of the other.
    assert first.reset_local()
    restored = first.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)
    assert second.answer(TOKENS).external_tokens == 0
    first.close()
    second.close()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_next_engine_starts_from_nothing(engines: Engines, backend: str, end: str) -> None:
    first = engines.start(named(backend, ""))
    cold = first.answer(TOKENS)
    if end == "kill":
        first.kill()
    first.close()
    second = engines.start(named(backend, ""))
    missed = second.answer(TOKENS)
    assert (missed.external_tokens, missed.tokens) == (0, cold.tokens)
    assert second.reset_local()
    restored = second.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)
    second.close()
