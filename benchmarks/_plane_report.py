# SPDX-License-Identifier: Apache-2.0
"""From samples to ratios, from ratios to a verdict, and to something that a person can read."""

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

_BAR_CHARACTERS = 40


@attrs.frozen
class Judged:
    """A number with a limit.

    Attributes:
        name: What it is.
        value: The number.
        limit: The most that it may be.
        spread: What a tenth of the rounds stayed below, and what a tenth exceeded.
        unit: Of all of them; empty for a ratio.
    """

    name: str
    value: float
    limit: float
    spread: tuple[float, float]
    unit: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether it is within its limit."""
        return self.value <= self.limit

    def line(self) -> str:
        """Says all of it in one line."""
        verdict = "kept  " if self.is_kept else "MISSED"
        low, high = (format_number(one) for one in self.spread)
        value, limit = format_number(self.value), format_number(self.limit)
        unit = f" {self.unit}" if self.unit else ""
        return f"{verdict} {value:>6}{unit} (from {low} to {high}), at most {limit}: {self.name}"


def format_number(value: float) -> str:
    """Writes three digits that mean something."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def ratio_of_sums(
    name: str, limit: float, mine: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> Judged:
    """Judges the ratio of two sums of medians; the spread is that of the sums of each round.

    Args:
        name: What it is.
        limit: The most that it may be.
        mine: Samples of each summand of the first.
        other: Samples of each summand of the second, taken in the same rounds.
    """
    value = float(np.median(mine, axis=1).sum() / np.median(other, axis=1).sum())
    each = np.sum(mine, axis=0) / np.sum(other, axis=0)
    return Judged(name, value, limit, spread_of(each.tolist()))


def ratio(
    name: str, limit: float, mine: Sequence[float], other: Sequence[float], *, paired: bool = True
) -> Judged:
    """Judges the ratio of two medians.

    Args:
        name: What it is.
        limit: The most that it may be.
        mine: Samples of the first.
        other: Samples of the second.
        paired: Samples of one index were taken one right after the other, so that the spread is
            that of their ratios; otherwise it is that of the first against the other's median.
    """
    value = float(np.median(mine) / np.median(other))
    each = np.divide(mine, other) if paired else np.divide(mine, np.median(other))
    return Judged(name, value, limit, spread_of(each.tolist()))


def bound(name: str, limit: float, samples: Sequence[float], unit: str) -> Judged:
    """Judges a median."""
    return Judged(name, float(np.median(samples)), limit, spread_of(samples), unit)


def spread_of(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the tenth and the ninetieth percentile."""
    low, high = np.percentile(samples, (10, 90))
    return float(low), float(high)


def bars(title: str, values: Mapping[str, float], unit: str) -> list[str]:
    """Draws values as bars, on a scale of their own."""
    most = max(values.values(), default=0.0)
    width = max(map(len, values), default=0)
    lines = [title]
    for name, value in values.items():
        bar = "█" * max(1, round(_BAR_CHARACTERS * value / most)) if most else ""
        lines.append(f"  {name:<{width}} {format_number(value):>8} {unit} {bar}")
    return lines


def table(title: str, rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> list[str]:
    """Sets numbers out by row and column; what was not measured is left empty."""
    width = max(map(len, rows), default=0)
    lines = [title, "  " + " " * width + "".join(f"{column:>18}" for column in columns)]
    for name, cells in rows.items():
        written = "".join(
            f"{format_number(cells[column]) if column in cells else '':>18}" for column in columns
        )
        lines.append(f"  {name:<{width}}{written}")
    return lines
