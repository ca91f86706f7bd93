# SPDX-License-Identifier: Apache-2.0
"""When the two sides report, and what.

vLLM asks in every step. A report is made when an interval has passed and something has changed,
and at once when the last work is done, since vLLM stops stepping then. What else a step costs is
one look at the clock.
"""

import itertools
import time
from collections.abc import Callable
from typing import Final

from umbp.backends.base import PoolStats
from umbp.connector.kv_events import KVEvents
from umbp.connector.metric_table import COUNTED, LIVE_STATES
from umbp.connector.samples import Samples
from umbp.connector.scheduler import SchedulerSide
from umbp.connector.stats import UMBPStats, report
from umbp.connector.worker import WorkerSide
from umbp.fsm import LeaseKind

INTERVAL_S: Final = 1.0
"""How often a side reports while it works: Prometheus looks every few seconds."""

_STATE_GAUGES: Final = {state: f"requests_{state.value}" for state in LIVE_STATES}

_numbers = itertools.count()


class _Deltas:
    """Tells what has changed since the last report."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._gauges: dict[str, int] = {}

    def take(self, counters: dict[str, int], gauges: dict[str, int]) -> dict[str, int] | None:
        """Returns how much each counter has risen; None when nothing at all has changed.

        Both dictionaries are kept.
        """
        before = self._counters.get
        risen = {
            name: count - before(name, 0)
            for name, count in counters.items()
            if count != before(name, 0) and name in COUNTED
        }
        if not risen and gauges == self._gauges:
            return None
        self._counters, self._gauges = counters, gauges
        return risen


class _Reporter:
    """Makes the reports of one side.

    Args:
        backend: Name of the backend.
        source: Where it keeps objects.
        name: What the side is called; a number makes it unique.
        rank: Rank of a worker.
    """

    def __init__(self, backend: str, source: str, name: str, rank: int | None = None) -> None:
        self._backend = backend
        self._source = source
        self._name = f"{name}{next(_numbers)}"
        self._rank = rank
        self._deltas = _Deltas()

    def report(
        self,
        counters: dict[str, int],
        gauges: dict[str, int],
        seconds: dict[str, list[float]],
    ) -> UMBPStats | None:
        """Returns what has changed since the last report; None when nothing has."""
        risen = self._deltas.take(counters, gauges)
        if risen is None and not seconds:
            return None
        return report(
            self._backend,
            self._name,
            source=self._source,
            rank=self._rank,
            counters=risen or {},
            gauges=gauges,
            seconds=seconds,
        )


class SchedulerReports:
    """Reports of the scheduler's side.

    Args:
        side: The scheduler's side.
        backend: Name of the backend.
        source: Where it keeps objects.
        kv_events: What makes KV events; None where nobody wants them.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        side: SchedulerSide,
        backend: str,
        source: str,
        kv_events: KVEvents | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._side = side
        self._kv_events = kv_events
        self._clock = clock
        self._reporter = _Reporter(backend, source, "scheduler ")
        self._due_s = clock()
        self._was_idle = True
        self._lookups = 0

    def take(self) -> UMBPStats | None:
        """Returns a report if one is due."""
        core = self._side.core
        now_s = self._clock()
        is_idle = not core.requests and not core.leases
        # A request may have come and gone between two looks.
        has_rested = self._was_idle and core.counters.lookups == self._lookups
        if now_s < self._due_s and (has_rested or not is_idle):
            return None
        self._due_s = now_s + INTERVAL_S
        self._was_idle = is_idle
        self._lookups = core.counters.lookups
        counters, gauges = self._read()
        seconds = _taken(lookup=self._side.lookup_meter.seconds)
        return self._reporter.report(counters, gauges, seconds)

    def _read(self) -> tuple[dict[str, int], dict[str, int]]:
        core = self._side.core
        counters = self._side.counters()
        counters["lookup_samples_dropped"] = self._side.lookup_meter.seconds.dropped
        # A request that has ended is known by its open transfers only.
        requests = {lease.request for lease in core.leases.values()}.union(core.requests.values())
        # No collections.Counter: it asks whether it is given a Mapping, which is a search through
        # all of torch's and vLLM's classes whenever one was registered with an ABC meanwhile.
        states = dict.fromkeys(_STATE_GAUGES.values(), 0)
        for request in requests:
            if request is not None and request.state in _STATE_GAUGES:
                states[_STATE_GAUGES[request.state]] += 1
        loads = sum(lease.kind is LeaseKind.LOAD for lease in core.leases.values())
        gauges = {
            **states,
            "leases_load": loads,
            "leases_store": len(core.leases) - loads,
            "blocks_pinned": core.pinned_blocks,
            "blocks_quarantined": core.quarantine.count(core.now_s),
            "lookup_breaker_open": counters.get("lookup_breaker_open", 0),
            "epoch": core.epoch,
        }
        if self._kv_events is not None:
            counters["kv_blocks_stored"] = self._kv_events.stored_count
            counters["kv_blocks_removed"] = self._kv_events.removed_count
            counters["kv_blocks_forgotten"] = self._kv_events.forgotten_count
            gauges["kv_blocks_announced"] = self._kv_events.announced_count
        return counters, gauges


class WorkerReports:
    """Reports of a worker's side.

    Args:
        side: The worker's side.
        backend: Name of the backend.
        source: Where it keeps objects.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        side: WorkerSide,
        backend: str,
        source: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._side = side
        self._clock = clock
        self._reporter = _Reporter(backend, source, f"rank {side.rank}, ", side.rank)
        self._due_s = clock()

    def take(self) -> UMBPStats | None:
        """Returns a report if one is due."""
        side = self._side
        now_s = self._clock()
        has_ended = not side.open_jobs and bool(side.load_seconds or side.store_seconds)
        if now_s < self._due_s and not has_ended:
            return None
        self._due_s = now_s + INTERVAL_S
        stats = side.pool_stats()
        gauges = {"jobs_open": side.open_jobs, **_pool_gauges(stats)}
        counters = {
            "objects_evicted": (stats.evicted_count or 0) if stats is not None else 0,
            "load_samples_dropped": side.load_seconds.dropped,
            "store_samples_dropped": side.store_seconds.dropped,
        }
        seconds = _taken(load=side.load_seconds, store=side.store_seconds)
        return self._reporter.report(counters, gauges, seconds)


def _taken(**samples: Samples) -> dict[str, list[float]]:
    return {name: one.take() for name, one in samples.items() if len(one)}


def _pool_gauges(stats: PoolStats | None) -> dict[str, int]:
    """Returns what a pool can tell of itself."""
    if stats is None:
        return {}
    known = {
        # A server that somebody else has started does not say how large it is.
        "pool_capacity_bytes": stats.capacity_bytes or None,
        "pool_used_bytes": stats.used_bytes,
        "pool_objects": stats.object_count,
    }
    return {name: value for name, value in known.items() if value is not None}
