"""A stand-in for a collector of OpenTelemetry spans: OTLP/HTTP in JSON. It keeps what it takes, and can refuse or hang."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

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
        self.batches: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.answer: dict[str, Any] = {}
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
                    collector.take(self.path, dict(self.headers.items()), json.loads(body))
                answer = json.dumps(collector.answer).encode()
                self.send_response(collector.status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def take(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        assert path == "/v1/traces" and headers["content-type"] == "application/json"
        (resource,) = body["resourceSpans"]
        (scope,) = resource["scopeSpans"]
        assert scope["scope"]["name"] == "penstock"
        service = plain(resource["resource"]["attributes"])["service.name"]
        self.headers.append({name.lower(): value for name, value in headers.items()})
        self.batches.append(len(scope["spans"]))
        self.spans += [seen(service, span) for span in scope["spans"]]

    def named(self, name: str, count: int = 1) -> list[SpanSeen]:
        """The spans of a name, once there are as many."""
        until(lambda: sum(span.name == name for span in self.spans) >= count)
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> SpanSeen:
        (span,) = self.named(name)
        return span


def seen(service: str, span: dict[str, Any]) -> SpanSeen:
    assert len(span["traceId"]) == 32 and len(span["spanId"]) == 16
    return SpanSeen(
        service,
        span["name"],
        span["kind"],
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId", ""),
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        plain(span["attributes"]),
        span.get("traceState", ""),
        span.get("status") == {"code": 2},
    )


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["key"]: value(each["value"]) for each in attributes}


def value(found: dict[str, Any]) -> Any:
    ((kind, said),) = found.items()
    if kind == "intValue":
        assert isinstance(said, str)  # 64 bits are written as text
        return int(said)
    if kind == "arrayValue":
        return [value(each) for each in said["values"]]
    kinds: dict[str, type | tuple[type, ...]] = {"stringValue": str, "boolValue": bool, "doubleValue": (float, int)}
    assert isinstance(said, kinds[kind])
    return said


def traced(collector: Collector, share: float | None = None) -> Telemetry:
    return Telemetry(otlp_traces_endpoint=collector.url, trace_share=share)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        collector.may_answer.set()
        collector.server.shutdown()
        collector.server.server_close()
        thread.join(10)
