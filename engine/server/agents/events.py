"""Passes the pieces of an answer to the Writer of an agents' API, which builds parts (reasoning, text, calls).

An answer begins with its first token, since only then the number of cached prompt tokens is known.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec

from penstock.engine.front.answer import Update
from penstock.engine.http.errors import HttpError
from penstock.engine.server.call import Call
from penstock.engine.server.endpoint import Reply
from penstock.engine.server.service import REFUSALS, Service, as_http_error
from penstock.engine.server.tool_choice import ChatFinish, ReadingPlan
from penstock.engine.text.tools.reader import Arguments, CallStart, Content, Piece, Reasoning

Kind = Literal["reasoning", "text", "call"]
KINDS: dict[type[Piece], Kind] = {Reasoning: "reasoning", Content: "text", CallStart: "call", Arguments: "call"}

_ENCODER = msgspec.json.Encoder()


class Writer(ABC):
    """Writes one answer as parts (reasoning, text, calls): the events of a stream, and the whole answer. It receives
    the same pieces with and without streaming, so that both have the same content."""

    def __init__(self, call: Call, reply: dict[str, Any], *, is_stream: bool) -> None:
        self._call, self.reply, self.is_stream = call, reply, is_stream
        self._kind: Kind | None = None  # kind of the open part
        self._text: list[str] = []  # text of the open part
        self._events: list[bytes] = []  # events that were not sent yet

    @abstractmethod
    async def see(self, update: Update) -> None:
        """Receive an update before the pieces of its text."""

    def take(self, piece: Piece) -> None:
        """Add a piece to the open part, or begin a new part with it."""
        start = piece if isinstance(piece, CallStart) else None
        if KINDS[type(piece)] != self._kind or start is not None:
            self._begin_part(KINDS[type(piece)], start)
        if not isinstance(piece, CallStart):
            self._text.append(piece.text)
            self._grow(piece.text)

    def taken(self) -> bytes:
        """Return the events that were not sent yet."""
        events, self._events = self._events, []
        return b"".join(events)

    @abstractmethod
    def begin(self) -> None:
        """Begin the answer; the number of cached prompt tokens is known by then."""

    @abstractmethod
    async def end(self, reason: ChatFinish, stop: int | str | None) -> None:
        """End the answer, which is complete or has reached its maximum length."""

    @abstractmethod
    async def fail(self, error: HttpError) -> None:
        """End the answer with an error; possible at any time."""

    def _begin_part(self, kind: Kind, call: CallStart | None) -> None:
        self._end_part("completed")
        self._kind, self._text = kind, []
        self._open(kind, call)

    @abstractmethod
    def _open(self, kind: Kind, call: CallStart | None) -> None: ...

    @abstractmethod
    def _grow(self, text: str) -> None: ...

    def _end_part(self, status: str) -> None:
        """Close the open part, if any. `status`: "completed", or "incomplete" if the answer is truncated."""
        if self._kind is not None:
            self._close(self._kind, "".join(self._text), status)
            self._kind = None

    @abstractmethod
    def _close(self, kind: Kind, text: str, status: str) -> None: ...

    def _event(self, kind: str, **fields: Any) -> None:
        if self.is_stream:
            data = _ENCODER.encode({"type": kind, **fields})
            self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))


async def respond(service: Service, call: Call, plan: ReadingPlan, writer: Writer) -> Reply:
    """Return the events of a stream, or the whole answer; its failures are raised instead of written."""
    events = write(service, call, plan, writer)
    if writer.is_stream:
        return events
    async for _ in events:
        pass
    return writer.reply


async def write(service: Service, call: Call, plan: ReadingPlan, writer: Writer) -> AsyncGenerator[bytes, None]:
    """Write the whole answer and yield its events."""
    has_begun = False
    reading, (answer,) = plan.begin(), call.answers
    try:
        async for updates in answer:
            for update in service.seen(answer, updates):
                if not has_begun:
                    has_begun = True
                    writer.begin()
                await writer.see(update)
                for piece in reading.pieces(update.text, is_last=update.finish_reason is not None):
                    writer.take(piece)
                reason = reading.finish_reason(update.finish_reason)
                if reason == "abort":
                    raise HttpError(503, "the answer was ended before it was complete")
                if reason is not None:
                    await writer.end(reason, update.stop_reason)
            if written := writer.taken():
                yield written
    except REFUSALS as error:
        if not writer.is_stream or (call.reports and not has_begun):  # the router retries on another engine
            raise
        await writer.fail(as_http_error(error, call))
        yield writer.taken()
