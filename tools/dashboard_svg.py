# SPDX-License-Identifier: Apache-2.0
"""Draws the panels of a dashboard as SVG: where Grafana puts them, with its legends and colours."""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_COLUMN_PX = 60
_ROW_PX = 24
_GAP_PX = 8
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BOTTOM_PX = 68, 12, 34, 20
_LEGEND_PX = 17
_CHARACTER_PX = 6.4
_TICKS = 4
_COLUMNS = 24
# Grafana's classic palette.
_COLOURS = ("#73BF69", "#F2CC0C", "#8AB8FF", "#FF780A", "#F2495C", "#5794F2", "#B877D9", "#C4C8CC")
_STYLE = """
text { font: 11px sans-serif; fill: #ccccdc }
.title { font-size: 13px; font-weight: 600 }
.row { font-size: 15px; font-weight: 600 }
.axis { font-size: 10px; fill: #9a9aa8 }
.panel { fill: #181b1f; stroke: #2a2d33 }
.grid { stroke: #2a2d33 }
.line { fill: none; stroke-width: 1.5; stroke-linejoin: round }
""".strip()


class Series(NamedTuple):
    """A line of a panel.

    Attributes:
        name: Its name in the legend.
        points: Seconds since 1970, and the value.
    """

    name: str
    points: list[tuple[float, float]]


class Panel(NamedTuple):
    """A panel, or the title of a row of panels.

    Attributes:
        title: Its title.
        is_row: Whether it is a title alone.
        unit: Grafana's name of the unit.
        grid: Left, top, width and height, in Grafana's columns and rows.
        series: Its lines.
    """

    title: str
    is_row: bool
    unit: str
    grid: tuple[int, int, int, int]
    series: list[Series]


def draw(panels: Sequence[Panel], begin_s: float, end_s: float) -> str:
    """Returns the picture of all panels.

    Args:
        panels: What to draw.
        begin_s: The left end of each panel, in seconds since 1970.
        end_s: The right end.
    """
    width = _COLUMNS * _COLUMN_PX + 2 * _GAP_PX
    rows = max(panel.grid[1] + panel.grid[3] for panel in panels)
    height = rows * _ROW_PX + 2 * _GAP_PX
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#111217"/>',
    ]
    for panel in panels:
        left, top = panel.grid[0] * _COLUMN_PX + _GAP_PX, panel.grid[1] * _ROW_PX + _GAP_PX
        if panel.is_row:
            lines.append(
                f'<text class="row" x="{left + 4}" y="{top + 17}">{escape(panel.title)}</text>'
            )
            continue
        lines.append(f'<g transform="translate({left} {top})">')
        lines += _Drawn(panel, begin_s, end_s).lines()
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


class _Drawn:
    """One panel in its own coordinates."""

    def __init__(self, panel: Panel, begin_s: float, end_s: float) -> None:
        self._panel = panel
        self._begin_s, self._end_s = begin_s, end_s
        self._width = panel.grid[2] * _COLUMN_PX - _GAP_PX
        self._height = panel.grid[3] * _ROW_PX - _GAP_PX
        self._series = [one for one in panel.series if one.points]
        self._legend = list(_legend_rows([one.name for one in self._series], self._width))
        values = [value for one in self._series for _, value in one.points]
        self._step = _tick_step(max(values, default=0.0), panel.unit)
        most = max(values, default=0.0)
        self._top_value = max(self._step, math.ceil(most / self._step - 1e-9) * self._step)

    def lines(self) -> Iterator[str]:
        """Yields the parts of the picture."""
        yield f'<rect class="panel" rx="2" width="{self._width}" height="{self._height}"/>'
        yield f'<text class="title" x="10" y="20">{escape(self._panel.title)}</text>'
        if not self._series:
            yield (
                f'<text class="axis" text-anchor="middle" x="{self._width / 2:g}" '
                f'y="{self._height / 2:g}">No data</text>'
            )
            return
        yield from self._axes()
        for index, series in enumerate(self._series):
            yield from self._line(series, _COLOURS[index % len(_COLOURS)])
        yield from self._legends()

    @property
    def _bottom(self) -> float:
        return self._height - _BOTTOM_PX - _LEGEND_PX * len(self._legend)

    def _x(self, at_s: float) -> float:
        share = (at_s - self._begin_s) / (self._end_s - self._begin_s)
        return _LEFT_PX + share * (self._width - _LEFT_PX - _RIGHT_PX)

    def _y(self, value: float) -> float:
        return self._bottom - value / self._top_value * (self._bottom - _TOP_PX)

    def _axes(self) -> Iterator[str]:
        for number in range(round(self._top_value / self._step) + 1):
            value = number * self._step
            y = self._y(value)
            yield f'<path class="grid" d="M{_LEFT_PX} {y:.1f}H{self._width - _RIGHT_PX}"/>'
            yield (
                f'<text class="axis" text-anchor="end" x="{_LEFT_PX - 6}" y="{y + 3.5:.1f}">'
                f"{format_value(value, self._panel.unit)}</text>"
            )
        for number in range(_TICKS):
            at_s = self._begin_s + (number + 0.5) * (self._end_s - self._begin_s) / _TICKS
            clock = time.strftime("%H:%M:%S", time.gmtime(at_s))
            yield (
                f'<text class="axis" text-anchor="middle" x="{self._x(at_s):.1f}" '
                f'y="{self._bottom + 14:.1f}">{clock}</text>'
            )

    def _line(self, series: Series, colour: str) -> Iterator[str]:
        """Yields the pieces of a line: it is broken where points are missing."""
        step_s = min(
            (second[0] - first[0] for first, second in itertools.pairwise(series.points)),
            default=0.0,
        )
        pieces: list[list[tuple[float, float]]] = []
        for point in series.points:
            if not pieces or point[0] - pieces[-1][-1][0] > 1.5 * step_s:
                pieces.append([])
            pieces[-1].append(point)
        for piece in pieces:
            path = "L".join(f"{self._x(at_s):.0f} {self._y(value):.1f}" for at_s, value in piece)
            if len(piece) == 1:
                path += "h1"
            yield f'<path class="line" stroke="{colour}" d="M{path}"/>'

    def _legends(self) -> Iterator[str]:
        index = 0
        for row, names in enumerate(self._legend):
            x, y = 12.0, self._bottom + _BOTTOM_PX + 10 + row * _LEGEND_PX
            for name in names:
                colour = _COLOURS[index % len(_COLOURS)]
                yield f'<path stroke="{colour}" stroke-width="3" d="M{x:.0f} {y - 4:.1f}h12"/>'
                yield f'<text x="{x + 17:.0f}" y="{y:.1f}">{escape(name)}</text>'
                x += _legend_px(name)
                index += 1


def _legend_px(name: str) -> float:
    return 34 + _CHARACTER_PX * len(name)


def _legend_rows(names: Sequence[str], width: int) -> Iterator[list[str]]:
    """Yields what fits beside each other."""
    row: list[str] = []
    for name in names:
        if row and sum(map(_legend_px, [*row, name])) > width - 12:
            yield row
            row = []
        row.append(name)
    if row:
        yield row


def _tick_step(most: float, unit: str) -> float:
    """Returns the distance of the lines of a grid, of which there are some ``_TICKS``."""
    if most <= 0:
        return 1.0
    if unit == "bytes":
        return float(2 ** math.ceil(math.log2(most / _TICKS)))
    power = 10.0 ** math.floor(math.log10(most / _TICKS))
    return next(step * power for step in (1, 2, 5, 10) if step * power * _TICKS >= most * 0.999)


def format_value(value: float, unit: str) -> str:
    """Writes a value as Grafana does in that unit."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        for least, name in ((1.0, "s"), (1e-3, "ms"), (0.0, "µs")):
            if value >= least:
                return "0 s" if not value else f"{value / max(least, 1e-6):.3g} {name}"
    if unit == "bytes":
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    if unit == "Bps":
        return _scaled(value, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))
    if unit == "ops":
        return f"{_scaled(value, 1000, ('', 'K', 'M', 'G'))} ops/s".replace("  ", " ")
    return _scaled(value, 1000, ("", "K", "M", "G"))


def _scaled(value: float, base: int, names: Sequence[str]) -> str:
    index = 0
    while abs(value) >= base and index < len(names) - 1:
        value /= base
        index += 1
    return f"{value:.3g} {names[index]}".strip()
