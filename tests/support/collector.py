"""A stand-in for a collector of OpenTelemetry spans: OTLP over HTTP. It keeps what it takes, and can refuse or hang."""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from unittest import mock

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from penstock.engine.http.telemetry import Telemetry
from tests.support.running_server import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class SpanSeen(NamedTuple):
    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    state: str
    is_failed: bool


class Collector:
    def __init__(self) -> None:
        self.spans: list[SpanSeen] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.num_asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.num_asked += 1
                collector.may_answer.wait(60)
                if collector.status == 200:
                    collector.take(self.path, dict(self.headers.items()), body)
                with contextlib.suppress(OSError):  # the exporter may have given up
                    self.send_response(collector.status)
                    self.send_header("content-length", "0")
                    self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces"
        self.headers.append({name.lower(): value for name, value in headers.items()})
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = plain(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                assert scope.scope.name == "penstock"
                self.spans += [seen(service, span) for span in scope.spans]

    def named(self, name: str, count: int = 1) -> list[SpanSeen]:
        """The spans of a name, once there are as many."""
        until(lambda: sum(span.name == name for span in self.spans) >= count)
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> SpanSeen:
        (span,) = self.named(name)
        return span


def seen(service: str, span: Span) -> SpanSeen:
    return SpanSeen(
        service,
        span.name,
        int(span.kind),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        plain(span.attributes),
        span.trace_state,
        span.status.code == Status.STATUS_CODE_ERROR,
    )


def plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: value(each.value) for each in attributes}


def value(found: AnyValue) -> Any:
    kind = found.WhichOneof("value")
    assert kind is not None
    return [value(each) for each in found.array_value.values] if kind == "array_value" else getattr(found, kind)


def traced(collector: Collector) -> Telemetry:
    return Telemetry(otlp_traces_endpoint=collector.url)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Serve a collector; processes that start meanwhile export their spans at once."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with mock.patch.dict(os.environ, OTEL_BSP_SCHEDULE_DELAY="20"):
            yield collector
    finally:
        collector.may_answer.set()
        collector.server.shutdown()
        collector.server.server_close()
        thread.join(60)
