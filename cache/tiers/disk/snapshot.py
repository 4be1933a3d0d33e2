"""The index file of a disk tier: one row with the key of each cell that holds a record.

It is written at an orderly close, and read at the next start. After a crash its rows are ignored, and the records are
found by reading their headers (keeper.py). A wrong row is harmless: it leads to a record that fails verification.

    index     header, a row for each record, least recently used first; written to index.tmp and renamed
    header    magic, version, clean, namespace, cell bytes, cells, zero, next sequence, rows, their checksum,
              checksum of the header
"""

import os
import struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from penstock.cache.tiers.disk.calls import SystemCalls, read_all, write_all
from penstock.cache.tiers.disk.record import PAGE, Geometry, cell_bytes

MAX_CHUNK_BYTES = 2**30
MAX_CELLS = 2**28  # a used cell takes about 100 bytes of memory; the index stores cell numbers in 32 bits
INDEX, SCRATCH = "index", "index.tmp"
_MAGIC, _VERSION = b"PNSTKIX1", 2
KEY = np.dtype("V32")
ROWS = np.dtype([("key", KEY), ("sequence", "<u8"), ("cell", "<u4")])
_HEADER = struct.Struct("<8sII32sQQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_AROUND_BYTES = 8192  # overhead of a file: its header, and rounding by the file system


class IndexHeader(NamedTuple):
    magic: bytes
    version: int
    clean: int  # 1 from a close to the next start: the rows are complete
    namespace: bytes
    cell_bytes: int
    num_cells: int  # when the index was written
    zero: int
    next_sequence: int
    num_rows: int
    rows_checksum: int

    def packed(self) -> bytes:
        fields = _HEADER.pack(*self)
        return fields + _CHECKSUM.pack(checksum(fields))


class IndexSnapshot(NamedTuple):
    header: IndexHeader
    rows: np.ndarray  # least recently used first; none if the tier is open or has crashed


def index_bytes(num_cells: int) -> int:
    """Return the disk space of the index file and its successor together."""
    return 2 * (_AROUND_BYTES + num_cells * ROWS.itemsize)


def read_snapshot(calls: SystemCalls, directory: int, namespace: bytes | None = None) -> IndexSnapshot | None:
    """Read the index file; return None if it is missing, invalid, or for another namespace than the given one."""
    try:
        file = calls.open(directory, INDEX, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        data = read_all(calls, file)
    finally:
        os.close(file)
    if len(data) < _HEADER_BYTES:
        return None
    header, body = IndexHeader(*_HEADER.unpack_from(data)), memoryview(data)[_HEADER_BYTES:]
    if header.packed() != data[:_HEADER_BYTES] or (header.magic, header.version) != (_MAGIC, _VERSION):
        return None
    if len(body) != header.num_rows * ROWS.itemsize or checksum(body) != header.rows_checksum:
        return None
    if namespace is not None and header.namespace != namespace:
        return None
    return IndexSnapshot(header, np.frombuffer(body if header.clean else b"", ROWS))


def write_snapshot(
    calls: SystemCalls, directory: int, geometry: Geometry, rows: np.ndarray, next_sequence: int
) -> None:
    """Replace the index file atomically. If a write fails, raise OSError; the previous file stays as it is."""
    body = rows.view(np.uint8).data
    header = IndexHeader(_MAGIC, _VERSION, 1, *geometry, 0, next_sequence, len(rows), checksum(body))
    file = calls.open(directory, SCRATCH, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(calls, file, header.packed(), 0)
        write_all(calls, file, body, _HEADER_BYTES)
        calls.sync(file)
    finally:
        os.close(file)
    calls.rename(directory, SCRATCH, INDEX)


def mark_open(calls: SystemCalls, directory: int, header: IndexHeader) -> None:
    """Clear the clean flag of the index file, since records written from now on are missing in it. It is changed in place,
    which a full file system allows."""
    file = calls.open(directory, INDEX, os.O_WRONLY)
    try:
        write_all(calls, file, header._replace(clean=0).packed(), 0)
    finally:
        os.close(file)


def cells_within(capacity_bytes: int, chunk_bytes: int) -> int:
    """Return how many records fit, together with the index, the small files and the file system's metadata."""
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes: {chunk_bytes} given; 1 to {MAX_CHUNK_BYTES} is expected")
    around = 3 * PAGE + capacity_bytes // 8192  # directory, lock, probe; extents: less than 128 KiB per slab
    per_cell = cell_bytes(chunk_bytes)
    num_cells = (capacity_bytes - around - index_bytes(0)) // (per_cell + index_bytes(1) - index_bytes(0))
    if num_cells < 1:
        raise ValueError(f"capacity_bytes: {capacity_bytes} given; at least {min_capacity(chunk_bytes)} is needed")
    if num_cells > MAX_CELLS:
        most = MAX_CELLS * per_cell
        raise ValueError(f"capacity_bytes: {capacity_bytes} given; at most {most} ({MAX_CELLS} records) is supported")
    return num_cells


def min_capacity(chunk_bytes: int) -> int:
    return (3 * PAGE + index_bytes(1) + cell_bytes(chunk_bytes)) * 8192 // 8191
