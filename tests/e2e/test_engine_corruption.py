# SPDX-License-Identifier: Apache-2.0
"""One wrong byte in one stored object changes the restored output.

That is what makes the comparisons of the other tests worth something. The objects are stored past
the connector, from KV memory in which one byte was changed, under the keys that the connector asks
for after its next reset; so it works on every backend.
"""

from collections.abc import Callable
from typing import Any

import engine_worker
import pytest
from engine import ANSWER_TOKENS, BLOCK_TOKENS, Answer, Engine, prompt
from engine_process import EngineProcess

BLOCKS = 5
# One token more than the blocks: everything but the last token is restored.
TOKENS = prompt(BLOCKS * BLOCK_TOKENS + 1, seed=50)


def answer_from_planted(
    engine: Engine, spoil: Callable[..., None] | None, *arguments: Any, block: int = 0
) -> tuple[Answer, Answer]:
    """Computes an answer, spoils a block, and has the answer restored from what memory holds then.

    Returns:
        The computed and the restored answer.
    """
    request_id = engine.submit(TOKENS)
    (cold,) = engine.finish(request_id)
    engine.settle()
    if spoil is not None:
        engine.workers(spoil, engine.block_ids(request_id)[block], *arguments)
    engine.plant(request_id, blocks=BLOCKS)
    assert engine.reset_all()
    return cold, engine.answer(TOKENS)


def test_unchanged_objects_give_the_same_output(engine: EngineProcess) -> None:
    cold, restored = engine.run(answer_from_planted, None)
    assert restored.external_tokens == BLOCKS * BLOCK_TOKENS
    assert restored.tokens == cold.tokens
    assert len(cold.tokens) == ANSWER_TOKENS


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("block", [0, 2, BLOCKS - 1])
def test_one_changed_byte_changes_the_output(engine: EngineProcess, block: int, layer: int) -> None:
    cold, restored = engine.run(
        answer_from_planted, engine_worker.change_byte, layer, 11, block=block
    )
    assert restored.external_tokens == BLOCKS * BLOCK_TOKENS
    assert restored.tokens != cold.tokens


@pytest.mark.parametrize("block", range(BLOCKS))
def test_one_zeroed_block_changes_the_output(engine: EngineProcess, block: int) -> None:
    cold, restored = engine.run(answer_from_planted, engine_worker.zero_block, block=block)
    assert restored.external_tokens == BLOCKS * BLOCK_TOKENS
    assert restored.tokens != cold.tokens
