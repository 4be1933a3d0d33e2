"""Client connections: HTTP/1.1, one request at a time, with limits on bytes and time.

httptools parses strictly (replicas use the same parser), and this file refuses a few more forms. A request is passed on when
its body is complete. It is written anew for the replica with one Content-Length, so that client and replica cannot disagree
about its framing. This file has no routes and no replicas.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, Protocol

import httptools

from penstock.engine.http.errors import HttpError
from penstock.engine.http.limits import KEEP_ALIVE_S, LINGER_S, MAX_REFUSALS, Limits
from penstock.engine.http.offers import without_upgrade
from penstock.router.http.heads import CONTINUE, ClientRequest, Headers, Heads, answer_head, written

HIGH_WATER_BYTES = 64 * 1024  # unread by a client before its replica is made to wait
NEVER = float("inf")


class Handler(Protocol):
    """The application behind the edge."""

    def admit(self, request: ClientRequest) -> HttpError | None:
        """Check the headers; a refusal is sent before the body is read."""

    def handle(self, request: ClientRequest, connection: "ClientConnection") -> None:
        """Answer through the connection: `answer`, or `write` pieces and then `finish`."""


class Reader(Protocol):
    """The writer of an answer. Called when the client reads slowly, reads again, or has left."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def client_gone(self) -> None: ...


class Edge:
    """All client connections of one listener."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.heads = Heads(limits.max_header_bytes, limits.max_body_bytes)
        self.connections: set[ClientConnection] = set()
        self.refused: Counter[int] = Counter()  # status → refusals of what was no valid request
        self.is_closing = False
        self._sweep_s = min(0.5, limits.header_timeout_s / 4, limits.body_timeout_s / 4, limits.write_timeout_s / 4)
        self._due_s = NEVER  # the next sweep
        self._timer: asyncio.TimerHandle | None = None

    def connection(self) -> "ClientConnection":
        return ClientConnection(self)

    @property
    def is_written(self) -> bool:
        """Return whether all answers have been handed to the kernel."""
        return not any(each.transport.get_write_buffer_size() for each in self.connections)

    def start(self) -> None:
        """Check the deadlines of all connections, and again after a pause: two timers for each request would cost more."""
        now_s = time.monotonic()
        late_s = now_s - self._due_s
        if late_s > self._sweep_s:  # the loop was blocked, and what has arrived is not read yet
            for connection in self.connections:
                connection.deadline_s += late_s
                connection.write_deadline_s += late_s
        for connection in [each for each in self.connections if each.deadline_s < now_s]:
            connection.late()
        for connection in [each for each in self.connections if each.write_deadline_s < now_s]:
            connection.transport.abort()
        self._due_s = now_s + self._sweep_s
        self._timer = asyncio.get_running_loop().call_later(self._sweep_s, self.start)

    def shutdown(self) -> None:
        """Close every connection with its next answer, and idle ones now."""
        self.is_closing = True
        for connection in list(self.connections):
            if connection.is_idle:
                connection.transport.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.connections):
            connection.transport.abort()


class ClientConnection(asyncio.Protocol):
    transport: asyncio.Transport
    _late: Callable[[], None]  # at the deadline

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.limits = edge.limits
        self.deadline_s = self.write_deadline_s = NEVER
        self.current: ClientRequest | None = None  # being answered
        self.reader: Reader | None = None
        self.is_paused = False  # the client does not read
        self._waiting: deque[ClientRequest | HttpError] = deque()  # pipelined behind it
        self._parser = httptools.HttpRequestParser(self)
        self._inside: Literal["nothing", "head", "body", "refused"] = "nothing"  # refused: no more is read
        self._arriving: ClientRequest | None = None  # inside a body: its request
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
        return False  # a client that shuts down its half has left; its request is dropped

    def data_received(self, data: bytes) -> None:
        if self._inside == "nothing" and self.current is None and not self._waiting and not self.is_paused:
            request = self.edge.heads.request(data)
            if request is not None:
                self._take_whole(request)
                return
        if self._inside in ("nothing", "head"):
            data = without_upgrade(data)
        # Fed in slices of the limit: an endless header costs at most twice that.
        limit = self.limits.max_header_bytes
        for start in range(0, len(data), limit):
            if self._inside == "refused":
                return
            self._feed(data[start : start + limit])

    def _take_whole(self, request: ClientRequest) -> None:
        """Do what `on_headers_complete` and `on_message_complete` do, for a request that came in one piece."""
        request.keep_alive = not self.edge.is_closing
        objection = self.edge.handler.admit(request)
        if objection is not None:
            self._refuse(objection)
            return
        self.deadline_s = NEVER
        self._start(request)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            assert self._inside == "refused"  # by its headers
        except httptools.HttpParserError:
            self._refuse(HttpError(400, "this is not a valid HTTP/1.1 request"))
        if self._inside == "head":
            if self._num_head_bytes == 0 and self.current is None:
                self._expect_rest("headers", self.limits.header_timeout_s)
            self._num_head_bytes += len(data)
            if self._num_head_bytes > 2 * self.limits.max_header_bytes:
                self._refuse(self._head_too_large())
        elif self._inside == "body" and self.deadline_s == NEVER:
            self._expect_rest("body", self.limits.body_timeout_s)
        if self._waiting and self._inside != "refused":
            self.transport.pause_reading()

    # Callbacks of the parser, which goes on to the end of its slice after a refusal.

    def on_message_begin(self) -> None:
        if self._inside == "nothing":
            self._inside = "head"
            self._target, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._inside == "head":  # else it is a trailer, which is dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._inside != "head":
            return
        parser, fields = self._parser, dict(self._headers)
        version, keep_alive = parser.get_http_version(), parser.should_keep_alive() and not self.edge.is_closing
        request = ClientRequest.of(parser.get_method(), self._target, self._headers, fields, version, keep_alive)
        objection = self._objection(request, fields, version) or self.edge.handler.admit(request)
        if objection is not None:
            self._refuse(objection)
            return
        self._inside, self._arriving = "body", request
        self._num_head_bytes, self.deadline_s = 0, NEVER
        if self.current is None and b"expect" in fields:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._inside == "body" and self._num_body_bytes > self.limits.max_body_bytes:
            self._refuse(self._too_large())  # chunked: nothing was declared
        self._body.append(body)

    def on_message_complete(self) -> None:
        request, self._arriving = self._arriving, None
        if request is None:
            return  # it was refused
        request.body = b"".join(self._body)
        self._inside, self._body, self._num_body_bytes = "nothing", [], 0
        self.deadline_s = NEVER
        if self.current is None and not self._waiting and not self.is_paused:
            self._start(request)
        else:
            self._waiting.append(request)

    def _objection(self, request: ClientRequest, fields: dict[bytes, bytes], version: str) -> HttpError | None:
        """Return the refusal of a request that the parser accepts and the router does not."""
        if self._num_head_bytes:  # it came in pieces: else the slice was no longer than the limit
            num_bytes = len(request.target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if num_bytes > self.limits.max_header_bytes:
                return self._head_too_large()
        if version not in ("1.1", "1.0"):
            return HttpError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        if self._parser.should_upgrade():
            return HttpError(400, "connection: the protocol cannot be changed", param="connection")
        is_doubtful = len(fields) < len(self._headers)  # a name came twice; usually none does
        if (b"host" not in fields and version == "1.1") or (is_doubtful and self._count(b"host") > 1):
            return HttpError(400, "host: exactly one is expected", param="host")
        if is_doubtful and self._count(b"transfer-encoding") > 1:
            return HttpError(400, "transfer-encoding: given more than once", param="transfer-encoding")
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or version == "1.0"):
            return HttpError(501, "transfer-encoding: only 'chunked' is understood", param="transfer-encoding")
        if int(fields.get(b"content-length", b"0")[:20]) > self.limits.max_body_bytes:
            return self._too_large()
        expect = fields.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            return HttpError(417, "expect: only '100-continue' is understood", param="expect")
        return None

    def _count(self, wanted: bytes) -> int:
        return sum(name == wanted for name, _ in self._headers)

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self.limits.max_body_bytes} bytes (--max-body-bytes)")

    def _head_too_large(self) -> HttpError:
        return HttpError(431, f"the headers are larger than {self.limits.max_header_bytes} bytes")

    # Answers.

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer of the router's own to the current request."""
        request = self.current
        if request is None:
            return  # the client is gone
        keep = request.keep_alive and not self.edge.is_closing
        head = answer_head(status, written([*headers, (b"content-length", b"%d" % len(body))]), keep)
        self.transport.write(head if request.method == b"HEAD" else head + body)
        self.finish(keep)

    def refuse(self, error: HttpError) -> None:
        self.answer(error.status, _headers_of(error), error.body())

    def finish(self, keep_alive: bool) -> None:
        """End the current answer, which is written."""
        self.current = self.reader = None
        if keep_alive and self._waiting:
            # Not from here: an immediate answer would call this again, as deep as the client pipelines.
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
        self.edge.handler.handle(request, self)

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

    # A client that does not read.

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

    # Time, and what is refused.

    def late(self) -> None:
        self.deadline_s = NEVER
        self._late()

    def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self.deadline_s = time.monotonic() + seconds
        self._late = otherwise

    def _expect_rest(self, what: str, seconds: float) -> None:
        self._expect(seconds, lambda: self._refuse(HttpError(408, f"the {what} did not arrive within {seconds:g} s")))

    def _refuse(self, error: HttpError) -> None:
        """End the connection with `error`, in its turn: a request in flight is answered first."""
        if self._inside == "refused":
            return
        self._inside, self._arriving = "refused", None
        self.edge.refused[error.status] += 1
        if self.current is None and not self._waiting:
            self._write_refusal(error)
        else:
            self._waiting.append(error)

    def _write_refusal(self, error: HttpError) -> None:
        """Write a refusal, then drop what the client still sends for a moment: a reset would overtake the answer."""
        body = error.body()
        headers = [*_headers_of(error), (b"content-length", b"%d" % len(body))]
        self.transport.write(answer_head(error.status, written(headers), keep_alive=False) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self._expect(LINGER_S, self.transport.abort)


def _headers_of(error: HttpError) -> Headers:
    given = ((name.encode(), value.encode("latin-1")) for name, value in error.headers.items())
    return [(b"content-type", b"application/json"), *given]
