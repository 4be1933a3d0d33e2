"""Pooled connections to one replica, which relay answers to sinks.

The parser runs over every byte, but only to find the end of the answer (0.2 µs per chunk): the router relays the replica's
bytes with their chunk framing. Bytes after the end of an answer are never relayed, because they could be taken for the
answer to another client's request.
"""

import asyncio
import errno
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import httptools

from penstock.engine.http.errors import clip
from penstock.router.http.heads import AnswerHead, Headers, Heads, request_head

MAX_HEAD_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 16 * MAX_HEAD_BYTES  # to the router's own requests; the rest is dropped
IDLE_S = 30.0  # keep-alive timeout; engines close idle connections after 75 s
MAX_IDLE = 256
HIGH_WATER_BYTES = 1 << 20  # write buffer of a connection to a replica
ROUNDS = 8  # iterations of the event loop within a timeout
# Errors of this process or machine, which say nothing about the replica.
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})


class ConnectFailed(Exception):
    """The error for a replica that accepts no connection or does not answer a request of the router itself.

    `is_dead`: it failed as if the replica's process had ended (refused or reset, not a timeout). `is_local`: the router
    itself lacks a resource, such as file descriptors; the error says nothing about the replica."""

    def __init__(self, reason: str, *, is_dead: bool = False, is_local: bool = False) -> None:
        super().__init__(reason)
        self.is_dead = is_dead
        self.is_local = is_local


class Sink(Protocol):
    """The receiver of an answer. No call follows `ended` or `lost`."""

    def head(self, head: AnswerHead) -> None: ...

    def data(self, data: bytes) -> None:
        """Receive raw bytes of the body, including chunk framing."""

    def ended(self) -> None: ...
    def lost(self, reason: str) -> None: ...


class Upstream(asyncio.Protocol):
    """A connection to a replica for one request at a time, reused if both sides keep it alive."""

    transport: asyncio.Transport

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.sink: Sink | None = None
        self.idle_since_s = 0.0
        self.has_heard = False  # a byte of the current answer has arrived
        self.is_at_boundary = False  # the received part of a chunked body ends with a complete chunk, not within a line
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._head = b""  # bytes until the head of an answer is complete
        self._answer: AnswerHead | None = None  # the head that the sink has received
        self._status = 0
        self._headers_done = self._is_complete = self._wants_more = self._is_excess = False

    def send(self, head: bytes, body: bytes, sink: Sink) -> None:
        self.sink = sink
        self.has_heard = False
        self.pool.busy.add(self)
        if len(body) < HIGH_WATER_BYTES // 8:
            self.transport.write(head + body)
        else:
            self.transport.writelines([head, body])

    def drop(self, sink: Sink) -> None:
        """Close the connection if `sink` still waits for its answer, which makes the replica abort the request.

        After the answer is complete, this does nothing: the connection may serve another request already."""
        if self.sink is sink:
            self.sink = None
            self._release(keep=False)

    # The transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        sink, self.sink = self.sink, None
        self.pool.forget(self)
        if sink is not None:
            if self._answer is not None and not self._answer.is_framed and exc is None:
                sink.ended()  # this is how an unframed body ends
            else:
                sink.lost("the connection broke" if self.has_heard else "the connection was closed without an answer")

    def data_received(self, data: bytes) -> None:
        sink = self.sink
        if sink is not None and not self.has_heard and (plain := self.pool.heads.answer(data)) is not None:
            self._take_whole(sink, *plain)
            return
        self.has_heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the replica changed the protocol (101), which was not requested")
            return
        except httptools.HttpParserError:
            self._fail("the answer is not valid HTTP")
            return
        # The parser reports a chunk's size when its line is complete, but the first digits are relayed already.
        self.is_at_boundary &= data.endswith(b"\r\n")
        if sink is None or self._is_excess:
            self._fail("the replica sent data after the end of its answer")
            return
        if self._answer is None:
            data = self._take_head(sink, data)
        if data and self.sink is sink:
            sink.data(data)
        if self._is_complete and self.sink is sink:
            self._finish(sink)

    def _take_whole(self, sink: Sink, head: AnswerHead, body: bytes) -> None:
        self.has_heard = self._wants_more = True
        self._answer = head
        sink.head(head)
        if body and self.sink is sink:
            sink.data(body)
        if self.sink is sink:
            self._finish(sink)

    def _take_head(self, sink: Sink, data: bytes) -> bytes:
        """Collect the head; once it is complete, pass it to the sink and return the first bytes of the body."""
        self._head += data
        if not self._headers_done:
            if len(self._head) > MAX_HEAD_BYTES:
                self._fail(f"the headers of its answer are larger than {MAX_HEAD_BYTES} bytes")
            return b""
        status = self._status
        if status < 200:
            self._fail(f"the replica sent an interim answer ({status}) that was not requested")
            return b""
        codings = [value for name, value in self._headers if name == b"transfer-encoding"]
        if codings and [coding.lower() for coding in codings] != [b"chunked"]:
            shown = b", ".join(codings).decode("latin-1")
            self._fail(f"the replica's answer has the transfer-encoding {clip(shown)!r}; only 'chunked' is understood")
            return b""
        rest = self._head.partition(b"\r\n\r\n")[2]
        self._head = b""
        self._answer = AnswerHead.of(status, self._headers)
        sink.head(self._answer)
        return rest

    def _finish(self, sink: Sink) -> None:
        assert self._answer is not None
        keep = self._answer.is_framed and self._wants_more
        self.sink = self._answer = None
        self._is_complete = self._headers_done = False
        self._headers = []
        self._release(keep)
        sink.ended()

    def _fail(self, reason: str) -> None:
        sink, self.sink = self.sink, None
        self._release(keep=False)
        if sink is not None:
            sink.lost(reason)

    def _release(self, keep: bool) -> None:
        if keep and not self.transport.is_closing():
            self.transport.resume_reading()
            self.pool.put_back(self)
        else:
            self.pool.forget(self)
            self.transport.abort()

    # The parser's callbacks. There is no on_body, since the bytes are relayed unchanged.

    def on_message_begin(self) -> None:
        if self.sink is None or self._is_complete or self._headers_done:
            self._is_excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        # Read here, because the parser resets these at the end of the message.
        self._status = self._parser.get_status_code()
        self._wants_more = self._parser.should_keep_alive()
        self._headers_done = True

    def on_chunk_header(self) -> None:
        self.is_at_boundary = False

    def on_chunk_complete(self) -> None:
        self.is_at_boundary = True

    def on_message_complete(self) -> None:
        self._is_complete = True


class Pool:
    """The connections to one replica. The most recently used is taken first, so that surplus ones expire."""

    def __init__(self, host: str, port: int, host_header: bytes, connect_timeout_s: float) -> None:
        self.host, self.port, self.host_header = host, port, host_header
        self.connect_timeout_s = connect_timeout_s
        self.heads = Heads(MAX_HEAD_BYTES, sys.maxsize)
        self.busy: set[Upstream] = set()
        self._idle: list[Upstream] = []
        self._is_closed = False

    def take_idle(self) -> Upstream | None:
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.transport.is_closing():
                return upstream
        return None

    async def connect(self) -> Upstream:
        loop = asyncio.get_running_loop()
        try:
            async with within(self.connect_timeout_s):
                _, upstream = await loop.create_connection(lambda: Upstream(self), self.host, self.port)
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self.connect_timeout_s:g} s") from None
        except OSError as error:
            is_local = error.errno in _LOCAL_ERRORS and not isinstance(error, socket.gaierror)
            is_dead = not is_local and not isinstance(error, socket.gaierror)
            reason = error.strerror or type(error).__name__
            raise ConnectFailed(reason, is_dead=is_dead, is_local=is_local) from None
        if self._is_closed:  # nobody would close it later
            upstream.transport.abort()
            raise ConnectFailed("the replica was removed")
        return upstream

    def put_back(self, upstream: Upstream) -> None:
        self.busy.discard(upstream)
        if len(self._idle) < MAX_IDLE:
            upstream.idle_since_s = time.monotonic()
            self._idle.append(upstream)
        else:
            upstream.transport.abort()

    def forget(self, upstream: Upstream) -> None:
        self.busy.discard(upstream)
        if upstream in self._idle:
            self._idle.remove(upstream)

    def sweep(self) -> None:
        idle_from_s = time.monotonic() - IDLE_S
        old = [each for each in self._idle if each.idle_since_s <= idle_from_s]
        self._idle = [each for each in self._idle if each not in old]
        for upstream in old:
            upstream.transport.abort()

    def close(self) -> None:
        """Abort all connections, which calls `lost` of their sinks."""
        self._is_closed = True
        idle, self._idle = self._idle, []
        for upstream in [*idle, *self.busy]:
            upstream.transport.abort()

    def check(self) -> None:
        assert not self.busy & set(self._idle), "a connection is busy and idle at once"
        assert all(upstream.sink is None for upstream in self._idle), "an idle connection has a reader"


class QueueSink:
    """A sink for the router's own requests: queues the body without chunk framing, then None."""

    def __init__(self) -> None:
        self.status = 0
        self.failure: str | None = None  # why the connection was lost before the end
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._body: Dechunker | None = None

    def head(self, head: AnswerHead) -> None:
        self.status = head.status
        self._body = Dechunker() if head.is_chunked else None

    def data(self, data: bytes) -> None:
        self.pieces.put_nowait(data if self._body is None else self._body.feed(data))

    def ended(self) -> None:
        self.pieces.put_nowait(None)

    def lost(self, reason: str) -> None:
        self.failure = reason
        self.pieces.put_nowait(None)


async def fetch(pool: Pool, path: str, lines: bytes, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
    """GET from a replica, or POST a JSON body; return status and body. Raise ConnectFailed or TimeoutError."""
    method, kind = (b"GET", b"") if body is None else (b"POST", b"content-type: application/json\r\n")
    head = request_head(method, path.encode(), pool.host_header, lines + kind, body)
    async with within(timeout_s):
        while True:
            kept = pool.take_idle()
            upstream = kept or await pool.connect()
            sink, answer = QueueSink(), bytearray()
            upstream.send(head, body or b"", sink)
            try:
                while (piece := await sink.pieces.get()) is not None:
                    if len(answer) + len(piece) <= MAX_ANSWER_BYTES:
                        answer += piece
            finally:
                upstream.drop(sink)
            if sink.failure is None:
                return sink.status, bytes(answer)
            if kept is None or upstream.has_heard:
                raise ConnectFailed(sink.failure, is_dead=not upstream.has_heard)


class Dechunker:
    """A streaming decoder of chunk framing, which the connection's parser has checked already."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def feed(self, data: bytes) -> bytes:
        self._parser.feed_data(data)
        parts, self._parts = self._parts, []
        return b"".join(parts)


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError after `seconds`, like asyncio.timeout, but not because the event loop was blocked.

    A loop that was blocked for two seconds runs expired timers before it reads answers that arrived long ago. So this
    expires only after its time has passed and the loop has run ROUNDS iterations since it was set: enough to connect,
    write and read what was waiting."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        async def expire() -> None:
            for _ in range(ROUNDS):
                await asyncio.sleep(seconds / ROUNDS)
            limit.reschedule(loop.time())

        expiring = loop.create_task(expire())
        try:
            yield
        finally:
            expiring.cancel()
