# SPDX-License-Identifier: Apache-2.0
"""Who asks what, and when: conversations that share system prompts, drawn from a seed.

A turn's prompt is all that was said before, answers included, and a new question. It comes a while
after the last answer, so that arrivals depend on how the engines fare.
"""

import random
from typing import Final

import attrs

_VOCABULARY: Final = 500

Span = tuple[int, int]
"""Smallest and largest of what is drawn."""


@attrs.frozen(kw_only=True)
class Traffic:
    """How much is asked.

    Attributes:
        conversations: Conversations in all.
        rate_per_s: Conversations that begin in a second, on average.
        turns: Questions of a conversation.
        think_s: Seconds between an answer and the next question, on average.
        systems: Different system prompts.
        system_tokens: Length of a system prompt.
        question_tokens: Length of a question.
        answer_tokens: Length of an answer.
    """

    conversations: int = 40
    rate_per_s: float = 8.0
    turns: Span = (1, 4)
    think_s: float = 0.5
    systems: int = 3
    system_tokens: int = 48
    question_tokens: Span = (8, 24)
    answer_tokens: Span = (4, 16)

    @property
    def longest_tokens(self) -> int:
        """Length that no conversation exceeds."""
        return self.system_tokens + self.turns[1] * (
            self.question_tokens[1] + self.answer_tokens[1]
        )

    @property
    def expected_s(self) -> float:
        """About how long the conversations take, where engines have time for all of them."""
        turns = (self.turns[0] + self.turns[1]) / 2
        return self.conversations / self.rate_per_s + turns * (self.think_s + 0.3)


@attrs.frozen
class Turn:
    """One question.

    Attributes:
        question: Token ids.
        answer_tokens: Length of the answer.
        think_s: Seconds since the last answer; of a first turn, none.
    """

    question: tuple[int, ...]
    answer_tokens: int
    think_s: float


@attrs.frozen
class Conversation:
    """What one client asks.

    Attributes:
        number: Its number, from 0, in the order in which conversations begin.
        begin_s: When its first question comes.
        system: Token ids of the system prompt.
        turns: Its questions in order.
    """

    number: int
    begin_s: float
    system: tuple[int, ...]
    turns: tuple[Turn, ...]


def draw_conversations(traffic: Traffic, seed: int) -> list[Conversation]:
    """Draws all conversations; they begin as a Poisson process."""
    source = random.Random(seed)
    systems = [_tokens(source, traffic.system_tokens) for _ in range(traffic.systems)]
    conversations, begin_s = [], 0.0
    for number in range(traffic.conversations):
        begin_s += source.expovariate(traffic.rate_per_s)
        turns = tuple(
            _draw_turn(traffic, source, first=not index)
            for index in range(source.randint(*traffic.turns))
        )
        conversations.append(Conversation(number, begin_s, source.choice(systems), turns))
    return conversations


def _draw_turn(traffic: Traffic, source: random.Random, *, first: bool) -> Turn:
    question = _tokens(source, source.randint(*traffic.question_tokens))
    answer_tokens = source.randint(*traffic.answer_tokens)
    think_s = source.expovariate(1 / traffic.think_s) if traffic.think_s and not first else 0.0
    return Turn(question, answer_tokens, think_s)


def _tokens(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(_VOCABULARY) for _ in range(count))
