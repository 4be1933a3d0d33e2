"""Parsing, filtering and writing of the heads of HTTP/1.1 messages.

`Heads` parses the common case of a plain, complete message in one C call (csrc/http_head.c). For all other messages, the
parsers of the connections (edge.py, upstream.py) find the headers, and the `of` methods interpret them. Both ways must
agree. Hop-by-hop headers, headers named by a Connection header and `x-penstock-` headers are removed in both directions.
"""

import re
from http import HTTPStatus

import msgspec

from penstock._csrc import ffi, lib
from penstock.engine.http.auth import CARRIERS, bearers
from penstock.engine.http.token_form import CACHED_HEADER

Headers = list[tuple[bytes, bytes]]  # names in lower case

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PRIVATE = b"x-penstock-"
CACHED = CACHED_HEADER.encode()
MAX_PLAIN_BYTES = 8192  # of the head of a plain message

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# Request headers that are not forwarded: hop-by-hop headers, and those that the router interprets or writes itself.
REWRITTEN = HOP_BY_HOP | CARRIERS | {b"host", b"content-length", b"content-type", b"expect"}
STATUS_LINES = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode()) for status in map(int, HTTPStatus)
}
_PLAIN_HOST = re.compile(rb"\r\nhost: ([^\r]*)", re.IGNORECASE)


class ClientRequest(msgspec.Struct, gc=False):
    """A client's request; the body is complete when the handler gets it."""

    method: bytes
    target: bytes
    path: str  # for matching routes: not decoded, not normalized
    host: bytes | None  # missing with HTTP/1.0
    lines: bytes  # the header lines to forward
    authorization: list[bytes]  # all values
    content_type: bytes
    session: bytes  # like all headers here, empty if missing
    is_http10: bool = False
    keep_alive: bool = True
    body: bytes = b""

    @classmethod
    def of(
        cls, method: bytes, target: bytes, headers: Headers, fields: dict[bytes, bytes], version: str, keep_alive: bool
    ) -> "ClientRequest":
        """Build a request from parsed headers; `fields` maps each name to the last value."""
        return cls(
            method,
            target,
            target.partition(b"?")[0].decode("latin-1"),
            fields.get(b"host"),
            passing(headers, fields, REWRITTEN),
            [] if CARRIERS.isdisjoint(fields) else bearers(headers),
            fields.get(b"content-type", b""),
            fields.get(b"x-session-id", b""),
            version == "1.0",
            keep_alive and version == "1.1",
        )


class AnswerHead(msgspec.Struct, frozen=True, gc=False):
    status: int
    lines: bytes  # the header lines to forward
    cached_tokens: int | None  # reported by the engine
    is_framed: bool = True  # the body has a length or chunks; otherwise it ends with the connection
    is_chunked: bool = False
    is_stream: bool = False  # server-sent events

    @classmethod
    def of(cls, status: int, headers: Headers) -> "AnswerHead":
        fields = dict(headers)
        is_chunked = b"transfer-encoding" in fields
        return cls(
            status,
            passing(headers, fields, HOP_BY_HOP),
            _count(fields.get(CACHED, b"")),
            is_chunked or b"content-length" in fields or status in (204, 304),
            is_chunked,
            fields.get(b"content-type", b"").startswith(b"text/event-stream"),
        )


class Heads:
    """A parser of plain, complete messages with size limits for head and body; returns None for all others."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self._max_bytes = min(max_bytes, MAX_PLAIN_BYTES)
        self._max_body_bytes = max_body_bytes
        self._offsets = ffi.new("int32_t[9]")
        self._lines = ffi.new("uint8_t[]", self._max_bytes)
        self._written = ffi.buffer(self._lines)

    def request(self, data: bytes) -> ClientRequest | None:
        """Parse a complete request."""
        offsets = self._offsets
        if not lib.penstock_plain_request(data, len(data), offsets, self._lines, self._max_bytes):
            return None
        target_end, begin, size, key, key_end, kind, kind_end, session, session_end = ffi.unpack(offsets, 9)
        if len(data) - begin > self._max_body_bytes:
            return None
        target, host = data[5:target_end], _PLAIN_HOST.search(data, target_end, begin)
        assert host is not None, "a plain request has one Host header"
        return ClientRequest(
            b"POST",
            target,
            target.partition(b"?")[0].decode("latin-1"),
            host[1],
            self._written[:size],
            [data[key:key_end]] if key else [],
            data[kind:kind_end],
            data[session:session_end],
            body=data[begin:],
        )

    def answer(self, data: bytes) -> tuple[AnswerHead, bytes] | None:
        """Parse a complete response; return its head and body."""
        offsets = self._offsets
        if not lib.penstock_plain_response(data, len(data), offsets, self._lines, self._max_bytes):
            return None
        status, begin, size, cached, cached_end = ffi.unpack(offsets, 5)
        return AnswerHead(status, self._written[:size], _count(data[cached:cached_end])), data[begin:]


def _count(value: bytes) -> int | None:
    return int(value) if value.isdigit() and len(value) < 10 else None


def passing(headers: Headers, fields: dict[bytes, bytes], dropped: frozenset[bytes]) -> bytes:
    """Return the header lines to forward: without `dropped`, and without headers that a Connection header names."""
    if b"connection" in fields:
        named = b",".join([value for name, value in headers if name == b"connection"]).lower()
        if named != b"keep-alive":
            dropped |= {word.strip() for word in named.split(b",")}
    return written([each for each in headers if (name := each[0]) not in dropped and not name.startswith(PRIVATE)])


def written(headers: Headers) -> bytes:
    return b"\r\n".join([*map(b": ".join, headers), b""])


def answer_head(status: int, lines: bytes, keep_alive: bool) -> bytes:
    """Return the head of a response with the given header lines."""
    status_line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    return status_line + lines + (b"\r\n" if keep_alive else b"connection: close\r\n\r\n")


def request_head(method: bytes, target: bytes, host: bytes, lines: bytes, body: bytes | None = None) -> bytes:
    """Return the head of a request to a replica; `lines` are the header lines filtered by `passing`."""
    length = b"" if body is None else b"content-length: %d\r\n" % len(body)
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n" % (method, target, host, lines, length)
