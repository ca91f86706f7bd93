# SPDX-License-Identifier: Apache-2.0
"""The tool that draws the dashboard without Grafana, and the page that explains its panels."""

import importlib
import json
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "umbp.json").read_text())
TITLES = [panel["title"] for panel in DASHBOARD["panels"]]


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module("render_dashboard")
    for name in ("render_dashboard", "dashboard_svg"):
        sys.modules.pop(name, None)


def texts_of(picture: str) -> set[str | None]:
    return {one.text for one in xml.etree.ElementTree.fromstring(picture).iter()}


def test_the_page_explains_every_panel() -> None:
    page = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    for title in TITLES:
        assert f"| {title} |" in page or f"## {title}\n" in page, title


def test_the_picture_shows_every_panel() -> None:
    texts = texts_of((ROOT / "docs" / "dashboard.svg").read_text(encoding="utf-8"))
    assert texts >= set(TITLES), "run: python tools/walk/traffic.py --svg docs/dashboard.svg"
    assert "No data" not in texts


def test_panels_hold_what_prometheus_answers(
    render: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(prometheus: str, query: str, window: object) -> list[Any]:
        asked.append(query)
        return [({"result": "hit", "source": "host"}, [(5.0, 1.0), (6.0, 3.0)])]

    monkeypatch.setattr(render, "query_range", answer)
    window = render.Window(0.0, 10.0, 20)
    panels = render.read_panels(render.DASHBOARD, "http://here", window)
    assert [panel.title for panel in panels] == TITLES
    assert not any("$" in query for query in asked)
    assert "[20s]" in asked[0]
    assert [one.name for one in panels[1].series] == ["hit", "started"]
    lines = render.in_words(panels)
    assert lines[:2] == ["\n[What is found]", "Lookups by result"]
    assert lines[2] == "  hit: 3 ops/s now, 3 ops/s at most"
    assert texts_of(render.draw(panels, 0.0, 10.0)) >= set(TITLES)


def test_a_panel_without_data_says_so(render: ModuleType) -> None:
    panel = render.Panel("a <title>", False, "short", (0, 0, 8, 8), [render.Series("s", [])])
    texts = texts_of(render.draw([panel], 0, 1))
    assert "No data" in texts
    assert "a <title>" in texts
    assert render.in_words([panel]) == ["a <title>"]


def test_a_line_is_broken_where_points_are_missing(render: ModuleType) -> None:
    points = [(at_s, 1.0) for at_s in (0.0, 1.0, 2.0, 6.0, 7.0)]
    panel = render.Panel("title", False, "short", (0, 0, 8, 8), [render.Series("s", points)])
    assert render.draw([panel], 0, 10).count('class="line"') == 2


def test_nobody_who_answers_is_one_line(
    render: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["render", "--prometheus", "http://127.0.0.1:9"])
    assert render.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("render_dashboard: --prometheus http://127.0.0.1:9: no answer")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.5, "percentunit", "50%"),
        (0.0, "s", "0 s"),
        (2e-5, "s", "20 µs"),
        (0.0025, "s", "2.5 ms"),
        (1.5, "s", "1.5 s"),
        (3 << 20, "bytes", "3 MiB"),
        (2.5e6, "Bps", "2.5 MB/s"),
        (0.25, "ops", "0.25 ops/s"),
        (1200.0, "short", "1.2 K"),
        (7.0, "short", "7"),
    ],
)
def test_values_are_written_as_grafana_does(
    render: ModuleType, value: float, unit: str, written: str
) -> None:
    assert sys.modules["dashboard_svg"].format_value(value, unit) == written
