"""The access log: one line per request with its properties and timing, without any of its content.

Ids from clients are cleaned (`clean_id`) and routes come from the route table, so clients cannot break or forge lines.
"""

import json
import logging
import sys
from datetime import UTC, datetime

import msgspec

from penstock.engine.http.telemetry import AccessForm


class AccessLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of a line. A field that is not known or has no meaning is left out."""

    time: str = ""
    route: str
    status: int
    total_ms: float
    id: str | None = None
    client_id: str | None = None  # the x-request-id that the client sent
    model: str | None = None
    key: int | None = None  # number of the API key, in the configured order; never the key itself
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cache_miss: str | None = None  # why no more was cached (docs/operations.md)
    output_tokens: int | None = None
    accepted_drafts: int | None = None  # of these, the tokens that were drafted
    queue_ms: float | None = None
    first_token_ms: float | None = None
    first_byte_ms: float | None = None  # for relayed answers
    finish_reason: str | None = None  # finish reasons of all choices
    replica: str | None = None  # the replica that answered, in a router's line
    attempts: int | None = None
    trace_id: str | None = None


class AccessLog:
    """Writes access lines at level info, those of probes at level debug, to the logger of the calling room."""

    def __init__(self, form: AccessForm, room: str) -> None:
        self._is_on, self._is_json = form != "off", form == "json"
        self._log = logging.getLogger(f"penstock.{room}.access")
        if self._is_json:  # JSON without a prefix
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(message)s"))
            self._log.handlers, self._log.propagate = [handler], False

    def level(self, is_probe: bool) -> int | None:
        """Return the level of a line; None if it must not be written."""
        level = logging.DEBUG if is_probe else logging.INFO
        return level if self._is_on and self._log.isEnabledFor(level) else None

    def write(self, level: int, line: AccessLine) -> None:
        text = as_json(line) if self._is_json else as_text(line)
        # Without finding the caller's source line, which would take longer than writing the line.
        self._log.handle(self._log.makeRecord(self._log.name, level, "", 0, text, (), None))


def as_json(line: AccessLine) -> str:
    """Return the line as JSON in ASCII, because some log readers also take other characters than a line feed as a line
    end."""
    line.time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps(msgspec.to_builtins(line), separators=(",", ":"))


def as_text(line: AccessLine) -> str:
    """Return the line as text, without the time, which the log adds."""
    _, route, status, total_ms, *values = msgspec.structs.astuple(line)
    said = [f"{name}={_word(value)}" for name, value in zip(_LISTED, values, strict=True) if value is not None]
    return f"{route} {status} {total_ms / 1000:.3f}s {' '.join(said)}"


def _word(value: str | float) -> str:
    """Return a value; in quotation marks if it has spaces, in which another field could stand (names of adapters)."""
    return json.dumps(value) if isinstance(value, str) and " " in value else str(value)


_LISTED = AccessLine.__struct_fields__[4:]
