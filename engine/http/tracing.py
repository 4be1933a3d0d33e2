"""Spans of the OpenTelemetry SDK, and the trace that a request belongs to (W3C Trace Context).

Imported only if tracing is enabled: the SDK is the extra `penstock[otel]`. Its own environment variables configure the
exporter, the batches, the resource and the sampler. Spans are made from times on the monotonic
clock; all spans of a request are shifted to the wall clock by the same offset.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import penstock
from penstock.engine.http.telemetry import Telemetry, traces_url

CLOSE_S = 3.0  # timeout for sending the remaining spans at the end

Value = str | int | float | bool | list[str] | None

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """The SDK's tracer of this process, and its end."""

    def __init__(self, telemetry: Telemetry, service: str) -> None:
        # The propagator logs a warning for every invalid header, which any client can send.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        own: dict[str, str | int] = {
            "service.name": service,
            "service.version": penstock.__version__,
            "service.instance.id": secrets.token_hex(8),  # distinguishes processes with the same service name
            "process.pid": os.getpid(),
        }
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource.create(Resource(own).merge(OTELResourceDetector().detect()).attributes)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        assert telemetry.otlp_traces_endpoint is not None
        exporter = OTLPSpanExporter(traces_url(telemetry.otlp_traces_endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock", penstock.__version__)

    def begin(self, headers: Iterable[tuple[bytes, bytes]], name: str, begun_s: float) -> "Trace":
        """Begin the span of a request with these headers, whose names are in lower case."""
        carrier: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
        for name_sent, value in headers:
            if (found := carrier.get(name_sent.decode("latin-1"))) is not None:
                found.append(value.decode("latin-1"))
        is_clear = len(carrier["traceparent"]) == 1  # ignored if given twice
        parent = _PROPAGATOR.extract(carrier) if is_clear else Context()
        return Trace(self._tracer, name, parent, begun_s)

    def close(self) -> None:
        """Send the remaining spans, blocking for at most CLOSE_S: a hung collector must not delay the end."""
        thread = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


class Trace:
    """A request's span and its child spans."""

    __slots__ = ("_context", "_shift_ns", "_tracer", "span")

    def __init__(self, tracer: Tracer, name: str, parent: Context, begun_s: float) -> None:
        self._tracer = tracer
        self._shift_ns = time.time_ns() - time.monotonic_ns()
        self.span = tracer.start_span(name, parent, SpanKind.SERVER, start_time=self._wall_ns(begun_s))
        self._context = set_span_in_context(self.span, Context())

    @property
    def trace_id(self) -> str:
        return format_trace_id(self.span.get_span_context().trace_id)

    @property
    def is_recorded(self) -> bool:
        return self.span.is_recording()

    def begin(self, name: str, begun_s: float, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """Begin a child span of the request's span."""
        return self._tracer.start_span(name, self._context, kind, start_time=self._wall_ns(begun_s))

    def record(self, name: str, begun_s: float, ended_s: float, attributes: Mapping[str, Value]) -> None:
        """Add a child span that has ended already."""
        self.end(self.begin(name, begun_s), max(begun_s, ended_s), attributes)

    def end(self, span: Span, ended_s: float, attributes: Mapping[str, Value], is_failed: bool = False) -> None:
        """End the request's span or a child span; attributes that are None are left out."""
        span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        if is_failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._wall_ns(ended_s))

    def _wall_ns(self, at_s: float) -> int:
        return self._shift_ns + int(at_s * 1e9)


def context_headers(span: Span) -> dict[str, str]:
    """Return the headers that propagate the trace with `span` as the parent, even if it is not recorded."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier
