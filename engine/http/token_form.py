"""The form of a request with its prompt as token ids, sent by a router that has tokenized the prompt.

    u32 little-endian: length of the JSON │ the JSON, its `messages` or `prompt` null │ ids, int32 little-endian

39,000 ids are 156 KB here and 284 KB in JSON, and the engine neither renders nor tokenizes again. Any client with a key
may use this form: ids are checked against the vocabulary, like those in a `prompt`.
"""

import struct
from array import array

import msgspec
from msgspec import Raw

from penstock.engine.http.errors import HttpError

CONTENT_TYPE = b"application/x-penstock-tokens"
REPORT_HEADER = b"x-penstock-report"  # a router asks for the next one; a stream then begins with its first token
CACHED_HEADER = "x-penstock-cached-tokens"


def pack(fields: dict[str, Raw], field: str, ids: bytes) -> bytes:
    """Return a JSON object with `field` set to null, followed by the token ids of the field."""
    return join(msgspec.json.encode({**fields, field: Raw(b"null")}), ids)


def join(text: bytes, ids: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text + ids


def cut(form: bytes) -> tuple[bytes, bytes]:
    """Split the form into the JSON and the packed ids."""
    if len(form) < 4:
        raise HttpError(400, "the body is shorter than its own length field")
    end = 4 + struct.unpack_from("<I", form)[0]
    if end > len(form) or (len(form) - end) % 4:
        raise HttpError(400, f"the body has {len(form)} bytes; its JSON ends at {end} and ids of 4 bytes follow")
    return form[4:end], form[end:]


def unpack(form: bytes) -> tuple[bytes, list[int]]:
    """Split the form into the JSON and the ids."""
    text, packed = cut(form)
    ids = array("i")
    ids.frombytes(packed)
    return text, ids.tolist()
