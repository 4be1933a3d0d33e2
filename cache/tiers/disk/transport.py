"""Record I/O on the worker threads: builds headers, transfers records between buffers and cells, verifies loaded ones.

O_DIRECT requires addresses, lengths and offsets that are multiples of a page. Host blocks satisfy this and are
transferred in place; any other buffer is copied through aligned memory of the thread.
"""

import errno
import threading

from xxhash import xxh3_64_intdigest as checksum

from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.directory import Slabs, is_usable
from penstock.cache.tiers.disk.record import HEADER_BYTES, PAGE, RecordHeader, read_header, round_up, write_header
from penstock.cache.tiers.disk.workers import LOAD, STORE, DiskJob
from penstock.cache.tiers.memory import address_of, huge_buffer

# Reasons for a failed load that a retry cannot fix: the record itself is bad.
CORRUPT, STALE = "corrupt", "stale"
SHORT = "short"  # fewer bytes were transferred than requested
NO_ROOM = "no room to grow"  # the file system has no space for another slab
FULL = ("ENOSPC", "EDQUOT", "EFBIG")


class Transport:
    """The I/O of one disk tier, called from any number of threads."""

    def __init__(self, calls: SystemCalls, probe_file: int, slabs: Slabs, namespace: bytes, chunk_bytes: int) -> None:
        self._calls = calls
        self._slabs = slabs
        self._namespace = namespace
        self._chunk_bytes = chunk_bytes
        self._probe_file = probe_file
        self._scratch = _Scratch(chunk_bytes)

    def work(self, job: DiskJob) -> None:
        """Execute the job and set its `ok` and `reason`."""
        try:
            if job.kind is STORE:
                job.reason = self._store(job)
            elif job.kind is LOAD:
                job.reason = self._load(job)
            else:
                job.reason = "" if is_usable(self._calls, self._probe_file, self._scratch.header) else SHORT
        except FileNotFoundError:
            job.reason = CORRUPT if job.kind is LOAD else "ENOENT"  # somebody removed the slab, or the directory
        except OSError as error:
            job.reason = errno.errorcode.get(error.errno or 0, "OSError")
            if job.reason in FULL and job.kind is STORE and not self._slabs.is_backed(job.cell):
                job.reason = NO_ROOM
        except Exception as error:  # the top of a thread: the job must end and report the error
            job.reason = f"{type(error).__name__}: {error}"
        job.ok = not job.reason

    def _store(self, job: DiskJob) -> str:
        header = self._scratch.header
        parts = self._parts(job.buffer)
        if parts[1] is not job.buffer:
            parts[1][: self._chunk_bytes] = job.buffer
        write_header(header, self._namespace, job.key, job.sequence, job.buffer)
        file, offset = self._slabs.locate(job.cell, grow=True)
        written = self._calls.writev(file, parts, offset)
        return "" if written == sum(map(len, parts)) else SHORT

    def _load(self, job: DiskJob) -> str:
        parts = self._parts(job.buffer)
        file, offset = self._slabs.locate(job.cell, grow=False)
        if self._calls.readv(file, parts, offset) < HEADER_BYTES + self._chunk_bytes:
            return CORRUPT  # the file has been truncated
        if parts[1] is not job.buffer:
            job.buffer[:] = parts[1][: self._chunk_bytes]
        header = read_header(self._scratch.header)
        if header is None:
            return CORRUPT
        if header[:4] != (self._namespace, job.key, job.sequence, self._chunk_bytes):
            return STALE
        return "" if checksum(job.buffer) == header.payload_checksum else CORRUPT

    def header_at(self, cell: int) -> RecordHeader | None:
        """Return the header in the cell if it belongs to a record of this namespace."""
        page = self._scratch.header
        file, offset = self._slabs.locate(cell, grow=False)
        if self._calls.readv(file, [page], offset) != HEADER_BYTES:
            return None
        header = read_header(page)
        if header is None or header.namespace != self._namespace or header.length != self._chunk_bytes:
            return None
        return header

    def _parts(self, buffer: memoryview) -> list[memoryview]:
        """Return the buffers of one system call: the header page, and the buffer or its aligned copy."""
        scratch = self._scratch
        is_aligned = self._chunk_bytes % PAGE == 0 and address_of(buffer) % PAGE == 0
        return [scratch.header, buffer if is_aligned or not self._slabs.is_direct else scratch.copy]


class _Scratch(threading.local):
    """Thread-local aligned memory for a header and a payload."""

    def __init__(self, chunk_bytes: int) -> None:
        pages = huge_buffer(PAGE + round_up(chunk_bytes))  # the kernel assigns memory at the first touch
        self.header, self.copy = pages[:PAGE], pages[PAGE:]
