# SPDX-License-Identifier: Apache-2.0
"""An engine whose vLLM traces sends a span for each state and transfer of a request."""

import pytest
from opentelemetry import trace
from otlp_receiver import facts, grpc_receiver
from scheduler_rig import MakeRig

from umbp.connector import tracing
from umbp.fsm import Core
from umbp.trace.spans import SpannedCore

PROMPT = range(100, 150)
RESTORED = 48  # Tokens of whole blocks.
BYTES_PER_TOKEN = 8  # The rig keeps one int64 a token.
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


def test_store_and_restore_of_a_request_are_spans_of_its_trace(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    # A batch leaves when it is told to, not by its own clock.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1000000")
    with grpc_receiver() as receiver:
        rig = make_rig(traces=receiver.endpoint)
        rig.serve("cold", PROMPT, headers=HEADERS)
        rig.forget_local()
        rig.serve("warm", PROMPT, headers=HEADERS)
        rig.check_at_rest()
        # Sends what waits.
        rig.scheduler.connector.shutdown()
        receiver.wait_for("umbp.load")
        spans = {span.span_id: span for span in receiver.spans}
        wholes = {facts(span)["umbp.request_id"]: span for span in receiver.named("umbp.request")}
    assert set(wholes) == {"cold", "warm"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert {whole.parent_span_id.hex() for whole in wholes.values()} == {PARENT_ID}
    (store,) = (span for span in spans.values() if span.name == "umbp.store")
    (load,) = (span for span in spans.values() if span.name == "umbp.load")
    assert store.parent_span_id == wholes["cold"].span_id
    assert load.parent_span_id == wholes["warm"].span_id
    for span in (store, load):
        known = facts(span)
        assert (known["umbp.begin_tokens"], known["umbp.end_tokens"]) == (0, RESTORED)
        assert known["umbp.blocks"] == RESTORED // 16
        assert known["umbp.bytes"] == RESTORED * BYTES_PER_TOKEN
        assert known["umbp.outcome"] == "settled"
    names = {span.name for span in spans.values() if span.parent_span_id == wholes["warm"].span_id}
    assert names == {
        "umbp.lookup", "umbp.load", "umbp.loading", "umbp.running", "umbp.storing",
    }  # fmt: skip
    for span in spans.values():
        whole = spans.get(span.parent_span_id, span)
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano


def test_without_tracing_the_core_is_an_ordinary_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert type(rig.side.core) is Core
    assert rig.scheduler.connector._spans is None


def test_without_opentelemetry_the_engine_goes_on_and_says_so(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing.otel, "is_available", lambda: False)
    rig = make_rig(traces="http://127.0.0.1:9")
    assert not isinstance(rig.side.core, SpannedCore)
    assert "OpenTelemetry is not installed: no spans" in caplog.text
