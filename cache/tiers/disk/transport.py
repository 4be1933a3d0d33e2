"""Moves records between buffers and cells, on the worker threads: builds headers, checks what comes back.

O_DIRECT wants addresses, lengths and offsets that are multiples of a page. Host blocks are: they are moved from and to
where they lie. Any other buffer goes through a copy in memory of the thread's own.
"""

import errno
import os
import threading

from xxhash import xxh3_64_intdigest as checksum

from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.directory import PROBE_FILE, Slabs
from penstock.cache.tiers.disk.record import HEADER_BYTES, PAGE, RecordHeader, read_header, round_up, write_header
from penstock.cache.tiers.disk.workers import LOAD, STORE, DiskJob
from penstock.cache.tiers.memory import address_of, huge_buffer

# What a load can meet that says: this record is no good, and trying again will not mend it.
CORRUPT, STALE = "corrupt", "stale"
SHORT = "short"  # fewer bytes moved than asked
NO_ROOM = "no room to grow"  # the file system has none for another slab
FULL = ("ENOSPC", "EDQUOT", "EFBIG")


class Transport:
    """Serves jobs of any number of threads."""

    def __init__(self, calls: SystemCalls, directory: int, slabs: Slabs, namespace: bytes, chunk_bytes: int) -> None:
        self._calls = calls
        self._slabs = slabs
        self._namespace = namespace
        self._chunk_bytes = chunk_bytes
        flags = os.O_RDWR | (os.O_DIRECT if slabs.is_direct else 0)
        self._probe_file = calls.open(directory, PROBE_FILE, flags)
        self._scratch = _Scratch(chunk_bytes)

    def work(self, job: DiskJob) -> None:
        """Do it, and leave `ok` or the reason in it."""
        try:
            if job.kind is STORE:
                job.reason = self._store(job)
            elif job.kind is LOAD:
                job.reason = self._load(job)
            else:
                job.reason = self._probe()
        except FileNotFoundError:
            job.reason = CORRUPT  # a slab was removed
        except OSError as error:
            job.reason = errno.errorcode.get(error.errno or 0, "OSError")
            if job.reason in FULL and job.kind is STORE and not self._slabs.is_backed(job.cell):
                job.reason = NO_ROOM
        except Exception as error:  # the top of a thread: the job must end, and its end says what happened
            job.reason = f"{type(error).__name__}: {error}"
        job.ok = not job.reason

    def close(self) -> None:
        os.close(self._probe_file)

    def _store(self, job: DiskJob) -> str:
        header = self._scratch.header
        parts = self._parts(job.buffer)
        if parts[1] is not job.buffer:
            parts[1][: self._chunk_bytes] = job.buffer
        write_header(header, self._namespace, job.key, job.sequence, job.buffer)
        file, offset = self._slabs.place(job.cell, grow=True)
        written = self._calls.writev(file, parts, offset)
        return "" if written == sum(map(len, parts)) else SHORT

    def _load(self, job: DiskJob) -> str:
        parts = self._parts(job.buffer)
        file, offset = self._slabs.place(job.cell, grow=False)
        if self._calls.readv(file, parts, offset) < HEADER_BYTES + self._chunk_bytes:
            return CORRUPT  # the file is shorter than it was made
        if parts[1] is not job.buffer:
            job.buffer[:] = parts[1][: self._chunk_bytes]
        header = read_header(self._scratch.header)
        if header is None:
            return CORRUPT
        if header[:4] != (self._namespace, job.key, job.sequence, self._chunk_bytes):
            return STALE
        return "" if checksum(job.buffer) == header.payload_checksum else CORRUPT

    def header_at(self, cell: int) -> RecordHeader | None:
        """What the cell says it holds, if that is a record of ours."""
        page = self._scratch.header
        file, offset = self._slabs.place(cell, grow=False)
        if self._calls.readv(file, [page], offset) != HEADER_BYTES:
            return None
        header = read_header(page)
        if header is None or header.namespace != self._namespace or header.length != self._chunk_bytes:
            return None
        return header

    def _probe(self) -> str:
        page = self._scratch.header
        if self._calls.writev(self._probe_file, [page], 0) != PAGE:
            return SHORT
        return "" if self._calls.readv(self._probe_file, [page], 0) == PAGE else SHORT

    def _parts(self, buffer: memoryview) -> list[memoryview]:
        """Return what one call moves: the header, and the buffer or the copy that stands for it."""
        scratch = self._scratch
        is_aligned = self._chunk_bytes % PAGE == 0 and address_of(buffer) % PAGE == 0
        return [scratch.header, buffer if is_aligned or not self._slabs.is_direct else scratch.copy]


class _Scratch(threading.local):
    """A thread's own aligned memory: each thread that asks gets its own."""

    def __init__(self, chunk_bytes: int) -> None:
        pages = huge_buffer(PAGE + round_up(chunk_bytes))  # memory is taken when a page is first touched
        self.header, self.copy = pages[:PAGE], pages[PAGE:]
