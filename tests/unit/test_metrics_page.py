# SPDX-License-Identifier: Apache-2.0
"""The page of metrics and the dashboard say what the table of metrics says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from umbp.cli.metrics_page import metrics_page
from umbp.connector.metric_table import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "umbp.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

# Some store them with an underscore: docs/metrics.md.
NAME = r'__name__=~"vllm\[:_\](umbp_\w+)"'
SERIES = {name: metric for metric in METRICS for name in metric.series}
VLLM_LABELS = {"__name__", "model_name", "engine", "le"}


def asked(query: str) -> list[str]:
    """Returns the series that a query asks for."""
    return [f"vllm:{name}" for name in re.findall(NAME, query)]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_page(), (
        "run: python -m umbp.cli.metrics_page docs/metrics.md"
    )


def test_the_page_has_a_row_for_each_metric() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", metrics_page(), re.MULTILINE)
    assert sorted(rows) == sorted(metric.name for metric in METRICS)


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_metrics_and_labels_that_exist(query: str) -> None:
    names = asked(query)
    assert names
    assert query.count("vllm") == len(names)
    assert set(names) <= SERIES.keys()
    labels = {label for name in names for label in SERIES[name].own_labels} | VLLM_LABELS
    grouped = re.findall(r"by \(([^)]*)\)", query)
    used = {label.strip() for group in grouped for label in group.split(",")}
    used |= set(re.findall(r"(\w+)=~?\"", query))
    assert used <= labels
    for name in names:
        # A counter is shown by how fast it rises.
        is_counter = SERIES[name].kind.value != "gauge"
        short = name.removeprefix("vllm:")
        rising = rf'(rate|increase)\({{__name__=~"vllm\[:_\]{short}"'
        assert is_counter == bool(re.search(rising, query)), name


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {name for query in QUERIES for name in asked(query)}
    missing = [metric.name for metric in METRICS if not shown & set(metric.series)]
    assert not missing


def test_panels_have_titles_and_do_not_overlap() -> None:
    places: set[tuple[int, int]] = set()
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells
