# SPDX-License-Identifier: Apache-2.0
"""Tables for people, and one JSON object for programs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from umbp.cli.outcome import Outcome, Run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BYTES_PER_UNIT: Final = 1024
_UNITS: Final = ("B", "KiB", "MiB", "GiB")


def format_bytes(count: int) -> str:
    """Writes a number of bytes with a unit, such as ``65.4 MiB``."""
    value = float(count)
    for unit in _UNITS[:-1]:
        if value < _BYTES_PER_UNIT:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _BYTES_PER_UNIT
    return f"{value:.1f} {_UNITS[-1]}"


def hit_source(run: Run, backend: str) -> str:
    """Says where the KV of a prompt came from: vLLM's own cache, the backend, or nowhere."""
    sources = []
    if run.request.local_token_count:
        sources.append("GPU cache")
    if run.request.external_token_count:
        sources.append(backend)
    return " + ".join(sources) or "none"


def _moved(run: Run) -> str:
    parts = [
        f"{format_bytes(count)} {what}"
        for count, what in ((run.stored_bytes, "stored"), (run.loaded_bytes, "loaded"))
        if count
    ]
    return "\n".join(parts) or "none"


def new_table(*, gap: int) -> "Table":
    """Returns a table with a line below its head and ``gap`` columns between cells."""
    from rich import box
    from rich.table import Table

    # The box itself puts one column between cells.
    return Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), show_edge=False, pad_edge=False)


def print_outcome(
    console: "Console", outcome: Outcome, backend: str, answer_lines: Sequence[str]
) -> None:
    """Prints the table of the demo, and the lines with question and answer."""
    table = new_table(gap=1)  # so that it fits a terminal of 80 columns
    table.add_column("run")
    for heading in ("prompt\ntokens", "GPU\ncache", "restored\nby umbp", "first\ntoken"):
        table.add_column(heading, justify="right")
    for heading in ("bytes moved", "hit source", "same\nanswer"):
        table.add_column(heading)
    for run in outcome.runs:
        request = run.request
        table.add_row(
            run.name,
            str(request.prompt_token_count),
            str(request.local_token_count),
            str(request.external_token_count),
            f"{request.first_token_s * 1000:.0f} ms",
            _moved(run),
            hit_source(run, backend),
            "yes" if outcome.is_identical(run) else "no",
        )
    console.print()
    console.print(table)
    console.print()
    for line in answer_lines:
        console.print(line, markup=False)


def outcome_as_json(
    outcome: Outcome,
    *,
    model: str,
    backend: str,
    question: str | None,
    counters: Mapping[str, int],
) -> dict[str, Any]:
    """Returns what the table says, with the connector's counters, as JSON types."""
    return {
        "model": model,
        "backend": backend,
        "question": question,
        "failed_condition": outcome.failed_condition(),
        "runs": [
            {
                "name": run.name,
                **attrs.asdict(run.request),
                "stored_bytes": run.stored_bytes,
                "loaded_bytes": run.loaded_bytes,
                "hit_source": hit_source(run, backend),
                "answer_identical": outcome.is_identical(run),
            }
            for run in outcome.runs
        ],
        "counters": dict(counters),
    }


def print_rows(
    console: "Console",
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: bool = False,
) -> None:
    """Prints a plain table of text.

    Args:
        console: Where to.
        columns: Headings.
        rows: Cells.
        numbers: All columns but the first are numbers.
    """
    from rich.text import Text

    table = new_table(gap=2)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and index else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
