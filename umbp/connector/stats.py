# SPDX-License-Identifier: Apache-2.0
"""What the two sides report to vLLM's frontend: what was counted since the last report.

vLLM calls for a report in every step, joins those of all workers with the scheduler's, and hands
the result to its logger and to Prometheus, through pickle and msgpack. So a report is plain
dictionaries, a step in which nothing has ended makes none, and joining changes neither part:
several loggers are given the same dictionaries.
"""

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

DURATIONS: Final = ("lookup", "load", "store")
"""What is timed."""

_MEBIBYTE: Final = 1 << 20


def report(  # noqa: PLR0913 - keyword-only
    backend: str,
    reporter: str,
    *,
    source: str,
    rank: int | None = None,
    counters: dict[str, int],
    gauges: dict[str, int],
    seconds: dict[str, list[float]],
) -> "UMBPStats":
    """Makes one side's report.

    Args:
        backend: Name of the backend.
        reporter: Tells this side from all others of the engine: what it says replaces what it said
            before.
        source: Where the backend keeps objects.
        rank: Rank of the worker.
        counters: How much each raw value has risen.
        gauges: How things are now.
        seconds: Durations since the last report.
    """
    return UMBPStats(
        {
            backend: {
                "source": source,
                "counters": counters,
                "gauges": {reporter: {"rank": rank, "values": gauges}},
                "seconds": seconds,
            }
        }
    )


class UMBPStats(KVConnectorStats):
    """Reports of one or more sides, by name of the backend."""

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Says whether there is nothing to report."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "UMBPStats":
        """Returns both joined: counts add up, and of gauges the later report of a side counts."""
        joined = dict(self.data)
        for backend, theirs in other.data.items():
            ours = joined.get(backend)
            joined[backend] = theirs if ours is None else _joined(ours, theirs)
        return UMBPStats(joined)

    def reduce(self) -> dict[str, int | float]:
        """Says in a few numbers what happened, for vLLM's log; what did not happen is left out."""
        summary: dict[str, int | float] = {}
        for backend, one in self.data.items():
            prefix = f"{backend} " if len(self.data) > 1 else ""
            for name, value in _summary(one).items():
                if value:
                    summary[prefix + name] = value
        return summary


def _joined(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    counters = dict(ours["counters"])
    for name, count in theirs["counters"].items():
        counters[name] = counters.get(name, 0) + count
    seconds = {}
    for name in DURATIONS:
        both = [*ours["seconds"].get(name, ()), *theirs["seconds"].get(name, ())]
        if both:
            # The logger joins for as long as its interval lasts. Each part was bounded when it was
            # made, and what is joined within a step must reach the histograms whole.
            seconds[name] = both
    return {
        "source": ours["source"],
        "counters": counters,
        "gauges": {**ours["gauges"], **theirs["gauges"]},
        "seconds": seconds,
    }


def _summary(one: dict[str, Any]) -> dict[str, int | float]:
    counters = one["counters"]
    gauges: dict[str, int] = {}
    for side in one["gauges"].values():
        for name, value in side["values"].items():
            gauges[name] = gauges.get(name, 0) + value
    hits = counters.get("lookup_hits", 0)
    ended = hits + counters.get("lookup_misses", 0) + counters.get("lookups_expired", 0)
    declined = sum(count for name, count in counters.items() if name.startswith("declined_"))
    return {
        "lookups": ended,
        "hits": hits,
        "lookup ms": _average_ms(one, "lookup"),
        "loads": counters.get("loads_settled", 0),
        "loads failed": counters.get("loads_failed", 0),
        "load ms": _average_ms(one, "load"),
        "loaded MiB": _mebibytes(counters.get("bytes_loaded", 0)),
        "tokens restored": counters.get("tokens_restored", 0),
        "stores": counters.get("stores_settled", 0),
        "stores failed": counters.get("stores_failed", 0),
        "stores declined": declined,
        "store ms": _average_ms(one, "store"),
        "stored MiB": _mebibytes(counters.get("bytes_stored", 0)),
        "tokens stored": counters.get("tokens_stored", 0),
        "evicted": counters.get("objects_evicted", 0),
        "pinned blocks": gauges.get("blocks_pinned", 0),
        "breaker open": gauges.get("lookup_breaker_open", 0),
    }


def _average_ms(one: dict[str, Any], name: str) -> float:
    seconds = one["seconds"].get(name)
    return round(1000 * sum(seconds) / len(seconds), 3) if seconds else 0


def _mebibytes(size_bytes: int) -> float:
    return round(size_bytes / _MEBIBYTE, 1)
