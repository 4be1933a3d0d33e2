"""Decodes the bytes of a request into a typed struct, with early refusal and errors that name the field.

Decoding has two passes: the first only finds the bounds of each top-level value (1 GB/s), so that unknown, duplicate
and oversized fields are refused before anything is built from them; the second decodes into the struct, strictly.
"""

import re
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from penstock.engine.http.errors import ClientGone, HttpError, clip
from penstock.engine.options import objection

MAX_FIELDS = 256  # at the top level: more than any API has, and few enough to iterate over quickly

T = TypeVar("T")

FIELDS = dict[str, msgspec.Raw]

_decoder = cache(msgspec.json.Decoder[Any])  # one per type, created at its first use
_KEY = re.compile(rb'[\s{,]*+("(?:[^"\\]++|\\.)*+")\s*+:\s*+')
_AFTER_VALUE = re.compile(rb"\s*[,}]")
_MEDIA = re.compile(r"invalid value ('(?:image|document)')")  # msgspec's message for an unknown block type


async def read_body(receive: Receive) -> bytes:
    """Read the whole body. The connection has limited its size."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def split_object(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the top-level fields of a JSON object, undecoded; refuse a field given twice."""
    if not body:
        raise HttpError(400, "the body is empty; a JSON object is expected")
    if not body.isascii():
        _check_utf8(body)  # names and unused fields are not decoded, so check them here
    fields = decode(FIELDS, body)
    if len(fields) > MAX_FIELDS:
        raise HttpError(400, f"the body has {len(fields)} fields; at most {MAX_FIELDS} are allowed")
    # If a name is given twice, the decoder keeps the last value at the position of the first, so iterating over the body
    # and the kept fields together finds a mismatch at one of the two.
    kept = iter(fields.items())
    position = 0
    while (found := _KEY.match(body, position)) is not None:
        name = msgspec.json.decode(found[1], type=str)
        expected, raw = next(kept, ("", msgspec.Raw()))
        value = bytes(raw)
        position = found.end() + len(value)
        if name != expected or not body.startswith(value, found.end()) or _AFTER_VALUE.match(body, position) is None:
            raise HttpError(400, f"{clip(name)}: the field is given more than once", param=name)
    return fields


def decode(kind: type[T], source: bytes | msgspec.Raw, field: str = "") -> T:
    """Decode `source`, the value of `field` or the whole body; raise a 400 that names the path of an invalid value."""
    try:
        found: T = _decoder(kind).decode(source)  # type: ignore[arg-type]  # types are hashable
        return found
    except msgspec.ValidationError as error:
        within, what = objection(error, kind)
        if (media := _MEDIA.fullmatch(what)) is not None:
            what = f"{media[1]} is not served; this model reads text only"
        place = (field + within).lstrip(".")
        raise HttpError(400, f"{clip(place)}: {what}" if place else what, param=place or None) from None
    except msgspec.DecodeError as error:
        raise HttpError(400, f"{field or 'the body'} is not valid JSON: {error}", param=field or None) from None
    except RecursionError:
        raise HttpError(400, f"{field or 'the body'} is nested too deeply", param=field or None) from None


def _check_utf8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
