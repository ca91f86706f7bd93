# SPDX-License-Identifier: Apache-2.0
"""Hybrid models under a scheduler with little room: chunks, preemption, answers across blocks.

One engine serves all tests: it has few blocks, computes few tokens in a step and stores what
decoding computes. Whatever is restored is held against vLLM's own prefix cache: that computes the
rest of a request in the same shapes, so that the output must be equal in bfloat16, too. Output of
requests that were not disturbed is no measure: in bfloat16 vLLM itself may go on otherwise after a
preemption, since it then computes in one pass what decoding had computed token by token.
"""

from typing import Any, Final

import pytest
from engine import Answer, Engine, EngineSettings, prompt
from engine_process import EngineProcess
from hybrids import Hybrid, cached_answer

LITTLE_ROOM: Final[dict[str, dict[str, Any]]] = {
    # A step takes a little more than a block of attention, ...
    "qwen_next": {"max_num_batched_tokens": 704, "num_gpu_blocks_override": 20},
    # ... or less, so that chunks end inside blocks.
    "lfm": {
        "max_num_batched_tokens": 100,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 26,
    },
    "gemma": {
        # umbp may reach further than vLLM here, so that the rest has another shape.
        "dtype": "float32",
        "max_num_batched_tokens": 100,
        "max_model_len": 768,
        "num_gpu_blocks_override": 72,
    },
}
LONG: Final = {"qwen_next": 1500, "lfm": 700, "gemma": 700}
"""Tokens of a prompt that takes several steps."""

CROWD: Final = {"qwen_next": (4, 600), "lfm": (4, 340), "gemma": (4, 220)}
"""How many requests are too many at a time, and the tokens that their prompts share."""

ANSWER_TOKENS: Final = 80


@pytest.fixture
def settings(backend: str, hybrid: Hybrid) -> EngineSettings:
    """An engine with little room."""
    return EngineSettings(
        model=hybrid.name,
        backend=backend,
        options={"save_decode_cache": True},
        arguments=hybrid.arguments | LITTLE_ROOM[hybrid.name],
    )


def reaches(hybrid: Hybrid, restored_tokens: int, local_tokens: int) -> bool:
    """Says whether an answer was restored as far as it must be.

    vLLM keeps a window at the ends of prompts only; umbp stores every block, and gets further.
    """
    if hybrid.states:
        return restored_tokens == local_tokens
    return restored_tokens >= local_tokens


@pytest.mark.parametrize("offset", [0, None])
def test_prompt_computed_in_chunks(
    engine: EngineProcess, hybrid: Hybrid, offset: int | None
) -> None:
    """Ends at the end of a block, or somewhere."""
    length = LONG[hybrid.name]
    if offset is not None:
        length = length // hybrid.block_tokens * hybrid.block_tokens + offset
    assert length > LITTLE_ROOM[hybrid.name]["max_num_batched_tokens"]
    tokens = prompt(length, seed=length)
    cold = engine.answer(tokens)
    cached = cached_answer(engine, tokens)
    assert engine.reset_local()
    restored = engine.answer(tokens)
    assert (cold.local_tokens, cold.external_tokens) == (0, 0)
    assert (restored.local_tokens, restored.external_tokens) == (0, cached.local_tokens)
    assert restored.external_tokens >= length - hybrid.block_tokens
    assert restored.tokens == cached.tokens


def test_chunks_after_a_restored_prefix(engine: EngineProcess, hybrid: Hybrid) -> None:
    """What is not restored takes several steps, too, and is stored, and restored itself."""
    prefix = prompt(hybrid.block_tokens + 37, seed=20)
    tokens = prefix + prompt(LONG[hybrid.name] - len(prefix), seed=21)
    engine.answer(prefix)
    cached = [engine.answer(tokens) for _ in range(2)]
    assert engine.reset_all()
    engine.answer(prefix)
    restored = []
    for _ in cached:
        assert engine.reset_local()
        restored.append(engine.answer(tokens))
    for local, external in zip(cached, restored, strict=True):
        assert (external.local_tokens, external.external_tokens) == (0, local.local_tokens)
        assert external.tokens == local.tokens
    assert 0 < restored[0].external_tokens < restored[1].external_tokens


def test_next_turn_after_an_answer_across_a_block_end(
    engine: EngineProcess, hybrid: Hybrid
) -> None:
    tokens = prompt(hybrid.block_tokens * 2 - 5, seed=30)

    def first_turn() -> list[int]:
        answer = engine.answer(tokens, max_tokens=ANSWER_TOKENS // 2)
        return [*tokens, *answer.tokens, *prompt(30, seed=31)]

    next_turn = first_turn()
    cached = [engine.answer(next_turn) for _ in range(2)]
    assert engine.reset_all()
    assert first_turn() == next_turn
    restored = []
    for _ in cached:
        assert engine.reset_local()
        restored.append(engine.answer(next_turn))
    for local, external in zip(cached, restored, strict=True):
        assert external.local_tokens == 0
        assert reaches(hybrid, external.external_tokens, local.local_tokens)
        assert external.tokens == local.tokens
    # Where the question ended, at least; and the second time what the first time was computed.
    assert restored[0].external_tokens >= len(tokens) - hybrid.block_tokens
    assert restored[1].external_tokens > len(tokens)


@pytest.mark.parametrize("offset", [-10, 33])
def test_preempted_request_resumes_as_from_the_prefix_cache(
    engine: EngineProcess, hybrid: Hybrid, offset: int
) -> None:
    """Preempted in the middle of its answer, across a block's end or not."""
    tokens = prompt(hybrid.block_tokens * 2 + offset, seed=40)
    cached, local = engine.run(_preempt_in_the_middle, tokens, keep_cache=True)
    assert engine.reset_all()
    restored, external = engine.run(_preempt_in_the_middle, tokens, keep_cache=False)
    assert (local["preemptions"], external["preemptions"]) == (1, 1)
    assert local["tokens_restored"] == 0 or not hybrid.states
    assert external["tokens_restored"] > len(tokens) - hybrid.block_tokens
    assert (external["loads_settled"], external["loads_failed"]) == (1, 0)
    assert restored.tokens == cached.tokens


def _preempt_in_the_middle(
    engine: Engine, tokens: list[int], *, keep_cache: bool
) -> tuple[Answer, dict[str, int]]:
    before = engine.counters()
    request_id = engine.submit(tokens, max_tokens=ANSWER_TOKENS)
    engine.step_until(_decodes_without_transfers, request_id)
    engine.preempt_all(keep_cache=keep_cache)
    (answer,) = engine.finish(request_id)
    engine.settle()
    return answer, {name: count - before[name] for name, count in engine.counters().items()}


def _decodes_without_transfers(engine: Engine, request_id: str) -> bool:
    length = engine.token_count(request_id)
    assert length < ANSWER_TOKENS, "the request ended before its stores did"
    return length >= ANSWER_TOKENS // 2 and not engine.counters()["leases_open"]


def test_requests_preempted_for_lack_of_room_are_restored(
    engine: EngineProcess, hybrid: Hybrid
) -> None:
    request_count, shared_tokens = CROWD[hybrid.name]
    shared = prompt(shared_tokens, seed=50)
    prompts = [shared + prompt(20 + 3 * index, seed=51 + index) for index in range(request_count)]
    alone = []
    for tokens in prompts:
        engine.answer(tokens)
        alone.append(cached_answer(engine, tokens))
    assert engine.reset_local()
    before = engine.counters()
    together = engine.generate(prompts, max_tokens=ANSWER_TOKENS)
    after = engine.counters()
    assert all(answer.local_tokens + answer.external_tokens > 0 for answer in together)
    assert after["preemptions"] > before["preemptions"]
    # Each is restored when it comes, and some once more when they are resumed.
    assert after["loads_settled"] - before["loads_settled"] > len(prompts)
    assert after["loads_failed"] == 0
    # Alone, on what they have left in either cache, and on what umbp has of them.
    for _ in range(2):
        for tokens, answer in zip(prompts, alone, strict=True):
            again = engine.answer(tokens)
            assert again.local_tokens + again.external_tokens == answer.local_tokens
            assert again.tokens == answer.tokens
        assert engine.reset_local()
