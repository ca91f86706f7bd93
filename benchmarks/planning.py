# SPDX-License-Identifier: Apache-2.0
"""How lookup and planning grow with the prompt: one group, and four groups of a hybrid model.

python benchmarks/planning.py [--check] [--json FILE]

Everything that the scheduler's side does for one request is timed by part: what to ask, what the
answer makes a hit, which blocks to load, which to store, and the plan for the workers. The groups
are vLLM's own classes; no model, no backend.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import Timing, origin, time_operations
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from umbp.connector.groups import Asked, GroupRules
from umbp.connector.metadata import PlanPart, pack_ids

PROMPTS = (8_192, 32_768, 131_072)
GROWTH_MAX = 18.0
"""Most that 16 times the tokens may cost."""

UNIT_TOKENS = 16
STATE_BLOCK_TOKENS = 640
STEP_TOKENS = 8_192
"""Tokens whose blocks one step stores; independent of the prompt, so stores are timed for this."""


def one_group() -> GroupRules:
    """Full attention alone, in blocks of 16 tokens."""
    spec = FullAttentionSpec(
        block_size=UNIT_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return _rules([spec], UNIT_TOKENS)


def four_groups() -> GroupRules:
    """Three groups of recurrent state beside attention; hits end at every 16 tokens."""
    attention = FullAttentionSpec(
        block_size=STATE_BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    state = MambaSpec(
        block_size=STATE_BLOCK_TOKENS,
        shapes=((1,),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    return _rules([state, state, state, attention], STATE_BLOCK_TOKENS)


def _rules(specs: Sequence[Any], block_tokens: int) -> GroupRules:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    manager = KVCacheManager(
        kv_cache_config=KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=1 << 20,
        scheduler_block_size=block_tokens,
        hash_block_size=UNIT_TOKENS,
        max_in_flight_tokens=1 << 20,
    )
    return GroupRules(manager)


class Request:
    """One prompt, all of which is stored, and the blocks that it was given."""

    def __init__(self, rules: GroupRules, tokens: int) -> None:
        self.rules = rules
        self.tokens = tokens
        self.hashes = [index.to_bytes(32, "big") for index in range(tokens // UNIT_TOKENS)]
        self.table = [list(range(1, tokens // group.block_tokens + 2)) for group in rules.groups]
        self.asked = self.ask()
        self.masks = [np.ones(len(one.hashes), dtype=bool) for one in self.asked]
        self.found = self.hit()

    def ask(self) -> list[Asked]:
        asked = self.rules.ask(self.hashes, 0)
        for one in asked:
            b"".join(one.hashes)
        return asked

    def hit(self) -> Any:
        return self.rules.hit(
            self.asked, self.masks, self.hashes, local_tokens=0, limit_tokens=self.tokens - 1
        )

    def load(self) -> list[PlanPart]:
        parts = self.found.parts(self.table, 0)
        assert parts
        return _plan(parts)

    def store(self) -> list[PlanPart]:
        span = (self.tokens - STEP_TOKENS, self.tokens)
        return _plan(self.rules.filled_parts(self.hashes, self.table, *span))


def _plan(parts: Sequence[Any]) -> list[PlanPart]:
    return [
        PlanPart(part.group_index, 32, b"".join(part.block_hashes), pack_ids(part.block_ids))
        for part in parts
    ]


def repeated(operation: Callable[[], Any], times: int) -> None:
    """Does something that many times."""
    for _ in range(times):
        operation()


def measure() -> dict[str, Timing]:
    """Times every part for every prompt and model, in turn."""
    operations = {}
    for name, rules in (("one group", one_group()), ("four groups", four_groups())):
        for tokens in PROMPTS:
            request = Request(rules, tokens)
            for part in ("ask", "hit", "load", "store"):
                operation = partial(repeated, getattr(request, part))
                operations[f"{name}, {part}, {tokens}"] = operation
    return time_operations(operations, rounds=5, samples=5, batch=2)


def report(timings: dict[str, Timing]) -> dict[str, float]:
    """Prints a table and returns the growth of each part from the first prompt to the last."""
    growths = {}
    header = "".join(f"{tokens:>14,}" for tokens in PROMPTS)
    print(f"{'microseconds by tokens':<24}{header}{'growth':>10}")
    for name in ("one group", "four groups"):
        for part in ("ask", "hit", "load", "store"):
            row = [timings[f"{name}, {part}, {tokens}"].median_us for tokens in PROMPTS]
            growth = row[-1] / row[0]
            growths[f"{name}, {part}"] = growth
            cells = "".join(f"{value:>14,.1f}" for value in row)
            print(f"{name + ', ' + part:<24}{cells}{growth:>9.1f}x")
    print(f"16 times the tokens may cost {GROWTH_MAX:.0f} times as much at most.")
    return growths


def main() -> int:
    """Returns 1 when ``--check`` is given and something grows faster than the prompt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where growth is not linear")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()
    timings = measure()
    growths = report(timings)
    if options.json is not None:
        result = {
            **origin(["attrs", "numpy"], sys.argv),
            "growths": growths,
            "samples_us": {name: timing.rounds_us for name, timing in timings.items()},
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    too_fast = {name: growth for name, growth in growths.items() if growth > GROWTH_MAX}
    for name, growth in too_fast.items():
        print(f"{name} costs {growth:.1f} times as much", file=sys.stderr)
    return 1 if options.check and too_fast else 0


if __name__ == "__main__":
    sys.exit(main())
