"""uvicorn's httptools connection with limits that it lacks: header size, slow senders, body size, unread answers.

httptools does not limit headers (another server accepted 200 MB of them), and an ASGI application gets a request only
when its headers are complete, so these checks have to be here. A refusal is written in the error format of the API;
then further input is discarded for a moment, because a reset could overtake the answer. Offers to upgrade the protocol
are taken out of a head before it is parsed.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.engine.http.errors import HttpError
from penstock.engine.http.limits import LINGER_S, MAX_REFUSALS, Limits

# "deadline" limits the headers, then the body, then the lingering; "unread" limits how long a client does not read.
TimerName = Literal["deadline", "unread"]

_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    """Rename the Upgrade header, which Java's client sends with every request. After it, a parser treats the following
    bytes as the other protocol: the body would be lost or parsed as the next request."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if _UPGRADE.search(data, 0, end) is None:  # the common case: nothing is copied
        return data
    return _UPGRADE.sub(b"\r\nx-penstock-upgrade:", data[:end]) + data[end:]


class GuardedConnection(HttpToolsProtocol):
    """One client connection. `refused` counts, per status, the requests that never reached the application."""

    def __init__(self, limits: Limits, refused: Counter[int], **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.limits = limits
        self.refused = refused
        self._is_in_headers = True
        self._num_header_bytes = 0  # header bytes of the request being read
        self._num_body_bytes = 0
        self._num_framing_bytes = 0  # received since the last body bytes: chunk sizes, their extensions and trailers
        self._is_refused = False
        self._timers: dict[TimerName, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections + MAX_REFUSALS:
            transport.abort()
        elif len(self.connections) > self.limits.max_connections:
            self._refuse(503, f"the server has {self.limits.max_connections} connections open (--max-connections)")
        else:
            self._start_timer("deadline", self.limits.header_timeout_s, self._headers_are_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in [*self._timers]:
            self._cancel_timer(timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_in_headers:
            if "deadline" not in self._timers:
                self._start_timer("deadline", self.limits.header_timeout_s, self._headers_are_late)
            # Feed at most up to the limit. Headers that begin inside a chunk are counted from the next chunk on, so at
            # most the limit plus one read of the socket is buffered.
            room = self.limits.max_header_bytes - self._num_header_bytes
            head, data = data[:room], data[room:]
            self._num_header_bytes += len(head)
            super().data_received(without_upgrade(head))
            if self._is_refused or self.transport.is_closing():
                return
            if self._is_in_headers and self._num_header_bytes >= self.limits.max_header_bytes:
                self._refuse(431, f"the headers are larger than {self.limits.max_header_bytes} bytes")
                return
        if not data:
            return
        self._num_framing_bytes += len(data)  # bytes of the body set it to zero
        super().data_received(data)
        # The parser buffers a trailer until its end.
        if not self._is_in_headers and self._num_framing_bytes > self.limits.max_header_bytes:
            self._refuse(431, f"the headers after the body are larger than {self.limits.max_header_bytes} bytes")

    # The parser's callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # the application has the headers already, so trailers are discarded
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        if (refusal := self._head_refusal()) is not None:
            self._refuse(*refusal)
            return
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(declared[:20]) > self.limits.max_body_bytes:  # the parser accepts only numbers
            self._refuse_body()
            return
        self._is_in_headers = False
        self._num_body_bytes = self._num_framing_bytes = 0
        self._start_timer("deadline", self.limits.body_timeout_s, self._body_is_late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._num_framing_bytes = 0
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self.limits.max_body_bytes:  # chunked: without a declared length
            self._refuse_body()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._cancel_timer("deadline")
        self._is_in_headers = True
        self._num_header_bytes = 0
        super().on_message_complete()

    def send_400_response(self, _msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP/1.1 request")

    # A client that does not read: the transport's buffer stays full, or stays non-empty after closing.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        self._cancel_timer("unread")
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_unread_timer()

    def _start_unread_timer(self) -> None:
        """Abort the connection unless the client reads within `write_timeout_s`."""
        self._start_timer("unread", self.limits.write_timeout_s, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # close() would wait for the client to read the answer

    # Refusals.

    def _head_refusal(self) -> tuple[int, str] | None:
        """Return the status and the message for a head that the parser accepts and this server does not. The router
        refuses the same heads, so that no proxy in between can understand a request differently."""
        version, num_hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.1", "1.0"):
            return 505, "only HTTP/1.1 and HTTP/1.0 are supported"
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            return 400, "host: exactly one is expected"
        if not self.url.startswith(b"/"):
            return 400, "the request target must begin with '/'"
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            return 501, "transfer-encoding: only 'chunked' is understood"
        if self.parser.should_upgrade():  # the head came in pieces or after another request
            return 400, "connection: the protocol cannot be changed"
        return None

    def _headers_are_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # A pipelined request starts only after the answer that is still being written.
            self._start_timer("deadline", self.limits.header_timeout_s, self._headers_are_late)
        elif self._num_header_bytes == 0:
            self.transport.close()
        else:
            self._refuse(408, f"the headers did not arrive within {self.limits.header_timeout_s:g} s")

    def _body_is_late(self) -> None:
        self._refuse(408, f"the body did not arrive within {self.limits.body_timeout_s:g} s")

    def _refuse_body(self) -> None:
        self._refuse(413, f"the body is larger than {self.limits.max_body_bytes} bytes (--max-body-bytes)")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with `status` if it is this request's turn, and end the connection."""
        if self._is_refused:  # the parser may refuse it too
            return
        self.refused[status] += 1
        self._is_refused = True
        self._unset_keepalive_if_required()
        # The client must take an answer that is sent now as the answer to the request being read.
        if self._is_in_headers:
            is_own_turn = self.cycle is None or self.cycle.response_complete
        else:
            is_own_turn = not self.cycle.response_started and not self.pipeline
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application must not answer as well
            self.cycle.message_event.set()
        if not is_own_turn:
            self.transport.abort()
            return
        body = HttpError(status, message).body()
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer("deadline", LINGER_S, self.transport.abort)

    def _start_timer(self, timer: TimerName, seconds: float, then: Callable[[], None]) -> None:
        self._cancel_timer(timer)
        self._timers[timer] = self.loop.call_later(seconds, then)

    def _cancel_timer(self, timer: TimerName) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()
