"""Passes the answers of a call to the Writer of its endpoint, which writes the events of a stream or the whole answer.

The same driver serves completions, chats and the agents' APIs. A writer receives the same updates with and without
streaming, so that both have the same content.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from penstock.engine.front.answer import Answer, Update
from penstock.engine.http.errors import HttpError
from penstock.engine.server.call import Call
from penstock.engine.server.prompts import in_thread_if
from penstock.engine.server.service import REFUSALS, Service, as_http_error

LONG_ANSWER = 2048  # positions with log-probabilities; formatting more of them would block the event loop

Json = dict[str, Any]  # an object of a response: the vendor's fields, with vLLM's additions that clients use


class Writer(ABC):
    """Writes the answers of one call: the events of a stream, or the object `reply`, which is complete after `end`."""

    def __init__(self, call: Call, reply: Json, *, is_stream: bool) -> None:
        self._call, self.reply, self.is_stream = call, reply, is_stream
        self._events: list[bytes] = []  # events that were not sent yet

    @abstractmethod
    def take(self, index: int, updates: Sequence[Update]) -> None:
        """Write updates of the choices of one prompt, in a thread if they have many log-probabilities."""

    @abstractmethod
    async def end(self) -> None:
        """End the answer after the last update."""

    @abstractmethod
    async def fail(self, error: HttpError) -> None:
        """End a stream with an error; possible at any time."""

    def taken(self) -> bytes:
        """Return the events that were not sent yet."""
        events, self._events = self._events, []
        return b"".join(events)


async def respond(service: Service, call: Call, writer: Writer) -> Json | AsyncGenerator[bytes, None]:
    """Return the events of a stream, or the whole answer; its failures are raised instead of written."""
    events = write(service, call, writer)
    if writer.is_stream:
        return events
    async for _ in events:
        pass
    return writer.reply


async def write(service: Service, call: Call, writer: Writer) -> AsyncGenerator[bytes, None]:
    """Write all answers and yield the events."""
    begun: set[tuple[int, int]] = set()  # choices whose first update has come; it may echo the prompt
    try:
        async with aclosing(_interleave(service, call.answers)) as arriving:
            async for index, updates in arriving:
                first = {(index, update.index) for update in updates} - begun
                begun |= first
                num_positions = len(first) * len(call.answers[index].prompt_logprobs or ())
                num_positions += sum(len(update.logprobs or ()) for update in updates)
                await in_thread_if(num_positions > LONG_ANSWER, partial(writer.take, index, updates))
                if events := writer.taken():
                    yield events
        await writer.end()
    except REFUSALS as error:
        if not writer.is_stream or (call.reports and not begun):  # the router retries on another engine
            raise
        await writer.fail(as_http_error(error, call))
    if events := writer.taken():
        yield events


async def _interleave(service: Service, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, list[Update]], None]:
    """Yield the updates of several prompts as they arrive, each with the index of its prompt."""
    if len(answers) == 1:
        async for updates in answers[0]:
            yield 0, service.seen(answers[0], updates)
        return
    waiting = {asyncio.ensure_future(anext(answer, None)): index for index, answer in enumerate(answers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                arrived = task.result()
                if arrived is not None:
                    waiting[asyncio.ensure_future(anext(answers[index], None))] = index
                    yield index, service.seen(answers[index], arrived)
    finally:
        for task in waiting:
            task.cancel()
