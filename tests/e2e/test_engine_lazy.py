# SPDX-License-Identifier: Apache-2.0
"""Lazy offload on real engines: what other requests have taken from the GPU comes back the same.

KV memory is so small that a few other prompts use all of it. The output of a prompt that was
restored is held against that of a hit in vLLM's own prefix cache.
"""

from typing import Any, Final

import attrs
import pytest
from engine import Answer, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess
from hybrids import GEMMA, QWEN, cached_answer


@attrs.frozen
class Model:
    """A model, and how small its engine is.

    Attributes:
        name: Name in ``tiny_models``.
        arguments: Arguments of vLLM's engine.
        tokens: Length of a prompt.
        crowd: Prompts that use all KV memory.
    """

    name: str
    arguments: dict[str, Any]
    tokens: int
    crowd: int


MODELS: Final = {
    model.name: model
    for model in (
        Model("llama", {"num_gpu_blocks_override": 44, "max_model_len": 512}, 230, 8),
        Model(
            "qwen_next",
            QWEN.arguments | {"max_num_batched_tokens": 704, "num_gpu_blocks_override": 64},
            1500,
            8,
        ),
        Model(
            "gemma",
            GEMMA.arguments
            | {
                "dtype": "float32",
                "max_model_len": 768,
                "max_num_batched_tokens": 100,
                "num_gpu_blocks_override": 300,
            },
            400,
            8,
        ),
    )
}


CASES: Final = (
    ("llama", False),
    ("llama", True),
    ("qwen_next", False),
    ("gemma", True),
)
"""A model, and ``save_decode_cache``."""


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'with' if case[1] else 'without'}")
def case(request: pytest.FixtureRequest) -> tuple[str, bool]:
    name, saves_decode = request.param
    return name, saves_decode


@pytest.fixture
def model(case: tuple[str, bool]) -> Model:
    return MODELS[case[0]]


@pytest.fixture
def saves_decode(case: tuple[str, bool]) -> bool:
    return case[1]


@pytest.fixture
def settings(model: Model, saves_decode: bool) -> EngineSettings:
    return EngineSettings(
        model=model.name,
        options={"lazy_offload": True, "save_decode_cache": saves_decode},
        arguments=model.arguments,
    )


def test_what_other_requests_reused_is_restored(
    engine: EngineProcess, model: Model, saves_decode: bool
) -> None:
    tokens = prompt(model.tokens, seed=1)
    cold = engine.answer(tokens, max_tokens=48)
    assert engine.counters()["stores_started"] == 0
    next_turn = [*tokens, *cold.tokens, *prompt(40, seed=2)]
    cached = [cached_answer(engine, tokens), cached_answer(engine, next_turn)]

    restored = []
    for number, asked in enumerate((tokens, next_turn)):
        for other in range(model.crowd):
            engine.answer(prompt(model.tokens, seed=10 + 10 * number + other))
        restored.append(engine.answer(asked))

    assert [one.local_tokens for one in restored] == [0, 0]
    assert [one.tokens for one in restored] == [one.tokens for one in cached]
    check_reach(model, saves_decode, restored, cached)
    counters = engine.counters()
    assert counters["lazy_stores_started"] == counters["stores_started"] > 0
    assert counters["loads_failed"] == counters["preemptions"] == 0


def check_reach(
    model: Model, saves_decode: bool, restored: list[Answer], cached: list[Answer]
) -> None:
    """As far as a local hit; but blocks that decoding has filled are there with the option only."""
    assert restored[0].external_tokens == cached[0].local_tokens > 0
    if model.name == "llama":
        turn = cached[1].local_tokens if saves_decode else full_blocks(model.tokens)
        assert restored[1].external_tokens == turn
