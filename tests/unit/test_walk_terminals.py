# SPDX-License-Identifier: Apache-2.0
"""What runs the commands of docs/walkthrough.md: it notices what a page does not say."""

import errno
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "walk"))
    module = importlib.import_module("terminal")
    monkeypatch.setattr(module, "PATIENCE_S", 2.0)
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    yield module
    for name in ("browser", "page", "perfetto", "terminal"):
        sys.modules.pop(name, None)


def block(text: str, label: str = "a label") -> Any:
    return importlib.import_module("page").Block(label, "page.md:1", "bash", text)


@pytest.fixture
def terminals(terminal: ModuleType, tmp_path: Path) -> Iterator[Any]:
    opened = terminal.Terminals(
        tmp_path,
        tmp_path,
        block("A=variable\n"),
        words={"8000": "81"},
        environment={"PATH": os.environ["PATH"]},
    )
    yield opened
    opened.close()


def test_a_block_runs_after_the_variables_in_the_folder(terminals: Any, tmp_path: Path) -> None:
    printed = terminals.run(block("echo $A 8000; pwd"), block(f"variable 81\n{tmp_path}"))
    assert printed == f"variable 81\n{tmp_path}\n"


def test_a_block_is_run_again_until_it_prints_what_the_page_shows(terminals: Any) -> None:
    counting = block("echo x >> count; wc -l < count")
    assert terminals.run(counting, block("3")).strip() == "3"


@pytest.mark.parametrize(
    ("text", "shows", "words"),
    [
        ("echo before; false; echo after", None, "page.md:1: ended with status 1"),
        ("false | true", None, "ended with status 1"),
        ("echo $UNSET_VARIABLE", None, "ended with status 1"),
        ("echo one", "two", "the page shows 'two', not printed"),
    ],
)
def test_a_block_that_fails_is_named(
    terminals: Any, terminal: ModuleType, text: str, shows: str | None, words: str
) -> None:
    with pytest.raises(terminal.WalkError, match=words) as caught:
        terminals.run(block(text), None if shows is None else block(shows))
    assert "after" not in caught.value.detail


def test_a_service_runs_until_it_is_interrupted(terminals: Any, tmp_path: Path) -> None:
    text = "trap 'echo stopped > end; exit 0' INT; echo ready; while :; do sleep 0.05; done"
    service = terminals.start(block(text), "ready")
    assert not (tmp_path / "end").exists()
    service.stop()
    service.stop()
    assert (tmp_path / "end").exists()


def test_a_service_that_ends_or_stays_silent_is_named(terminals: Any, terminal: ModuleType) -> None:
    with pytest.raises(terminal.WalkError, match="ended with status 4") as caught:
        terminals.start(block("echo the cause; exit 4"), "ready")
    assert caught.value.detail == "the cause"
    with pytest.raises(terminal.WalkError, match="has not printed 'ready'"):
        terminals.start(block("exec sleep 60"), "ready")


def test_a_trace_that_breaks_its_format_is_found(terminal: ModuleType, tmp_path: Path) -> None:
    perfetto = importlib.import_module("perfetto")
    span = {"ph": "X", "name": "RUNNING", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1.0}
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "requests"}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [name, span]}), encoding="utf-8")
    assert perfetto.check_events(path) == ["requests"]
    for events, words in (
        ([name], "no span"),
        ([span | {"dur": -1.0}], "ends before it begins"),
        ([{key: span[key] for key in span if key != "ts"}], "lacks ts"),
        ([span | {"ph": "?"}], "lacks ph that is known"),
    ):
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
        with pytest.raises(terminal.WalkError, match=words):
            perfetto.check_events(path)


def test_a_folder_that_is_still_written_to_is_removed_when_that_is_over(
    terminal: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the profile of a browser is, whose processes end one after the other."""
    browser = importlib.import_module("browser")
    monkeypatch.setattr(browser, "_PAUSE_S", 0.001)
    folder = tempfile.TemporaryDirectory(prefix="umbp-")
    left = [2]
    cleanup = folder.cleanup

    def cleanup_beside_a_writer() -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOTEMPTY, "Directory not empty", "Default")
        cleanup()

    monkeypatch.setattr(folder, "cleanup", cleanup_beside_a_writer)
    browser.remove(folder, 30.0)
    assert not Path(folder.name).exists()
    left[0] = 1 << 30
    with pytest.raises(OSError, match="Directory not empty"):
        browser.remove(folder, 0.01)
