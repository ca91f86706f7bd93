# SPDX-License-Identifier: Apache-2.0
"""Preempted requests give the output of requests that had room, and are restored when resumed.

The pool of KV blocks is too small for the requests that run at once, so vLLM takes the blocks of
some of them back and computes them again later.
"""

import pytest
from engine import Answer, EngineSettings, prompt
from engine_process import EngineProcess, Engines

PROMPTS = [prompt(100, seed=90 + index) for index in range(4)]
ANSWER_TOKENS = 100
SMALL = {"num_gpu_blocks_override": 20, "max_model_len": 512}


@pytest.fixture(scope="module")
def undisturbed(engines: Engines) -> list[tuple[int, ...]]:
    """Output of an engine with room for everything and no connector."""
    large = {**SMALL, "num_gpu_blocks_override": 256}
    engine = engines.start(EngineSettings(backend=None, arguments=large))
    answers: list[Answer] = engine.generate(PROMPTS, max_tokens=ANSWER_TOKENS)
    engine.close()
    return [answer.tokens for answer in answers]


@pytest.fixture(params=["prompts", "prompts_and_answers"])
def settings(request: pytest.FixtureRequest, backend: str) -> EngineSettings:
    """An engine with little room."""
    options = {"save_decode_cache": request.param == "prompts_and_answers"}
    return EngineSettings(backend=backend, options=options, arguments=SMALL)


def test_preempted_requests_are_restored(
    engine: EngineProcess, undisturbed: list[tuple[int, ...]]
) -> None:
    before = engine.counters()
    first = engine.generate(PROMPTS, max_tokens=ANSWER_TOKENS)
    between = engine.counters()
    assert engine.reset_local()
    second = engine.generate(PROMPTS, max_tokens=ANSWER_TOKENS)
    after = engine.counters()

    assert between["preemptions"] > before["preemptions"]
    assert after["preemptions"] > between["preemptions"]
    assert [answer.tokens for answer in first] == undisturbed
    assert [answer.tokens for answer in second] == undisturbed
    # The second time every request is restored when it comes, and once more when it is resumed.
    assert [answer.external_tokens for answer in second] == [96] * len(PROMPTS)
    restores = after["loads_settled"] - between["loads_settled"]
    assert restores > len(PROMPTS)
    assert after["loads_failed"] == before["loads_failed"]
