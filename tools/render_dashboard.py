# SPDX-License-Identifier: Apache-2.0
"""Evaluates the dashboard's queries in a Prometheus, as Grafana does, and draws its panels.

    python3 tools/render_dashboard.py --prometheus http://localhost:9090 --svg dashboard.svg

For machines without Grafana, and for the picture in the documentation. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from dashboard_svg import Panel, Series, draw, format_value

DASHBOARD = Path(__file__).resolve().parents[1] / "dashboards" / "umbp.json"
_POINTS = 120
_TIMEOUT_S = 30.0
_PLACEHOLDER = re.compile(r"\{\{ *(\w+) *\}\}")


class RenderError(Exception):
    """There is no picture. One line: what failed and what to do."""


class Window(NamedTuple):
    """What part of the past is shown.

    Attributes:
        begin_s: Its begin, in seconds since 1970.
        end_s: Its end.
        rate_s: Over how long rates are taken: Grafana's ``$__rate_interval``.
    """

    begin_s: float
    end_s: float
    rate_s: int

    @property
    def step_s(self) -> float:
        """Time between two points."""
        return max(1.0, (self.end_s - self.begin_s) / _POINTS)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prometheus", default="http://localhost:9090", help="its address")
    parser.add_argument("--minutes", type=float, default=60, help="how much of the past")
    parser.add_argument(
        "--rate-seconds", type=int, default=60, help="what rates are taken over: $__rate_interval"
    )
    parser.add_argument("--svg", type=Path, help="draw the panels into this file")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, help="another dashboard")
    options = parser.parse_args()
    now_s = time.time()
    window = Window(now_s - 60 * options.minutes, now_s, options.rate_seconds)
    try:
        panels = read_panels(options.dashboard, options.prometheus, window)
    except RenderError as error:
        print(f"render_dashboard: {error}", file=sys.stderr)
        return 1
    print("\n".join(in_words(panels)))
    if options.svg is not None:
        options.svg.write_text(draw(panels, window.begin_s, window.end_s), encoding="utf-8")
    return 0


def read_panels(dashboard: Path, prometheus: str, window: Window) -> list[Panel]:
    """Returns the panels of a dashboard with what their queries find.

    Args:
        dashboard: File of the dashboard.
        prometheus: Address of Prometheus.
        window: What is asked for.

    Raises:
        RenderError: Prometheus does not answer, or refuses a query.
    """
    described = json.loads(dashboard.read_text(encoding="utf-8"))
    variables = [one["name"] for one in described["templating"]["list"]]
    panels = []
    for panel in described["panels"]:
        series: list[Series] = []
        for target in panel.get("targets", ()):
            query = expand(target["expr"], variables, window.rate_s)
            for labels, points in query_range(prometheus, query, window):
                series.append(Series(legend(target["legendFormat"], labels), points))
        place = panel["gridPos"]
        panels.append(
            Panel(
                title=panel["title"],
                is_row=panel["type"] == "row",
                unit=panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short"),
                grid=(place["x"], place["y"], place["w"], place["h"]),
                series=series,
            )
        )
    return panels


def expand(query: str, variables: list[str], rate_s: int) -> str:
    """Puts in what Grafana would: every value of a variable, and the interval of rates."""
    for name in variables:
        query = query.replace(f"${name}", ".*")
    return query.replace("$__rate_interval", f"{rate_s}s")


def legend(form: str, labels: dict[str, str]) -> str:
    """Names a series as Grafana does."""
    return _PLACEHOLDER.sub(lambda match: labels.get(match[1], ""), form)


def query_range(
    prometheus: str, query: str, window: Window
) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Returns labels and points of each series that a query finds.

    Raises:
        RenderError: Prometheus does not answer, or refuses the query.
    """
    parameters = {
        "query": query,
        "start": f"{window.begin_s:.3f}",
        "end": f"{window.end_s:.3f}",
        "step": f"{window.step_s:.3f}",
    }
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise RenderError(f"{query}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise RenderError(f"--prometheus {prometheus}: no answer ({error}); start it") from error
    return [
        # A rate of nothing is no number.
        (one["metric"], [(at_s, float(text)) for at_s, text in one["values"] if text != "NaN"])
        for one in found
    ]


def in_words(panels: list[Panel]) -> list[str]:
    """Returns a line for each panel, and one for each of its series: the last value, and most."""
    lines = []
    for panel in panels:
        lines.append(f"\n[{panel.title}]" if panel.is_row else panel.title)
        for series in panel.series:
            if series.points:
                last, most = series.points[-1][1], max(value for _, value in series.points)
                values = [format_value(one, panel.unit) for one in (last, most)]
                lines.append(f"  {series.name}: {values[0]} now, {values[1]} at most")
    return lines


if __name__ == "__main__":
    sys.exit(main())
