# SPDX-License-Identifier: Apache-2.0
"""The table of mutants is in step with the code: each applies, and is still a program."""

import ast
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant
from mutate import mutated_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_changes_the_program_and_leaves_a_program(mutant: Mutant) -> None:
    before = (ROOT / mutant.file).read_text(encoding="utf-8")
    after = mutated_text(ROOT, mutant)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    for test in mutant.tests:
        assert (ROOT / test).is_file(), test


def test_there_are_enough_and_no_two_are_the_same() -> None:
    assert len(MUTANTS) >= 12
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_that_no_longer_applies_is_an_error() -> None:
    mutant = Mutant("none", "umbp/keys.py", "no such text", "", ())
    with pytest.raises(ValueError, match="has the text of mutant 'none' 0 times"):
        mutated_text(ROOT, mutant)
