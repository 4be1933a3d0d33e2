"""An HTTP/1.1 client for proofs and load generators, with keep-alive connections and one exchange at a time on each.

It uses raw asyncio and httptools: a client that spends more time on a chunk than the server would measure itself. It
knows nothing of models or events (stream.py). It passes each piece of a body on as it arrives, with the time at which
the bytes were read.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

Take = Callable[[int, bytes, float], None]  # status, bytes of the body, time at which they were read
KEY_VARIABLES = ("PENSTOCK_API_KEY", "OPENAI_API_KEY")  # environment variables; the first one that is set is sent


def key_header() -> dict[str, str]:
    """Return the header with the API key from the environment, or no header if no variable is set."""
    key = next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
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
            connection = self._idle.pop() if self._idle else None
            is_fresh = connection is None
            if connection is None:
                connection = await self.connect()
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

    async def connect(self, kind: Callable[[], "Connection"] | None = None) -> "Connection":
        """Open a new connection, which the caller must close."""
        loop, target = asyncio.get_running_loop(), self.target
        _, connection = await loop.create_connection(kind or Connection, target.host, target.port, ssl=target.tls)
        return connection


class Connection(asyncio.Protocol):
    """One connection. The methods named on_… are httptools' callbacks."""

    def __init__(self) -> None:
        self.has_heard = False  # whether a byte of the current response has arrived
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[int] | None = None
        self._now_s = 0.0

    async def exchange(self, request: bytes, take: Take) -> int:
        assert self._ended is None, "one exchange at a time"
        self.has_heard = self.is_reusable = False
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection before the request was sent")
        self._status, self._take, self._has_length = 0, take, False
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._ended
        finally:
            self._ended = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's callbacks -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is not an asyncio.Transport

    def data_received(self, data: bytes) -> None:
        if self._ended is None:  # bytes that belong to no exchange
            self.close()
            return
        self._now_s = time.perf_counter()
        self.has_heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        self._transport = None
        if self._status >= 200 and not self._has_length and error is None:
            self._end(None)  # a body without a length ends with the connection
        else:
            what = "in the middle of the answer" if self.has_heard else "without an answer"
            self._end(ConnectionResetError(f"the connection was closed {what}"))

    # -- httptools' callbacks ------------------------------------------------------------------------------

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._take(self._status, data, self._now_s)

    def on_message_complete(self) -> None:
        if self._status >= 200:  # 1xx responses come before the final one
            self.is_reusable = self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(self._status)
        else:
            self._ended.set_exception(error)
