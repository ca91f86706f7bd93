# SPDX-License-Identifier: Apache-2.0
"""Writes down how many examples each property was tried on, where ``UMBP_PROOF_FILE`` says so."""

import json
import os
import re
from pathlib import Path

import pytest


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Appends one line of JSON for a property: its name, and the examples that held."""
    path = os.environ.get("UMBP_PROOF_FILE")
    # Left on the item by Hypothesis' own plugin.
    statistics = getattr(item, "hypothesis_statistics", "")
    counts = [int(count) for count in re.findall(r"(\d+) passing,", statistics)]
    if path and counts:
        line = {"property": item.nodeid, "examples": sum(counts)}
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")
