"""One HTTP request as its handler and the log see it, with the answers that belong to it.

No text of the conversation and no key is kept here. An id that the client chose is only echoed and logged, and never
becomes a key of ours: two clients that send the same one would meet.
"""

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.front.answer import Answer
from penstock.engine.http.errors import clean_id

if TYPE_CHECKING:
    from penstock.engine.http.tracing import Trace


class Call:
    """One HTTP request. `id` is fresh; `client_id` is what the client sent, cleaned, and is only echoed and logged."""

    def __init__(self, client_id: str | None) -> None:
        self.id = secrets.token_hex(16)
        self.client_id = client_id
        self.created = int(time.time())
        self.begun_s = time.monotonic()
        self.model = ""  # by the name that the client used
        self.prompt_ids: list[int] | None = None  # given by a router in place of the text
        self.ignored: list[str] = []  # what was left out of the request, for the log and a header
        self.reports = False  # a router wants to know how much was cached
        self.scope: Mapping[str, Any] = {}  # of ASGI
        self.is_gone = False  # the client left before the answer was complete
        self.is_stream = False
        self.is_cancelled = False  # by a request on another connection: the failure that follows is none
        self.trace: Trace | None = None  # where requests are traced
        self.answers: list[Answer] = []  # one for each prompt

    @property
    def num_prompt_tokens(self) -> int:
        return sum(answer.num_prompt_tokens for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of the prompts were cached, as far as it is known."""
        return sum(answer.num_cached_tokens or 0 for answer in self.answers)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended, as far as it was read. A choice that has not ended counts as aborted."""
        found: list[str] = []
        for answer in self.answers:
            found += answer.finish_reasons
            found += ["abort"] * (len(answer.choices) - len(answer.finish_reasons))
        return found

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated so far."""
        return sum(answer.num_tokens for answer in self.answers)


def client_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the client's X-Request-Id, cut and cleaned so that it can stand in a header and in a line of the log."""
    return next((clean_id(value.decode("latin-1")) for name, value in headers if name == b"x-request-id"), None)
