# SPDX-License-Identifier: Apache-2.0
"""Applies a mutant to a copy of the project."""

import shutil
from pathlib import Path

from mutants import Mutant

_COPIED = ("umbp", "tests", "pyproject.toml")


def mutated_text(root: Path, mutant: Mutant) -> str:
    """Returns the text of the mutant's file with the mistake in it.

    Raises:
        ValueError: The file does not have the text exactly once: the table is out of date.
    """
    text = (root / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.before)
    if count != 1:
        raise ValueError(f"{mutant.file} has the text of mutant {mutant.name!r} {count} times")
    return text.replace(mutant.before, mutant.after)


def copy_project(root: Path, folder: Path, mutant: Mutant | None) -> None:
    """Copies what tests need into a folder, with a mistake or without."""
    for name in _COPIED:
        source = root / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    if mutant is not None:
        (folder / mutant.file).write_text(mutated_text(root, mutant), encoding="utf-8")
