"""A stand-in for a collector of OpenTelemetry spans: OTLP over HTTP. It keeps what it takes, and can refuse or hang."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from penstock.engine.http.telemetry import Telemetry
from tests.support.router_stub import Seen, stub, whole
from tests.support.running_server import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class SpanSeen:
    def __init__(self, service: str, span: Span) -> None:
        self.service, self.name, self.kind = service, span.name, int(span.kind)
        self.trace_id, self.span_id, self.parent_id = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.begun_ns, self.ended_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes, self.state = plain(span.attributes), span.trace_state
        self.is_failed = span.status.code == Status.STATUS_CODE_ERROR

    def __repr__(self) -> str:
        return str(vars(self))


class Collector:
    url: str

    def __init__(self) -> None:
        self.spans: list[SpanSeen] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.num_requests = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def answer(self, request: Seen, sock: socket.socket) -> bytes:
        self.num_requests += 1
        self.may_answer.wait(60)
        if self.status == 200:
            assert request.line.startswith(b"POST /v1/traces ")
            self.headers.append({name.decode(): value.decode() for name, value in request.headers})
            for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
                service = plain(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    assert scope.scope.name == "penstock"
                    self.spans += [SpanSeen(service, span) for span in scope.spans]
        return whole(b"", b"%d said so" % self.status)

    def named(self, name: str, count: int = 1) -> list[SpanSeen]:
        """Return the spans of a name, once there are as many."""
        until(lambda: sum(span.name == name for span in self.spans) >= count)
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> SpanSeen:
        (span,) = self.named(name)
        return span


def plain(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: value(each.value) for each in attributes}


def value(any_value: AnyValue) -> Any:
    kind = any_value.WhichOneof("value")
    assert kind is not None
    return [value(each) for each in any_value.array_value.values] if kind == "array_value" else getattr(any_value, kind)


def traced(collector: Collector) -> Telemetry:
    return Telemetry(otlp_traces_endpoint=collector.url)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Serve a collector; processes that start meanwhile export their spans at once."""
    collector = Collector()
    with stub(collector.answer) as server, mock.patch.dict(os.environ, OTEL_BSP_SCHEDULE_DELAY="20"):
        collector.url = server.url + "/v1/traces"
        yield collector
        collector.may_answer.set()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as started:
        yield started
