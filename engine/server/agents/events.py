"""Hands the pieces of an answer to the Writer of an agents' API, which turns them into parts (reasoning, text, calls).

A Writer makes an API's events and its whole answer. It is given all pieces in a stream and otherwise, so that both carry the
same. It begins with the first token, since only then it is known how much of the prompt was cached.
"""

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

import msgspec

from penstock.engine.http.errors import HttpError
from penstock.engine.server.call import Call
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.logprobs import chat_logprobs
from penstock.engine.server.prompts import in_thread_if, render
from penstock.engine.server.requests import ChatRequest
from penstock.engine.server.responses import ChatFinish, ChatLogprobs
from penstock.engine.server.service import REFUSALS, Service, as_http_error
from penstock.engine.server.tool_choice import ReadingPlan
from penstock.engine.text.prompt import INLINE_CHARS
from penstock.engine.text.tools.reader import Arguments, CallStart, Content, Piece, Reasoning

Kind = Literal["reasoning", "text", "call"]
KINDS: dict[type[Piece], Kind] = {Reasoning: "reasoning", Content: "text", CallStart: "call", Arguments: "call"}

_ENCODER = msgspec.json.Encoder()


class EventQueue:
    """The events that are yet to be sent; kept only for a stream."""

    def __init__(self, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._waiting: list[bytes] = []

    def add(self, kind: str, **fields: Any) -> None:
        if self._is_stream:
            data = _ENCODER.encode({"type": kind, **fields})
            self._waiting.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def taken(self) -> bytes:
        waiting, self._waiting = self._waiting, []
        return b"".join(waiting)


class Writer(Protocol):
    """Of one answer: `begin`, then parts, each with `start` and `grow`, until `end` or, at any time, `fail`."""

    events: EventQueue

    def begin(self) -> None: ...

    def tokens(self, logprobs: ChatLogprobs, /) -> None:
        """Of what comes next."""

    def start(self, kind: Kind, call: CallStart | None, /) -> None:
        """The part before it is complete."""

    def grow(self, text: str, /) -> None: ...

    async def end(self, reason: ChatFinish, stop: int | str | None, /) -> None: ...

    async def fail(self, error: HttpError, /) -> None: ...


async def write(
    service: Service, call: Call, plan: ReadingPlan, writer: Writer, *, raises: bool = False
) -> AsyncGenerator[bytes, None]:
    """Write the whole answer, in pieces of a stream. `raises`: a failure is the caller's to report."""
    has_begun = False
    kind: Kind | None = None
    reading, (answer,) = plan.begin(), call.answers
    try:
        async for updates in answer:
            for update in service.seen(answer, updates):
                if not has_begun:
                    has_begun = True
                    writer.begin()
                if update.logprobs is not None:
                    writer.tokens(chat_logprobs(service.tokenizer, update.logprobs, as_ids=False))
                for piece in reading.pieces(update.text, is_last=update.finish_reason is not None):
                    start = piece if isinstance(piece, CallStart) else None
                    if KINDS[type(piece)] != kind or start is not None:
                        kind = KINDS[type(piece)]
                        writer.start(kind, start)
                    if not isinstance(piece, CallStart):
                        writer.grow(piece.text)
                reason = reading.finish_reason(update.finish_reason)
                if reason == "abort":
                    raise HttpError(503, "the answer was ended before it was complete")
                if reason is not None:
                    await writer.end(reason, update.stop_reason)
            if written := writer.events.taken():
                yield written
    except REFUSALS as error:
        if raises or (call.reports and not has_begun):  # of a router: it asks another engine
            raise
        await writer.fail(as_http_error(error))
        yield writer.events.taken()


async def num_prompt_tokens(service: Service, request: ChatRequest, conversation: Conversation) -> int:
    """Count the tokens of a chat's prompt, however long it is."""
    with conversation.named_by_client():
        text = await render(request, conversation, service)
    adds = bool(request.add_special_tokens)
    return len(await in_thread_if(len(text) > INLINE_CHARS, lambda: service.tokenizer.encode(text, adds)))


def thinking_switch(is_on: bool) -> dict[str, bool]:
    """The variables by which templates learn whether the model shall think."""
    return {"enable_thinking": is_on, "thinking": is_on}
