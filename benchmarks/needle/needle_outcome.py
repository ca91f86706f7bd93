# SPDX-License-Identifier: Apache-2.0
"""What the answers showed, whether that is what umbp promises, and the table of it."""

from collections.abc import Sequence
from typing import Any

import attrs
from needle_prompts import Prompt

from umbp.cli.engine import RequestRecord


@attrs.frozen
class Pair:
    """One prompt: the run that filled the caches, and the two answers to compare.

    Attributes:
        prompt: The prompt.
        cold: The first run, which computes the whole prompt.
        local: The answer after a hit in vLLM's own prefix cache.
        restored: The answer after that cache was emptied, from what umbp restored.
    """

    prompt: Prompt
    cold: RequestRecord
    local: RequestRecord
    restored: RequestRecord

    def retrieves(self, record: RequestRecord) -> bool:
        """Says whether an answer names the code."""
        return self.prompt.case.log.code in record.answer_text

    @property
    def is_identical(self) -> bool:
        """Whether both answers have the same token ids."""
        return self.local.answer_token_ids == self.restored.answer_token_ids

    @property
    def needle_was_restored(self) -> bool:
        """Whether every token of the needle came from umbp."""
        return self.prompt.needle_end_tokens <= self.restored.external_token_count

    def faults(self) -> list[str]:
        """Returns each condition that does not hold, as one line."""
        case, found = self.prompt.case, []
        reused = self.cold.local_token_count + self.cold.external_token_count
        if reused:
            found.append(f"the first run was not cold, it reused {reused} tokens")
        if self.local.external_token_count or not self.local.local_token_count:
            found.append(
                f"the second run had {self.local.local_token_count} tokens of the prefix cache"
                f" and {self.local.external_token_count} of umbp"
            )
        if self.restored.local_token_count:
            found.append(f"the prefix cache still had {self.restored.local_token_count} tokens")
        if self.restored.external_token_count != self.local.local_token_count:
            found.append(
                f"umbp restored {self.restored.external_token_count} tokens,"
                f" the prefix cache had {self.local.local_token_count}"
            )
        if not self.needle_was_restored:
            found.append(
                f"the needle ends at token {self.prompt.needle_end_tokens},"
                f" {self.restored.external_token_count} were restored"
            )
        if not self.is_identical:
            found.append("the two answers differ")
        where = f"prompt {case.number} ({case.length_tokens} tokens, depth {case.depth:g})"
        return [f"{where}: {fault}" for fault in found]

    def as_json(self) -> dict[str, Any]:
        """Returns all of it but the prompt's tokens."""
        case = self.prompt.case
        return {
            **attrs.asdict(case),
            "code": case.log.code,
            "needle_end_tokens": self.prompt.needle_end_tokens,
            "identical": self.is_identical,
            "needle_restored": self.needle_was_restored,
            "retrieved_local": self.retrieves(self.local),
            "retrieved_restored": self.retrieves(self.restored),
            "faults": self.faults(),
            "cold": attrs.asdict(self.cold),
            "local": attrs.asdict(self.local),
            "restored": attrs.asdict(self.restored),
        }


@attrs.frozen
class Outcome:
    """All pairs, in the order in which they were made.

    Attributes:
        pairs: The pairs.
        failed_loads: Loads that failed during all of it.
    """

    pairs: Sequence[Pair]
    failed_loads: int

    def faults(self) -> list[str]:
        """Returns each condition that does not hold, as one line; empty when all do."""
        found = [fault for pair in self.pairs for fault in pair.faults()]
        if self.failed_loads:
            found.append(f"{self.failed_loads} loads failed")
        if not self.pairs:
            found.append("no prompt was answered")
        return found

    def summary(self) -> str:
        """Returns the numbers that count, as one line."""
        count = len(self.pairs)
        local = sum(pair.retrieves(pair.local) for pair in self.pairs)
        restored = sum(pair.retrieves(pair.restored) for pair in self.pairs)
        tokens = sum(pair.restored.external_token_count for pair in self.pairs)
        return (
            f"{count} pairs: {sum(pair.is_identical for pair in self.pairs)} with identical token"
            f" ids, {sum(pair.needle_was_restored for pair in self.pairs)} needles inside the"
            f" restored tokens, {self.failed_loads} failed loads, {tokens} tokens restored;"
            f" retrieved {local} after a local hit, {restored} after a restore"
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns headings and rows: one row a length, one column a depth."""
        lengths = dict.fromkeys(pair.prompt.case.length_tokens for pair in self.pairs)
        depths = dict.fromkeys(pair.prompt.case.depth for pair in self.pairs)
        rows = [
            [str(length), *(self._cell(length, depth) for depth in depths)] for length in lengths
        ]
        return ["tokens", *(f"depth {depth:g}" for depth in depths)], rows

    def as_json(self) -> dict[str, Any]:
        """Returns the pairs with what was found wrong."""
        return {
            "summary": self.summary(),
            "faults": self.faults(),
            "failed_loads": self.failed_loads,
            "pairs": [pair.as_json() for pair in self.pairs],
        }

    def _cell(self, length_tokens: int, depth: float) -> str:
        pairs = [
            pair
            for pair in self.pairs
            if (pair.prompt.case.length_tokens, pair.prompt.case.depth) == (length_tokens, depth)
        ]
        local = sum(pair.retrieves(pair.local) for pair in pairs)
        restored = sum(pair.retrieves(pair.restored) for pair in pairs)
        return f"{local} | {restored} of {len(pairs)}"
