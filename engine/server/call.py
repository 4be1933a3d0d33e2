"""One HTTP request as its handler and the log see it, and the answers that belong to it.

No text of the conversation and no key is kept here.
"""

import time

from penstock.engine.front.answer import Answer
from penstock.engine.http.request_id import fresh_id


class Call:
    """`id` is ours and fresh; `client_id` is what the client sent, cleaned, only to be echoed and logged."""

    def __init__(self, client_id: str | None) -> None:
        self.id = fresh_id()
        self.client_id = client_id
        self.created = int(time.time())
        self.begun_s = time.monotonic()
        self.model = ""  # by the name that the client used
        self.prompt_ids: list[int] | None = None  # given by a router in place of the text
        self.reports = False  # a router wants to know how much was cached
        self.is_gone = False  # the client left before the answer was complete
        self.answers: list[Answer] = []  # one for each prompt

    @property
    def echo_id(self) -> str:
        return self.client_id or self.id

    @property
    def num_prompt_tokens(self) -> int:
        return sum(answer.num_prompt_tokens for answer in self.answers)

    @property
    def num_tokens(self) -> int:
        """What was written so far."""
        return sum(answer.num_tokens for answer in self.answers)
