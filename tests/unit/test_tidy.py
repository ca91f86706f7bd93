# SPDX-License-Identifier: Apache-2.0
"""The tree stays readable: small files, short functions, a licence line, no leftovers."""

import ast
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
FILE_LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 70
LICENCE: Final = "# SPDX-License-Identifier: Apache-2.0"
LEFTOVERS: Final = ("TO" + "DO", "FIX" + "ME", "XX" + "X")


def python_files() -> list[Path]:
    """Every Python file under version control, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


FILES: Final = python_files()


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_tree_is_found() -> None:
    assert any(name(path) == "umbp/fsm/table.py" for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_is_tidy(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= FILE_LINES_MAX, "split the file"
    assert not lines or LICENCE in lines[:2], "begin with the licence line"
    for word in LEFTOVERS:
        assert word not in text, f"{word}: finish it, or open an issue"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"
