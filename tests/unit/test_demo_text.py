# SPDX-License-Identifier: Apache-2.0
"""The demo's document: one fact, no rival to it, as long as was asked for."""

import re

import pytest

from umbp.cli.demo_text import (
    ACCESS_CODE,
    QUESTION,
    Log,
    chat_messages,
    fit_document,
    write_document,
)


def count_words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("entry_count", [1, 2, 7, 150])
def test_document_holds_the_fact_once_and_no_other_code(entry_count: int) -> None:
    document = write_document(entry_count)
    assert document.count(ACCESS_CODE) == 1
    assert re.findall(r"\d{4,}", document) == [ACCESS_CODE]


def test_fact_lies_in_the_middle() -> None:
    document = write_document(100)
    assert 0.4 < document.index(ACCESS_CODE) / len(document) < 0.6


@pytest.mark.parametrize(("depth", "entry_index"), [(0.0, 0), (0.25, 10), (0.5, 20), (1.0, 39)])
def test_fact_lies_at_the_depth_of_the_log(depth: float, entry_index: int) -> None:
    log = Log(title="Volume 2", code="1234", depth=depth, first_day_index=100)
    title, *entries = write_document(40, log).split("\n\n")
    assert title == "Volume 2"
    assert [index for index, entry in enumerate(entries) if log.fact in entry] == [entry_index]
    assert entries[0].startswith("Day 101. ")
    assert fit_document(900, count_words, log).startswith("Volume 2\n\nDay 101. ")


@pytest.mark.parametrize("depth", [-0.1, 1.1])
def test_no_fact_outside_of_the_log(depth: float) -> None:
    with pytest.raises(ValueError, match="depth"):
        Log(depth=depth)


def test_entries_do_not_repeat_within_the_longest_prompt() -> None:
    entries = [entry.partition(". ")[2] for entry in write_document(400).split("\n\n")[1:]]
    assert len(set(entries)) == len(entries) == 400


def test_document_is_the_same_every_time() -> None:
    assert write_document(30) == write_document(30)


def test_no_log_without_a_day() -> None:
    with pytest.raises(ValueError, match="got 0"):
        write_document(0)


@pytest.mark.parametrize("target", [80, 81, 500, 3000, 8000])
def test_fitted_document_is_the_longest_within_the_target(target: int) -> None:
    document = fit_document(target, count_words)
    entry_count = document.count("Day ")
    assert count_words(document) <= target
    assert count_words(write_document(entry_count + 1)) > target


def test_target_below_one_day_is_refused_with_its_length() -> None:
    shortest = count_words(write_document(1))
    assert fit_document(shortest, count_words) == write_document(1)
    with pytest.raises(ValueError, match=f"has {shortest} tokens, {shortest - 1} are wanted"):
        fit_document(shortest - 1, count_words)


def test_question_follows_the_document() -> None:
    (message,) = chat_messages("the document")
    assert message["role"] == "user"
    assert message["content"].startswith("the document")
    assert message["content"].endswith(QUESTION)
