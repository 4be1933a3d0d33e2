"""What the router reads of messages: a client's request and the head of a replica's answer.

Most are plain: `Heads` reads those in one call of C (csrc/http_head.c). All others go through the parser of the
connection, header by header, and are put together here from what it found. Both ways must agree.
"""

import msgspec

from penstock._csrc import ffi, lib
from penstock.engine.http.token_form import CACHED_HEADER
from penstock.router.http.wire import HOP_BY_HOP, REWRITTEN, Headers, passing, written

CACHED = CACHED_HEADER.encode()
MAX_PLAIN_BYTES = 8192  # of a head


class Request:
    """A request as it came; the body is complete. `path` is as it will be matched: nothing decoded or normalised."""

    __slots__ = (
        "authorization", "body", "content_type", "is_http10", "keep_alive", "lines", "method", "path", "session",
        "target",
    )  # fmt: skip

    def __init__(
        self,
        method: bytes,
        target: bytes,
        lines: bytes,
        authorization: list[bytes],
        content_type: bytes,
        session: bytes,
        *,
        body: bytes = b"",
        is_http10: bool = False,
        keep_alive: bool = True,
    ) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.lines = lines  # the headers that may pass on, as they will be written
        self.authorization = authorization  # all that were given
        self.content_type = content_type
        self.session = session  # empty where none was given, as all headers here
        self.body = body
        self.is_http10 = is_http10
        self.keep_alive = keep_alive

    @classmethod
    def of(cls, method: bytes, target: bytes, headers: Headers, *, is_http10: bool, keep_alive: bool) -> "Request":
        """From what a parser found; of a header that came several times the last counts."""
        fields = dict(headers)
        return cls(
            method,
            target,
            written(passing(headers, REWRITTEN)),
            [value for name, value in headers if name == b"authorization"],
            fields.get(b"content-type", b""),
            fields.get(b"x-session-id", b""),
            is_http10=is_http10,
            keep_alive=keep_alive,
        )


class AnswerHead(msgspec.Struct, frozen=True, gc=False):
    status: int
    lines: bytes  # the headers that may pass on, as they will be written
    cached_tokens: int | None  # as an engine reports them
    is_framed: bool = True  # the body has a length or chunks; else it ends with the connection
    is_chunked: bool = False
    is_stream: bool = False  # of events

    @classmethod
    def of(cls, status: int, headers: Headers) -> "AnswerHead":
        fields = dict(headers)
        is_chunked = b"transfer-encoding" in fields
        return cls(
            status,
            written(passing(headers, HOP_BY_HOP)),
            _count(fields.get(CACHED, b"")),
            is_chunked or b"content-length" in fields or status in (204, 304),
            is_chunked,
            fields.get(b"content-type", b"").startswith(b"text/event-stream"),
        )


class Heads:
    """Reads plain messages; None for what is not plain. `max_bytes` of a head, `max_body_bytes` of a body."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self._max_bytes = min(max_bytes, MAX_PLAIN_BYTES)
        self._max_body_bytes = max_body_bytes
        self._found = ffi.new("int32_t[9]")
        self._lines = ffi.new("uint8_t[]", self._max_bytes)
        self._written = ffi.buffer(self._lines)

    def request(self, data: bytes) -> Request | None:
        """A whole one."""
        found = self._found
        if not lib.penstock_plain_request(data, len(data), found, self._lines, self._max_bytes):
            return None
        target_end, begin, size, key, key_end, kind, kind_end, session, session_end = ffi.unpack(found, 9)
        if len(data) - begin > self._max_body_bytes:
            return None
        return Request(
            b"POST",
            data[5:target_end],
            self._written[:size],
            [data[key:key_end]] if key else [],
            data[kind:kind_end],
            data[session:session_end],
            body=data[begin:],
        )

    def answer(self, data: bytes) -> tuple[AnswerHead, bytes] | None:
        """A whole one, with its body."""
        found = self._found
        if not lib.penstock_plain_answer(data, len(data), found, self._lines, self._max_bytes):
            return None
        status, begin, size, cached, cached_end = ffi.unpack(found, 5)
        return AnswerHead(status, self._written[:size], _count(data[cached:cached_end])), data[begin:]


def _count(value: bytes) -> int | None:
    return int(value) if value.isdigit() and len(value) < 10 else None
