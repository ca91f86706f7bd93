# SPDX-License-Identifier: Apache-2.0
"""The demo's hybrid model: a tiny Qwen3-Next with random weights, asked random tokens.

Three layers of four keep recurrent state (gated delta nets) instead of KV blocks. Nothing is
downloaded; in return neither prompt nor answer means anything, and only token ids can be compared.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from umbp.cli import engine
from umbp.cli.outcome import Outcome
from umbp.cli.random_model import QWEN_NEXT, make_model

MATCH_TOKENS: Final = 16
"""Tokens in vLLM's unit of a prefix hit, which may end inside a block."""

PROMPT_TOKENS_MIN: Final = 128
"""Shortest prompt: longer than the one that warms up, which is its end."""

_SPECIAL_TOKENS: Final = 3
_TOKENS_SHOWN: Final = 12


class HybridModel:
    """See ``demo_models.DemoModel``."""

    folder: Final = "random-Qwen3-Next"
    format: Final = "hybrid 1"
    preparation: Final = "writing a model with random weights, once"
    question: Final[str | None] = None
    engine_arguments: Final[Mapping[str, Any]] = {
        "block_size": None,  # vLLM makes the blocks of attention as large as those of state
        "mamba_cache_mode": "align",
        "prefix_match_unit": MATCH_TOKENS,
        "skip_tokenizer_init": True,
    }

    def write(self, directory: Path) -> None:
        """Writes the model."""
        make_model(directory, QWEN_NEXT)

    def prompt(self, token_count: int, demo_engine: "engine.DemoEngine") -> list[int]:
        """Returns random tokens, always the same.

        Raises:
            ValueError: They are too few for a prefix hit.
        """
        if token_count < PROMPT_TOKENS_MIN:
            raise ValueError(f"the model hybrid wants at least {PROMPT_TOKENS_MIN}")
        random_ = random.Random(0)
        vocabulary = range(_SPECIAL_TOKENS, QWEN_NEXT["vocab_size"])
        return random_.choices(vocabulary, k=token_count)

    def answer_lines(self, outcome: Outcome) -> list[str]:
        """Returns the first token ids of the answers that differ."""
        lines = ["The model has random weights and the prompt is random: answers are token ids."]
        for ids in dict.fromkeys(run.request.answer_token_ids for run in outcome.runs):
            shown = " ".join(map(str, ids[:_TOKENS_SHOWN]))
            more = f" ... ({len(ids)} tokens)" if len(ids) > _TOKENS_SHOWN else ""
            lines.append(f"Answer:   {shown}{more}")
        return lines
