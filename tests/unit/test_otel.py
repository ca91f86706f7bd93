# SPDX-License-Identifier: Apache-2.0
"""Spans reach a real OTLP receiver, right and whole; nothing waits for one that is gone or slow."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="comes with vLLM")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from otlp_receiver import PATIENCE_S, Receiver, facts, grpc_receiver, http_receiver

from umbp.trace import otel
from umbp.trace.otel import OtelSpans, is_available
from umbp.trace.spans import Lifecycle, Note, Span

OFFSET_S = 1_000_000.0
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}


@pytest.fixture(autouse=True)
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the tracer provider that another test, or vLLM, has set for the process."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    for name in ("OTEL_PYTHON_TRACER_PROVIDER", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    # A batch leaves when it is told to, not by its own clock.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1000000")


@pytest.fixture(params=["grpc", "http/protobuf"])
def receiver(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", request.param)
    with grpc_receiver() if request.param == "grpc" else http_receiver() as receiver:
        yield receiver


def lifecycle(
    headers: dict[str, str] | None = None, *, name: str = "umbp.request", error: str = ""
) -> Lifecycle:
    """A request of one transfer, from 1 s to 4 s."""
    load = Span("umbp.load", 2.0, 3.5, {"umbp.bytes": 1 << 40, "umbp.synchronous": False})
    load.note("RankAnswered", 3.0, {"umbp.rank": 1})
    load.error = error
    state = Span("umbp.storing", 4.0, 4.0, {})
    whole = Span(name, 1.0, 4.0, {"umbp.request_id": "cmpl-1", "umbp.lives": 1})
    return Lifecycle(whole, headers, [load], state)


def opened(endpoint: str, **fields: Any) -> OtelSpans:
    return OtelSpans(endpoint, offset_s=lambda: OFFSET_S, **fields)


def nanoseconds(at_s: float) -> int:
    return int((at_s + OFFSET_S) * 1e9)


def test_spans_are_children_of_the_requests_own_trace(receiver: Receiver) -> None:
    spans = opened(receiver.endpoint)
    spans.put(lifecycle(SAMPLED))
    spans.close(PATIENCE_S)
    whole, load = receiver.wait_for("umbp.request"), receiver.wait_for("umbp.load")
    assert whole.trace_id.hex() == load.trace_id.hex() == TRACE_ID
    assert whole.parent_span_id.hex() == PARENT_ID
    assert load.parent_span_id == whole.span_id
    assert facts(whole) == {"umbp.request_id": "cmpl-1", "umbp.lives": 1}
    assert facts(load) == {"umbp.bytes": 1 << 40, "umbp.synchronous": False}
    assert whole.start_time_unix_nano == nanoseconds(1.0)
    assert whole.end_time_unix_nano == nanoseconds(4.0)
    assert load.start_time_unix_nano == nanoseconds(2.0)
    assert load.end_time_unix_nano == nanoseconds(3.5)
    (event,) = load.events
    assert (event.name, event.time_unix_nano) == ("RankAnswered", nanoseconds(3.0))
    assert facts(event) == {"umbp.rank": 1}
    assert set(receiver.scopes.values()) == {"umbp"}
    assert load.status.code == load.status.STATUS_CODE_UNSET


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}])
def test_a_request_without_a_trace_begins_one_of_its_own(headers: dict[str, str] | None) -> None:
    with grpc_receiver() as receiver:
        spans = opened(receiver.endpoint)
        spans.put(lifecycle(headers, error="2 of 2 objects are missing"))
        spans.close(PATIENCE_S)
        whole, load = receiver.wait_for("umbp.request"), receiver.wait_for("umbp.load")
    assert whole.parent_span_id == b""
    assert load.parent_span_id == whole.span_id
    assert load.status.code == load.status.STATUS_CODE_ERROR
    assert load.status.message == "2 of 2 objects are missing"


def test_a_trace_that_is_not_sampled_stays_so() -> None:
    with grpc_receiver() as receiver:
        spans = opened(receiver.endpoint)
        spans.put(lifecycle(NOT_SAMPLED, name="unsampled"))
        spans.put(lifecycle(SAMPLED, name="sampled"))
        spans.close(PATIENCE_S)
        receiver.wait_for("sampled")
        assert receiver.named("unsampled") == []
        assert len(receiver.named("umbp.load")) == 1


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.names: list[str] = []

    def export(self, spans: Any) -> Any:
        self.names += [span.name for span in spans]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Names of the spans that the process's own tracer provider gets."""
    exporter, provider = Kept(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def test_the_provider_of_the_process_is_used_where_there_is_one(kept: Kept) -> None:
    spans = opened("http://127.0.0.1:9")
    spans.put(lifecycle(SAMPLED))
    spans.close(PATIENCE_S)
    assert kept.names == ["umbp.load", "umbp.request"]


def test_whoever_puts_a_lifecycle_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The exporter hangs and its thread with it: what is too much is dropped, with one warning."""
    entered, release = threading.Event(), threading.Event()

    class Hangs(SpanExporter):
        def export(self, spans: Any) -> Any:
            entered.set()
            release.wait(PATIENCE_S)

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Hangs()))
    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.WARNING, "umbp"):
        patched.setattr(trace, "_TRACER_PROVIDER", provider)
        spans = opened("http://127.0.0.1:9", queue_limit=4)
        spans.put(lifecycle(SAMPLED))
        assert entered.wait(PATIENCE_S)
        into_queue = spans._queue.put

        def put(item: Any, block: bool = True, timeout: float | None = None) -> None:
            assert not block
            into_queue(item, block, timeout)

        patched.setattr(spans._queue, "put", put)
        for _ in range(10):
            spans.put(lifecycle(SAMPLED))
        assert spans.dropped == 6
        patched.setattr(spans._queue, "put", into_queue)
        spans.close(0.01)
        release.set()
    assert [record.getMessage() for record in caplog.records] == [
        "spans are lost: 4 requests wait already"
    ]


def test_a_receiver_that_is_gone_ends_neither_the_thread_nor_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with grpc_receiver() as receiver:
        endpoint = receiver.endpoint
    spans = opened(endpoint)
    for _ in range(3):
        spans.put(lifecycle(SAMPLED))
    begin_s = time.monotonic()
    spans.close(0.2)
    assert time.monotonic() - begin_s < PATIENCE_S
    assert spans.dropped == 0
    spans.put(lifecycle(SAMPLED))


def test_a_library_that_raises_costs_spans_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def get_tracer(self, *arguments: Any) -> Any:
            raise ValueError("no such sampler")

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", Broken())
    spans = opened("http://127.0.0.1:9", queue_limit=2)
    with caplog.at_level(logging.WARNING, "umbp"):
        spans.put(lifecycle(SAMPLED))
        thread = spans._thread
        assert thread is not None
        thread.join(PATIENCE_S)
        for _ in range(5):
            spans.put(lifecycle(SAMPLED))
        assert spans._queue.qsize() == 1, "nobody takes what is put after the thread's end"
        spans.close(PATIENCE_S)
    assert [record.getMessage() for record in caplog.records] == [
        "spans are lost: ValueError: no such sampler"
    ]


def test_one_lifecycle_that_cannot_be_sent_does_not_end_the_others(kept: Kept) -> None:
    spans = opened("http://127.0.0.1:9")
    broken = lifecycle(SAMPLED)
    broken.spans[0].notes.append(Note("x", "no number", {}))  # type: ignore[arg-type]
    spans.put(broken)
    spans.put(lifecycle(SAMPLED))
    spans.close(PATIENCE_S)
    assert spans.dropped == 1
    assert kept.names[-2:] == ["umbp.load", "umbp.request"]


def test_a_closed_way_out_takes_nothing_and_closes_again() -> None:
    spans = opened("http://127.0.0.1:9")
    spans.close(PATIENCE_S)
    spans.put(lifecycle())
    assert spans._thread is None
    spans.close(PATIENCE_S)


def test_nothing_of_opentelemetry_is_imported_before_a_lifecycle_is_to_be_sent() -> None:
    script = """
import sys
import umbp.trace.otel, umbp.trace.spans
assert umbp.trace.otel.is_available()
umbp.trace.otel.OtelSpans("http://127.0.0.1:9").close(1.0)
print([name for name in sys.modules if name.startswith("opentelemetry.")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    # Looking for a package imports what it is in, a namespace that holds nothing.
    assert set(eval(done.stdout)) <= {"opentelemetry.exporter"}


def test_without_the_packages_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_available()
    monkeypatch.setattr(otel, "_NEEDED", ("no_such_package.at_all",))
    assert not is_available()
    monkeypatch.setattr(otel, "_NEEDED", ("no_such_package",))
    assert not is_available()
