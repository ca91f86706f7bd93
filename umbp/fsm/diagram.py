# SPDX-License-Identifier: Apache-2.0
"""The page docs/lifecycle.md, made from the tables.

python -m umbp.fsm.diagram > docs/lifecycle.md
"""

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from umbp.fsm.compile import EffectMachine, mermaid
from umbp.fsm.core import LEASE_MACHINE, REQUEST_MACHINE
from umbp.fsm.lease import LeaseState
from umbp.fsm.request import RequestState
from umbp.fsm.table import (
    LEASE_DEADLINES,
    LEASE_TABLE,
    REQUEST_DEADLINES,
    REQUEST_TABLE,
    STAY,
    Deadline,
    Row,
)

_INTRODUCTION: Final = """\
# The lifecycle

A request is driven by one state machine, and each of its transfers, a lease, by another.
`umbp/fsm/table.py` explains how the two are coupled, and holds every transition.

This page is generated from the code: `python -m umbp.fsm.diagram > docs/lifecycle.md`.
"""

_LEGEND: Final = "⏱ marks what the end of a deadline brings.\n"


def lifecycle_page() -> str:
    """Renders the page."""
    requests = _machine_section(REQUEST_MACHINE, RequestState, REQUEST_TABLE, REQUEST_DEADLINES)
    leases = _machine_section(LEASE_MACHINE, LeaseState, LEASE_TABLE, LEASE_DEADLINES)
    return "\n".join([_INTRODUCTION, "## Requests\n", *requests, "## Leases\n", *leases])


def _machine_section(
    machine: EffectMachine,
    states: type[enum.Enum],
    table: Sequence[Row],
    deadlines: Mapping[Any, Deadline],
) -> Iterator[str]:
    bounds = list(_bounds(table, deadlines))
    expiries = frozenset(deadline.event for _, deadline in bounds)
    yield f"```mermaid\n{mermaid(machine, states, expiries)}\n```\n"
    yield _LEGEND
    yield _markdown_table(("Event", "In", "Next", "Effect"), map(_row_cells, table))
    yield "### Deadlines\n"
    yield _markdown_table(
        ("While", "Limit", "Its end brings"),
        ((name, f"`{deadline.limit}`", deadline.event.__name__) for name, deadline in bounds),
    )


def _bounds(
    table: Sequence[Row], deadlines: Mapping[Any, Deadline]
) -> Iterator[tuple[str, Deadline]]:
    """Yields what each deadline bounds, and the deadline."""
    for row in table:
        if row.deadline is not None:
            yield f"{row.dest.name} after {row.event.__name__}", row.deadline
    for state, deadline in deadlines.items():
        yield state.name, deadline


def _row_cells(row: Row) -> tuple[str, ...]:
    sources = ", ".join(source.name for source in row.sources)
    dest = "the same" if row.dest == STAY else row.dest.name
    if row.effect is not None:
        effect = row.effect.__doc__.splitlines()[0]
    else:
        effect = "Nothing." if row.dest == STAY else "Nothing else; the time of the state begins."
    return row.event.__name__, sources, dest, effect


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    # The page is UTF-8 whatever the locale says.
    sys.stdout.buffer.write(lifecycle_page().encode())
