# SPDX-License-Identifier: Apache-2.0
"""Metrics in Prometheus' registry: exact text, several engines, connectors beside each other."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from umbp.connector import UMBPStoreConnector
from umbp.connector.metric_table import METRICS
from umbp.connector.prom import UMBPPromMetrics
from umbp.connector.stats import UMBPStats, report

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
NAME = "UMBPStoreConnector"


@pytest.fixture(autouse=True)
def _clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Without the plugin that adds our connector to vLLM's.
    known = {name: load for name, load in KVConnectorFactory._registry.items() if name != NAME}
    monkeypatch.setattr(KVConnectorFactory, "_registry", known)
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


class DerivedConnector(UMBPStoreConnector):
    """A connector of another class, which asks for the same metrics."""


def config(**fields: Any) -> Any:
    settings = {
        "kv_connector": NAME,
        "kv_connector_module_path": "umbp.connector",
        "kv_role": "kv_both",
        **fields,
    }
    return types.SimpleNamespace(kv_transfer_config=KVTransferConfig(**settings))


def multi(*connectors: dict[str, Any]) -> Any:
    return config(
        kv_connector="MultiConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": list(connectors)},
    )


def ours(**fields: Any) -> dict[str, Any]:
    one = {"kv_connector": NAME, "kv_connector_module_path": "umbp.connector"}
    return {**one, "kv_role": "kv_both", **fields}


def prom(vllm_config: Any) -> KVConnectorProm:
    return KVConnectorProm(vllm_config, LABELS, ENGINES)


def told(reporter: str = "scheduler 0", *, pinned: int = 2, **counters: int) -> UMBPStats:
    return report(
        "memory",
        reporter,
        source="host",
        counters=counters,
        gauges={"blocks_pinned": pinned},
        seconds={"load": [0.002]},
    )


def series() -> dict[str, float]:
    """Every series of ours that is not zero, by name and labels."""
    found = {}
    for line in generate_latest(REGISTRY).decode().splitlines():
        if line.startswith("vllm:umbp_") and "_created{" not in line:
            name, _, value = line.rpartition(" ")
            assert name not in found, "the same series twice"
            found[name] = float(value)
    return {name: value for name, value in found.items() if value}


def test_a_report_becomes_text() -> None:
    metrics = prom(config())
    metrics.observe(told(lookup_hits=3, tokens_restored=64).to_dict(), 0)
    metrics.observe(told(lookup_hits=1, declined_pin_limit=2, pinned=5).to_dict(), 0)
    metrics.observe(told(lookup_hits=9).to_dict(), 1)
    labels = 'backend="memory",engine="0",model_name="m"'
    found = {name: value for name, value in series().items() if 'engine="0"' in name}
    assert {name: value for name, value in found.items() if "_bucket" not in name} == {
        f'vllm:umbp_lookups_total{{{labels},result="hit",source="host"}}': 4.0,
        f'vllm:umbp_restored_tokens_total{{{labels},source="host"}}': 64.0,
        f'vllm:umbp_stores_declined_total{{{labels},reason="pin_limit"}}': 2.0,
        f"vllm:umbp_pinned_blocks{{{labels}}}": 5.0,
        f"vllm:umbp_load_seconds_count{{{labels}}}": 2.0,
        f"vllm:umbp_load_seconds_sum{{{labels}}}": 0.004,
    }
    assert (
        found[
            'vllm:umbp_load_seconds_bucket{backend="memory",engine="0",le="0.0025",model_name="m"}'
        ]
        == 2.0
    )


def test_everything_is_there_with_the_first_report() -> None:
    prom(config()).observe(told().to_dict(), 0)
    text = generate_latest(REGISTRY).decode()
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.kind.value}\n" in text
    for metric in METRICS:
        if metric.kind.value != "gauge":
            for values in metric.samples.values():
                wanted = [f'{name}="{v}"' for name, v in zip(metric.labels, values, strict=True)]
                lines = [line for line in text.splitlines() if line.startswith(metric.series[0])]
                assert any(all(want in line for want in wanted) for line in lines), metric.name


def test_gauges_of_workers_are_apart_by_rank() -> None:
    metrics = prom(config())
    for rank in (0, 1):
        gauges = {"pool_used_bytes": 100 + rank}
        stats = report(
            "memory",
            f"rank {rank}, 0",
            source="host",
            rank=rank,
            counters={},
            gauges=gauges,
            seconds={},
        )
        metrics.observe(stats.to_dict(), 0)
    labels = 'backend="memory",engine="0",model_name="m"'
    assert series() == {
        f'vllm:umbp_pool_used_bytes{{{labels},rank="0"}}': 100.0,
        f'vllm:umbp_pool_used_bytes{{{labels},rank="1"}}': 101.0,
    }


def test_the_next_engine_of_a_process_registers_anew() -> None:
    prom(config()).observe(told(lookup_hits=3).to_dict(), 0)
    unregister_vllm_metrics()  # As vLLM does before it makes an engine's logger.
    prom(config()).observe(told(lookup_hits=1).to_dict(), 0)
    (hits,) = [value for name, value in series().items() if 'result="hit"' in name]
    assert hits == 1.0


def test_two_connectors_of_one_class_under_multi_connector() -> None:
    metrics = prom(multi(ours(), ours(kv_connector_extra_config={"lookup_instance": "b"})))
    both = told("scheduler 0", lookup_hits=1).aggregate(told("scheduler 1", lookup_hits=2))
    metrics.observe(MultiKVConnectorStats({NAME: both}).to_dict(), 0)
    found = {name: value for name, value in series().items() if "_bucket" not in name}
    assert [value for name, value in found.items() if 'result="hit"' in name] == [3.0]
    assert [value for name, value in found.items() if "pinned" in name] == [4.0]


def test_a_derived_connector_beside_ours_shares_the_metrics() -> None:
    for _ in range(2):
        one, other = (
            cls.build_prom_metrics(config(), TYPES, LABELS, ENGINES)
            for cls in (UMBPStoreConnector, DerivedConnector)
        )
        one.observe(told("scheduler 0", lookup_hits=1).to_dict(), 0)
        other.observe(told("scheduler 1", lookup_hits=2).to_dict(), 0)
        found = series()
        assert [value for name, value in found.items() if 'result="hit"' in name] == [3.0]
        assert [value for name, value in found.items() if "pinned" in name] == [4.0]
        unregister_vllm_metrics()


def test_a_name_that_is_somebody_elses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.connector.prom._registered", None)
    Counter("vllm:umbp_lookups_started_total", "not ours")
    with pytest.raises(ValueError, match="Duplicated"):
        UMBPPromMetrics(config(), TYPES, LABELS, ENGINES)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_vllm_logs_the_sums_of_an_interval(is_wrapped: bool) -> None:
    vllm_config = multi(ours()) if is_wrapped else config()
    prom(vllm_config)
    loggers = [KVConnectorLogging(vllm_config.kv_transfer_config) for _ in range(2)]
    for hits in (1, 2):
        data = told(lookup_hits=hits).to_dict()
        for logger in loggers:
            logger.observe({NAME: data} if is_wrapped else data)
    for logger in loggers:
        lines: list[str] = []
        logger.log(lambda line, *arguments, to=lines: to.append(line % arguments))
        (line,) = lines
        assert "hits" in line
        assert "3" in line
        assert "load ms" in line


def test_multi_connector_joins_reports_of_its_connectors() -> None:
    prom(multi(ours()))
    stats = MultiConnector.build_kv_connector_stats({NAME: told(lookup_hits=1).to_dict()})
    assert type(stats.data[NAME]) is UMBPStats
    assert stats.aggregate(stats).data[NAME].data["memory"]["counters"] == {"lookup_hits": 2}
