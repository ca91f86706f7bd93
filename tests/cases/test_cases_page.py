# SPDX-License-Identifier: Apache-2.0
"""``docs/cases.md`` and the tests beside this one agree."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "cases.md"

CASES = [
    "1.1",
    "1.3",
    "1.5",
    "1.7",
    "1.9",
    "2.2",
    "2.4",
    "2.6",
    "2.8",
    "2.10",
    "2.12",
    "2.14",
    "3.1",
    "3.3",
    "3.5",
    "3.7",
    "4.2",
    "4.4",
    "4.6",
    "4.8",
    "5.1",
    "5.3",
    "5.5",
    "5.7",
    "5.9",
    "6.2",
    "6.4",
    "7.1",
    "7.3",
    "7.5",
    "8.2",
    "8.4",
    "8.6",
    "8.8",
    "9.1",
    "9.3",
    "9.5",
    "10.2",
    "10.4",
    "10.6",
    "11.1",
    "11.3",
    "11.5",
    "12.2",
    "12.4",
    "12.6",
    "12.8",
]
REASONS = ("cannot occur", "not built yet")


def rows() -> dict[str, list[str]]:
    """The columns of each case."""
    lines = PAGE.read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found = [row for row in cells if row and re.fullmatch(r"\d+\.\d+", row[0])]
    assert all(len(row) == 5 for row in found)
    assert len({row[0] for row in found}) == len(found)
    return {row[0]: row[1:] for row in found}


def written() -> list[tuple[str, str]]:
    """The case and the name of each test."""
    tests = []
    for path in sorted(HERE.glob("test_theme_*.py")):
        theme = int(path.name.split("_")[2])
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                match = re.match(r"test_case_(\d+)_(\d+)_", node.name)
                assert match, f"{node.name}: name the test after its case"
                assert int(match[1]) == theme, f"{node.name} belongs to another module"
                tests.append((f"{match[1]}.{match[2]}", node.name))
    return tests


def test_every_case_has_a_row_in_order() -> None:
    assert list(rows()) == CASES


def test_every_row_names_the_tests_of_its_case_or_says_why_there_are_none() -> None:
    tests = written()
    for case, (reports, elsewhere, umbp, names) in rows().items():
        assert reports.startswith("[")
        assert elsewhere
        expected = [name for number, name in tests if number == case]
        assert re.findall(r"`(\w+)`", names) == expected, case
        assert expected or any(reason in umbp for reason in REASONS), case


def test_every_test_is_of_a_known_case() -> None:
    assert {number for number, _ in written()} <= set(CASES)
