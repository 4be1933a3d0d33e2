"""The format and verification of a record on disk: pure functions over bytes, without file access.

A record is a one-page header followed by the payload, in a cell of fixed size. Records are never synced, so a read may
return torn, stale or foreign data. A payload is valid only if the header's own checksum matches, the header has the
expected namespace, key, sequence and length, and the payload matches the checksum in the header.

    0     8        12        16            48    80         88       96          104      4088       4096
    magic version  reserved  namespace(32) key   sequence   length   xxh3 of     zeros    xxh3 of 0 to 4088
                                                                     the payload
"""

import hashlib
import struct
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest as checksum

PAGE = 4096  # O_DIRECT requires addresses, lengths and offsets aligned to this
HEADER_BYTES = PAGE
KEY_BYTES = 32
FORMAT_VERSION = 1
MAGIC = b"PNSTKKV1"
_HEADER = struct.Struct("<8sII32s32sQQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


class Geometry(NamedTuple):
    """The parameters of one namespace's directory."""

    namespace: bytes
    cell_bytes: int
    num_cells: int


class RecordHeader(NamedTuple):
    """The header of a record, with a valid checksum of its own; the caller checks that it is the expected record."""

    namespace: bytes
    key: bytes
    sequence: int
    length: int
    payload_checksum: int


def namespace_of(fingerprint: bytes, chunk_bytes: int) -> bytes:
    """Hash everything that payloads depend on into the 32-byte namespace; a directory holds one namespace."""
    digest = hashlib.sha256(b"penstock disk tier")
    digest.update(struct.pack("<QQQ", FORMAT_VERSION, chunk_bytes, len(fingerprint)) + fingerprint)
    return digest.digest()


def cell_bytes(chunk_bytes: int) -> int:
    """Return the size of a record on disk: the header's page and whole pages for the payload."""
    return HEADER_BYTES + round_up(chunk_bytes)


def round_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def write_header(into: Any, namespace: bytes, key: bytes, sequence: int, payload: Any) -> None:
    """Write a header and zero the rest of its page, which may contain another record's data."""
    length = len(payload)
    into[:HEADER_BYTES] = bytes(HEADER_BYTES)
    _HEADER.pack_into(into, 0, MAGIC, FORMAT_VERSION, 0, namespace, key, sequence, length, checksum(payload))
    _CHECKSUM.pack_into(into, _CHECKED_BYTES, checksum(into[:_CHECKED_BYTES]))


def read_header(page: Any) -> RecordHeader | None:
    """Return the header in the page; None unless it is a complete header of this version."""
    magic, version, _, namespace, key, sequence, length, payload_checksum = _HEADER.unpack_from(page)
    if magic != MAGIC or version != FORMAT_VERSION:
        return None
    if _CHECKSUM.unpack_from(page, _CHECKED_BYTES)[0] != checksum(page[:_CHECKED_BYTES]):
        return None
    return RecordHeader(namespace, key, sequence, length, payload_checksum)
