"""Which slot holds which key, kept where a restart finds it: a snapshot, and a journal of what changed since.

Both consist of rows, one per slot and change; the last row of a slot is true. Neither can do harm: a row that is
wrong leads to a record that fails its check. So the journal is never synced, and a snapshot only so that a crash
of the machine does not cost the whole cache. What both have missed is found by reading headers (keeper.py).

    index     header, rows of all live slots; written beside and renamed
    journal   header, then frames: magic, count, checksum, rows; the first bad frame ends it
    header    magic, version, clean, namespace, slot bytes, slots, generation, next sequence, rows, their checksum,
              checksum of the header; a journal counts if its generation is that of the snapshot
"""

import contextlib
import os
import struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from penstock.cache.tiers.disk.calls import Calls, read_all, write_all

ROW = struct.Struct("<32sQQII")  # key, sequence, stamp, slot, live
ROWS = np.dtype([("key", "V32"), ("sequence", "<u8"), ("stamp", "<u8"), ("slot", "<u4"), ("live", "<u4")])
INDEX, SCRATCH, JOURNAL = "index", "index.tmp", "journal"
_VERSION = 1
_INDEX_MAGIC, _JOURNAL_MAGIC, _FRAME_MAGIC = b"PNSTKIX1", b"PNSTKJN1", b"PNSTKFR1"
_HEADER = struct.Struct("<8sII32sQQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_AROUND_BYTES = 8192  # of a file: its header, and what the file system rounds up
_FRAME = struct.Struct("<8sQQ")  # magic, rows, checksum


class Geometry(NamedTuple):
    namespace: bytes
    slot_bytes: int
    num_slots: int


class Known(NamedTuple):
    """What the index says; `rows` of live slots in the order of their stamps."""

    geometry: Geometry  # `num_slots` as it was when the snapshot was written
    generation: int
    next_sequence: int
    is_clean: bool  # closed in order: there is nothing that these rows do not tell
    rows: np.ndarray


def room_bytes(num_slots: int) -> int:
    """What index, its successor and the journal may take on disk together."""
    return 3 * _AROUND_BYTES + 2 * num_slots * ROW.size + journal_limit(num_slots)


def journal_limit(num_slots: int) -> int:
    """The journal is as long as the index at most, before a snapshot takes its place."""
    return 32 * 1024 + num_slots * ROW.size


def read_index(calls: Calls, directory: int, namespace: bytes | None = None) -> Known | None:
    """None if there is no snapshot that can be trusted; one of another namespace cannot."""
    header, body = _read(calls, directory, INDEX, _INDEX_MAGIC)
    if header is None or checksum(body) != header.rows_checksum or len(body) != header.num_rows * ROW.size:
        return None
    if namespace is not None and header.namespace != namespace:
        return None
    rows = np.frombuffer(body, ROWS)
    changes = _read_journal(calls, directory, header)
    if changes is not None and len(changes):
        rows = _last_of_each_slot(np.concatenate([rows, changes]))
    next_sequence = max(header.next_sequence, int(rows["sequence"].max(initial=0)) + 1)
    rows = rows[rows["live"] == 1]
    rows = rows[np.argsort(rows["stamp"], kind="stable")]
    geometry = Geometry(header.namespace, header.slot_bytes, header.num_slots)
    return Known(geometry, header.generation, next_sequence, bool(header.clean) and changes is None, rows)


class Journal:
    """Writes snapshots and frames. A failed write raises OSError, and what was on disk before still counts."""

    def __init__(self, calls: Calls, directory: int, geometry: Geometry, generation: int) -> None:
        self.generation = generation
        self.size_bytes = 0
        self._calls = calls
        self._directory = directory
        self._geometry = geometry
        self._file = -1

    def snapshot(self, rows: np.ndarray, next_sequence: int, *, clean: bool) -> None:
        """From here on these rows are what is known, and the journal begins anew."""
        body = rows.tobytes()
        generation = self.generation + 1
        file = self._calls.open(self._directory, SCRATCH, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._calls, file, self._header(_INDEX_MAGIC, generation, next_sequence, body, clean), 0)
            write_all(self._calls, file, body, _HEADER_BYTES)
            self._calls.sync(file)
        finally:
            os.close(file)
        self._calls.rename(self._directory, SCRATCH, INDEX)
        self.generation = generation
        self._end()

    def begin(self) -> None:
        """Open a journal behind the snapshot: from now on the directory does not count as closed in order."""
        file = self._calls.open(self._directory, JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._calls, file, self._header(_JOURNAL_MAGIC, self.generation, 0, b"", False), 0)
        except BaseException:
            os.close(file)
            raise
        self._file, self.size_bytes = file, _HEADER_BYTES

    def append(self, rows: bytes) -> None:
        if self._file < 0:
            self.begin()
        frame = _FRAME.pack(_FRAME_MAGIC, len(rows) // ROW.size, checksum(rows)) + rows
        write_all(self._calls, self._file, frame, self.size_bytes)
        self.size_bytes += len(frame)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _end(self) -> None:
        """The old journal no longer counts: its generation is over."""
        self.close()
        self.size_bytes = 0
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(self._directory, JOURNAL)

    def _header(self, magic: bytes, generation: int, next_sequence: int, body: bytes, clean: bool) -> bytes:
        namespace, slot_bytes, num_slots = self._geometry
        sums = len(body) // ROW.size, checksum(body)
        fields = _HEADER.pack(
            magic, _VERSION, clean, namespace, slot_bytes, num_slots, generation, next_sequence, *sums
        )
        return fields + _CHECKSUM.pack(checksum(fields))


class _Header(NamedTuple):
    magic: bytes
    version: int
    clean: int
    namespace: bytes
    slot_bytes: int
    num_slots: int
    generation: int
    next_sequence: int
    num_rows: int
    rows_checksum: int


def _read(calls: Calls, directory: int, name: str, magic: bytes) -> tuple[_Header | None, bytes]:
    try:
        file = calls.open(directory, name, os.O_RDONLY)
    except FileNotFoundError:
        return None, b""
    try:
        data = read_all(calls, file)
    finally:
        os.close(file)
    if len(data) < _HEADER_BYTES:
        return None, b""
    header = _Header(*_HEADER.unpack_from(data))
    if _CHECKSUM.unpack_from(data, _HEADER.size)[0] != checksum(data[: _HEADER.size]):
        return None, b""
    if header.magic != magic or header.version != _VERSION:
        return None, b""
    return header, data[_HEADER_BYTES:]


def _read_journal(calls: Calls, directory: int, index: _Header) -> np.ndarray | None:
    """None without a journal that goes on from this snapshot."""
    header, data = _read(calls, directory, JOURNAL, _JOURNAL_MAGIC)
    if header is None or (header.namespace, header.generation) != (index.namespace, index.generation):
        return None
    frames, at = [np.empty(0, ROWS)], 0
    while at + _FRAME.size <= len(data):
        magic, num_rows, rows_checksum = _FRAME.unpack_from(data, at)
        rows = data[at + _FRAME.size : at + _FRAME.size + num_rows * ROW.size]
        if magic != _FRAME_MAGIC or len(rows) != num_rows * ROW.size or checksum(rows) != rows_checksum:
            break
        frames.append(np.frombuffer(rows, ROWS))
        at += _FRAME.size + len(rows)
    return np.concatenate(frames)


def _last_of_each_slot(rows: np.ndarray) -> np.ndarray:
    _, last = np.unique(rows["slot"][::-1], return_index=True)
    return rows[::-1][last]
