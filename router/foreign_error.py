"""Conversion of other engines' error bodies into OpenAI's form.

An object under `error` is OpenAI's form, and Anthropic's: such an answer passes as it came, byte for byte. Others say
`{"object": "error", "message": …}`, `{"detail": …}`, or plain text. The status stays.
"""

from typing import Any

import msgspec

from penstock.engine.http.errors import error_body
from penstock.router.http.heads import AnswerHead
from penstock.router.http.upstream import Dechunker

REPLACED = (b"content-length:", b"content-type:")
CODED = (b"content-encoding:",)  # bytes that are not read here


def in_openais_form(head: AnswerHead, body: bytes) -> tuple[bytes, bytes] | None:
    """Return the headers and the body that replace an error response; None if it is forwarded unchanged."""
    lines = head.lines.splitlines(keepends=True)
    if any(line.lower().startswith(CODED) for line in lines):
        return None
    text = Dechunker().feed(body) if head.is_chunked else body
    try:
        said: Any = msgspec.json.decode(text)
        message = message_of(said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = message = text.decode("utf-8", "replace").strip()
    if isinstance(said, dict) and isinstance(said.get("error"), dict):
        return None
    mapped = error_body(head.status, message or f"the replica answered {head.status}")
    kept = b"".join(line for line in lines if not line.lower().startswith(REPLACED))
    return kept + b"content-type: application/json\r\ncontent-length: %d\r\n" % len(mapped), mapped


def message_of(said: Any) -> str:
    """Return the text of an error, found at any of the usual places in `said`."""
    if isinstance(said, dict):
        found = next((said[name] for name in ("message", "error", "detail", "msg") if said.get(name)), None)
        where = ".".join(map(str, said["loc"])) if isinstance(said.get("loc"), list) else ""
        return f"{where}: {message_of(found)}" if where else message_of(found)
    if isinstance(said, list):
        return "; ".join(filter(None, map(message_of, said)))
    return said if isinstance(said, str) else ""
