# SPDX-License-Identifier: Apache-2.0
"""Tables of a simulation, for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from umbp.cli.report import format_bytes, print_rows
from umbp.sim.journal import Entry
from umbp.sim.run import SimRun
from umbp.sim.summary import Tally, tallies, total

if TYPE_CHECKING:
    from rich.console import Console


def print_run(console: "Console", run: SimRun, request_id: str | None) -> None:
    """Prints what a run came to.

    Args:
        console: Where to.
        run: The run.
        request_id: The request whose time line is shown; None: nobody asked anything.
    """
    plan = run.plan
    console.print(
        f"seed {plan.seed}: {run.talks_over} of {plan.traffic.conversations} conversations over,"
        f" {run.rounds} steps, {run.clock.now():.2f} virtual seconds",
        markup=False,
    )
    for index, at_s in run.ended.items():
        console.print(f"engine {index} ended at {at_s:.2f} s: a pool stalled", markup=False)
    for fault in plan.faults:
        console.print(f"fault: {fault.text}", markup=False)
    of_engines = tallies(run)
    named = [
        *((str(index), one) for index, one in enumerate(of_engines)),
        ("all", total(of_engines)),
    ]
    console.print()
    print_rows(console, _TOKEN_COLUMNS, [_token_row(*one) for one in named], numbers=True)
    console.print()
    print_rows(console, _TRANSFER_COLUMNS, [_transfer_row(*one) for one in named], numbers=True)
    if request_id is not None:
        console.print()
        console.print(_title(run, request_id), markup=False)
        entries = run.journal.entries[request_id]
        print_rows(console, _LINE_COLUMNS, [_line(entry) for entry in entries])


_TOKEN_COLUMNS = (
    "engine",
    "requests",
    "answered",
    "prompt\ntokens",
    "local\nhit",
    "restored",
    "computed",
    "computed\nagain",
    "hit\nrate",
    "first\ntoken",
)
_TRANSFER_COLUMNS = (
    "engine",
    "steps",
    "preempted",
    "lookups",
    "expired",
    "loads",
    "failed",
    "stores",
    "failed",
    "loaded",
    "stored",
)
_LINE_COLUMNS = ("time s", "by", "event", "tokens", "state", "what umbp does, and more")


def _token_row(name: str, tally: Tally) -> Sequence[str]:
    return (
        name,
        str(tally.requests),
        str(tally.answered),
        str(tally.prompt_tokens),
        str(tally.local_tokens),
        str(tally.restored_tokens),
        str(tally.computed_tokens),
        str(tally.recomputed_tokens),
        f"{tally.hit_percent:.1f} %",
        f"{tally.first_token_ms:.0f} ms",
    )


def _transfer_row(name: str, tally: Tally) -> Sequence[str]:
    return (
        name,
        str(tally.steps),
        str(tally.preemptions),
        str(tally.lookups),
        str(tally.lookups_expired),
        str(tally.loads_settled),
        str(tally.loads_failed),
        str(tally.stores_settled),
        str(tally.stores_failed),
        format_bytes(tally.loaded_bytes),
        format_bytes(tally.stored_bytes),
    )


def _title(run: SimRun, request_id: str) -> str:
    for index, engine in enumerate(run.engines):
        account = engine.accounts.get(request_id)
        if account is not None:
            return (
                f"{request_id} on engine {index}: {account.request.prompt_tokens} tokens,"
                f" {account.local_tokens} local, {account.restored_tokens} restored,"
                f" {account.computed_tokens} computed"
            )
    return request_id


def _line(entry: Entry) -> Sequence[str]:
    tokens = "" if entry.tokens is None else f"{entry.tokens[0]}..{entry.tokens[1]}"
    return (f"{entry.time_s:.3f}", entry.origin, entry.event, tokens, entry.state, entry.detail)
