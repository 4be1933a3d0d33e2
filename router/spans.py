"""The spans of an exchange: its own, and one for every attempt, under which the replica's then stands.

The client's `traceparent` ends here, and each replica that is asked gets one that names its attempt; also where nothing is
recorded, or replicas would decide anew.
"""

import re
import time
from typing import TYPE_CHECKING

from penstock.engine.http.telemetry import Telemetry
from penstock.engine.http.tracing import CLIENT, SERVER, Trace, Tracer, Value, new_id, open_tracer
from penstock.router.fleet.replica import Outcome
from penstock.router.http.heads import ClientRequest
from penstock.router.metrics import route_of
from penstock.router.placement.load import Charge

if TYPE_CHECKING:
    from penstock.router.exchange import Exchange

_CONTEXT = re.compile(rb"^(traceparent|tracestate):[ \t]*([^\r]*?)[ \t]*\r\n", re.MULTILINE)


class ExchangeSpans:
    def __init__(self, telemetry: Telemetry) -> None:
        self._tracer = open_tracer(telemetry, "penstock-router")
        self.exporter = self._tracer.exporter

    def begin(self, request: ClientRequest) -> "ExchangeTrace":
        """Takes what is said of traces out of the headers that pass on."""
        trace = self._tracer.trace((match[1], match[2]) for match in _CONTEXT.finditer(request.lines))
        request.lines = _CONTEXT.sub(b"", request.lines)
        return ExchangeTrace(self._tracer, trace)


class ExchangeTrace:
    __slots__ = ("_tracer", "trace")

    def __init__(self, tracer: Tracer, trace: Trace) -> None:
        self._tracer, self.trace = tracer, trace

    def attempt(self, charge: Charge, name: str = "attempt") -> "AttemptSpan":
        return AttemptSpan(self._tracer, self.trace, charge, name)

    def end(self, exchange: "Exchange", status: int) -> None:
        """When the last byte is relayed, or there is nothing more to relay."""
        if not self.trace.is_recorded:
            return
        method, path = exchange.request.method.decode("latin-1"), route_of(exchange.request)
        attributes: dict[str, Value] = {
            "http.request.method": method,
            "http.route": path,
            "http.response.status_code": status,
            "gen_ai.request.model": exchange.model,
            "error.type": str(status) if status >= 400 else None,
            "penstock.router.policy": exchange.app.config.policy,
            "penstock.router.attempts": exchange.num_attempts,
        }
        self._tracer.record(
            self.trace,
            f"{method} {path}",
            exchange.begun_s,
            time.monotonic(),
            attributes,
            kind=SERVER,
            span_id=self.trace.span_id,
            is_failed=status >= 500,
        )


class AttemptSpan:
    """One replica asked once."""

    __slots__ = ("_begun_s", "_method", "_name", "_replica", "_span_id", "_trace", "_tracer", "_will_find")

    def __init__(self, tracer: Tracer, trace: Trace, charge: Charge, name: str) -> None:
        self._tracer, self._trace, self._name = tracer, trace, name
        self._replica, self._will_find = charge.replica, charge.predicted_cached_tokens
        self._span_id, self._begun_s, self._method = new_id(), time.monotonic(), b"POST"

    def lines(self, method: bytes) -> bytes:
        """The headers by which the replica finds its place."""
        self._method = method
        state = f"tracestate: {self._trace.state}\r\n" if self._trace.state else ""
        return f"traceparent: {self._trace.header(self._span_id)}\r\n{state}".encode()

    def end(self, outcome: Outcome, status: int) -> None:
        if not self._trace.is_recorded:
            return
        host, _, port = self._replica.removeprefix("http://").rpartition(":")
        is_failed = outcome not in ("answered", "gone") or status >= 500
        attributes: dict[str, Value] = {
            "http.request.method": self._method.decode("latin-1"),
            "http.response.status_code": status or None,
            "server.address": host,
            "server.port": int(port),
            "penstock.router.predicted_cached_tokens": self._will_find,
            "penstock.router.outcome": outcome,
            "error.type": (str(status) if status >= 400 else outcome) if is_failed else None,
        }
        self._tracer.record(
            self._trace,
            self._name,
            self._begun_s,
            time.monotonic(),
            attributes,
            kind=CLIENT,
            span_id=self._span_id,
            is_failed=is_failed,
        )
