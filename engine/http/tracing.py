"""Spans as OpenTelemetry has them, and the trace that a request belongs to (W3C Trace Context).

A request that comes with a `traceparent` is recorded if that says so, others by chance; either way what is asked on
its behalf learns of the decision. Times are those that the process has measured itself, on the clock that never
steps, and are moved to the wall clock when a span is written, all of a request's by the same distance.
"""

import os
import random
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from penstock.engine.http.otlp import Exporter
from penstock.engine.http.telemetry import Collector, Telemetry

INTERNAL: Final = 1  # kinds of spans
SERVER: Final = 2
CLIENT: Final = 3
FAILED = {"code": 2}  # a span's status

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(rb"[ -~]{1,512}")  # of others; what is longer or odd is not passed on

Value = str | int | float | bool | list[str] | None


class Trace(msgspec.Struct, frozen=True):
    """What a request is part of: its own span, and the one that it came from."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    state: str = ""  # of other tracing systems, passed on
    is_recorded: bool = True
    shift_ns: int = msgspec.field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    def header(self, span_id: str) -> str:
        """The `traceparent` for what is asked on its behalf, in this span."""
        return f"00-{self.trace_id}-{span_id}-{'01' if self.is_recorded else '00'}"


class OtlpSpan(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """As OTLP writes it in JSON: ids in hexadecimal, 64-bit numbers as text."""

    trace_id: str
    span_id: str
    name: str
    kind: Literal[1, 2, 3]
    start_time_unix_nano: str
    end_time_unix_nano: str
    attributes: list[dict[str, Any]]
    parent_span_id: str = ""
    trace_state: str = ""
    status: dict[str, int] = {}


class Tracer:
    """Knows for each request whether it is recorded, and writes spans."""

    def __init__(self, exporter: Exporter, share: float) -> None:
        self.exporter = exporter
        self._share = share
        self._encoder = msgspec.json.Encoder()

    def trace(self, headers: Iterable[tuple[bytes, bytes]]) -> Trace:
        """Of a request that comes with these; their names are in lower case."""
        parents, states = [], []
        for name, value in headers:
            if name == b"traceparent":
                parents.append(value)
            elif name == b"tracestate":
                states.append(value)
        found = parent_of(parents)
        if found is None:
            return Trace(secrets.token_hex(16), new_id(), is_recorded=random.random() < self._share)
        trace_id, parent_id, is_recorded = found
        state = b",".join(states)
        return Trace(trace_id, new_id(), parent_id, state.decode() if _STATE.fullmatch(state) else "", is_recorded)

    def record(
        self,
        trace: Trace,
        name: str,
        begun_s: float,
        ended_s: float,
        attributes: Mapping[str, Value],
        *,
        kind: Literal[1, 2, 3] = INTERNAL,
        span_id: str | None = None,
        is_failed: bool = False,
    ) -> None:
        """A span that has ended, by the monotonic clock. `span_id` is the request's own, or that of a span within
        it; left out, it is a new one within it. Only for traces that are recorded."""
        is_own = span_id == trace.span_id
        span = OtlpSpan(
            trace.trace_id,
            span_id or new_id(),
            name,
            kind,
            str(trace.shift_ns + int(begun_s * 1e9)),
            str(trace.shift_ns + int(max(begun_s, ended_s) * 1e9)),
            [{"key": key, "value": _value(value)} for key, value in attributes.items() if value is not None],
            trace.parent_id if is_own else trace.span_id,
            trace.state if is_own else "",
            FAILED if is_failed else {},
        )
        self.exporter.put(self._encoder.encode(span))


def open_tracer(telemetry: Telemetry, service: str) -> Tracer:
    assert telemetry.otlp_traces_endpoint is not None
    collector = Collector(telemetry.otlp_traces_endpoint, service, os.environ)
    return Tracer(Exporter(collector), 1.0 if telemetry.trace_share is None else telemetry.trace_share)


def new_id() -> str:
    return secrets.token_hex(8)


def parent_of(headers: list[bytes]) -> tuple[str, str, bool] | None:
    """Trace, span and whether it is recorded; None where there is no such header, or not one that can be read."""
    match = _PARENT.fullmatch(headers[0]) if len(headers) == 1 else None
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = match[2].decode(), match[3].decode()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, bool(int(match[4], 16) & 1)


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [{"stringValue": each} for each in value]}}
    return {"stringValue": value}
