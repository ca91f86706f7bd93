# SPDX-License-Identifier: Apache-2.0
"""Opens an exported trace: by the rules of its format, and in Perfetto's own page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from browser import Browser, BrowserError
from terminal import WalkError

if TYPE_CHECKING:
    from pathlib import Path

# "Trace Event Format": what each kind of event has to have beside "ph", "name" and "pid".
_FIELDS = {"X": ("ts", "dur", "tid"), "i": ("ts", "tid", "s"), "M": ("args",)}
_TITLES = """
(() => {
  const texts = [];
  const visit = node => {
    if (node.shadowRoot) visit(node.shadowRoot);
    if (node.nodeType === Node.TEXT_NODE) texts.push(node.data.trim());
    node.childNodes.forEach(visit);
  };
  visit(document.body);
  return texts;
})()
"""


def check_events(path: Path) -> list[str]:
    """Checks a file against the format; returns the names of its groups of tracks.

    Raises:
        WalkError: It breaks a rule.
    """
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    for event in events:
        needed = ("name", "pid", *_FIELDS.get(event.get("ph"), ("ph that is known",)))
        missing = [name for name in needed if name not in event]
        if missing:
            raise WalkError(f"{path.name}: {event} lacks {', '.join(missing)}")
    spans = [event for event in events if event["ph"] == "X"]
    if not spans or min(event["dur"] for event in spans) < 0:
        raise WalkError(f"{path.name}: no span, or one that ends before it begins")
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def look_at_trace(program: str, url: str, tracks: list[str], picture: Path) -> None:
    """Opens Perfetto's page, which has been given a trace, and waits for the tracks.

    Args:
        program: The browser.
        url: Where the page is.
        tracks: What it must show.
        picture: Where a screenshot goes.

    Raises:
        WalkError: It does not show them.
    """
    browser = Browser(program)
    try:
        browser.open(url)
        for track in tracks:
            browser.await_true(f"({_TITLES}).some(text => text.startsWith({json.dumps(track)}))")
        browser.screenshot(picture)
    except BrowserError as error:
        browser.screenshot(picture)
        raise WalkError(f"Perfetto: {error}; see {picture}") from error
    finally:
        browser.close()
