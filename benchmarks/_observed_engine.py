# SPDX-License-Identifier: Apache-2.0
"""An engine whose whole steps are timed, while metrics and traces are on or off."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
from _plane_engine import PlaneEngine, Shape
from _plane_umbp import Umbp, UmbpOnSockets
from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from umbp.connector.prom import UMBPPromMetrics

STEP_S = 0.02
"""How long a step of the engine is taken to last, so that a report is due every 50th."""

_TRACE_BYTES = 1 << 30


@attrs.frozen
class Kind:
    """How an engine is observed.

    Attributes:
        log_stats: vLLM's own statistics; off as with ``--disable-log-stats``.
        reports: Whether umbp is asked for its reports.
        trace: Whether a trace is written; takes an engine of its own.
    """

    log_stats: bool = True
    reports: bool = True
    trace: bool = False


METRICS_ON = "metrics on, trace off"
AGAIN = "the same once more"
VLLM_ALONE = "vLLM's statistics alone"
METRICS_OFF = "statistics off"
TRACE_ON = "metrics on, trace on"
KINDS = {
    METRICS_ON: Kind(),
    AGAIN: Kind(),
    VLLM_ALONE: Kind(reports=False),
    METRICS_OFF: Kind(log_stats=False),
    TRACE_ON: Kind(trace=True),
}


class ObservedEngine:
    """One engine, stepped from here.

    Args:
        shape: What it is built for.
        trace: Folder of a trace; None: none is written.
        with_workers: Whether it has a worker with a pool; otherwise workers are played.

    Attributes:
        engine: The engine.
        peer: What stands for the workers.
        reports: What vLLM would send to its frontend.
        asked_s: Seconds that umbp has taken to say what it reports, or that there is nothing.
        made_us: Microseconds of each time that it was something.
    """

    def __init__(self, shape: Shape, trace: Path | None, *, with_workers: bool) -> None:
        traced = {"report_dir": str(trace), "trace_bytes": _TRACE_BYTES}
        options = {} if trace is None else traced
        self.peer: Any = UmbpOnSockets(**options) if with_workers else _Played(options)
        self.engine = PlaneEngine(self.peer, shape, log_stats=True)
        self.reports: list[Any] = []
        self.asked_s = 0.0
        self.made_us: list[float] = []
        self._workers = getattr(self.peer, "workers", [])
        self._connectors = [self.engine.connector, *self._workers]
        self._takers = [
            self._timed(connector.get_kv_connector_stats) for connector in self._connectors
        ]
        self._now_s = 0.0
        for connector in self._connectors:
            connector._reports._clock = self._clock
            connector._reports._due_s = 0.0

    def observe(self, kind: Kind) -> None:
        """Switches what is observed, but for a trace.

        One engine for all that is compared: two that are built alike differ by some per cent for as
        long as they live, by where their objects lie in memory.
        """
        scheduler = self.engine.scheduler
        scheduler.log_stats = scheduler.kv_cache_manager.log_stats = kind.log_stats
        for connector, take in zip(self._connectors, self._takers, strict=True):
            connector.get_kv_connector_stats = take if kind.reports else _nothing

    def _timed(self, take: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            # The thread's own clock costs as much as what is timed here.
            begin_s = time.perf_counter()
            stats = take()
            took_s = time.perf_counter() - begin_s
            self.asked_s += took_s
            if stats is not None:
                self.made_us.append(took_s * 1e6)
            return stats

        return timed

    def _clock(self) -> float:
        return self._now_s

    def step(self) -> float:
        """Does a step; returns the seconds of this thread that scheduler and workers took."""
        self._now_s += STEP_S
        begin_s = time.thread_time()
        output = self.engine.schedule()
        answers, received = self.peer.execute(self.engine.metadata)
        stats = None
        for worker in self._workers:
            more = worker.get_kv_connector_stats()
            stats = more if stats is None or more is None else stats.aggregate(more)
        outputs = self.engine.complete(output, answers, received, stats)
        took_s = time.thread_time() - begin_s
        for one in outputs.values():
            if one.scheduler_stats is not None and one.scheduler_stats.kv_connector_stats:
                self.reports.append(one.scheduler_stats.kv_connector_stats)
        return took_s

    def close(self) -> None:
        """Ends it."""
        self.engine.close()


class _Played(Umbp):
    """umbp with played workers, and options of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._options = options

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        return {**super().options(shape), **self._options}


def frontend_us(reports: Sequence[Any]) -> list[float]:
    """Returns the microseconds that vLLM's frontend, another process, takes for each report."""
    unregister_vllm_metrics()
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    labels: dict[int, list[object]] = {0: ["a-model", "0"]}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = UMBPPromMetrics(config, types, ["model_name", "engine"], labels)
    taken = []
    for data in reports:
        begin_s = time.thread_time()
        metrics.observe(data, 0)
        taken.append((time.thread_time() - begin_s) * 1e6)
    unregister_vllm_metrics()
    return taken[1:]  # The first makes the series.


def _nothing() -> None:
    """Reports nothing."""
