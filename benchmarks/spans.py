# SPDX-License-Identifier: Apache-2.0
"""What spans cost: the scheduler for one request, and the thread that sends them.

python benchmarks/spans.py [--check] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _measure import Operation, Timing, origin, time_operations
from lifecycle import UNIT_TOKENS, live_through
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from umbp.fsm import Core, CoreLimits
from umbp.trace.otel import send, wall_offset_s
from umbp.trace.spans import Lifecycle, SpannedCore

OFF = "lifecycle, tracing off"
AGAIN = "the same, measured twice"
NOTED = "lifecycle, spans noted"
CHECKED = "one step of the connector, tracing off"
SENT = "on the thread: made into spans"

NOTED_RATIO_MAX = 6.0
"""Three spans of states and two of transfers, with their notes, beside what they are about."""


class Last:
    """A sink that keeps the last lifecycle."""

    def __init__(self) -> None:
        self.lifecycle: Lifecycle | None = None

    def put(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle

    def close(self, timeout_s: float) -> None: ...


class Nowhere(SpanExporter):
    """Takes batches and drops them."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def lifecycles(core: Core) -> Operation:
    """Makes requests live and end, one after the other."""

    def run(count: int) -> None:
        for _ in range(count):
            live_through(core, "request", core.now_s)
        core.tick(core.now_s + 0.01)

    return run


def spanned() -> tuple[SpannedCore, Last]:
    """A core whose lifecycles become spans, and what takes them."""
    core, last = SpannedCore(CoreLimits(unit_tokens=UNIT_TOKENS)), Last()
    core.span_to(last)
    return core, last


def checks() -> Operation:
    """Asks, as the connector does in every step, whether anybody wants spans."""

    class Connector:
        _spans = None

    connector = Connector()

    def run(count: int) -> None:
        for _ in range(count):
            if connector._spans is not None:
                raise AssertionError

    return run


def sending() -> Operation:
    """Makes spans of one lifecycle with OpenTelemetry's SDK, which batches and drops them."""
    core, last = spanned()
    live_through(core, "request", 0.0)
    lifecycle = last.lifecycle
    assert lifecycle is not None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    tracer = provider.get_tracer("benchmark")

    def run(count: int) -> None:
        for _ in range(count):
            send(tracer, lifecycle, wall_offset_s())

    return run


def print_report(timings: Mapping[str, Timing]) -> None:
    """Prints medians, the spread over the rounds, and ratios to an engine that does not trace."""
    unit_us = timings[OFF].median_us
    for name, timing in timings.items():
        lowest, highest = timing.spread_us
        rounds = f"{lowest:.2f} to {highest:.2f}"
        ratio = timing.median_us / unit_us
        print(f"{name:42}{timing.median_us:7.2f} µs  {rounds:>18}{ratio:8.3f}x")


def main() -> int:
    """Measures, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(description="What spans cost.")
    parser.add_argument("--check", action="store_true", help="fail when a bound is not kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    options = parser.parse_args()
    timings = time_operations(
        {
            OFF: lifecycles(Core(CoreLimits(unit_tokens=UNIT_TOKENS))),
            AGAIN: lifecycles(Core(CoreLimits(unit_tokens=UNIT_TOKENS))),
            NOTED: lifecycles(spanned()[0]),
            CHECKED: checks(),
            SENT: sending(),
        }
    )
    print_report(timings)
    if options.json is not None:
        result = {
            "origin": origin(("umbp", "opentelemetry-sdk"), sys.argv),
            "rounds_us": {name: timing.rounds_us for name, timing in timings.items()},
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    ratio = timings[NOTED].median_us / timings[OFF].median_us
    if options.check and ratio >= NOTED_RATIO_MAX:
        print(f"bound: {NOTED}: {ratio:.2f}x, not below {NOTED_RATIO_MAX:g}x", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
