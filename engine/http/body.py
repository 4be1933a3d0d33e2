"""Decodes the bytes of a request into a typed struct, with early refusal and errors that name the field.

Decoding has two passes: the first only finds the bounds of each top-level value (1 GB/s), so that unknown and
oversized fields are refused before anything is built from them; the second decodes into the struct, strictly.
"""

import re
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import msgspec

from penstock.engine.http.errors import HttpError, clip
from penstock.engine.options import REQUIRED, reason_of, refused_part

MAX_FIELDS = 256  # at the top level: more than any API has, and few enough to iterate over quickly
MAX_PARTS = 10_000  # commas in a field of which the invalid part is searched for, which takes at most 10 ms

T = TypeVar("T")

FIELDS = dict[str, msgspec.Raw]

_decoder = cache(msgspec.json.Decoder[Any])  # one per type, created at its first use
# Types of blocks or parts that are no text
_MEDIA = ("image", "document", "input_image", "input_file", "input_audio", "computer_screenshot")
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
        return decoded(kind, source)
    except msgspec.ValidationError as error:
        if not field and isinstance(kind, msgspec.StructMeta):
            decode_fields(kind, split_object(bytes(source)))
        within, reason = _refusal(kind, source, error)
        place = (field + within).lstrip(".")
        raise HttpError(400, f"{clip(place)}: {reason}" if place else reason, param=place or None) from None
    except msgspec.DecodeError as error:
        reason = _lone_surrogate(bytes(source)) or str(error)
        raise HttpError(400, f"{field or 'the body'} is not valid JSON: {reason}", param=field or None) from None
    except UnicodeDecodeError:
        raise HttpError(400, f"{field or 'the body'} is not valid UTF-8", param=field or None) from None
    except RecursionError:
        raise HttpError(400, f"{field or 'the body'} is nested too deeply", param=field or None) from None


def decoded(kind: type[T], source: bytes | msgspec.Raw) -> T:
    """Decode `source`, without explaining errors."""
    found: T = _decoder(kind).decode(source)  # type: ignore[arg-type]  # types are hashable
    return found


def decode_fields(kind: type[T], fields: dict[str, msgspec.Raw]) -> T:
    """Decode the fields of a body one by one; raise a 400 for the first that is missing or invalid."""
    values = {}
    for field in msgspec.structs.fields(kind):  # type: ignore[arg-type]  # a struct
        name, raw = field.encode_name, fields.get(field.encode_name)
        if raw is not None:
            values[field.name] = raw if field.type is msgspec.Raw else decode(field.type, raw, name)
        elif field.required:
            raise HttpError(400, f"{name}: {REQUIRED}", param=name)
    return kind(**values)


def _refusal(kind: Any, source: bytes | msgspec.Raw, error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the path of the error and the reason. Images, audio and files are not served."""
    if bytes(source).count(b",") <= MAX_PARTS:
        with suppress(msgspec.DecodeError, RecursionError):  # of a number that is out of range, for example
            path, part, reason = refused_part(decoded(object, source), kind, error, str_keys=True)
            return path, f"{part!r} is not served; this model reads text only" if part in _MEDIA else reason
    return "", reason_of(error)


def _lone_surrogate(source: bytes) -> str | None:
    """Name the first half of a surrogate pair without its other half that caused an error: msgspec reports one near the
    end as truncated input. Of a long text only the end is searched, because a search of 4 MiB takes half a second."""
    lone = _LONE_SURROGATE.search(source, max(len(source) - 4096, 0))
    return None if lone is None else f"{lone[0].decode()} at byte {lone.start()} is a surrogate without its other half"
