"""The error format of every HTTP response: `{"type": "error", "error": {"message", "type", "param", "code"}}`, which
clients of OpenAI's and of Anthropic's API understand.

Values sent by a client are truncated before they are echoed: a body once made another server send a response five
thousand times as large.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_MESSAGE_CHARS = 600
MAX_ECHO_CHARS = 80  # of one value that the client sent
MAX_ID_CHARS = 128  # of a client's x-request-id
CLIENT_CLOSED = 499  # never sent: the status in logs, metrics and spans if the client has disconnected

_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class HttpError(Exception):
    """An error response. `param` is the invalid field of the request. `details`: what a client's library reads to decide
    what it does next."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        self.details = details

    def info(self) -> dict[str, Any]:
        """Return the object `error` of the response, bounded in size."""
        info = {
            "message": clip(self.message, MAX_MESSAGE_CHARS),
            "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            "param": None if self.param is None else clip(self.param),
            "code": self.status,
        }
        return info if self.details is None else info | {"details": self.details}

    def body(self) -> bytes:
        return msgspec.json.encode({"type": "error", "error": self.info()})


def clip(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """Return at most `limit` characters of `text`, with an ellipsis if there was more."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_id(text: str) -> str | None:
    """Return an id, shortened and cleaned for use in headers and log lines; None if nothing is left."""
    return _NOT_IN_AN_ID.sub("", text[:MAX_ID_CHARS]) or None
