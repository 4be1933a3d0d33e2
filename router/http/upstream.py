"""Connections to one replica, and the answer of one request as it comes in.

The parser runs over every byte, but only to find the end of the answer (0.2 µs a chunk): what is relayed is the
replica's bytes with its own chunk framing. Bytes beyond the end of an answer are never passed on: they could
only be taken for the answer to another client's request.
"""

import asyncio
import errno
import socket
import sys
import time
from typing import Protocol

import httptools

from penstock.router.http.deadline import within
from penstock.router.http.heads import AnswerHead, Headers, Heads, question_head, request_head

MAX_HEAD_BYTES = 64 * 1024
IDLE_S = 30.0  # a kept connection; engines close theirs after 75 s
MAX_IDLE = 256
HIGH_WATER_BYTES = 1 << 20  # a body not yet written to a replica
# Errors of this process or machine, which say nothing about the replica.
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})


class ConnectFailed(Exception):
    """The replica accepts no connection, or does not answer a question of the router.

    `is_dead`: it failed as if the replica's process had ended (refused or reset, not a timeout). `is_local`: the router
    itself lacks something, such as file descriptors, and the replica is not to blame."""

    def __init__(self, reason: str, *, is_dead: bool = False, is_local: bool = False) -> None:
        super().__init__(reason)
        self.is_dead = is_dead
        self.is_local = is_local


class Leg(Protocol):
    """What a request learns of its answer. After `lost` or `ended` nothing follows."""

    def head(self, head: AnswerHead) -> None: ...

    def data(self, data: bytes) -> None:
        """Raw bytes of the body, chunk framing included."""

    def ended(self) -> None: ...
    def lost(self, reason: str) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection: one request at a time, kept for the next one when both sides agree."""

    transport: asyncio.Transport

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.leg: Leg | None = None
        self.idle_since_s = 0.0
        self.has_heard = False  # a byte of the current answer has come
        self.is_closed = False
        self.is_at_boundary = False  # what came so far of a chunked body ends with a whole chunk
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._head = b""  # bytes until the head of an answer is complete
        self._status = 0
        self._headers_done = self._in_body = self._is_complete = self._is_framed = False
        self._wants_more = self._keep = False
        self._is_excess = False

    def send(self, head: bytes, body: bytes, leg: Leg) -> None:
        self.leg = leg
        self.has_heard = False
        self.pool.busy.add(self)
        if len(body) < HIGH_WATER_BYTES // 8:
            self.transport.write(head + body)
        else:
            self.transport.writelines([head, body])

    def drop(self, leg: Leg) -> None:
        """`leg` does not wait any more: the replica sees us leave and aborts. Without effect when its answer is
        complete, for then the connection may serve another already."""
        if self.leg is leg:
            self.leg = None
            self._release(keep=False)

    # The transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        leg, self.leg = self.leg, None
        self.pool.forget(self)
        if leg is not None:
            if self._in_body and not self._is_framed and exc is None:
                leg.ended()  # this is how an unframed body ends
            else:
                leg.lost("the connection broke" if self.has_heard else "the connection was closed without an answer")

    def data_received(self, data: bytes) -> None:
        leg = self.leg
        if leg is not None and not self.has_heard and (plain := self.pool.heads.answer(data)) is not None:
            self._take_whole(leg, *plain)
            return
        self.has_heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("the answer is not valid HTTP")
            return
        if leg is None or self._is_excess:
            self._fail("it sent more than was asked for")
            return
        if not self._in_body:
            data = self._take_head(leg, data)
        if data and self._in_body and self.leg is leg:
            leg.data(data)
        if self._is_complete and self.leg is leg:
            self._finish(leg)

    def _take_whole(self, leg: Leg, head: AnswerHead, body: bytes) -> None:
        self.has_heard = self._keep = True
        leg.head(head)
        if body and self.leg is leg:
            leg.data(body)
        if self.leg is leg:
            self._finish(leg)

    def _take_head(self, leg: Leg, data: bytes) -> bytes:
        """Collect the head; what follows it is the body's first piece."""
        self._head += data
        if not self._headers_done:
            if len(self._head) > MAX_HEAD_BYTES:
                self._fail(f"the headers of its answer are larger than {MAX_HEAD_BYTES} bytes")
            return b""
        status = self._status
        if status < 200:
            self._fail(f"it sent an interim answer ({status}) that was not asked for")
            return b""
        rest = self._head.partition(b"\r\n\r\n")[2]
        self._head = b""
        self._in_body = True
        head = AnswerHead.of(status, self._headers)
        self._is_framed = head.is_framed
        self._keep = head.is_framed and self._wants_more
        leg.head(head)
        return rest

    def _finish(self, leg: Leg) -> None:
        self.leg = None
        self._in_body = self._is_complete = self._headers_done = False
        self._headers = []
        self._release(self._keep)
        leg.ended()

    def _fail(self, reason: str) -> None:
        leg, self.leg = self.leg, None
        self._release(keep=False)
        if leg is not None:
            leg.lost(reason)

    def _release(self, keep: bool) -> None:
        if keep and not self.transport.is_closing():
            self.transport.resume_reading()
            self.pool.put_back(self)
        else:
            self.pool.forget(self)
            self.transport.abort()

    # What the parser finds. No on_body: the bytes are passed on as they are.

    def on_message_begin(self) -> None:
        if self.leg is None or self._is_complete or self._headers_done:
            self._is_excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        # Asked here and not later: with the end of a message the parser forgets.
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
    """The connections to one replica. The last one used is taken first, so that spare ones grow old and go."""

    def __init__(self, host: str, port: int, host_header: bytes, connect_timeout_s: float) -> None:
        self.host, self.port, self.host_header = host, port, host_header
        self.connect_timeout_s = connect_timeout_s
        self.heads = Heads(MAX_HEAD_BYTES, sys.maxsize)
        self.busy: set[Upstream] = set()
        self._idle: list[Upstream] = []

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def take_idle(self) -> Upstream | None:
        while self._idle:
            upstream = self._idle.pop()
            if not upstream.is_closed and not upstream.transport.is_closing():
                return upstream
        return None

    async def connect(self) -> Upstream:
        loop = asyncio.get_running_loop()
        try:
            async with within(self.connect_timeout_s):
                _, upstream = await loop.create_connection(lambda: Upstream(self), self.host, self.port)
                return upstream
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self.connect_timeout_s:g} s") from None
        except OSError as error:
            is_local = error.errno in _LOCAL_ERRORS and not isinstance(error, socket.gaierror)
            is_dead = not is_local and not isinstance(error, socket.gaierror)
            reason = error.strerror or type(error).__name__
            raise ConnectFailed(reason, is_dead=is_dead, is_local=is_local) from None

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
        """Cut all connections; who waits on one hears of it."""
        idle, self._idle = self._idle, []
        for upstream in [*idle, *self.busy]:
            upstream.transport.abort()

    def check(self) -> None:
        assert not self.busy & set(self._idle), "a connection is busy and idle at once"
        assert all(upstream.leg is None for upstream in self._idle), "an idle connection has a reader"


class Collected:
    """A whole small answer, for the router's own questions to replicas."""

    def __init__(self) -> None:
        self.status = 0
        self.is_chunked = False
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def head(self, head: AnswerHead) -> None:
        self.status, self.is_chunked = head.status, head.is_chunked

    def data(self, data: bytes) -> None:
        self._size_bytes += len(data)
        if self._size_bytes <= MAX_HEAD_BYTES * 16:
            self._parts.append(data)

    def ended(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def lost(self, reason: str) -> None:
        if not self.future.done():
            self.future.set_exception(ConnectFailed(reason))

    @property
    def body(self) -> bytes:
        raw = b"".join(self._parts)
        return Dechunker().feed(raw) if self.is_chunked else raw


async def fetch(pool: Pool, path: str, lines: bytes, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
    """GET from a replica, or POST of a body in JSON: status and body of the answer; `lines` are headers, written. Raises
    ConnectFailed or TimeoutError."""
    head = question_head(path, pool.host_header, lines)
    if body is not None:
        lines += b"content-type: application/json\r\n"
        head = request_head(b"POST", path.encode(), pool.host_header, lines, len(body))
    async with within(timeout_s):
        while True:
            kept = pool.take_idle()
            upstream = kept or await pool.connect()
            answer = Collected()
            upstream.send(head, body or b"", answer)
            try:
                await answer.future
                return answer.status, answer.body
            except ConnectFailed as error:
                if kept is None or upstream.has_heard:
                    raise ConnectFailed(str(error), is_dead=not upstream.has_heard) from None
            finally:
                upstream.drop(answer)


class Dechunker:
    """Takes the chunk framing off, piece by piece. The connection's parser has seen that the framing is right."""

    def __init__(self) -> None:
        self._left = 0  # of the current chunk, its line end included
        self._line = b""
        self.is_over = False

    def feed(self, data: bytes) -> bytes:
        parts = []
        while data and not self.is_over:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                parts.append(piece[: max(self._left - 2, 0)])
                self._left -= len(piece)
                continue
            line, found, data = data.partition(b"\n")
            self._line += line + found
            if found:
                size = int(self._line.partition(b";")[0], 16)
                self._line = b""
                if size == 0:
                    self.is_over = True
                self._left = size + 2
        return b"".join(parts)
