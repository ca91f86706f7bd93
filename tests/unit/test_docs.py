# SPDX-License-Identifier: Apache-2.0
"""The page of the lifecycle says what the tables say."""

import os
import subprocess
import sys
from pathlib import Path

from umbp.fsm import LeaseState, RequestState
from umbp.fsm.diagram import lifecycle_page
from umbp.fsm.table import LEASE_TABLE, REQUEST_TABLE

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == lifecycle_page(), (
        "run: python -m umbp.fsm.diagram > docs/lifecycle.md"
    )


def test_the_page_is_written_alike_under_every_locale() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "umbp.fsm.diagram"],
        check=True,
        capture_output=True,
        env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )
    assert printed.stdout.decode() == lifecycle_page()


def test_the_page_has_a_line_for_each_row_and_a_place_for_each_state() -> None:
    lines = lifecycle_page().splitlines()
    rows = [*REQUEST_TABLE, *LEASE_TABLE]
    described = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.count("|") == 5]
    assert [name for name in described if name not in ("Event", "---")] == [
        row.event.__name__ for row in rows
    ]
    for state in (*RequestState, *LeaseState):
        assert any(line.startswith(f"    {state.name} --> ") for line in lines)


def test_every_effect_says_what_it_does() -> None:
    for row in (*REQUEST_TABLE, *LEASE_TABLE):
        assert row.effect is None or row.effect.__doc__.splitlines()[0].endswith(".")
