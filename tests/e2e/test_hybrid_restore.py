# SPDX-License-Identifier: Apache-2.0
"""Hybrid models are restored where vLLM's own prefix cache would resume them, with equal output.

Recurrent state (gated delta nets), short convolutions and sliding windows beside full attention.
Before a prompt is restored, vLLM's prefix cache is emptied and all KV memory is overwritten.
"""

from typing import Any

import pytest
from engine import Engine, EngineSettings, prompt
from engine_process import EngineProcess
from hybrids import Hybrid, cached_answer


@pytest.fixture
def settings(backend: str, hybrid: Hybrid) -> EngineSettings:
    return EngineSettings(model=hybrid.name, backend=backend, arguments=hybrid.arguments)


def test_restored_where_a_local_hit_ends_with_equal_output(
    engine: EngineProcess, hybrid: Hybrid
) -> None:
    for length in hybrid.lengths:
        tokens = prompt(length, seed=length)
        cold = engine.answer(tokens)
        cached = cached_answer(engine, tokens)
        assert engine.reset_local()
        restored = engine.answer(tokens)
        assert cold.local_tokens == 0
        assert restored.local_tokens == 0
        assert restored.external_tokens == cached.local_tokens, length
        assert restored.tokens == cached.tokens, length
        assert length < 2 * hybrid.block_tokens or restored.external_tokens > 0
        assert len(set(restored.tokens)) > 10


def test_prefixes_shared_by_requests_that_run_together(
    engine: EngineProcess, hybrid: Hybrid
) -> None:
    """Concurrent, with decoding across a block's end, on prefixes that end inside blocks."""
    shared = prompt(hybrid.block_tokens * 2 - 50, seed=7)
    prompts = [shared + prompt(40 + 5 * index, seed=70 + index) for index in range(4)]
    alone = []
    for tokens in prompts:
        engine.answer(tokens)
        alone.append(cached_answer(engine, tokens))
    assert engine.reset_local()
    before = engine.counters()
    engine.generate(prompts)
    after = engine.counters()
    assert after["tokens_restored"] > before["tokens_restored"]
    assert after["loads_failed"] == 0
    # Sums round otherwise in a batch; alone, on what the batch has restored and computed.
    for tokens, answer in zip(prompts, alone, strict=True):
        again = engine.answer(tokens)
        assert again.local_tokens > 0
        assert again.tokens == answer.tokens


def test_stored_again_and_restored_again_after_a_reset(
    engine: EngineProcess, hybrid: Hybrid
) -> None:
    tokens = prompt(hybrid.lengths[-1], seed=8)
    engine.answer(tokens)
    cached = cached_answer(engine, tokens)
    assert engine.reset_all()
    assert engine.answer(tokens).external_tokens == 0
    engine.answer(tokens)
    assert engine.reset_local()
    restored = engine.answer(tokens)
    assert restored.external_tokens == cached.local_tokens > 0
    assert restored.tokens == cached.tokens


def spoil_objects(engine: Engine, group: int) -> int:
    """Inverts every byte of the newest object of a group, in the memory backend's pool."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    pool: Any = get_kv_transfer_group().worker_side._pool
    objects = [
        found
        for key, found in pool._index._objects.items()
        if int.from_bytes(key[24:26], "big") == group
    ]
    for found in objects:
        view = pool._buffer.tensor[found.offset : found.offset + found.object_bytes]
        view.bitwise_not_()
    return len(objects)


@pytest.mark.parametrize("group", range(4))
def test_spoiled_objects_of_any_group_change_the_output(
    engine: EngineProcess, hybrid: Hybrid, backend: str, group: int
) -> None:
    """What makes the other comparisons worth something, for state, windows and attention alike."""
    if backend != "memory":
        pytest.skip("objects can be reached in the memory backend's pool only")
    # One token after the boundary: a short convolution's state reaches two tokens.
    tokens = prompt(hybrid.block_tokens + 33, seed=9)
    engine.answer(tokens)
    cached = cached_answer(engine, tokens)
    assert engine.reset_local()
    assert engine.run(spoil_objects, group) > 0
    restored = engine.answer(tokens)
    assert restored.external_tokens == cached.local_tokens == hybrid.block_tokens + 32
    assert restored.tokens != cached.tokens
