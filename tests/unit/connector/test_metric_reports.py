# SPDX-License-Identifier: Apache-2.0
"""Reports to vLLM: when they are made, that they add up, and that they survive its encoders."""

import pickle
from typing import Any

import msgspec
import pytest

from umbp.backends.base import PoolStats, TransferOutcome
from umbp.connector.metadata import StepMetadata
from umbp.connector.metric_table import COUNTED, LIVE_STATES, MEASURED, METRICS, PREFIX, Kind
from umbp.connector.reports import INTERVAL_S, SchedulerReports, WorkerReports
from umbp.connector.samples import SAMPLES_MAX, Samples
from umbp.connector.stats import DURATIONS, UMBPStats, report
from umbp.connector.worker import WorkerSide
from umbp.fsm.counters import CoreCounters

from .bench import Bench
from .fakes import UNIT_TOKENS, FakeRequest, step_output
from .worker_bench import FakeWorkerPool, make_side, plan, step

BACKEND = "memory"


def reports_of(bench: Bench) -> SchedulerReports:
    """The bench's reports, with the first one taken."""
    reports = SchedulerReports(bench.side, BACKEND, "host", clock=lambda: bench.now_s)
    assert reports.take() is not None
    return reports


def counts(stats: UMBPStats | None) -> dict[str, int]:
    assert stats is not None
    counted: dict[str, int] = stats.data[BACKEND]["counters"]
    return counted


def gauges(stats: UMBPStats | None) -> dict[str, int]:
    assert stats is not None
    (side,) = stats.data[BACKEND]["gauges"].values()
    values: dict[str, int] = side["values"]
    return values


def run(bench: Bench, name: str, units: int) -> int:
    """Computes a prompt, and returns the job that stores it."""
    request = FakeRequest.of(name, units * UNIT_TOKENS + 1)
    (store,) = bench.run_prompt(request, bench.admit(request)).stores
    bench.side.finished(request, ([],))
    return store.job_id


# ---------------------------------------------------------------- the table


def test_names_and_raw_values_are_used_once() -> None:
    names = [metric.name for metric in METRICS]
    raw = [raw for metric in METRICS for raw in metric.samples]
    assert len(set(names)) == len(names)
    assert len(set(raw)) == len(raw)
    assert all(name.startswith(PREFIX) for name in names)


def test_every_counter_of_the_scheduler_side_is_a_metric() -> None:
    bench = Bench()
    # What these say is a gauge, split by state or kind.
    split = {"requests_live", "leases_open"}
    assert set(bench.side.counters()) - split <= COUNTED | MEASURED
    assert set(CoreCounters().as_dict()) <= COUNTED


def test_units_and_suffixes_follow_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.name.endswith("_seconds") == (metric.kind is Kind.HISTOGRAM), metric.name
        assert metric.help.endswith("."), metric.name
        for values in metric.samples.values():
            assert len(values) == len(metric.labels), metric.name
    assert tuple(raw for m in METRICS if m.kind is Kind.HISTOGRAM for raw in m.samples) == DURATIONS


# ---------------------------------------------------------------- the scheduler's side


def test_a_decode_step_reports_nothing() -> None:
    bench = Bench()
    reports = reports_of(bench)
    request = FakeRequest.of("a", 40)
    bench.run_prompt(request, bench.admit(request))
    bench.now_s += INTERVAL_S
    assert reports.take() is not None
    for _ in range(20):
        bench.side.step_metadata(step_output({"a": 1}))
        assert reports.take() is None
    # Nothing has changed after an interval, either.
    bench.now_s += INTERVAL_S
    assert reports.take() is None


def test_reports_of_a_store_add_up_to_the_counters() -> None:
    bench = Bench()
    reports = reports_of(bench)
    total: dict[str, int] = {}
    for number in range(3):
        job_id = run(bench, f"r{number}", 2)
        bench.now_s += INTERVAL_S
        during = reports.take()
        bench.answer(job_id, bytes_moved=100)
        after = reports.take()
        assert (gauges(during)["leases_store"], gauges(after)["leases_store"]) == (1, 0)
        assert (gauges(during)["blocks_pinned"], gauges(after)["blocks_pinned"]) == (2, 0)
        assert (gauges(during)["requests_storing"], gauges(after)["requests_storing"]) == (1, 0)
        for stats in (during, after):
            for name, count in counts(stats).items():
                total[name] = total.get(name, 0) + count
    counters = bench.side.counters()
    assert total == {name: n for name, n in counters.items() if name in COUNTED and n}
    assert total["tokens_stored"] == 3 * 2 * UNIT_TOKENS
    assert total["bytes_stored"] == 300


def test_the_last_work_is_reported_at_once() -> None:
    bench = Bench()
    reports = reports_of(bench)
    job_id = run(bench, "a", 2)
    assert reports.take() is None  # There is work left, and no interval has passed.
    bench.answer(job_id)
    assert counts(reports.take())["stores_settled"] == 1
    assert reports.take() is None


def test_a_request_that_came_and_went_between_two_looks_is_reported() -> None:
    bench = Bench()
    reports = reports_of(bench)
    request = FakeRequest.of("a", 40)
    bench.side.matched_tokens(request, 0)
    bench.side.finished(request, ([],))
    assert counts(reports.take()) == {"lookups": 1, "lookup_misses": 1}


def test_lookups_are_timed_and_failures_counted() -> None:
    bench = Bench()
    reports = reports_of(bench)
    bench.lookups.is_broken = True
    bench.side.matched_tokens(FakeRequest.of("a", 40), 0)
    bench.now_s += INTERVAL_S
    stats = reports.take()
    assert counts(stats)["lookups_failed"] == 1
    assert stats is not None
    assert stats.data[BACKEND]["seconds"] == {"lookup": [0.0]}


def test_every_state_of_a_request_is_told() -> None:
    bench = Bench()
    bench.side.matched_tokens(FakeRequest.of("a", 40), 0)
    told = gauges(SchedulerReports(bench.side, BACKEND, "host", clock=lambda: 0.0).take())
    names = {f"requests_{state.value}" for state in LIVE_STATES}
    assert names <= told.keys() <= MEASURED
    assert sum(told[name] for name in names) == told["requests_lookup"] == 1


# ---------------------------------------------------------------- workers


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def worker_reports() -> tuple[WorkerSide, FakeWorkerPool, WorkerReports, _Clock]:
    side, pool = make_side()
    clock = _Clock()
    reports = WorkerReports(side, BACKEND, "host", clock=clock)
    assert gauges(reports.take()) == {"jobs_open": 0}
    return side, pool, reports, clock


def test_a_worker_times_what_it_attempted_and_nothing_else() -> None:
    side, pool, reports, _ = worker_reports()
    step(side, StepMetadata(0, loads=[plan(1), plan(2)], stores=[plan(3)]))
    pool.end(1, TransferOutcome.DONE)
    pool.end(2, TransferOutcome.NOT_ATTEMPTED)
    step(side, StepMetadata(0))
    assert reports.take() is None  # One job is open, and no interval has passed.
    pool.end(3, TransferOutcome.FAILED)
    step(side, StepMetadata(0))
    stats = reports.take()
    assert stats is not None
    seconds = stats.data[BACKEND]["seconds"]
    assert {name: len(durations) for name, durations in seconds.items()} == {"load": 1, "store": 1}
    assert all(duration >= 0 for durations in seconds.values() for duration in durations)


def test_a_worker_says_how_full_its_pool_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pool, reports, clock = worker_reports()
    clock.now_s += INTERVAL_S
    assert reports.take() is None
    clock.now_s += INTERVAL_S
    monkeypatch.setattr(pool, "stats", lambda: PoolStats(1000, 300, 3, 7))
    stats = reports.take()
    assert gauges(stats) == {
        "jobs_open": 0,
        "pool_capacity_bytes": 1000,
        "pool_used_bytes": 300,
        "pool_objects": 3,
    }
    assert counts(stats) == {"objects_evicted": 7}


def test_durations_are_bounded_and_the_rest_is_counted() -> None:
    samples = Samples()
    for _ in range(SAMPLES_MAX + 5):
        samples.add(1.0)
    assert (len(samples.take()), samples.dropped, len(samples)) == (SAMPLES_MAX, 5, 0)


# ---------------------------------------------------------------- joining, encoding, logging


def one(reporter: str, rank: int | None = None, **counters: int) -> UMBPStats:
    return report(
        BACKEND,
        reporter,
        source="host",
        rank=rank,
        counters=counters,
        gauges={"jobs_open": sum(counters.values())},
        seconds={"load": [0.5]},
    )


def test_joining_adds_counts_and_keeps_the_last_gauges_of_each_side() -> None:
    joined = one("a", 0, loads_settled=1).aggregate(one("b", 1, loads_settled=2, lookups=1))
    joined = joined.aggregate(one("a", 0, lookups=4))
    assert joined.data == {
        BACKEND: {
            "source": "host",
            "counters": {"loads_settled": 3, "lookups": 5},
            "gauges": {
                "a": {"rank": 0, "values": {"jobs_open": 4}},
                "b": {"rank": 1, "values": {"jobs_open": 3}},
            },
            "seconds": {"load": [0.5, 0.5, 0.5]},
        }
    }


def test_joining_changes_neither_part() -> None:
    # Two loggers of vLLM begin with the same dictionaries and join on their own.
    first, second = one("a", lookups=1), one("b", lookups=2)
    before = pickle.dumps((first.data, second.data))
    loggers = [UMBPStats(first.data), UMBPStats(first.data)]
    loggers = [logger.aggregate(UMBPStats(second.data)) for logger in loggers]
    assert [logger.data[BACKEND]["counters"] for logger in loggers] == [{"lookups": 3}] * 2
    assert pickle.dumps((first.data, second.data)) == before


def test_reports_survive_the_way_from_worker_to_frontend() -> None:
    bench = Bench()
    reports_of(bench)
    run(bench, "a", 1)
    stats = SchedulerReports(bench.side, BACKEND, "host", clock=lambda: 0.0).take()
    assert stats is not None
    carried = pickle.loads(pickle.dumps(stats))
    assert (type(carried), carried.data) == (UMBPStats, stats.data)
    decoded: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert decoded == stats.data


def test_the_log_line_says_what_happened_and_nothing_else() -> None:
    stats = report(
        BACKEND,
        "a",
        source="host",
        counters={
            "lookup_hits": 2,
            "lookup_misses": 1,
            "loads_settled": 2,
            "tokens_restored": 64,
            "bytes_loaded": 3 << 20,
            "declined_pin_limit": 1,
        },
        gauges={"blocks_pinned": 0},
        seconds={"load": [0.001, 0.002]},
    )
    assert stats.reduce() == {
        "lookups": 3,
        "hits": 2,
        "loads": 2,
        "load ms": 1.5,
        "loaded MiB": 3.0,
        "tokens restored": 64,
        "stores declined": 1,
    }
    assert UMBPStats({}).is_empty()
    assert UMBPStats({}).reduce() == {}
