# SPDX-License-Identifier: Apache-2.0
"""What the lifecycle core costs: time for one request, and memory for a live one.

python benchmarks/lifecycle.py [--check] [--json FILE]
"""

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from _measure import Operation, Timing, merge, origin, time_operations
from transitions import Machine

from umbp.fsm import (
    BlocksFilled,
    ComputeAdmitted,
    Core,
    CoreLimits,
    LeasePart,
    LeaseSent,
    LeaseState,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    RankSucceeded,
    RequestFinished,
    RequestState,
)
from umbp.fsm.table import LEASE_TABLE, REQUEST_TABLE, STAY

LIFECYCLE_US_MAX = 25.0
LIVE_REQUEST_BYTES_MAX = 400.0
ATTEMPTS = 5
PAUSE_S = 3.0

UNIT_TOKENS = 16
BLOCKS = (LeasePart(0, (b"",) * 64, tuple(range(64))),)
LOADED = len(BLOCKS[0].block_ids) * UNIT_TOKENS
PROMPT = 2 * LOADED
RANKS = 1024
LIVE_REQUESTS = 10_000

REQUEST_EVENTS = (
    "LookupAsked",
    "LookupAnswered",
    "LoadAdmitted",
    "LoadSettled",
    "BlocksFilled",
    "RequestFinished",
    "LeaseClosed",
    "LeasesDrained",
)
LEASE_EVENTS = ("LeaseSent", "AllRanksSucceeded", "LeaseReleased")
TRANSITIONS = (REQUEST_EVENTS, LEASE_EVENTS, LEASE_EVENTS)
"""The transitions of the lifecycle that is timed: one request, its load and its store."""

LIFECYCLE = "lifecycle of a request"
CROWDED = "lifecycle among 1,000 live requests"
DISPATCH = "one event that has no effect"
STOCK = "the same transitions, stock Machine"
DICTIONARY = "the same transitions, plain dictionary"


# ---------------------------------------------------------------- the core


def live_through(core: Core, request_id: str, now_s: float) -> None:
    """Takes a request from its lookup to its end: a hit is loaded, the rest stored."""
    core.step(LookupAsked(request_id, None, 0, PROMPT - 1, PROMPT), now_s)
    request: Any = core.requests[request_id]
    core.step(LookupAnswered(request_id, request.question_id, LOADED), now_s)
    load: Any = core.step(LoadAdmitted(request_id, 0, LOADED, BLOCKS, False), now_s)[0]
    core.step(LeaseSent(load.lease.job_id), now_s)
    core.step(RankSucceeded(load.lease.job_id, 0), now_s)
    store: Any = core.step(BlocksFilled(request_id, LOADED, PROMPT, BLOCKS), now_s)[0]
    core.step(LeaseSent(store.lease.job_id), now_s)
    core.step(RequestFinished(request_id), now_s)
    core.step(RankSucceeded(store.lease.job_id, 0), now_s)


def lifecycles(others: int) -> Operation:
    """Makes requests live and end, one after the other, beside others that stay."""
    core = Core(CoreLimits(unit_tokens=UNIT_TOKENS))
    for index in range(others):
        start_running(core, f"other {index}")
    now_s = 0.0

    def run(count: int) -> None:
        nonlocal now_s
        for _ in range(count):
            live_through(core, "request", now_s)
        now_s += 0.01
        core.tick(now_s)

    return run


def start_asking(core: Core, request_id: str) -> None:
    """Leaves a request with an open question."""
    core.step(LookupAsked(request_id, None, 0, PROMPT - 1, PROMPT), 0.0)


def start_running(core: Core, request_id: str) -> None:
    """Leaves a request computing a prompt that is to be stored."""
    start_asking(core, request_id)
    core.step(ComputeAdmitted(request_id, 0), 0.0)


def dispatches() -> Operation:
    """Gives answers of single ranks: nothing follows from them but one look-up in the table."""
    core = Core(CoreLimits(unit_tokens=UNIT_TOKENS, rank_count=RANKS))
    start_running(core, "request")
    store: Any = core.step(BlocksFilled("request", 0, LOADED, BLOCKS), 0.0)[0]
    lease = store.lease
    core.step(LeaseSent(lease.job_id), 0.0)
    all_ranks = lease.ranks_left

    def run(count: int) -> None:
        lease.ranks_left = all_ranks
        for rank in range(count):
            core.step(RankSucceeded(lease.job_id, rank), 0.0)

    return run


def bytes_per_live_request(start: Callable[[Core, str], None]) -> float:
    """Measures what a request holds on to, beside the engine's own objects: its id and numbers."""
    request_ids = [f"request {index}" for index in range(LIVE_REQUESTS)]
    core = Core(CoreLimits(unit_tokens=UNIT_TOKENS))
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for request_id in request_ids:
            start(core, request_id)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / LIVE_REQUESTS


# ---------------------------------------------------------------- what it is compared with


class Model:
    """Something that has a state."""

    __slots__ = ("state",)

    def __init__(self, state: Enum) -> None:
        self.state = state


def stock_machine(states: type[Enum], table: Any) -> Machine:
    """Builds the machine of a table as the documentation of ``transitions`` has it."""
    machine = Machine(model=None, states=states, initial=next(iter(states)), auto_transitions=False)
    for row in table:
        machine.add_transition(row.event.__name__, list(row.sources), row.dest)
    return machine


def stock_transitions() -> Operation:
    """Goes the way of one request and its two leases through stock machines."""
    machines = [stock_machine(RequestState, REQUEST_TABLE)]
    machines += [stock_machine(LeaseState, LEASE_TABLE)] * 2
    starts = (RequestState.LOOKUP, LeaseState.SUBMITTED, LeaseState.SUBMITTED)

    def run(count: int) -> None:
        for _ in range(count):
            for machine, start, names in zip(machines, starts, TRANSITIONS, strict=True):
                model = Model(start)
                for name in names:
                    machine.events[name].trigger(model)

    return run


def plain_table(table: Any) -> dict[Any, dict[str, Any]]:
    """Writes a table as ``plain[state][event] -> next state``."""
    plain: dict[Any, dict[str, Any]] = {}
    for row in table:
        for source in row.sources:
            dest = source if row.dest == STAY else row.dest
            plain.setdefault(source, {})[row.event.__name__] = dest
    return plain


def dictionary_transitions() -> Operation:
    """Goes the same way through dictionaries: no effect, no event object, no check."""
    request, lease = plain_table(REQUEST_TABLE), plain_table(LEASE_TABLE)
    tables = (request, lease, lease)
    starts = (RequestState.LOOKUP, LeaseState.SUBMITTED, LeaseState.SUBMITTED)

    def run(count: int) -> None:
        for _ in range(count):
            for table, start, names in zip(tables, starts, TRANSITIONS, strict=True):
                model = Model(start)
                for name in names:
                    model.state = table[model.state][name]

    return run


# ---------------------------------------------------------------- report


def print_report(timings: Mapping[str, Timing], memory: Mapping[str, float]) -> None:
    """Prints medians, the spread over the rounds, and ratios to the lifecycle."""
    unit_us = timings[LIFECYCLE].median_us
    print(f"{'':42}{'median':>10}  {'rounds':>18}{'ratio':>9}")
    for name, timing in timings.items():
        lowest, highest = timing.spread_us
        rounds = f"{lowest:.2f} to {highest:.2f}"
        ratio = timing.median_us / unit_us
        print(f"{name:42}{timing.median_us:7.2f} µs  {rounds:>18}{ratio:8.2f}x")
    for name, size_bytes in memory.items():
        print(f"{name:42}{size_bytes:8.0f} B")


def broken_bounds(timings: Mapping[str, Timing], memory: Mapping[str, float]) -> list[str]:
    """Returns one line for each bound that is not kept."""
    lines = [
        f"{name}: {timings[name].median_us:.2f} µs, not below {LIFECYCLE_US_MAX:g} µs"
        for name in (LIFECYCLE, CROWDED)
        if timings[name].median_us >= LIFECYCLE_US_MAX
    ]
    lines += [
        f"{name}: {size_bytes:.0f} B, not below {LIVE_REQUEST_BYTES_MAX:g} B"
        for name, size_bytes in memory.items()
        if size_bytes >= LIVE_REQUEST_BYTES_MAX
    ]
    return lines


def measure() -> dict[str, Timing]:
    """Times everything once."""
    return time_operations(
        {
            LIFECYCLE: lifecycles(0),
            CROWDED: lifecycles(1000),
            DISPATCH: dispatches(),
            STOCK: stock_transitions(),
            DICTIONARY: dictionary_transitions(),
        }
    )


def main() -> int:
    """Measures, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description="What the lifecycle core costs.")
    parser.add_argument("--check", action="store_true", help="fail when a bound is not kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    options = parser.parse_args()
    memory = {
        "live request, asking": bytes_per_live_request(start_asking),
        "live request, running": bytes_per_live_request(start_running),
    }
    timings = measure()
    for _ in range(ATTEMPTS - 1):
        if not options.check or not broken_bounds(timings, {}):
            break
        # Whatever else runs here can only make it slower: look for a quiet moment.
        time.sleep(PAUSE_S)
        timings = merge(timings, measure())
    print_report(timings, memory)
    if options.json is not None:
        result = {
            "origin": origin(("umbp", "attrs", "transitions"), sys.argv),
            "rounds_us": {name: timing.rounds_us for name, timing in timings.items()},
            "median_us": {name: timing.median_us for name, timing in timings.items()},
            "bytes": memory,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    broken = broken_bounds(timings, memory)
    for line in broken:
        print(f"bound: {line}", file=sys.stderr)
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
