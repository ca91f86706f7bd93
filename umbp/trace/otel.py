# SPDX-License-Identifier: Apache-2.0
"""Hands lifecycles to OpenTelemetry, on a thread of its own.

The scheduler only puts a finished lifecycle into a queue that is bounded. The thread makes spans of
it with the tracer provider of the process, which is vLLM's where vLLM traces, and that exports them
in batches on yet another thread. Whatever goes wrong here costs spans and nothing else.

OpenTelemetry is imported when the first lifecycle arrives, and only then.
"""

import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from umbp.trace.spans import Lifecycle, Span

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 1024
"""Lifecycles that may wait; a few hundred bytes for each of their spans."""

_NEEDED: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp")
_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def is_available() -> bool:
    """Whether the packages that export spans are installed. Imports none of them."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:
        # What they are in is not there either.
        return False


def wall_offset_s() -> float:
    """Returns what to add to ``time.monotonic()`` for the time of day."""
    return time.time() - time.monotonic()


class OtelSpans:
    """Exports lifecycles. Its thread begins with the first of them.

    Args:
        endpoint: Where spans go, an OTLP endpoint; used when the process has no tracer provider.
        queue_limit: Lifecycles that may wait.
        offset_s: Says what to add to a lifecycle's times for the time of day.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        queue_limit: int = QUEUE_LIMIT,
        offset_s: Callable[[], float] = wall_offset_s,
    ) -> None:
        self._endpoint = endpoint
        self._offset_s = offset_s
        # None ends the thread.
        self._queue: queue.Queue[Lifecycle | None] = queue.Queue(queue_limit)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_warned = False
        self.dropped = 0

    def put(self, lifecycle: Lifecycle) -> None:
        """Takes a lifecycle that is done. Neither blocks nor raises."""
        if self._is_closed:
            return
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="umbp-spans", daemon=True)
                self._thread.start()
            self._queue.put_nowait(lifecycle)
        except queue.Full:
            self.dropped += 1
            self._warn(f"{self._queue.maxsize} requests wait already")
        except RuntimeError as error:
            # The system has no thread to give; the next lifecycle tries again.
            self._thread = None
            self.dropped += 1
            self._warn(_one_line(error))

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for at most ``timeout_s``. Idempotent."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return
        give_up_s = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        thread.join(max(0.0, give_up_s - time.monotonic()))

    def _work(self) -> None:
        """Makes spans until the end; the body of the thread."""
        try:
            provider, tracer = open_tracer(self._endpoint)
        except Exception as error:  # Of a library that reads much of its environment.
            self._is_closed = True
            self._warn(_one_line(error))
            return
        while (lifecycle := self._queue.get()) is not None:
            try:
                send(tracer, lifecycle, self._offset_s())
            except Exception as error:  # A sampler or processor of somebody else's.
                self.dropped += 1
                self._warn(_one_line(error))
        try:
            provider.force_flush()
        except Exception as error:  # An exporter of somebody else's.
            self._warn(_one_line(error))

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("spans are lost: %s", why)


def open_tracer(endpoint: str) -> "tuple[Any, Tracer]":
    """Returns the tracer provider of this process and a tracer of it; makes one where none is.

    Args:
        endpoint: Where the spans of a new one go. Its protocol is gRPC, unless the environment
            says ``http/protobuf``, as with vLLM.
    """
    from opentelemetry import trace

    import umbp

    provider: Any = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        provider = _new_provider(endpoint)
    return provider, provider.get_tracer("umbp", umbp.__version__)


def _new_provider(endpoint: str) -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    exporter: SpanExporter
    if os.environ.get(_PROTOCOL, "grpc") == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        exporter = over_http.OTLPSpanExporter(endpoint=endpoint)
    else:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        exporter = over_grpc.OTLPSpanExporter(endpoint=endpoint, insecure=True)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def send(tracer: "Tracer", lifecycle: Lifecycle, offset_s: float) -> None:
    """Makes the spans of a lifecycle, below the span that its client named.

    Args:
        tracer: Makes them.
        lifecycle: What the request did.
        offset_s: What to add to its times for the time of day.
    """
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers = lifecycle.headers
    parent = TraceContextTextMapPropagator().extract(headers) if headers else None
    whole = _start(tracer, lifecycle.whole, parent, offset_s)
    if whole.is_recording():
        inside = trace.set_span_in_context(whole)
        for span in lifecycle.spans:
            _start(tracer, span, inside, offset_s).end(_nanoseconds(span.end_s, offset_s))
    whole.end(_nanoseconds(lifecycle.whole.end_s, offset_s))


def _start(tracer: "Tracer", span: Span, context: Any, offset_s: float) -> Any:
    from opentelemetry.trace import Status, StatusCode

    started = tracer.start_span(
        span.name,
        context=context,
        attributes=span.facts,
        start_time=_nanoseconds(span.begin_s, offset_s),
    )
    for note in span.notes:
        started.add_event(note.name, note.facts, _nanoseconds(note.at_s, offset_s))
    if span.error:
        started.set_status(Status(StatusCode.ERROR, span.error))
    return started


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _nanoseconds(at_s: float, offset_s: float) -> int:
    return int((at_s + offset_s) * 1e9)
