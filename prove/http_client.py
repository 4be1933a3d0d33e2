"""An HTTP/1.1 client for proofs and load generators, with keep-alive connections and one exchange at a time on each.

It uses raw asyncio and a parser of its own: a client that spends more time on a chunk than the server would measure
itself. It passes each piece of a body on as it arrives, with the time at which the bytes were read. `Events` cuts
streamed bodies into server-sent events; nothing here knows of models.
"""

import asyncio
import math
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

Take = Callable[[int, bytes, float], None]  # status, bytes of the body, time at which they were read
MAX_HEAD_BYTES = 256 * 2**10  # of a response


def key_header() -> dict[str, str]:
    """Return the header with the API key from the environment, or no header if no variable is set."""
    key = os.environ.get("PENSTOCK_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class Target(NamedTuple):
    """The server that requests are sent to."""

    host: str
    port: int
    prefix: str = ""  # of every path
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, base_url: str) -> "Target":
        """Parse `http://host:port/prefix`; raise ValueError if the text is not such a URL."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is not a URL like http://127.0.0.1:8000")
        tls = ssl.create_default_context() if url.scheme == "https" else None
        return cls(url.hostname, url.port or (443 if tls else 80), url.path.rstrip("/"), tls)

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the complete request as bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {"Host": f"{host}:{self.port}", "Content-Length": str(len(body)), **headers}
        if body:
            fields = {"Content-Type": "application/json", **fields}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Client:
    """Sends requests to one target, with one connection per concurrent exchange."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[Connection] = []  # the one used last is reused first

    async def exchange(self, request: bytes, take: Take) -> int:
        """Send the request, pass the body to `take` as it arrives, and return the status. Raises OSError on failure."""
        while True:
            is_fresh = not self._idle
            connection = await self.connect() if is_fresh else self._idle.pop()
            try:
                status = await connection.exchange(request, take)
            except ConnectionError:
                # The server may close an idle connection at any time. Without any answer, send it again.
                if is_fresh or connection.has_heard:
                    raise
                continue
            finally:
                if not connection.is_reusable:
                    connection.close()
            if connection.is_reusable:
                self._idle.append(connection)
            return status

    async def fetch(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> tuple[int, bytes]:
        """Make a small exchange; return the status and the whole body."""
        parts: list[bytes] = []
        request = self.target.request(method, path, body, headers)
        status = await self.exchange(request, lambda _status, data, _now: parts.append(data))
        return status, b"".join(parts)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def connect(self, pause_s: float = 0.0) -> "Connection":
        """Open a new connection, which the caller must close. It stops reading for `pause_s` after each read."""
        loop, target = asyncio.get_running_loop(), self.target
        return (await loop.create_connection(partial(Connection, pause_s), target.host, target.port, ssl=target.tls))[1]


class Connection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s  # inf: nothing is read after the first bytes
        self.has_heard = False  # whether a byte of the current response has arrived
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[int] | None = None

    async def exchange(self, request: bytes, take: Take) -> int:
        assert self._ended is None, "one exchange at a time"
        self.has_heard = self.is_reusable = False
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection before the request was sent")
        self._take, self._response = take, ResponseParser()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._ended
        finally:
            self._ended = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is not an asyncio.Transport
        if self._pause_s:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def data_received(self, data: bytes) -> None:
        if self._ended is None:  # bytes that belong to no exchange
            self.close()
            return
        now_s, response = time.perf_counter(), self._response
        self.has_heard = True
        try:
            for piece in response.feed(data):
                self._take(response.status, piece, now_s)
        except ValueError as error:
            self._end(ConnectionError(f"the answer is not HTTP: {error}"))
        if response.is_done:
            self.is_reusable = response.keeps_alive
            self._end(None)
        elif self._pause_s and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            if self._pause_s < math.inf:
                asyncio.get_running_loop().call_later(self._pause_s, self._transport.resume_reading)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        self._transport = None
        if self._ended is not None and self._response.ends_with_connection and error is None:
            self._end(None)
        else:
            what = "in the middle of the answer" if self.has_heard else "without an answer"
            self._end(ConnectionResetError(f"the connection was closed {what}"))

    def _end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(self._response.status)
        else:
            self._ended.set_exception(error)


class ResponseParser:
    """An incremental parser of one HTTP/1.1 response: the head, then a body with a length, in chunks, or until the
    connection closes."""

    def __init__(self) -> None:
        self.status = 0  # of the final response, once its head has arrived
        self.is_done, self.keeps_alive, self.ends_with_connection = False, True, False
        self._rest = b""  # an incomplete head or chunk
        self._left = 0  # bytes of a body with a length
        self._is_chunked = False

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the pieces of the body that are complete. Raise ValueError if they are not HTTP."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        while not self.status:
            head, separator, rest = data.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1."[: len(head)]) or len(head) > MAX_HEAD_BYTES:
                raise ValueError(f"it begins with {head[:20]!r}")
            if not separator:
                self._rest = data
                return []
            self._read_head(head.decode("latin-1"))
            data = rest
        if self._is_chunked:
            return self._chunks(data)
        if not self.ends_with_connection:
            data = data[: self._left]
            self._left -= len(data)
            self.is_done = not self._left
        return [data] if data else []

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        version, _, rest = first.partition(" ")
        status = int(rest[:3])
        if status < 200:  # 1xx responses come before the final one
            return
        pairs = (line.partition(":") for line in lines)
        fields = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
        self.status = status
        self.keeps_alive = fields.get("connection", "" if version == "HTTP/1.1" else "close") != "close"
        self._is_chunked = "chunked" in fields.get("transfer-encoding", "")
        self._left = 0 if status in (204, 304) else int(fields.get("content-length", 0))
        self.ends_with_connection = not (self._is_chunked or "content-length" in fields or status in (204, 304))

    def _chunks(self, data: bytes) -> list[bytes]:
        """Return the whole chunks. A server sends an event as one chunk, so nothing is gained by pieces of chunks."""
        pieces, at = [], 0
        while (end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:end].partition(b";")[0], 16)
            if size == 0:  # trailers may follow, then an empty line
                self.is_done = data.startswith(b"\r\n", end + 2) or b"\r\n\r\n" in data[end:]
                break
            stop = end + 2 + size
            if len(data) < stop + 2:
                break
            pieces.append(data[end + 2 : stop])
            at = stop + 2
        self._rest = data[at:]
        return pieces


class Events:
    """Cuts a byte stream into the payloads of its `data:` lines, wherever the chunks begin and end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes of the stream; return the payloads that are complete now."""
        data = self._rest + data
        if b"\r" in data:  # JSON never contains a raw carriage return
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [payload for event in events if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all events
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
