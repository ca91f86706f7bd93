# SPDX-License-Identifier: Apache-2.0
"""The page docs/metrics.md, made from the table of metrics.

python -m umbp.cli.metrics_page docs/metrics.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from umbp.connector.metric_table import BUCKETS_S, METRICS, Kind, Metric

_INTRODUCTION: Final = """\
# Metrics

umbp's metrics come out of vLLM's own endpoint (`/metrics` of `vllm serve`), beside vLLM's. Every
metric has vLLM's labels (`model_name`, `engine`) and `backend`, the backend's name. Under
`MultiConnector` each is there once, whatever stands beside umbp.

* A side of the connector reports at most once per second while it works, and at once when its last
  work is done; a step without a report costs one look at the clock. An engine that does nothing
  reports nothing, and gauges stay at their last value. Nothing is reported when vLLM's statistics
  are off (`--disable-log-stats`).
* vLLM's log line `KV Transfer metrics` gives the interval's sums: what did not happen is left out,
  times are averages.
* `source` is what vLLM calls the tier of a hit: `p2p` for backend `distributed`, where an object
  may lie on another host, else `host`. vLLM 0.32 and later count prompt tokens by the same source
  (`vllm:prompt_tokens_cached_by_source_total`).
* Ray stores these names, and vLLM's own, with `_` in place of `:`. So does a Prometheus before 3.0
  that scrapes `prometheus_client`'s own server; from `vllm serve` it takes them as they are.
* [dashboards/umbp.json](../dashboards/umbp.json) is a Grafana dashboard of these metrics, under
  either name; [its page](dashboard.md) explains the panels.

This page is generated from the code: `python -m umbp.cli.metrics_page docs/metrics.md`.
"""

_HEADINGS: Final = {
    Kind.COUNTER: "Counters",
    Kind.GAUGE: "Gauges",
    Kind.HISTOGRAM: "Histograms",
}


def metrics_page() -> str:
    """Renders the page."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield _INTRODUCTION
    for kind, heading in _HEADINGS.items():
        yield f"## {heading}\n"
        if kind is Kind.HISTOGRAM:
            bounds = ", ".join(f"{bound:g}" for bound in BUCKETS_S)
            yield f"In seconds; upper bounds of the buckets: {bounds}.\n"
        yield "| metric | labels | meaning |\n|---|---|---|"
        for metric in METRICS:
            if metric.kind is kind:
                yield f"| `{metric.name}` | {_labels(metric)} | {metric.help} |"
        yield ""


def _labels(metric: Metric) -> str:
    parts = [f"`{name}`" for name in metric.own_labels[1:] if name not in metric.labels]
    for at, name in enumerate(metric.labels):
        values = dict.fromkeys(sample[at] for sample in metric.samples.values())
        parts.append(f"`{name}`: " + ", ".join(values))
    return "; ".join(parts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the file to write: python -m umbp.cli.metrics_page docs/metrics.md")
    Path(sys.argv[1]).write_text(metrics_page(), encoding="utf-8")
