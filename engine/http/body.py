"""Decodes the bytes of a request into a typed struct, with early refusal and errors that name the field.

Decoding has two passes: the first only finds the bounds of each top-level value (1 GB/s), so that unknown and
oversized fields are refused before anything is built from them; the second decodes into the struct, strictly.
"""

import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from penstock.engine.http.errors import HttpError, clip
from penstock.engine.options import objection

MAX_FIELDS = 256  # at the top level: more than any API has, and few enough to iterate over quickly

T = TypeVar("T")

FIELDS = dict[str, msgspec.Raw]

_decoder = cache(msgspec.json.Decoder[Any])  # one per type, created at its first use
# msgspec's message for a block or part that is no text
_MEDIA = re.compile(
    r"invalid (?:enum )?value ('(?:image|document|input_image|input_file|input_audio|computer_screenshot)')"
)
_ERROR_AT = re.compile(r"\(byte (\d+)\)")  # in msgspec's message; none at the end of the input
# An escape of half a surrogate pair whose other half is missing. Something must follow: the end may cut a pair in two.
_LONE_SURROGATE = re.compile(
    rb"\\u(?<!\\\\u)(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"(?=[^\\]|\\[^u]|\\u....)",
    re.DOTALL,
)


def split_object(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the top-level fields of a JSON object, undecoded. Of a field given twice, the last value counts."""
    if not body:
        raise HttpError(400, "the body is empty; a JSON object is expected")
    if not body.isascii():
        try:
            body.decode()  # names and unused fields are not decoded below
        except UnicodeDecodeError as error:
            raise HttpError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    fields = decode(FIELDS, body)
    if len(fields) > MAX_FIELDS:
        raise HttpError(400, f"the body has {len(fields)} fields; at most {MAX_FIELDS} are allowed")
    return fields


def decode(kind: type[T], source: bytes | msgspec.Raw, field: str = "") -> T:
    """Decode `source`, the value of `field` or the whole body; raise a 400 that names the path of an invalid value."""
    try:
        found: T = _decoder(kind).decode(source)  # type: ignore[arg-type]  # types are hashable
        return found
    except msgspec.ValidationError as error:
        within, what = explained(error, kind)
        place = (field + within).lstrip(".")
        raise HttpError(400, f"{clip(place)}: {what}" if place else what, param=place or None) from None
    except msgspec.DecodeError as error:
        reason = _lone_surrogate(bytes(source), str(error)) or error
        raise HttpError(400, f"{field or 'the body'} is not valid JSON: {reason}", param=field or None) from None
    except RecursionError:
        raise HttpError(400, f"{field or 'the body'} is nested too deeply", param=field or None) from None


def _lone_surrogate(source: bytes, error: str) -> str | None:
    """Name the first half of a surrogate pair without its other half that caused an error: msgspec reports some as
    truncated input. Only the last bytes before the error are searched, because a search of 4 MiB takes half a second."""
    at = _ERROR_AT.search(error)
    end = len(source) if at is None else int(at[1])
    lone = _LONE_SURROGATE.search(source, max(end - 12, 0), end + 12)
    return None if lone is None else f"{lone[0].decode()} at byte {lone.start()} is a surrogate without its other half"


def explained(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """Return the path of the error and the message, like `objection`; images, audio and files are not served."""
    place, what = objection(error, kind)
    media = _MEDIA.match(what)
    return place, what if media is None else f"{media[1]} is not served; this model reads text only"
