# SPDX-License-Identifier: Apache-2.0
"""Simulated clients: what they ask and when, drawn from a seed within the given sizes."""

from itertools import pairwise

from umbp.sim.traffic import Traffic, draw_conversations

TRAFFIC = Traffic(
    conversations=200,
    rate_per_s=5.0,
    turns=(2, 3),
    think_s=1.0,
    systems=2,
    system_tokens=12,
    question_tokens=(3, 5),
    answer_tokens=(1, 2),
)


def test_equal_seeds_ask_the_same() -> None:
    assert draw_conversations(TRAFFIC, 1) == draw_conversations(TRAFFIC, 1)
    assert draw_conversations(TRAFFIC, 1) != draw_conversations(TRAFFIC, 2)


def test_sizes_are_as_asked_and_all_of_them_occur() -> None:
    conversations = draw_conversations(TRAFFIC, 3)
    turns = [turn for one in conversations for turn in one.turns]
    assert {len(one.turns) for one in conversations} == {2, 3}
    assert {len(turn.question) for turn in turns} == {3, 4, 5}
    assert {turn.answer_tokens for turn in turns} == {1, 2}
    assert len({one.system for one in conversations}) == 2
    assert {len(one.system) for one in conversations} == {12}


def test_conversations_begin_at_the_rate_and_turns_come_after_some_thought() -> None:
    conversations = draw_conversations(TRAFFIC, 4)
    begins = [one.begin_s for one in conversations]
    assert all(first < second for first, second in pairwise(begins))
    assert 0.7 < begins[-1] / (TRAFFIC.conversations / TRAFFIC.rate_per_s) < 1.4
    assert all(one.turns[0].think_s == 0 for one in conversations)
    thoughts = [turn.think_s for one in conversations for turn in one.turns[1:]]
    assert 0.7 < sum(thoughts) / len(thoughts) < 1.4


def test_no_conversation_is_longer_than_announced() -> None:
    lengths = [
        len(one.system) + sum(len(turn.question) + turn.answer_tokens for turn in one.turns)
        for one in draw_conversations(TRAFFIC, 5)
    ]
    assert 0.8 * TRAFFIC.longest_tokens < max(lengths) <= TRAFFIC.longest_tokens


def test_clients_may_ask_without_thinking() -> None:
    conversations = draw_conversations(Traffic(think_s=0.0), 6)
    assert {turn.think_s for one in conversations for turn in one.turns} == {0.0}
