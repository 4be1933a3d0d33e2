"""Writes an answer of the agents' APIs as parts (reasoning, text, calls): the base of their two writers.

An answer begins with its first token, since only then the number of cached prompt tokens is known.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.engine.front.answer import Update
from penstock.engine.http.errors import HttpError
from penstock.engine.server.answer_writer import Json, Writer
from penstock.engine.server.call import Call
from penstock.engine.server.tool_choice import ChatFinish, ReadingPlan
from penstock.engine.text.tools.reader import Arguments, CallStart, Content, Piece, Reasoning

Kind = Literal["reasoning", "text", "call"]
KINDS: dict[type[Piece], Kind] = {Reasoning: "reasoning", Content: "text", CallStart: "call", Arguments: "call"}

_ENCODER = msgspec.json.Encoder()


class PartWriter(Writer):
    """Writes one answer: the events of its parts, and the whole answer."""

    def __init__(self, call: Call, plan: ReadingPlan, reply: Json, *, is_stream: bool) -> None:
        super().__init__(call, reply, is_stream=is_stream)
        self._reading = plan.begin()
        self._has_begun = False
        self._outcome: tuple[ChatFinish, int | str | None] | None = None  # finish and stop reason
        self._kind: Kind | None = None  # kind of the open part
        self._text: list[str] = []  # text of the open part

    def take(self, _index: int, updates: Sequence[Update]) -> None:
        for update in updates:
            if not self._has_begun:
                self._has_begun = True
                self._begin()
            for piece in self._reading.pieces(update.text, is_last=update.finish_reason is not None):
                self._add(piece)
            if (reason := self._reading.finish_reason(update.finish_reason)) is not None:
                self._outcome = reason, update.stop_reason

    async def end(self) -> None:
        assert self._outcome is not None, "an answer ends with a finish reason"
        reason, stop = self._outcome
        if reason == "abort":
            raise HttpError(503, "the answer was ended before it was complete")
        await self._finish(reason, stop)

    @abstractmethod
    def _begin(self) -> None:
        """Begin the answer; the number of cached prompt tokens is known by then."""

    @abstractmethod
    async def _finish(self, reason: ChatFinish, stop: int | str | None) -> None:
        """End the answer, which is complete or has reached its maximum length."""

    def _add(self, piece: Piece) -> None:
        """Add a piece to the open part, or begin a new part with it."""
        start = piece if isinstance(piece, CallStart) else None
        if KINDS[type(piece)] != self._kind or start is not None:
            self._begin_part(KINDS[type(piece)], start)
        if not isinstance(piece, CallStart):
            self._text.append(piece.text)
            self._grow(piece.text)

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
