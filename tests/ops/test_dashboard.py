# SPDX-License-Identifier: Apache-2.0
"""Every query of the dashboard, evaluated by a real Prometheus that scrapes umbp's metrics.

Needs Prometheus' program, on PATH or named by ``UMBP_PROMETHEUS``; Debian has it in the package
``prometheus``, which need not be installed: ``apt-get download prometheus`` and ``dpkg -x``.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import types
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram, start_http_server
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from umbp.connector.metric_table import COUNTED, MEASURED
from umbp.connector.prom import UMBPPromMetrics
from umbp.connector.stats import DURATIONS, report

PROGRAM = os.environ.get("UMBP_PROMETHEUS") or shutil.which("prometheus")
DASHBOARD = Path(__file__).parents[2] / "dashboards" / "umbp.json"
LABELS: dict[int, list[object]] = {0: ["a-model", "0"]}
PATIENCE_S = 60.0
PAUSE_S = 0.2

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="the program prometheus is not here")


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name in ("model_name", "engine", "backend"):
        found = [query.replace(f"${name}", ".*") for query in found]
    return [query.replace("$__rate_interval", "10s") for query in found]


def observe(metrics: UMBPPromMetrics) -> None:
    """Has both sides report that everything has risen."""
    for rank in (None, 0):
        stats = report(
            "memory",
            f"side {rank}",
            source="host",
            rank=rank,
            counters=dict.fromkeys(COUNTED, 1),
            gauges={name: 1 for name in MEASURED if _is_of_workers(name) == (rank is not None)},
            seconds={name: [0.001, 0.2] for name in DURATIONS},
        )
        metrics.observe(stats.to_dict(), 0)


def _is_of_workers(name: str) -> bool:
    return name.startswith("pool_") or name == "jobs_open"


@pytest.fixture
def metrics() -> Iterator[UMBPPromMetrics]:
    unregister_vllm_metrics()
    config = types.SimpleNamespace(kv_transfer_config=None)
    types_ = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    yield UMBPPromMetrics(config, types_, ["model_name", "engine"], LABELS)
    unregister_vllm_metrics()


@pytest.fixture
def address(metrics: UMBPPromMetrics, tmp_path: Path) -> Iterator[str]:
    """Address of a Prometheus that scrapes this process."""
    server, thread = start_http_server(0, addr="127.0.0.1")
    (tmp_path / "prometheus.yml").write_text(
        "scrape_configs:\n"
        "  - job_name: vllm\n"
        "    scrape_interval: 500ms\n"
        "    scrape_timeout: 500ms\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{server.server_port}']}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    assert PROGRAM is not None
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address={own}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    yield f"http://{own}"
    process.terminate()
    process.wait(PATIENCE_S)
    server.shutdown()
    server.server_close()
    thread.join(PATIENCE_S)


def evaluate(address: str, query: str) -> list[Any]:
    """Returns the series that a query finds; none while Prometheus does not answer yet."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []
    # A rate of nothing is no number.
    return [series for series in found if series["value"][1] != "NaN"]


def test_every_query_of_the_dashboard_finds_something(
    metrics: UMBPPromMetrics, address: str
) -> None:
    missing = queries()
    assert missing
    deadline_s = time.monotonic() + PATIENCE_S
    while missing:
        assert time.monotonic() < deadline_s, missing
        observe(metrics)
        time.sleep(PAUSE_S)
        missing = [query for query in missing if not evaluate(address, query)]
