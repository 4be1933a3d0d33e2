"""KV blocks on a local disk: fixed cells in preallocated files, found by key, checked whenever they are read.

The caller's thread owns the index and does nothing that can block: a lookup is a dict's, a `put` takes a cell and
appends to a queue. Worker threads move the bytes (transport.py), a keeper writes the index down (keeper.py); what
they finish comes back through `poll`. Any failure of the disk is a miss. docs/tiers.md has the whole.

    put ─▶ writes ─┐               ┌─▶ done ─▶ poll: index, counters, results
    start_load ─▶ reads ─▶ workers ┘          └▶ table of cells ─▶ keeper ─▶ snapshots
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from penstock.cache.tiers.base import JobTimes, StoreResult, chunk_of
from penstock.cache.tiers.disk.admission import AdmissionPolicy
from penstock.cache.tiers.disk.calls import DIRECTORY_MODE, SystemCalls
from penstock.cache.tiers.disk.catalog import Catalog
from penstock.cache.tiers.disk.directory import SLAB_BYTES, Slabs, lock, open_directory, takes_direct
from penstock.cache.tiers.disk.keeper import Keeper
from penstock.cache.tiers.disk.record import KEY_BYTES, PAGE, Geometry, cell_bytes, namespace_of
from penstock.cache.tiers.disk.snapshot import mark_open, read_snapshot, room_bytes, write_snapshot
from penstock.cache.tiers.disk.transport import CORRUPT, NO_ROOM, STALE, Transport
from penstock.cache.tiers.disk.workers import LOAD, PROBE, STORE, DiskJob, Workers
from penstock.cache.tiers.health import HealthLimits, TierHealth

MAX_CHUNK_BYTES = 2**30
MAX_CELLS = 2**28  # each takes some 100 bytes of memory once it is used; the index counts them in 32 bits
NUM_WORKERS = 3  # two keep the disk busy, one checks or hashes meanwhile
_BAD_RECORD = (CORRUPT, STALE, "EIO")  # trying again will not mend it


class DiskLimits(NamedTuple):
    """Bounds that suit every disk we know; tests have tighter ones."""

    queue_bytes: int = 256 * 2**20  # of stores in flight
    queue_s: float = 2.0  # the same, by how fast the disk has been
    close_s: float = 10.0
    slab_bytes: int = SLAB_BYTES
    health: HealthLimits = HealthLimits()


class DiskTier:
    """One namespace's records below `path`, at most `capacity_bytes` with everything that belongs to them.

    Payloads have `chunk_bytes` bytes and keys 32. `fingerprint` names everything that gives the bytes their meaning;
    other fingerprints and chunk sizes live in directories of their own. One thread at a time may call. Raises OSError
    if the directory cannot be used (DirectoryInUse if another process does), ValueError for what cannot work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        chunk_bytes: int,
        fingerprint: bytes,
        limits: DiskLimits = DiskLimits(),  # noqa: B008  (a constant)
        calls: SystemCalls | None = None,
    ) -> None:
        num_cells = cells_within(capacity_bytes, chunk_bytes)
        namespace = namespace_of(fingerprint, chunk_bytes)
        self.directory = os.path.join(os.fspath(path), namespace.hex()[:32])
        self._limits = limits
        self._capacity_bytes = capacity_bytes
        self._chunk_bytes = chunk_bytes
        self._admission = AdmissionPolicy(num_cells)
        # A call that moves much may take longer: 10 MB/s are slow, not hanging.
        stall_s = max(limits.health.stall_s, chunk_bytes / 10e6)
        self._health = TierHealth(limits.health._replace(stall_s=stall_s))
        self._counts: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()  # puts that were refused or failed, by reason
        self._failures: Counter[str] = Counter()  # of calls, by errno or kind
        self._stored, self._loaded = JobTimes(), JobTimes()
        self._storing: set[bytes] = set()
        self._num_jobs = 0  # given to the workers and not taken back yet
        self._store_s = 0.0  # moving average of one store
        self._results: list[StoreResult] = []
        self._next_ticket = 1
        self._sequence = 1  # of the next record
        self._is_closed = False
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
        with contextlib.ExitStack() as undo:
            self._open(calls or SystemCalls(), Geometry(namespace, cell_bytes(chunk_bytes), num_cells), undo)
            self._files = undo.pop_all()
        self._max_storing = self._store_room()

    @property
    def is_open(self) -> bool:
        """Not bypassed."""
        return self._health.is_open

    # -- what is there -------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Whether there is a record. No system call."""
        return key in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def keys(self) -> list[bytes]:
        """Of all records, in no particular order."""
        return list(self._cells)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that can be read and could not at the last call, and the other way round."""
        return self._catalog.changes.take()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that these were used, in this order; the end of a chain comes before its start, and is evicted first."""
        for key in keys:
            self._admission.saw(key)
            cell = self._cells.get(key)
            if cell is not None:
                self._catalog.use(cell)

    # -- storing -------------------------------------------------------------------------------------------

    def put(self, key: bytes, buffer: Any) -> bool:
        """Queue a store. True borrows the buffer until `poll` yields its result; False does not, and none comes.

        False says that it is there already or in flight, or that it was dropped (`stats` counts why): the disk is
        behind, bypassed, full of what is in use, or does not find the block worth it. Never blocks.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"key: {len(key)} bytes given; {KEY_BYTES} are expected")
        payload = chunk_of("buffer", buffer, self._chunk_bytes)
        self._admission.saw(key)
        if key in self._storing:
            return False
        if key in self._cells:
            self._catalog.use(self._cells[key])
            return False
        cell = None
        if len(self._storing) >= self._max_storing:
            reason = self._why_no_room()
        elif self._catalog.is_full and not self._admission.admits(key):
            reason = "not seen before"
        else:
            # Until the scan is over, it may find records in cells that seem free.
            cell, reason = self._catalog.take(keep_free=self._keeper.scan_left > 0), "all in use"
        if cell is None:
            self._drops[reason] += 1
            return False
        sequence = self._sequence
        self._sequence = sequence + 1
        self._storing.add(key)
        self._start(DiskJob(STORE, key, cell, sequence, payload, sequence))
        return True

    def _store_room(self) -> int:
        """How many stores may be in flight: bounded by bytes, and by the time that they will take."""
        if self._is_closed or not self._health.is_open:
            return 0
        room = self._limits.queue_bytes // self._chunk_bytes
        if self._store_s:
            room = min(room, int(NUM_WORKERS * self._limits.queue_s / self._store_s))
        return max(room, NUM_WORKERS)

    def _why_no_room(self) -> str:
        if self._is_closed:
            return "closed"
        return "queue is full" if self._health.is_open else "bypassed"

    # -- loading -------------------------------------------------------------------------------------------

    def start_load(self, key: bytes, out: Any) -> int | None:
        """A ticket, and `out` borrowed until `poll` yields its result; None if there is nothing to read.

        `out` holds the payload if the result is ok, and anything if it is not. A load that hangs keeps its ticket
        and `out` until the system lets go of both, however long: memory that a late read can still write to must not
        be used. Wait no longer than is worth it, and put `out` to no other use.
        """
        into = chunk_of("out", out, self._chunk_bytes, to_write=True)
        self._admission.saw(key)
        cell = self._cells.get(key)
        if cell is None:
            self._counts["misses"] += 1
            return None
        if self._is_closed or not self._health.is_open:
            self._counts["loads refused"] += 1
            return None
        self._catalog.use(cell)
        _, sequence = self._catalog.table.record_in(cell)
        self._catalog.loading[cell] += 1
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._start(DiskJob(LOAD, key, cell, sequence, into, ticket))
        return ticket

    # -- what the threads have done ------------------------------------------------------------------------

    def poll(self) -> list[StoreResult]:
        """Return what has ended since the last call, and look after the disk's health. Never blocks."""
        self._settle()
        if self._keeper.found:
            self._adopt()
        if not self._is_closed:
            self._watch()
        self._max_storing = self._store_room()
        results, self._results = self._results, []
        return results

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that is queued has ended and the index on disk has it; False if that takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._results = self.poll()
            if self._num_jobs == 0:
                return self._keeper.save(max(0.0, deadline_s - time.monotonic()))
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.0005)

    def close(self) -> None:
        """Drop what no thread has begun, wait for the rest, write the index. Results can still be polled.

        If the disk hangs, threads and files are left to the end of the process: a descriptor that is closed under
        a thread could be another file's by the time it is used.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._max_storing = 0
        self._cancel("closed")
        ended = self._workers.stop(self._limits.close_s)
        self._settle()
        if self._keeper.stop(self._limits.close_s) and ended:
            self._files.close()

    def __enter__(self) -> "DiskTier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- how things stand ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the tier was opened, and how things stand. Numbers, and dicts of numbers."""
        return {
            "entries": len(self._cells),
            "slots": self._slabs.num_cells,
            "workers": NUM_WORKERS,
            "used_bytes": len(self._cells) * self._slabs.cell_bytes,
            "capacity_bytes": self._capacity_bytes,
            "queue_bytes": len(self._storing) * self._chunk_bytes,
            "pinned": len(self._catalog.loading),  # records that eviction passes by
            "loading": self._catalog.loading.total(),
            "is_open": self._health.is_open,
            "is_direct": self._slabs.is_direct,
            "is_picky": self._admission.is_picky,
            "bypasses": self._health.num_bypasses,
            "index_errors": self._keeper.num_errors,
            "scan_left": self._keeper.scan_left,
            "recovery_s": self._recovery_s,
            "retention_s": self._catalog.retention_s,
            "evictions": self._catalog.num_evictions,
            "hits": self._loaded.num,
            "misses": self._counts["misses"],
            "stores": self._stored.num,
            "loaded_bytes": self._loaded.num * self._chunk_bytes,
            "stored_bytes": self._stored.num * self._chunk_bytes,
            "corrupt_reads": self._counts[CORRUPT],
            "stale_reads": self._counts[STALE],
            "loads_refused": self._counts["loads refused"],
            "drops": dict(self._drops),
            "failures": dict(self._failures),
            "store_times": {"sum_s": self._stored.sum_s},
            "load_times": {"sum_s": self._loaded.sum_s},
        }

    def check(self) -> None:
        """What holds between any two calls."""
        self._catalog.check(len(self._storing))
        assert not self._storing & self._cells.keys()
        assert self._num_jobs >= len(self._storing) + self._catalog.loading.total()

    # -- beneath -------------------------------------------------------------------------------------------

    def _open(self, calls: SystemCalls, geometry: Geometry, undo: contextlib.ExitStack) -> None:
        started_s = time.monotonic()
        directory = open_directory(self.directory, create=True)
        undo.callback(os.close, directory)
        undo.callback(os.close, lock(calls, directory, self.directory))
        is_direct = takes_direct(calls, directory)
        self._slabs = Slabs(calls, directory, geometry, slab_bytes=self._limits.slab_bytes, is_direct=is_direct)
        undo.callback(self._slabs.close)
        self._transport = Transport(calls, directory, self._slabs, geometry.namespace, self._chunk_bytes)
        undo.callback(self._transport.close)

        self._catalog = Catalog(geometry.num_cells, num_backed=self._slabs.trim())
        self._cells = self._catalog.cells
        known = read_snapshot(calls, directory, geometry.namespace)
        is_clean = known is not None and bool(known.header.clean)
        if known is not None:
            self._catalog.restore(known.rows)
            self._sequence = known.header.next_sequence
        if known is not None and is_clean:
            mark_open(calls, directory, known.header)
        else:  # beyond what records may lie there that the index does not know of
            self._sequence = max(self._sequence, int(time.time()) << 32)

        def write(rows: np.ndarray, clean: bool) -> None:
            write_snapshot(calls, directory, geometry, rows, self._sequence, clean=clean)

        self._keeper = Keeper(write, self._catalog.table, self._transport)
        self._workers = Workers(self._transport.work, NUM_WORKERS)
        self._workers.start()
        self._keeper.start([] if is_clean else self._catalog.to_scan(), is_saved=is_clean)
        self._recovery_s = time.monotonic() - started_s

    def _start(self, job: DiskJob) -> None:
        self._num_jobs += 1
        self._workers.add(job)

    def _settle(self) -> None:
        done = self._workers.done
        while done:
            job = done.popleft()
            self._end(job)
            if job.kind is PROBE:
                self._health.probed(time.monotonic(), job.ok)
                if self._health.is_open:
                    self._catalog.hide(False)
            elif job.ok:
                self._health.worked()
            else:
                self._blame(job.reason)

    def _end(self, job: DiskJob) -> None:
        """Every job comes here once, whether it was done or taken back."""
        self._num_jobs -= 1
        if job.kind is STORE:
            self._end_store(job)
            self._results.append(StoreResult("store", job.ticket, job.key, job.ok))
        elif job.kind is LOAD:
            self._end_load(job)
            self._results.append(StoreResult("load", job.ticket, job.key, job.ok))

    def _end_store(self, job: DiskJob) -> None:
        self._storing.remove(job.key)
        if job.ok:
            self._store_s = 0.9 * self._store_s + 0.1 * job.seconds if self._store_s else job.seconds
            self._stored.add(job.seconds)
            self._catalog.publish(job.cell, job.key, job.sequence)
        else:
            self._drops[job.reason] += 1
            self._catalog.release(job.cell)
            if job.reason == NO_ROOM:
                self._catalog.stop_growing(self._slabs.is_backed)

    def _end_load(self, job: DiskJob) -> None:
        loading = self._catalog.loading
        loading[job.cell] -= 1
        if not loading[job.cell]:
            del loading[job.cell]
        if job.ok:
            self._loaded.add(job.seconds)
        elif job.reason in _BAD_RECORD:
            self._counts[job.reason] += 1
            self._catalog.forget(job.cell, job.key, job.sequence)

    def _adopt(self) -> None:
        found = self._keeper.found
        while found:
            cell, key, sequence = found.popleft()
            if key not in self._storing and self._catalog.adopt(cell, key, sequence):
                self._sequence = max(self._sequence, sequence + 1)

    # -- health --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        now_s = time.monotonic()
        if self._health.watch(now_s, self._workers.oldest_started_s()):
            self._withdraw()
        elif self._health.wants_probe(now_s):
            self._start(DiskJob(PROBE))

    def _blame(self, reason: str) -> None:
        """A job has failed. A bad record, or a file system without room to grow, says nothing about the disk."""
        self._failures[reason] += 1
        if reason not in (CORRUPT, STALE, NO_ROOM) and self._health.failed(time.monotonic(), reason):
            self._withdraw()

    def _withdraw(self) -> None:
        """The tier is bypassed: nothing is queued any more, and nothing can be read until it is back."""
        self._catalog.hide(True)
        self._cancel("bypassed")

    def _cancel(self, reason: str) -> None:
        for job in self._workers.cancel():
            job.reason = reason
            self._end(job)


def cells_within(capacity_bytes: int, chunk_bytes: int) -> int:
    """How many records fit with everything around them: index, small files, the file system's own blocks."""
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes: {chunk_bytes} given; 1 to {MAX_CHUNK_BYTES} are possible")
    around = 3 * PAGE + capacity_bytes // 8192  # directory, lock and probe; extents: less than 128 KiB for a slab
    per_cell = cell_bytes(chunk_bytes)
    num_cells = (capacity_bytes - around - room_bytes(0)) // (per_cell + room_bytes(1) - room_bytes(0))
    if num_cells < 1:
        raise ValueError(f"capacity_bytes: {capacity_bytes} given; at least {least_capacity(chunk_bytes)} are needed")
    if num_cells > MAX_CELLS:
        most = MAX_CELLS * per_cell
        raise ValueError(f"capacity_bytes: {capacity_bytes} given; at most {most} can be used, {MAX_CELLS} records")
    return num_cells


def least_capacity(chunk_bytes: int) -> int:
    return (3 * PAGE + room_bytes(1) + cell_bytes(chunk_bytes)) * 8192 // 8191 + 1
