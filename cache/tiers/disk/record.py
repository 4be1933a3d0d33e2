"""What a record on disk looks like, and how it proves itself. Pure functions over bytes; no files.

A record is a header of one page and the payload behind it, in a cell of fixed size. Nothing is ever synced, so
whatever is read back may be torn, stale, or another record's. A payload counts only if the header's own checksum
holds, the header is for this namespace, key, sequence and length, and the payload has the checksum it names.

    0     8        12        16            48    80         88       96          104      4088       4096
    magic version  reserved  namespace(32) key   sequence   length   xxh3 of     zeros    xxh3 of 0 to 4088
                                                                     the payload
"""

import hashlib
import struct
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest as checksum

PAGE = 4096  # alignment of everything that O_DIRECT touches
HEADER_BYTES = PAGE
KEY_BYTES = 32
FORMAT_VERSION = 1
MAGIC = b"PNSTKKV1"
_HEADER = struct.Struct("<8sII32s32sQQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


class Geometry(NamedTuple):
    """Of one namespace's directory."""

    namespace: bytes
    cell_bytes: int
    num_cells: int


class RecordHeader(NamedTuple):
    """Of a record whose header is whole; whether it is the one that was looked for is another question."""

    namespace: bytes
    key: bytes
    sequence: int
    length: int
    payload_checksum: int


def namespace_of(fingerprint: bytes, chunk_bytes: int) -> bytes:
    """32 bytes that name everything which gives the payloads their meaning; a directory holds one namespace."""
    digest = hashlib.sha256(b"penstock disk tier")
    digest.update(struct.pack("<QQQ", FORMAT_VERSION, chunk_bytes, len(fingerprint)) + fingerprint)
    return digest.digest()


def cell_bytes(chunk_bytes: int) -> int:
    """The room that a record takes on disk: the header's page and whole pages for the payload."""
    return HEADER_BYTES + round_up(chunk_bytes)


def round_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def write_header(into: Any, namespace: bytes, key: bytes, sequence: int, payload: Any) -> None:
    """Fill one page, zeros included: the page was another record's before."""
    length = len(payload)
    into[:HEADER_BYTES] = bytes(HEADER_BYTES)
    _HEADER.pack_into(into, 0, MAGIC, FORMAT_VERSION, 0, namespace, key, sequence, length, checksum(payload))
    _CHECKSUM.pack_into(into, _CHECKED_BYTES, checksum(into[:_CHECKED_BYTES]))


def read_header(page: Any) -> RecordHeader | None:
    """None unless the page is a header that was written whole by this version."""
    magic, version, _, namespace, key, sequence, length, payload_checksum = _HEADER.unpack_from(page)
    if magic != MAGIC or version != FORMAT_VERSION:
        return None
    if _CHECKSUM.unpack_from(page, _CHECKED_BYTES)[0] != checksum(page[:_CHECKED_BYTES]):
        return None
    return RecordHeader(namespace, key, sequence, length, payload_checksum)
