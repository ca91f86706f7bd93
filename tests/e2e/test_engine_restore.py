# SPDX-License-Identifier: Apache-2.0
"""Restored KV gives the output that the same prompt gave when it was computed.

Before a prompt is sent again, vLLM's prefix cache is emptied and all KV memory is overwritten, so
that what the second answer rests on can only come from the store.
"""

import threading
from collections.abc import Sequence
from unittest import mock

import pytest
from engine import BLOCK_TOKENS, Answer, Engine, full_blocks, prompt
from engine_process import EngineProcess

from umbp.backends.lookup_server import LookupServer


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3, 9, 20])
def test_cold_cached_and_restored_output_are_equal(
    engine: EngineProcess, blocks: int, offset: int
) -> None:
    token_count = blocks * BLOCK_TOKENS + offset
    tokens = prompt(token_count, seed=blocks)
    cold = engine.answer(tokens)
    cached = engine.answer(tokens)
    assert engine.reset_local()
    restored = engine.answer(tokens)

    assert (cold.local_tokens, cold.external_tokens) == (0, 0)
    assert (cached.local_tokens, cached.external_tokens) == (full_blocks(token_count), 0)
    assert (restored.local_tokens, restored.external_tokens) == (0, full_blocks(token_count))
    assert cold.tokens == cached.tokens == restored.tokens
    # A model that repeats itself would hide a wrong restore.
    assert len(set(cold.tokens)) > 10


def test_what_is_restored_can_be_shared_and_restored_again(engine: EngineProcess) -> None:
    tokens = prompt(200, seed=31)
    cold = engine.answer(tokens)
    for _ in range(2):
        assert engine.reset_local()
        restored = engine.answer(tokens)
        cached = engine.answer(tokens)
        assert (restored.external_tokens, cached.local_tokens) == (192, 192)
        assert cold.tokens == restored.tokens == cached.tokens
    assert engine.counters()["stores_started"] == engine.counters()["stores_settled"]


def answer_and_watch(engine: Engine, tokens: Sequence[int]) -> tuple[Answer, set[bool]]:
    """Answers a prompt, and says whether its lookups were answered on the engine's own thread."""
    are_own: set[bool] = set()
    reply = LookupServer._reply

    def watch(server: LookupServer, frame: bytes) -> object:
        are_own.add(threading.current_thread() is threading.main_thread())
        return reply(server, frame)

    with mock.patch.object(LookupServer, "_reply", watch):
        return engine.answer(tokens), are_own


def test_a_pool_in_the_schedulers_process_is_called_unless_it_may_wait(
    engine: EngineProcess, backend: str
) -> None:
    tokens = prompt(205, seed=38)
    cold = engine.answer(tokens)
    assert engine.reset_local()
    restored, are_own = engine.run(answer_and_watch, tokens)
    assert restored.external_tokens == full_blocks(205)
    assert restored.tokens == cold.tokens
    assert are_own == {backend == "memory"}


def test_a_restore_begins_where_the_local_cache_ends(engine: EngineProcess) -> None:
    tokens = prompt(300, seed=32)
    cold = engine.answer(tokens)
    assert engine.reset_local()
    beginning = engine.answer(tokens[:140])
    assert (beginning.local_tokens, beginning.external_tokens) == (0, 128)
    whole = engine.answer(tokens)
    assert (whole.local_tokens, whole.external_tokens) == (128, 160)
    assert whole.tokens == cold.tokens


def test_what_follows_a_restored_prefix_is_stored_too(engine: EngineProcess) -> None:
    tokens = prompt(300, seed=33)
    engine.answer(tokens[:100])
    assert engine.reset_local()
    first = engine.answer(tokens)
    assert first.external_tokens == 96
    assert engine.reset_local()
    second = engine.answer(tokens)
    assert second.external_tokens == 288
    assert engine.reset_all()
    assert engine.answer(tokens).tokens == first.tokens == second.tokens


def test_prompts_that_part_after_a_shared_prefix(engine: EngineProcess) -> None:
    tokens = prompt(150, seed=34)
    other = tokens[:100] + prompt(50, seed=35)
    cold = [engine.answer(tokens), engine.answer(other)]
    assert cold[1].local_tokens == 96
    assert engine.reset_local()
    restored = [engine.answer(tokens), engine.answer(other)]
    assert [answer.external_tokens for answer in restored] == [128, 32]
    assert [answer.tokens for answer in restored] == [answer.tokens for answer in cold]


def test_concurrent_requests_in_chunks_with_shared_prefixes(engine: EngineProcess) -> None:
    # Steps hold 64 tokens, so most prompts take several, beside the decoding of others.
    prefixes = [prompt(160, seed=36), prompt(97, seed=37)]
    prompts = [
        prefixes[index % 2] + prompt(length, seed=40 + index)
        for index, length in enumerate((1, 30, 64, 95, 140, 200))
    ]
    alone = []
    for tokens in prompts:
        alone.append(engine.answer(tokens).tokens)
        assert engine.reset_all()
    cold = engine.generate(prompts)
    assert engine.reset_local()
    restored = engine.generate(prompts)

    assert [answer.tokens for answer in cold] == alone
    assert [answer.tokens for answer in restored] == alone
    for tokens, answer in zip(prompts, restored, strict=True):
        assert answer.local_tokens + answer.external_tokens == full_blocks(len(tokens))
    assert sum(answer.external_tokens for answer in restored) > 0
