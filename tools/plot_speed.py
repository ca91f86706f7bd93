# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/speed.md from the samples in benchmarks/results.

python tools/plot_speed.py [--into docs]

Needs matplotlib, which nothing else here does: pip install matplotlib.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError:
    sys.exit("tools/plot_speed.py needs matplotlib: pip install matplotlib")

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks/results"
STAGES: Final = {"cold": "#b0b7c3", "prefix hit": "#6c9bd2", "restored": "#d9733a"}
FIELDS: Final = {"cold": "cold_s", "prefix hit": "hit_s", "restored": "restored_s"}
BAR_HEIGHT: Final = 0.26


def read(name: str) -> Any:
    """Reads a result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and how far the quartiles are from it."""
    first, middle, third = statistics.quantiles(values, n=4)
    return middle, middle - first, third - middle


def new_figure(height: float) -> Figure:
    """Returns an empty picture, ten inches wide."""
    return Figure(figsize=(10, height), layout="constrained")


def draw_restores(record: Mapping[str, Any]) -> Figure:
    """Draws the time to the first token: a bar for each engine and stage, with quartiles."""
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    engines = list(record["samples"])
    for index, (stage, colour) in enumerate(STAGES.items()):
        found = [
            spread([1e3 * sample[FIELDS[stage]] for sample in record["samples"][engine]])
            for engine in engines
        ]
        axes.barh(
            [row + (index - 1) * BAR_HEIGHT for row in range(len(engines))],
            [middle for middle, _, _ in found],
            BAR_HEIGHT,
            xerr=[[below for _, below, _ in found], [above for _, _, above in found]],
            color=colour,
            label=stage,
            error_kw={"elinewidth": 1},
        )
    axes.set_yticks(range(len(engines)), engines)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds to the first token: median, with quartiles")
    axes.set_title(f"A prompt of which {record['prompt_tokens']:,} tokens are stored")
    figure.legend(loc="outside lower center", ncols=len(STAGES))
    return figure


def draw_transfers(record: Mapping[str, Any]) -> Figure:
    """Draws rates beside that of a plain copy."""
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    rows = [(result, direction) for result in record["results"] for direction in ("store", "load")]
    colours = {"memory": "#d9733a", "embedded": "#8a63b8"}
    for row, (result, direction) in enumerate(rows):
        of = result["directions"][direction]
        rates = [rate / 1e9 for rate in of["bytes_per_second"]]
        plain = statistics.median(of["plain_bytes_per_second"]) / 1e9
        middle, below, above = spread(rates)
        axes.barh(row, middle, 0.7, xerr=[[below], [above]], color=colours[result["backend"]])
        axes.plot([plain, plain], [row - 0.45, row + 0.45], color="black", linewidth=1.5)
    labels = [
        f"{result['backend']}, {result['scenario']}: {direction}" for result, direction in rows
    ]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s: median, with quartiles; black: a plain copy in the same run")
    return figure


def main() -> int:
    """Draws every picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "docs", help="a folder")
    into = parser.parse_args().into
    # The same bytes for the same samples.
    mpl.rcParams["svg.hashsalt"] = "umbp"
    for name, figure in (
        ("speed_restore", draw_restores(read("gpu_restore_h200"))),
        ("speed_transfers", draw_transfers(read("transfers_h200"))),
    ):
        path = into / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
