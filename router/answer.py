"""Writes a replica's answer to the client, with the replica's chunk framing if the client supports chunks.

Nothing is written before `begin`, so that until then another replica's answer can take its place. Afterwards never, for half
an answer cannot be taken back: a stream that breaks ends with an error event.
"""

import logging
import re

from penstock.engine.http.errors import HttpError
from penstock.router.http.edge import ClientConnection
from penstock.router.http.heads import AnswerHead, ClientRequest, answer_head
from penstock.router.http.upstream import Dechunker

MAX_HELD_BYTES = 64 * 1024  # of a busy replica's answer, which another replica's may replace
BUSY = frozenset({429, 503})  # another replica may give a better answer than these
NO_ANSWER = AnswerHead(0, b"", None)
log = logging.getLogger("penstock.router")
_CACHED = re.compile(rb'"cached_tokens": ?(\d{1,9})\b')


class AnswerWriter:
    def __init__(self, request: ClientRequest, connection: ClientConnection) -> None:
        self.head = NO_ANSWER
        self._request, self._connection = request, connection
        self.held: list[bytes] = []  # of a busy replica's answer, which another replica's can still replace
        self._plain: Dechunker | None = None  # a client of HTTP/1.0 does not know chunks

    def expect(self, head: AnswerHead) -> None:
        """Begin an answer with this head, in place of any earlier one."""
        self.head, self.held = head, []
        self._plain = Dechunker() if head.is_chunked and self._request.is_http10 else None

    def hold(self, data: bytes) -> bool:
        """Hold back a piece of a busy replica's answer. Return False for a piece that the caller must write."""
        if self.head.status not in BUSY or self.head.is_stream or sum(map(len, self.held)) >= MAX_HELD_BYTES:
            return False
        self.held.append(data)
        return True

    def write(self, data: bytes) -> None:
        if self._plain is not None:
            data = self._plain.feed(data)
        self._connection.transport.write(data)

    def begin(self, data: bytes = b"") -> None:
        """Write the head, what was held, and `data`."""
        body, lines = b"".join((*self.held, data)) if self.held else data, self.head.lines
        self.held = []
        if self._plain is not None:
            body = self._plain.feed(body)
        elif self.head.is_chunked:
            lines += b"transfer-encoding: chunked\r\n"
        self._connection.transport.write(answer_head(self.head.status, lines, self._keeps) + body)

    def finish(self) -> None:
        """End a complete answer."""
        self._connection.finish(self._keeps)

    def break_off(self, reason: str, *, is_at_boundary: bool) -> None:
        """End an answer that was partly written: with an error event if the last chunk of a stream is complete, otherwise by
        aborting the connection."""
        if is_at_boundary and self.head.is_stream and self._plain is None:
            # Anthropic's clients look for the event's name; others read the data alone.
            error = HttpError(502, f"the replica failed: {reason}")
            event = b"event: error\ndata: " + error.body() + b"\n\ndata: [DONE]\n\n"
            self._connection.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
            self._connection.finish(keep_alive=False)
        else:
            self._connection.transport.abort()

    @property
    def _keeps(self) -> bool:
        """Return whether the connection stays open after this answer."""
        return self.head.is_framed and self._request.keep_alive and not self._connection.edge.is_closing


def cached_tokens_in(data: bytes) -> int | None:
    """Return the cached tokens that a piece of a response body reports. (In generated text the quotes would be escaped.)"""
    found = _CACHED.findall(data)
    return int(found[-1]) if found else None


def as_refusal(error: Exception) -> HttpError:
    """Return the error that the client gets. The traceback of a bug goes to the log only."""
    if isinstance(error, HttpError):
        return error
    log.error("a request failed in the router", exc_info=error)
    return HttpError(500, "internal error")
