# SPDX-License-Identifier: Apache-2.0
"""Registers the metrics of ``metric_table`` with vLLM's Prometheus endpoint, and fills them in.

Lives in vLLM's frontend: what happens here delays no step.
"""

from collections.abc import Mapping
from typing import Any

import attrs
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from umbp.connector.metric_table import BUCKETS_S, METRICS, Kind, Metric, samples_of


@attrs.frozen(eq=False)
class _Series:
    """The series of one engine and one backend.

    Attributes:
        counters: By raw value.
        histograms: By raw value.
    """

    counters: Mapping[str, Any]
    histograms: Mapping[str, Any]


class _Registered:
    """All metrics, registered once, and what every side has said last.

    Args:
        classes: For each of Prometheus' types, the class to make.
        labels: vLLM's own labels.
    """

    def __init__(self, classes: Mapping[type[Any], type[Any]], labels: list[str]) -> None:
        self._metrics = {
            metric.name: _register(metric, classes, [*labels, *metric.own_labels])
            for metric in METRICS
        }
        self._series: dict[tuple[int, str], _Series] = {}
        # For each engine and backend, and each of its sides: rank, and gauges by raw value.
        self._sides: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}

    def observe(self, data: Mapping[str, Any], engine: int, labels: list[Any]) -> None:
        """Takes the reports of one step.

        Args:
            data: The data of ``UMBPStats``.
            engine: Index of the engine.
            labels: Values of vLLM's labels for it.
        """
        for backend, one in data.items():
            place = (engine, backend)
            series = self._series.get(place)
            if series is None:
                series = self._make_series([*labels, backend], one["source"])
                self._series[place] = series
            for raw, count in one["counters"].items():
                series.counters[raw].inc(count)
            for raw, seconds in one["seconds"].items():
                for duration in seconds:
                    series.histograms[raw].observe(duration)
            self._set_gauges(place, one["gauges"], [*labels, backend])

    def _make_series(self, labels: list[Any], source: str) -> _Series:
        def made(kind: Kind) -> dict[str, Any]:
            return {
                raw: self._metrics[metric.name].labels(
                    *labels, *((source,) if metric.has_source else ()), *values
                )
                for raw, metric, values in samples_of(kind)
            }

        return _Series(made(Kind.COUNTER), made(Kind.HISTOGRAM))

    def _set_gauges(
        self, place: tuple[int, str], reports: Mapping[str, Any], labels: list[Any]
    ) -> None:
        sides = self._sides.setdefault(place, {})
        sides.update(reports)
        ranks = {side["rank"] for side in reports.values()}
        for raw, metric, values in samples_of(Kind.GAUGE):
            for rank in ranks:
                told = [
                    side["values"][raw]
                    for side in sides.values()
                    if side["rank"] == rank and raw in side["values"]
                ]
                if told:
                    ranked = (str(rank),) if metric.has_rank else ()
                    # Several sides are connectors of one backend beside each other.
                    self._metrics[metric.name].labels(*labels, *ranked, *values).set(sum(told))


def _register(metric: Metric, classes: Mapping[type[Any], type[Any]], labels: list[str]) -> Any:
    common: dict[str, Any] = {
        "name": metric.name,
        "documentation": metric.help,
        "labelnames": labels,
    }
    if metric.kind is Kind.COUNTER:
        return classes[Counter](**common)
    if metric.kind is Kind.GAUGE:
        return classes[Gauge](**common, multiprocess_mode="mostrecent")
    return classes[Histogram](**common, buckets=list(BUCKETS_S))


_registered: _Registered | None = None


def _register_all(classes: Mapping[type[Any], type[Any]], labels: list[str]) -> _Registered:
    """Registers the metrics, or returns those that are registered already.

    vLLM takes them out of the registry before an engine's logger asks; but a connector beside this
    one, of a class derived from it, asks for the same again.

    Raises:
        ValueError: Somebody else has a metric of that name.
    """
    global _registered  # noqa: PLW0603 - the registry that it mirrors is the process's, too
    try:
        _registered = _Registered(classes, labels)
    except ValueError:
        if _registered is None:
            raise
    return _registered


class UMBPPromMetrics(KVConnectorPromMetrics):
    """umbp's metrics in vLLM's registry."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._registered = _register_all(metric_types, labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes the reports of one step of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        self._registered.observe(transfer_stats_data, engine_idx, labels)
