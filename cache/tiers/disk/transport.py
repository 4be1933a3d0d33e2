"""Moves records between buffers and slots, on the worker threads: builds headers, checks what comes back.

O_DIRECT wants addresses, lengths and offsets that are multiples of a page. A payload's whole pages go straight from
or to the caller's buffer if that is aligned, the rest through a page of the thread's own; a buffer that is not
aligned goes through a copy.
"""

import errno
import os
import threading

from penstock.cache.tiers.disk.calls import Calls
from penstock.cache.tiers.disk.directory import PROBE_FILE, Slabs
from penstock.cache.tiers.disk.record import HEADER_BYTES, PAGE, Header, checksum, read_header, round_up, write_header
from penstock.cache.tiers.disk.workers import LOAD, PROBE, STORE, Job
from penstock.cache.tiers.memory import address_of, huge_buffer

# What a load can meet that says: this record is no good, and trying again will not mend it.
CORRUPT, STALE = "corrupt", "stale"
SHORT = "short"  # fewer bytes moved than asked
NO_ROOM = "no room to grow"  # the file system has none for another slab


class Transport:
    """Serves jobs of any number of threads."""

    def __init__(self, calls: Calls, directory: int, slabs: Slabs, namespace: bytes, chunk_bytes: int) -> None:
        self._calls = calls
        self._slabs = slabs
        self._namespace = namespace
        self._chunk_bytes = chunk_bytes
        flags = os.O_RDWR | (os.O_DIRECT if slabs.is_direct else 0)
        self._probe_file = calls.open(directory, PROBE_FILE, flags)
        self._own = threading.local()

    def work(self, job: Job) -> None:
        """Do it, and leave `ok` or the reason in it."""
        try:
            if job.kind is not PROBE:
                job.buffer = job.buffer.cast("B")
            if job.kind is STORE:
                job.reason = self._store(job)
            elif job.kind is LOAD:
                job.reason = self._load(job)
            else:
                job.reason = self._probe()
        except FileNotFoundError:
            job.reason = CORRUPT  # somebody removed a slab
        except OSError as error:
            job.reason = errno.errorcode.get(error.errno or 0, "OSError")
            if job.reason == "ENOSPC" and job.kind is STORE and not self._slabs.is_backed(job.slot):
                job.reason = NO_ROOM
        except Exception as error:  # the top of a thread: the job must end, and its end says what happened
            job.reason = f"{type(error).__name__}: {error}"
        job.ok = not job.reason

    def close(self) -> None:
        os.close(self._probe_file)

    def _store(self, job: Job) -> str:
        header = self._scratch().header
        parts, own, start = self._parts(job.buffer)
        if own is not None:
            own[: self._chunk_bytes - start] = job.buffer[start:]
        write_header(header, self._namespace, job.key, job.sequence, job.buffer)
        file, offset = self._slabs.place(job.slot, grow=True)
        written = self._calls.writev(file, parts, offset)
        return "" if written == sum(map(len, parts)) else SHORT

    def _load(self, job: Job) -> str:
        parts, own, start = self._parts(job.buffer)
        file, offset = self._slabs.place(job.slot, grow=False)
        if self._calls.readv(file, parts, offset) < HEADER_BYTES + self._chunk_bytes:
            return CORRUPT  # the file is shorter than it was made
        if own is not None:
            job.buffer[start:] = own[: self._chunk_bytes - start]
        header = read_header(self._scratch().header)
        if header is None:
            return CORRUPT
        if header[:4] != (self._namespace, job.key, job.sequence, self._chunk_bytes):
            return STALE
        return "" if checksum(job.buffer) == header.payload_checksum else CORRUPT

    def header_at(self, slot: int) -> Header | None:
        """What the slot says it holds, if that is a record of ours."""
        page = self._scratch().header
        file, offset = self._slabs.place(slot, grow=False)
        if self._calls.readv(file, [page], offset) != HEADER_BYTES:
            return None
        header = read_header(page)
        if header is None or header.namespace != self._namespace or header.length != self._chunk_bytes:
            return None
        return header

    def _probe(self) -> str:
        page = self._scratch().header
        if self._calls.writev(self._probe_file, [page], 0) != PAGE:
            return SHORT
        return "" if self._calls.readv(self._probe_file, [page], 0) == PAGE else SHORT

    def _parts(self, buffer: memoryview) -> tuple[list[memoryview], memoryview | None, int]:
        """What one call moves; and the memory of our own among it, with where in the payload it begins."""
        scratch = self._scratch()
        if not self._slabs.is_direct:
            return [scratch.header, buffer], None, 0
        if address_of(buffer) % PAGE:
            bounce = scratch.bounce(self._chunk_bytes)
            return [scratch.header, bounce], bounce, 0
        whole = self._chunk_bytes - self._chunk_bytes % PAGE
        if whole == self._chunk_bytes:
            return [scratch.header, buffer], None, 0
        return [scratch.header, *([buffer[:whole]] if whole else []), scratch.tail], scratch.tail, whole

    def _scratch(self) -> "_Scratch":
        scratch = getattr(self._own, "scratch", None)
        if scratch is None:
            scratch = self._own.scratch = _Scratch()
        return scratch


class _Scratch:
    """A thread's own aligned memory."""

    def __init__(self) -> None:
        pages = huge_buffer(2 * PAGE)
        self.header, self.tail = pages[:PAGE], pages[PAGE:]
        self.payload: memoryview | None = None

    def bounce(self, chunk_bytes: int) -> memoryview:
        if self.payload is None:
            self.payload = huge_buffer(round_up(chunk_bytes))
        return self.payload
