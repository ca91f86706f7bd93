# SPDX-License-Identifier: Apache-2.0
"""The page that `make walk` runs, and the configurations that other pages show, without running.

Commands parse, every labelled block has a step that runs it, and umbp takes every configuration.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from umbp.backends.registry import find_backend
from umbp.connector.config import ConnectorOptions
from umbp.options import parse_options

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "walkthrough.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MODULES = ("browser", "page", "perfetto", "steps", "terminal")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "walk"))
    yield importlib.import_module("page")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def steps(page: ModuleType) -> ModuleType:
    return importlib.import_module("steps")


def configurations() -> list[tuple[str, dict[str, Any]]]:
    """Finds every whole configuration that a page shows."""
    found = []
    for path in PAGES:
        # It begins a line or an argument, and ends with a brace that is indented as its line is.
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(
            r"^(?P<indent> *)(?:[^\n]*')?(\{\n *\"kv_connector\".*?^(?P=indent)\})",
            text,
            re.M | re.S,
        ):
            body = match[2].replace("$PWD", "/tmp")
            place = f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}"
            found.append((place, json.loads(body)))
    return found


CONFIGURATIONS = configurations()


def test_configurations_are_found() -> None:
    named = {place.partition(":")[0] for place, _ in CONFIGURATIONS}
    pages = {"README.md", "quickstart.md", "standalone.md", "distributed.md", "walkthrough.md"}
    assert named >= pages


@pytest.mark.parametrize(("place", "config"), CONFIGURATIONS)
def test_every_configuration_that_a_page_shows_is_taken(place: str, config: dict[str, Any]) -> None:
    assert config["kv_load_failure_policy"] == "recompute", place
    options = config["kv_connector_extra_config"]
    parse_options(options, ConnectorOptions, find_backend(options["backend"]).options_type)


def test_every_block_of_the_page_has_a_step_and_every_step_a_block(steps: ModuleType) -> None:
    assert len(steps.read_walk(PAGE)) > 20


def test_a_block_that_no_step_runs_is_found(steps: ModuleType, tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    text = PAGE.read_text(encoding="utf-8")
    copy.write_text(f"{text}\n<!-- walk: dance -->\n\n```bash\ndance\n```\n", encoding="utf-8")
    with pytest.raises(importlib.import_module("terminal").WalkError, match=r"\['dance'\]"):
        steps.read_walk(copy)
    copy.write_text(text.replace("<!-- walk: ask -->", ""), encoding="utf-8")
    with pytest.raises(importlib.import_module("terminal").WalkError, match=r"\['ask'\]"):
        steps.read_walk(copy)


def test_every_command_of_the_page_parses(page: ModuleType) -> None:
    for block in page.read_blocks(PAGE).values():
        if block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text.encode(), check=True)


def test_a_page_that_is_not_well_written_is_one_line(page: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    good = "<!-- walk: a -->\n\n```bash\ntrue\n```\n"
    path.write_text(good, encoding="utf-8")
    assert page.read_blocks(path) == {"a": page.Block("a", "page.md:1", "bash", "true\n")}
    for text, words in (
        (good + good, "page.md:6: there are two blocks 'a'"),
        ("<!-- walk: a -->\n```bash\n```\n", "empty line"),
        ("<!-- walk: a -->\n\n```bash\n", "does not end"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(page.PageError, match=re.escape(words)):
            page.read_blocks(path)


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("a … c", "x\n  a b c\n", None),
        ("a\nb", "a\nx\nb", None),
        ("a\nb", "b\na", "b"),
        ("…2 of…", "1 of 3", "…2 of…"),
        ("a.b", "axb", "a.b"),
        ("a", "ab", "a"),
    ],
)
def test_what_is_shown_must_be_printed_in_that_order(
    page: ModuleType, shown: str, printed: str, missing: str | None
) -> None:
    assert page.missing_line(shown, printed) == missing


def test_words_are_replaced_as_wholes(page: ModuleType) -> None:
    words = {"8000": "5", "~/a": "/b"}
    assert page.substitute("h:8000 18000 80001 ~/a/c", words) == "h:5 18000 80001 /b/c"
