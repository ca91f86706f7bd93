# SPDX-License-Identifier: Apache-2.0
"""A real OTLP receiver in this process, over gRPC or HTTP, that keeps the spans it is sent."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 30.0


@attrs.define
class Receiver:
    """What has come in.

    Attributes:
        endpoint: Where spans are to be sent.
        scopes: Name of the instrumentation library of each span, by the span's id.
        gate: While it is not set, nobody is answered.
    """

    endpoint: str = ""
    spans: list[Span] = attrs.field(factory=list)
    scopes: dict[bytes, str] = attrs.field(factory=dict)
    gate: threading.Event = attrs.field(factory=threading.Event)

    def take(self, request: messages.ExportTraceServiceRequest) -> None:
        self.gate.wait(PATIENCE_S)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.scopes.update({span.span_id: scope.scope.name for span in scope.spans})
                self.spans.extend(scope.spans)

    def wait_for(self, name: str) -> Span:
        """Returns the first span of a name."""
        give_up_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_s:
            for span in list(self.spans):
                if span.name == name:
                    return span
            time.sleep(0.005)
        raise AssertionError(f"no {name} among {[span.name for span in self.spans]}")

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def facts(holder: Any) -> dict[str, Any]:
    """The attributes of a span or of an event."""
    return {
        pair.key: getattr(pair.value, str(pair.value.WhichOneof("value")))
        for pair in holder.attributes
    }


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    receiver.gate.set()

    class Servicer(service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - its name in the protocol
            receiver.take(request)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    receiver.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.stop(0).wait(PATIENCE_S)


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    receiver.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(messages.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)
