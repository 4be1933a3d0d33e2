"""One HTTP request as its handler and the log see it, and the engine's work that belongs to it.

No text of the conversation and no key is kept here.
"""

import time

from penstock.engine.front.answer import Update
from penstock.engine.front.client import AsyncEngine, Generation
from penstock.engine.http.errors import HttpError
from penstock.engine.http.request_id import clean_id, fresh_id
from penstock.engine.server.metrics import Record


class Call:
    """`id` is ours and fresh; `client_id` is what the client sent, cleaned, only to be echoed and logged."""

    def __init__(self, client_id: str | None) -> None:
        self.id = fresh_id()
        self.client_id = client_id
        self.created = int(time.time())
        self.begun_s = time.monotonic()
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.prompt_ids: list[int] | None = None  # given by a router in place of the text
        self.reports = False  # a router wants to know how much was cached
        self.is_gone = False  # the client left before the answer was complete
        self.answers: list[Answering] = []

    def note_client_id(self, text: str | None) -> None:
        """An id in the body counts if there is none in the headers."""
        if text is not None and self.client_id is None:
            self.client_id = clean_id(text)

    @property
    def echo_id(self) -> str:
        return self.client_id or self.id


class Answering:
    """A prompt that the engine is working on, measured as it is read. Iterating yields its updates."""

    def __init__(self, engine: AsyncEngine, generation: Generation, record: Record) -> None:
        self.generation = generation
        self._engine = engine
        self._record = record
        self._is_closed = False

    def __aiter__(self) -> "Answering":
        return self

    async def __anext__(self) -> list[Update]:
        updates = await self.generation.__anext__()
        self._record.see(updates)
        for update in updates:
            if update.finish_reason == "error":
                message = update.error or "the engine could not complete the request"
                if update.is_refusal:
                    raise HttpError(400, message)
                raise HttpError(500 if self._engine.health().alive else 503, message)
        return updates

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.generation.abort()
            self._record.end()
