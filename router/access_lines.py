"""A request's line in the router's access log: which replica answered it, and how long it took."""

import re
import time

from penstock.engine.http.access_line import AccessLine
from penstock.engine.http.errors import clean_id
from penstock.router.exchange import Exchange
from penstock.router.http.heads import ClientRequest
from penstock.router.routes import route_of

_REQUEST_ID = re.compile(rb"^x-request-id:[ \t]*([^\r]*)\r\n", re.MULTILINE)


def line_of(request: ClientRequest, status: int, key: int | None, exchange: Exchange | None) -> AccessLine:
    line = AccessLine(route=route_of(request), status=status, total_ms=0.0, key=key, client_id=_id_in(request.lines))
    if exchange is not None:
        line.total_ms = round((time.monotonic() - exchange.begun_s) * 1000, 3)
        line.model = clean_id(exchange.model or "")
        line.replica, line.attempts = exchange.replica or None, exchange.num_attempts
        line.trace_id = exchange.trace.trace_id
        if exchange.answer is not None and exchange.first_byte_s is not None:
            line.id, line.cached_tokens = _id_in(exchange.answer.lines), exchange.answer.cached_tokens
            line.first_byte_ms = round(exchange.first_byte_s * 1000, 3)
    return line


def _id_in(lines: bytes) -> str | None:
    found = _REQUEST_ID.search(lines)
    return None if found is None else clean_id(found[1].decode("latin-1"))
