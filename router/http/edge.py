"""Client connections: HTTP/1.1, one request at a time, with limits on bytes and time.

httptools parses strictly (the replicas use the same parser); this file refuses further doubtful requests. A request is
passed to the handler when its body is complete. The router writes the request to a replica anew with one Content-Length,
so a replica cannot interpret the client's framing differently. This file handles neither routes nor replicas.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, Protocol

import httptools

from penstock.engine.http.connection import without_upgrade
from penstock.engine.http.errors import HttpError
from penstock.engine.http.limits import KEEP_ALIVE_S, LINGER_S, MAX_REFUSALS, Limits
from penstock.router.http.heads import CONTINUE, ClientRequest, Headers, Heads, answer_head, written

HIGH_WATER_BYTES = 64 * 1024  # bytes unread by a client before reading from its replica pauses
NEVER = float("inf")


class Reader(Protocol):
    """The writer of an answer, which is notified when the client is slow, reads again, or has disconnected."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def client_gone(self) -> None: ...


class Edge:
    """All client connections of one listener.

    `admit` checks the headers; its error is sent before the body is read. `handle` answers through the connection: `answer`,
    or `write` of the transport and then `finish`."""

    def __init__(
        self,
        limits: Limits,
        admit: Callable[[ClientRequest], HttpError | None],
        handle: Callable[[ClientRequest, "ClientConnection"], None],
    ) -> None:
        self.limits, self.admit, self.handle = limits, admit, handle
        self.heads = Heads(limits.max_header_bytes, limits.max_body_bytes)
        self.connections: set[ClientConnection] = set()
        self.refused: Counter[int] = Counter()  # status → number of requests refused by this file
        self.is_closing = False
        self._sweep_s = min(0.5, limits.header_timeout_s / 4, limits.body_timeout_s / 4, limits.write_timeout_s / 4)

    @property
    def is_written(self) -> bool:
        """Return whether all answers have been written to the sockets."""
        return not any(each.transport.get_write_buffer_size() for each in self.connections)

    async def watch_deadlines(self) -> None:
        """Check the deadlines of all connections again and again: two timers per request would cost more."""
        while True:
            due_s = time.monotonic() + self._sweep_s
            await asyncio.sleep(self._sweep_s)
            now_s = time.monotonic()
            late_s = now_s - due_s
            if late_s > self._sweep_s:  # the loop was blocked: data that arrived meanwhile is not read yet
                for connection in self.connections:
                    connection.deadline_s += late_s
                    connection.write_deadline_s += late_s
            for connection in [each for each in self.connections if each.deadline_s < now_s]:
                connection.late()
            for connection in [each for each in self.connections if each.write_deadline_s < now_s]:
                connection.transport.abort()

    def shutdown(self) -> None:
        """Close idle connections now, and every other connection after its answer."""
        self.is_closing = True
        for connection in list(self.connections):
            if connection.is_idle:
                connection.transport.close()

    def close(self) -> None:
        for connection in list(self.connections):
            connection.transport.abort()


class ClientConnection(asyncio.Protocol):
    transport: asyncio.Transport
    _late: Callable[[], None]  # called at the deadline

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.limits = edge.limits
        self.deadline_s = self.write_deadline_s = NEVER
        self.current: ClientRequest | None = None  # the request being answered
        self.reader: Reader | None = None
        self.is_paused = False  # the client does not read
        self._waiting: deque[ClientRequest | HttpError] = deque()  # pipelined requests
        self._parser = httptools.HttpRequestParser(self)
        self._inside: Literal["nothing", "head", "body", "refused"] = "nothing"  # "refused": input is ignored
        self._arriving: ClientRequest | None = None  # the request whose body is being read
        self._target = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._num_head_bytes = self._num_body_bytes = 0

    @property
    def is_idle(self) -> bool:
        return self.current is None and self._inside == "nothing"

    # The transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.edge.connections.add(self)
        count = len(self.edge.connections) - self.limits.max_connections
        if count > max(MAX_REFUSALS, self.limits.max_connections):
            transport.abort()
        elif count > 0:
            self._refuse(
                HttpError(503, f"the router has {self.limits.max_connections} connections open (--max-connections)")
            )
        else:
            self._expect(self.limits.header_timeout_s, transport.abort)

    def connection_lost(self, _error: Exception | None) -> None:
        self.edge.connections.discard(self)
        self.deadline_s = NEVER
        self._inside = "refused"
        self._waiting.clear()
        reader, self.reader = self.reader, None
        self.current = None
        if reader is not None:
            reader.client_gone()

    def eof_received(self) -> bool:
        return False  # a client that half-closes counts as disconnected: its requests are dropped

    def data_received(self, data: bytes) -> None:
        if self._inside == "nothing" and self.current is None and not self._waiting and not self.is_paused:
            request = self.edge.heads.request(data)
            if request is not None:
                self._take_whole(request)
                return
        if self._inside in ("nothing", "head"):
            data = without_upgrade(data)
        # Slices of the limit's size: an endless header is refused after at most twice the limit.
        limit = self.limits.max_header_bytes
        for start in range(0, len(data), limit):
            if self._inside == "refused":
                return
            self._feed(data[start : start + limit])

    def _take_whole(self, request: ClientRequest) -> None:
        """Do what `on_headers_complete` and `on_message_complete` do, for a complete plain request."""
        request.keep_alive = not self.edge.is_closing
        objection = self.edge.admit(request)
        if objection is not None:
            self._refuse(objection)
            return
        self.deadline_s = NEVER
        self._start(request)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            assert self._inside == "refused"  # `_objection` refused the upgrade
        except httptools.HttpParserError:
            self._refuse(HttpError(400, "this is not a valid HTTP/1.1 request"))
        if self._inside == "head":
            if self._num_head_bytes == 0 and self.current is None:
                self._expect_rest("headers", self.limits.header_timeout_s)
        elif self._inside == "body" and self.deadline_s == NEVER:
            self._expect_rest("body", self.limits.body_timeout_s)
        if self._inside in ("head", "body"):
            self._num_head_bytes += len(data)  # within a body: its trailers, which the parser buffers
            if self._num_head_bytes > 2 * self.limits.max_header_bytes:
                self._refuse(self._head_too_large())
        if self._waiting and self._inside != "refused":
            self.transport.pause_reading()

    # The parser's callbacks. After a refusal, the parser still processes the rest of its slice.

    def on_message_begin(self) -> None:
        if self._inside == "nothing":
            self._inside = "head"
            self._target, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._inside == "head":  # otherwise it is a trailer, which is dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._inside != "head":
            return
        parser, fields = self._parser, dict(self._headers)
        version, keep_alive = parser.get_http_version(), parser.should_keep_alive() and not self.edge.is_closing
        request = ClientRequest.of(parser.get_method(), self._target, self._headers, fields, version, keep_alive)
        objection = self._objection(request, fields, version) or self.edge.admit(request)
        if objection is not None:
            self._refuse(objection)
            return
        self._inside, self._arriving = "body", request
        self._num_head_bytes, self.deadline_s = 0, NEVER
        if self.current is None and b"expect" in fields:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        self._num_body_bytes += len(body)
        if self._inside == "body" and self._num_body_bytes > self.limits.max_body_bytes:
            self._refuse(self._too_large())  # chunked: without a declared length
        self._body.append(body)

    def on_message_complete(self) -> None:
        request, self._arriving = self._arriving, None
        if request is None:
            return  # it was refused
        request.body = b"".join(self._body)
        self._inside, self._body = "nothing", []
        self._num_head_bytes = self._num_body_bytes = 0
        self.deadline_s = NEVER
        if self.current is None and not self._waiting and not self.is_paused:
            self._start(request)
        else:
            self._waiting.append(request)

    def _objection(self, request: ClientRequest, fields: dict[bytes, bytes], version: str) -> HttpError | None:
        """Return an error for a request that the parser accepts and the router refuses."""
        if self._num_head_bytes:  # the head came in several slices; a single slice is within the limit
            num_bytes = len(request.target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if num_bytes > self.limits.max_header_bytes:
                return self._head_too_large()
        if version not in ("1.1", "1.0"):
            return HttpError(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        if self._parser.should_upgrade():
            return HttpError(400, "connection: protocol upgrades are not supported", param="connection")
        is_doubtful = len(fields) < len(self._headers)  # a name occurs twice, which is rare
        if (b"host" not in fields and version == "1.1") or (is_doubtful and self._count(b"host") > 1):
            return HttpError(400, "host: exactly one is expected", param="host")
        if is_doubtful and self._count(b"transfer-encoding") > 1:
            return HttpError(400, "transfer-encoding: given more than once", param="transfer-encoding")
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or version == "1.0"):
            return HttpError(501, "transfer-encoding: only 'chunked' is supported", param="transfer-encoding")
        if int(fields.get(b"content-length", b"0")[:20]) > self.limits.max_body_bytes:
            return self._too_large()
        expect = fields.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            return HttpError(417, "expect: only '100-continue' is supported", param="expect")
        return None

    def _count(self, name: bytes) -> int:
        return sum(each == name for each, _ in self._headers)

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self.limits.max_body_bytes} bytes (--max-body-bytes)")

    def _head_too_large(self) -> HttpError:
        return HttpError(431, f"the headers are larger than {self.limits.max_header_bytes} bytes")

    # Answers.

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Write a complete answer of the router itself to the current request."""
        request = self.current
        if request is None:
            return  # the client has disconnected
        keep = request.keep_alive and not self.edge.is_closing
        head = answer_head(status, written([*headers, (b"content-length", b"%d" % len(body))]), keep)
        self.transport.write(head if request.method == b"HEAD" else head + body)
        self.finish(keep)

    def refuse(self, error: HttpError) -> None:
        self.answer(error.status, headers_of(error), error.body())

    def finish(self, keep_alive: bool) -> None:
        """Finish the current answer, which has been written, and start the next request or close the connection."""
        self.current = self.reader = None
        if keep_alive and self._waiting:
            # Not called directly: requests answered at once would recurse as deep as the client pipelines.
            asyncio.get_running_loop().call_soon(self._next)
        elif not keep_alive or self._inside == "refused":
            self._inside = "refused"
            self._expect(self.limits.write_timeout_s, self.transport.abort)
            self.transport.close()
        elif self._inside == "nothing":
            self._expect(KEEP_ALIVE_S, self.transport.abort)
        elif self._inside == "head":
            self._expect_rest("headers", self.limits.header_timeout_s)
        else:
            self._expect_rest("body", self.limits.body_timeout_s)

    def _start(self, request: ClientRequest) -> None:
        self.current = request
        self.edge.handle(request, self)

    def _next(self) -> None:
        if self.current is not None or self.is_paused or not self._waiting or self.transport.is_closing():
            return
        following = self._waiting.popleft()
        if not self._waiting:
            self.transport.resume_reading()
        if isinstance(following, HttpError):
            self._write_refusal(following)
        else:
            self._start(following)

    # Flow control.

    def pause_writing(self) -> None:
        self.is_paused = True
        self.write_deadline_s = time.monotonic() + self.limits.write_timeout_s
        if self.reader is not None:
            self.reader.pause()

    def resume_writing(self) -> None:
        self.is_paused = False
        self.write_deadline_s = NEVER
        if self.reader is not None:
            self.reader.resume()
        self._next()

    # Deadlines and refusals.

    def late(self) -> None:
        self.deadline_s = NEVER
        self._late()

    def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self.deadline_s = time.monotonic() + seconds
        self._late = otherwise

    def _expect_rest(self, part: str, seconds: float) -> None:
        self._expect(seconds, lambda: self._refuse(HttpError(408, f"the {part} did not arrive within {seconds:g} s")))

    def _refuse(self, error: HttpError) -> None:
        """End the connection with `error`, after the answers to earlier requests."""
        if self._inside == "refused":
            return
        self._inside, self._arriving = "refused", None
        self.edge.refused[error.status] += 1
        if self.current is None and not self._waiting:
            self._write_refusal(error)
        else:
            self._waiting.append(error)

    def _write_refusal(self, error: HttpError) -> None:
        """Write the error, then discard input for a moment: closing at once would reset the connection and lose it."""
        body = error.body()
        headers = [*headers_of(error), (b"content-length", b"%d" % len(body))]
        self.transport.write(answer_head(error.status, written(headers), keep_alive=False) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self._expect(LINGER_S, self.transport.abort)


def headers_of(error: HttpError) -> Headers:
    given = ((name.encode(), value.encode("latin-1")) for name, value in error.headers.items())
    return [(b"content-type", b"application/json"), *given]
