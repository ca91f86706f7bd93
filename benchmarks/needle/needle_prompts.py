# SPDX-License-Identifier: Apache-2.0
"""The prompts: a log of a given length with a code at a given depth, each unlike all others.

Nothing is random, so that every run and every machine asks the same prompts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs

from umbp.cli.demo_text import Log, chat_messages, fit_document

Encode = Callable[[Sequence[dict[str, str]]], list[int]]
"""Turns a chat into token ids."""

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""


@attrs.frozen
class Case:
    """One prompt of a cell of the table.

    Attributes:
        number: Number of the prompt, from 1; no two prompts have the same.
        length_tokens: Most tokens of the prompt.
        depth: Where the needle is: 0 at the beginning, 1 at the end.
    """

    number: int
    length_tokens: int
    depth: float

    @property
    def log(self) -> Log:
        """What the prompt's log says."""
        return Log(
            # The number comes first, so that two prompts differ within their first block.
            title=f"{self.number}. volume of the log of the lighthouse on Gull Rock",
            # 7919 is a prime: the codes of 9,000 cases are all different.
            code=str(1000 + self.number * 7919 % 9000),
            depth=self.depth,
            first_day_index=self.number * 101,
        )


@attrs.frozen
class Prompt:
    """A case as tokens.

    Attributes:
        case: The case.
        token_ids: The whole prompt.
        needle_end_tokens: Tokens from the beginning through the end of the needle.
    """

    case: Case
    token_ids: tuple[int, ...]
    needle_end_tokens: int


def make_cases(
    lengths_tokens: Sequence[int], depths: Sequence[float], cases_per_cell: int
) -> Iterator[Case]:
    """Lists the cases of all cells, row by row."""
    numbers = itertools.count(1)
    for length_tokens in lengths_tokens:
        for depth in depths:
            for _ in range(cases_per_cell):
                yield Case(next(numbers), length_tokens, depth)


def make_prompt(case: Case, encode: Encode, decode: Decode) -> Prompt:
    """Writes the longest prompt of a case that keeps to its length.

    Args:
        case: What it says.
        encode: The chat template and tokenizer of the model.
        decode: Its inverse.

    Raises:
        ValueError: Even the shortest is longer.
    """
    document = fit_document(
        case.length_tokens, lambda text: len(encode(chat_messages(text))), case.log
    )
    token_ids = encode(chat_messages(document))
    return Prompt(case, tuple(token_ids), end_of_text(case.log.fact, token_ids, decode))


def end_of_text(text: str, token_ids: Sequence[int], decode: Decode) -> int:
    """Returns how many tokens it takes, from the beginning, until a text is complete.

    Args:
        text: What to look for.
        token_ids: Tokens that contain it.
        decode: Turns tokens into text.

    Raises:
        ValueError: They do not contain it.
    """
    if text not in decode(token_ids):
        raise ValueError(f"{text!r} is not in the prompt")
    lacking, complete = 0, len(token_ids)
    while complete - lacking > 1:
        middle = (lacking + complete) // 2
        if text in decode(token_ids[:middle]):
            complete = middle
        else:
            lacking = middle
    return complete
