"""Request ids. Ours is always fresh; the client's is only echoed and logged.

An id that the client chose never becomes a key of ours: two clients that send the same one would meet.
"""

import re
import secrets
from collections.abc import Iterable

MAX_CLIENT_ID_CHARS = 128

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._:/+=@-]")


def fresh_id() -> str:
    """32 hexadecimal characters that were never used before."""
    return secrets.token_hex(16)


def client_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The client's X-Request-Id, cut and cleaned until it can stand in a header and in a line of the log."""
    for name, value in headers:
        if name == b"x-request-id":
            return clean_id(value.decode("latin-1"))
    return None


def clean_id(text: str) -> str | None:
    return _NOT_ALLOWED.sub("", text[:MAX_CLIENT_ID_CHARS]) or None
