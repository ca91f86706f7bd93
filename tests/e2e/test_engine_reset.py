# SPDX-License-Identifier: Apache-2.0
"""A reset of the connector makes everything stored before unfindable, and nothing else."""

import engine_worker
from engine import Engine, full_blocks, prompt
from engine_process import EngineProcess

TOKENS = prompt(205, seed=60)
COVERED = full_blocks(205)
LONG = 120
"""Tokens of an answer that is not complete when its prompt is stored."""


def plant_wrong_objects(engine: Engine) -> None:
    """Has wrong objects stored for the prompt, under the keys of the epoch to come."""
    request_id = engine.submit(TOKENS)
    engine.finish(request_id)
    engine.settle()
    for block_id in engine.block_ids(request_id):
        engine.workers(engine_worker.zero_block, block_id)
    engine.plant(request_id, blocks=len(engine.block_ids(request_id)))


def test_after_a_reset_a_prompt_misses_is_stored_and_is_restored(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS)
    for epoch in range(1, 4):
        assert engine.reset_all()
        missed = engine.answer(TOKENS)
        assert engine.reset_local()
        restored = engine.answer(TOKENS)
        assert (missed.local_tokens, missed.external_tokens) == (0, 0), epoch
        assert restored.external_tokens == COVERED, epoch
        assert cold.tokens == missed.tokens == restored.tokens, epoch


def test_nothing_from_before_a_reset_is_served(engine: EngineProcess) -> None:
    cold = engine.answer(TOKENS)
    engine.run(plant_wrong_objects)
    assert engine.reset_all()
    wrong = engine.answer(TOKENS)
    assert wrong.external_tokens == COVERED
    assert wrong.tokens != cold.tokens

    # The wrong objects are still in the pool, under keys of an epoch that is over.
    assert engine.reset_all()
    missed = engine.answer(TOKENS)
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert (missed.external_tokens, restored.external_tokens) == (0, COVERED)
    assert missed.tokens == restored.tokens == cold.tokens


def test_a_local_reset_leaves_the_store_alone(engine: EngineProcess) -> None:
    engine.answer(TOKENS)
    stored = engine.counters()["tokens_stored"]
    for _ in range(3):
        assert engine.reset_local()
        assert engine.answer(TOKENS).external_tokens == COVERED
    assert engine.counters()["tokens_stored"] == stored


def test_a_reset_while_requests_run_computes_them_again(engine: EngineProcess) -> None:
    others = prompt(90, seed=61)
    cold = [answer.tokens for answer in engine.generate([TOKENS, others], max_tokens=LONG)]
    assert engine.reset_all()
    finished = engine.run(_reset_in_the_middle, [TOKENS, others])
    assert finished == cold

    # What they computed after the reset is stored for the new epoch.
    assert engine.reset_local()
    restored = engine.generate([TOKENS, others], max_tokens=LONG)
    assert [answer.external_tokens for answer in restored] == [COVERED, full_blocks(90)]
    assert [answer.tokens for answer in restored] == cold


def _reset_in_the_middle(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    request_ids = [engine.submit(tokens, max_tokens=LONG) for tokens in prompts]
    engine.step_until(_decodes_without_transfers, request_ids)
    assert engine.reset_with_running()
    engine.workers(engine_worker.overwrite_kv_memory)
    answers = engine.finish(*request_ids)
    engine.settle()
    return [answer.tokens for answer in answers]


def _decodes_without_transfers(engine: Engine, request_ids: list[str]) -> bool:
    lengths = [engine.token_count(request_id) for request_id in request_ids]
    assert max(lengths) < LONG, "the requests ended before their stores did"
    return min(lengths) >= 3 and not engine.counters()["leases_open"]
