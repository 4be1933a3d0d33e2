"""The state of one HTTP request for its handler and the access log, including its answers.

It contains neither text of the conversation nor an API key. An id chosen by the client is only echoed and logged, never
used as a key, because two clients may send the same id.
"""

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs

from penstock.engine.front.answer import Answer
from penstock.engine.http.auth import OWNER_HEADER
from penstock.engine.http.errors import clean_id
from penstock.engine.sampling_params import SamplingParams


class Call:
    """One HTTP request. `id` is random; `client_id` is the client's X-Request-Id, cleaned, only echoed and logged."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], key: int | None = None) -> None:
        """`key`: the number of the request's API key, in the configured order."""
        self.id, self.key = secrets.token_hex(16), key
        ids = (clean_id(value.decode("latin-1")) for name, value in headers if name == b"x-request-id")
        self.client_id = next(ids, None)
        self.created = int(time.time())
        self.begun_s = time.monotonic()
        self.model = ""  # the name that the client used
        self.prompt_ids: list[int] | None = None  # sent by a router instead of the text
        self.paths: dict[str, str] = {}  # for errors: a field's name in the chat API → its name in the request
        self.ignored: list[str] = []  # names of ignored request fields, for the log and a header
        self.reports = False  # a router asked for the number of cached tokens
        self.scope: Mapping[str, Any] = {}  # the ASGI scope
        self.is_gone = False  # the client disconnected before the answer was complete
        self.is_stream = False
        self.trace_id: str | None = None  # set if requests are traced
        self.answers: list[Answer] = []  # one for each prompt
        # If the request is only rendered: its prompts as they would be submitted, with their parameters.
        self.rendered: list[tuple[bytes, SamplingParams]] | None = None

    @property
    def query(self) -> dict[str, list[str]]:
        """The parameters in the URL."""
        return parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)

    @property
    def owner(self) -> tuple[int | None, bytes]:
        """Return the owner of what this request stores: the number of its key, and a digest of the client that a router
        names. The client only divides what the key owns, so a client that invents one reaches nothing of another key."""
        named = [value for name, value in self.scope["headers"] if name == OWNER_HEADER]
        return self.key, hashlib.sha256(b",".join(named)).digest() if named else b""

    @property
    def client(self) -> bytes:
        """Return the client for which the engine queues this request: a digest of the owner, or where nothing names one,
        of the X-Session-ID header; empty without that."""
        owner = self.owner
        sessions = [value for name, value in self.scope["headers"] if name == b"x-session-id"]
        named = repr(owner).encode() if any(owner) else b",".join(sessions)
        return hashlib.sha256(named).digest()[:8] if named else b""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(answer.num_prompt_tokens for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        """The number of cached prompt tokens, as far as it is known yet."""
        return sum(answer.num_cached_tokens or 0 for answer in self.answers)

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each choice; a choice whose end was not read counts as aborted."""
        found: list[str] = []
        for answer in self.answers:
            found += answer.finish_reasons
            found += ["abort"] * (len(answer.choices) - len(answer.finish_reasons))
        return found

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far."""
        return sum(answer.num_tokens for answer in self.answers)

    def client_path(self, field: str) -> str:
        """Return the client's name of a field: its longest prefix in `paths` is replaced."""
        end = len(field)
        while end > 0:
            if (found := self.paths.get(field[:end])) is not None:
                return found + field[end:]
            end = max(field.rfind(".", 0, end), field.rfind("[", 0, end))
        return field


class NoSpans:
    """The spans of requests if tracing is off; spans.py has the recording ones."""

    def begin(self, call: Call, scope: Mapping[str, Any]) -> None: ...
    def phases(self, call: Call) -> None: ...
    def end(self, call: Call, route: str, status: int) -> None: ...
    def close(self) -> None: ...
