"""The spans of an exchange: its own, and one for each leg, which is the parent of the replica's.

The client's `traceparent` ends here. Each replica gets one that names its leg, also where nothing is recorded; otherwise the
replica would decide anew whether to record.
"""

import re
import time

from opentelemetry.trace import SpanKind

from penstock.engine.http.telemetry import Telemetry
from penstock.engine.http.tracing import Trace, Tracing, Value, context_headers
from penstock.router import exchange
from penstock.router.fleet.replica import Outcome
from penstock.router.http.heads import ClientRequest
from penstock.router.leg import LegSpan
from penstock.router.placement.load import Charge
from penstock.router.routes import route_of

_CONTEXT = re.compile(rb"^(traceparent|tracestate):[ \t]*([^\r]*?)[ \t]*\r\n", re.MULTILINE)


class ExchangeSpans:
    def __init__(self, telemetry: Telemetry, policy: str) -> None:
        self._tracing = Tracing(telemetry, "penstock-router")
        self._policy = policy
        self.close = self._tracing.close

    def begin(self, request: ClientRequest) -> "ExchangeTrace":
        """Begin the exchange's span, and take the trace context out of the headers that pass on."""
        headers = [(match[1].lower(), match[2]) for match in _CONTEXT.finditer(request.lines)]
        request.lines = _CONTEXT.sub(b"", request.lines)
        trace = self._tracing.begin(headers, request.method.decode("latin-1"), time.monotonic())
        return ExchangeTrace(trace, self._policy)


class ExchangeTrace(exchange.RequestTrace):
    def __init__(self, trace: Trace, policy: str) -> None:
        self._trace, self._policy = trace, policy
        self.trace_id = trace.trace_id

    def leg(self, charge: Charge, name: str = "attempt") -> LegSpan:
        return RecordedLeg(self._trace, charge, name)

    def end(self, exchange: exchange.Exchange, status: int) -> None:
        """End the exchange's span, when the last byte is relayed or there is nothing more to relay."""
        if not self._trace.is_recorded:
            return
        method, path = exchange.request.method.decode("latin-1"), route_of(exchange.request)
        attributes: dict[str, Value] = {
            "http.request.method": method,
            "http.route": path,
            "http.response.status_code": status,
            "gen_ai.request.model": exchange.model,
            "error.type": str(status) if status >= 400 else None,
            "penstock.router.policy": self._policy,
            "penstock.router.attempts": exchange.num_attempts,
        }
        self._trace.span.update_name(f"{method} {path}")
        self._trace.end(self._trace.span, time.monotonic(), attributes, status >= 500)


class RecordedLeg(LegSpan):
    def __init__(self, trace: Trace, charge: Charge, name: str) -> None:
        self._trace, self._method = trace, b"POST"
        self._replica, self._predicted = charge.replica, charge.predicted_cached_tokens
        self._span = trace.begin(name, time.monotonic(), SpanKind.CLIENT)

    def lines(self, method: bytes) -> bytes:
        self._method = method
        return "".join(f"{name}: {value}\r\n" for name, value in context_headers(self._span).items()).encode()

    def end(self, outcome: Outcome, status: int) -> None:
        if not self._span.is_recording():
            return
        host, _, port = self._replica.removeprefix("http://").rpartition(":")
        is_failed = outcome not in ("answered", "gone") or status >= 500
        attributes: dict[str, Value] = {
            "http.request.method": self._method.decode("latin-1"),
            "http.response.status_code": status or None,
            "server.address": host,
            "server.port": int(port),
            "penstock.router.predicted_cached_tokens": self._predicted,
            "penstock.router.outcome": outcome,
            "error.type": (str(status) if status >= 400 else outcome) if is_failed else None,
        }
        self._trace.end(self._span, time.monotonic(), attributes, is_failed)
