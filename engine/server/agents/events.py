"""How an answer comes in the agents' APIs: the chunks of a chat, cut into parts of reasoning, text and calls.

A Writer turns the parts into another API's events and whole answer; it is given all of them in a stream and otherwise, so
that both are one and the same. It begins with the first token, as only then it is known how much of the prompt was cached.
"""

from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET

from penstock.engine.http.errors import HttpError
from penstock.engine.server.call import Call
from penstock.engine.server.chat import ChatReply
from penstock.engine.server.prompts import Conversation, in_thread_if, render
from penstock.engine.server.requests import ChatRequest
from penstock.engine.server.responses import ChatFinish, ChatLogprobs, Delta, ToolCallDelta
from penstock.engine.server.service import REFUSALS, Service, as_http_error
from penstock.engine.text.prompt import INLINE_CHARS

Kind = Literal["reasoning", "text", "call"]

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

    def start(self, kind: Kind, call: ToolCallDelta | None, /) -> None:
        """The part before it is complete."""

    def grow(self, text: str, /) -> None: ...

    async def end(self, reason: ChatFinish, stop: int | str | None, /) -> None: ...

    async def fail(self, error: HttpError, /) -> None: ...


async def write(
    service: Service, call: Call, reply: ChatReply, writer: Writer, *, raises: bool = False
) -> AsyncGenerator[bytes, None]:
    """Everything to its end, in pieces of a stream. `raises`: what fails is the caller's to say."""
    has_begun, kind = False, None
    (answer,) = call.answers
    try:
        async for updates in answer:
            chunks = [chunk for update in service.seen(answer, updates) for chunk in reply.chunks(0, update)]
            if chunks and not has_begun:
                has_begun = True
                writer.begin()
            for choice in (chunk.choices[0] for chunk in chunks):
                if choice.logprobs is not None:
                    writer.tokens(choice.logprobs)
                for next_kind, text, called in _parts(choice.delta):
                    if next_kind != kind or called is not None:
                        kind = next_kind
                        writer.start(kind, called)
                    if text:
                        writer.grow(text)
                if choice.finish_reason == "abort":
                    raise HttpError(503, "the answer was ended before it was complete")
                if choice.finish_reason is not None:
                    await writer.end(choice.finish_reason, choice.stop_reason or None)
            if piece := writer.events.taken():
                yield piece
    except REFUSALS as error:
        if raises or (call.reports and not has_begun):  # of a router: it asks another engine
            raise
        await writer.fail(as_http_error(error))
        yield writer.events.taken()


def _parts(delta: Delta) -> Iterator[tuple[Kind, str, ToolCallDelta | None]]:
    if delta.reasoning_content:
        yield "reasoning", delta.reasoning_content, None
    if delta.content:
        yield "text", delta.content, None
    for call in delta.tool_calls or ():
        yield "call", call.function.arguments, call if call.id is not UNSET else None


async def num_prompt_tokens(service: Service, request: ChatRequest, conversation: Conversation) -> int:
    """Count the tokens of a chat's prompt, however long it is."""
    text = await render(request, conversation, service)
    adds = bool(request.add_special_tokens)
    return len(await in_thread_if(len(text) > INLINE_CHARS, lambda: service.tokenizer.encode(text, adds)))


def thinking_switch(is_on: bool) -> dict[str, bool]:
    """The variables by which templates learn whether the model shall think."""
    return {"enable_thinking": is_on, "thinking": is_on}
