# SPDX-License-Identifier: Apache-2.0
"""The site has every page, and troubleshooting has every message that an engine logs."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
LEVELS = ("warning", "error", "exception", "critical", "log")
FRAGMENT_CHARS_MIN = 8
"""A shorter piece of a message says nothing: ``%s: %s`` is another's message handed on."""


def messages() -> Iterator[tuple[str, str]]:
    """Yields where a warning is logged, and its text with placeholders."""
    for path in sorted(ROOT.glob("umbp/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "logger"
                and node.func.attr in LEVELS
            ):
                text = node.args[1 if node.func.attr == "log" else 0]
                assert isinstance(text, ast.Constant), f"{path}: {ast.unparse(text)}"
                yield str(path.relative_to(ROOT)), str(text.value)


def fragment(message: str) -> str:
    """Returns the first piece of a message between placeholders that says something, or nothing."""
    pieces = [piece.strip(" :;,()") for piece in re.split(r"%[-\d.]*[a-z]", message)]
    return next((piece for piece in pieces if len(piece) >= FRAGMENT_CHARS_MIN), "")


LOGGED = sorted({(path, message) for path, message in messages()})


def test_messages_are_found() -> None:
    assert ("umbp/connector/lookups.py", "lookup of %s failed: %s") in LOGGED
    assert fragment("%s: lookup of %.3f failed") == "lookup of"
    assert fragment("%s: %s") == ""


@pytest.mark.parametrize(("path", "message"), LOGGED)
def test_every_message_is_explained(path: str, message: str) -> None:
    piece = fragment(message)
    # A long message may be cut after a piece that nobody could take for another.
    assert piece[:60].rstrip() in PAGE, (
        f"explain the message {message!r} of {path} in docs/troubleshooting.md"
    )


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert sorted(listed) == sorted(pages)


def test_links_to_files_of_the_project_are_names_on_the_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs_site

    try:
        rendered = docs_site.on_page_markdown(
            "[its\ndescription](../native/README.md#a), [`../a` b](other.md), [`x/y.py`](../x/y.py)"
        )
    finally:
        del sys.modules["docs_site"]
    assert rendered == "its\ndescription (`native/README.md`), [`../a` b](other.md), `x/y.py`"


def test_links_outside_of_the_pages_lead_to_files() -> None:
    """MkDocs checks links between pages; these it never sees."""
    for page in ROOT.glob("docs/*.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((\.\./[^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
