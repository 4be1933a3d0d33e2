"""The store of KV blocks on a local disk: fixed cells in preallocated files, found by key, verified at every load.

The caller's thread owns the index and never blocks: a lookup is a dict lookup, a `put` takes a cell and appends to a
queue. Worker threads transfer the bytes (transport.py); `poll` returns the results. A keeper thread scans the records
after a crash and writes the index at the end (keeper.py). Any failure of the disk is a miss. docs/tiers.md describes the whole.

    put ─▶ stores ─┐               ┌─▶ done ─▶ poll: index, counters, results
    start_load ─▶ loads ─▶ workers ┘          └▶ catalog of cells ─▶ close: index file
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.cache.tiers.base import StoreResult, chunk_view
from penstock.cache.tiers.disk.admission import AdmissionPolicy
from penstock.cache.tiers.disk.calls import DIRECTORY_MODE, SystemCalls
from penstock.cache.tiers.disk.catalog import Catalog
from penstock.cache.tiers.disk.directory import SLAB_BYTES, Slabs, lock, open_directory, open_probe
from penstock.cache.tiers.disk.keeper import Keeper
from penstock.cache.tiers.disk.record import KEY_BYTES, Geometry, cell_bytes, namespace_of
from penstock.cache.tiers.disk.snapshot import cells_within, mark_open, read_snapshot, write_snapshot
from penstock.cache.tiers.disk.transport import CORRUPT, NO_ROOM, STALE, Transport
from penstock.cache.tiers.disk.workers import LOAD, PROBE, STORE, DiskJob, Workers
from penstock.cache.tiers.health import FailureLog, HealthLimits, TierHealth

NUM_WORKERS = 3  # two keep the disk busy while one computes checksums
_BAD_RECORD = (CORRUPT, STALE, "EIO")  # a retry will not help


class DiskLimits(NamedTuple):
    """Limits that suit every disk measured so far; tests use tighter ones."""

    queue_bytes: int = 256 * 2**20  # stores in flight
    queue_s: float = 2.0  # the expected time to finish the stores in flight
    close_s: float = 10.0
    slab_bytes: int = SLAB_BYTES
    health: HealthLimits = HealthLimits()


class DiskTier:
    """The records of one namespace below `path`, using at most `capacity_bytes` of disk space in all.

    Payloads have `chunk_bytes` bytes and keys 32. `fingerprint` identifies everything that the bytes depend on; each
    fingerprint and chunk size has a directory of its own. `about` has the model and the tokens of a payload, which only
    `penstock cache inspect` shows. One thread at a time may call. Raises OSError if the directory
    cannot be used (DirectoryInUse if another process uses it), ValueError for impossible sizes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        chunk_bytes: int,
        fingerprint: bytes,
        about: tuple[str, int] = ("unknown", 0),
        limits: DiskLimits = DiskLimits(),  # noqa: B008  (a constant)
        calls: SystemCalls | None = None,
    ) -> None:
        self._about = about
        num_cells = cells_within(capacity_bytes, chunk_bytes)
        namespace = namespace_of(fingerprint, chunk_bytes)
        self.directory = os.path.join(os.fspath(path), namespace.hex()[:32])
        self._limits = limits
        self._capacity_bytes = capacity_bytes
        self._chunk_bytes = chunk_bytes
        self._admission = AdmissionPolicy(num_cells)
        # Large chunks may take longer than stall_s: a disk with 10 MB/s is slow, but not hung.
        stall_s = max(limits.health.stall_s, chunk_bytes / 10e6)
        self._health = TierHealth(limits.health._replace(stall_s=stall_s), "the disk tier")
        self._failure_log = FailureLog(self.directory)
        self._counts: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()  # stores that were refused or failed, by reason
        self._failures: Counter[str] = Counter()  # failed calls, by errno or kind
        self._loads_s = self._stores_s = 0.0  # total durations of the successful ones
        self._storing: set[bytes] = set()
        self._store_s = 0.0  # moving average of the duration of a store
        self._results: list[StoreResult] = []
        self._next_ticket = 1
        self._sequence = 1  # sequence number of the next record
        self._is_closed = False
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
        with contextlib.ExitStack() as undo:
            self._open(calls or SystemCalls(), Geometry(namespace, cell_bytes(chunk_bytes), num_cells), undo)
            self._files = undo.pop_all()
        self._max_storing = self._store_limit()

    @property
    def is_open(self) -> bool:
        """Return whether the tier is in use, that is, not bypassed."""
        return self._health.is_open

    # -- lookups -------------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return whether there is a record, without a system call."""
        return key in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def keys(self) -> list[bytes]:
        """Return the keys of all records, in no particular order."""
        return list(self._cells)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys gained since the last call, and the lost keys."""
        return self._catalog.changes.take()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark keys as used, in this order; pass the end of a chain before its start, so that it is evicted first."""
        for key in keys:
            self._admission.note_use(key)
            self._catalog.use(key)

    # -- storing -------------------------------------------------------------------------------------------

    def put(self, key: bytes, buffer: Any) -> bool:
        """Queue a store, never block. True borrows the buffer until `poll` returns its result; after False no result comes.

        False means that the key is stored or in flight already, or that the store was dropped (`stats` counts the
        reasons): the queue is full, the tier is bypassed, all records are in use, or the admission policy refused the key.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"key: {len(key)} bytes given; {KEY_BYTES} are expected")
        payload = chunk_view("buffer", buffer, self._chunk_bytes)
        self._admission.note_use(key)
        if key in self._storing or self._catalog.use(key) is not None:
            return False
        cell = None
        if len(self._storing) >= self._max_storing:
            reason = "closed" if self._is_closed else "queue is full" if self._health.is_open else "bypassed"
        elif self._catalog.is_full and not self._admission.admits(key):
            reason = "not seen before"
        else:
            # Until the scan has finished, it may find records in cells that seem free.
            cell, reason = self._catalog.take(keep_free=self._keeper.scan_left > 0), "all in use"
        if cell is None:
            self._drops[reason] += 1
            return False
        sequence = self._sequence
        self._sequence = sequence + 1
        self._storing.add(key)
        self._workers.add(DiskJob(STORE, key, cell, sequence, payload, sequence))
        return True

    def _store_limit(self) -> int:
        """Return how many stores may be in flight, limited by their bytes and by the time they are expected to take."""
        if self._is_closed or not self._health.is_open:
            return 0
        room = self._limits.queue_bytes // self._chunk_bytes
        if self._store_s:
            room = min(room, int(NUM_WORKERS * self._limits.queue_s / self._store_s))
        return max(room, NUM_WORKERS)

    # -- loading -------------------------------------------------------------------------------------------

    def start_load(self, key: bytes, out: Any) -> int | None:
        """Queue a load into `out`, borrowed until `poll` returns its result; return its ticket, or None for a miss.

        `out` holds the payload if the result is ok; otherwise its content is undefined. A hung load keeps `out` borrowed
        until the system call returns, however long that takes: a late load could still write to it. The caller may stop
        waiting, but must not reuse `out` before the result.
        """
        into = chunk_view("out", out, self._chunk_bytes, to_fill=True)
        self._admission.note_use(key)
        cell = self._catalog.use(key)
        if cell is None or self._is_closed or not self._health.is_open:
            self._counts["misses"] += 1
            return None
        self._catalog.loading[cell] += 1
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._workers.add(DiskJob(LOAD, key, cell, self._catalog.sequence_in(cell), into, ticket))
        return ticket

    # -- results and shutdown ------------------------------------------------------------------------------

    def poll(self) -> list[StoreResult]:
        """Return the results since the last call, and update the health of the disk. Never blocks."""
        self._finish_jobs()
        if self._keeper.records:
            self._adopt_records()
        if not self._is_closed:
            self._check_health()
        self._max_storing = self._store_limit()
        results, self._results = self._results, []
        return results

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all stores and loads have ended; return False after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._results = self.poll()
            if not (self._storing or self._catalog.loading):
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.0005)

    def close(self) -> None:
        """Cancel queued jobs, wait for running ones and write the index. Results can still be polled.

        If the disk hangs, threads and files stay until the process ends: a descriptor closed while a thread uses it
        could refer to another file by then.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._max_storing = 0
        self._cancel("closed")
        ended = self._workers.stop(self._limits.close_s)
        self._finish_jobs()
        self._adopt_records()
        if self._keeper.stop(self._limits.close_s) and ended:
            self._files.close()

    # -- statistics ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters since the tier was opened and its current state: numbers, and dicts of numbers."""
        return {
            "entries": len(self._cells),
            "slots": self._slabs.num_cells,
            "workers": NUM_WORKERS,
            "used_bytes": len(self._cells) * self._slabs.cell_bytes,
            "capacity_bytes": self._capacity_bytes,
            "queue_bytes": len(self._storing) * self._chunk_bytes,
            "pinned": len(self._catalog.loading),  # records that eviction skips
            "loading": self._catalog.loading.total(),
            "is_open": self._health.is_open,
            "bypasses": self._health.num_bypasses,
            "scan_left": self._keeper.scan_left,
            "evictions": self._catalog.num_evictions,
            "hits": self._counts["loads"],
            "misses": self._counts["misses"],
            "stores": self._counts["stores"],
            "loaded_bytes": self._counts["loads"] * self._chunk_bytes,
            "stored_bytes": self._counts["stores"] * self._chunk_bytes,
            "corrupt_reads": self._counts[CORRUPT],
            "stale_reads": self._counts[STALE],
            "drops": dict(self._drops),
            "failures": dict(self._failures),
            "store_times": {"sum_s": self._stores_s},
            "load_times": {"sum_s": self._loads_s},
        }

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        self._catalog.check(len(self._storing))
        assert not self._storing & self._cells.keys()

    # -- internals -----------------------------------------------------------------------------------------

    def _open(self, calls: SystemCalls, geometry: Geometry, undo: contextlib.ExitStack) -> None:
        directory = open_directory(self.directory, create=True)
        undo.callback(os.close, directory)
        undo.callback(os.close, lock(calls, directory, self.directory, self._about))
        probe_file, is_direct = open_probe(calls, directory)
        undo.callback(os.close, probe_file)
        self._slabs = Slabs(calls, directory, geometry, slab_bytes=self._limits.slab_bytes, is_direct=is_direct)
        undo.callback(self._slabs.close)
        self._transport = Transport(calls, probe_file, self._slabs, geometry.namespace, self._chunk_bytes)

        num_backed = self._slabs.trim()
        self._catalog = Catalog(geometry.num_cells, num_backed)
        self._cells = self._catalog.cells
        index = read_snapshot(calls, directory, geometry.namespace)
        is_clean = index is not None and bool(index.header.clean)
        if index is not None:
            self._sequence = index.header.next_sequence
        if index is not None and is_clean:
            self._catalog.restore(index.rows)
            mark_open(calls, directory, index.header)
        else:  # exceed the sequence numbers of records that the index is missing
            self._sequence = max(self._sequence, int(time.time()) << 32)

        def write() -> None:
            write_snapshot(calls, directory, geometry, self._catalog.rows(), self._sequence)

        self._keeper = Keeper(write, self._transport, () if is_clean else range(num_backed))
        self._workers = Workers(self._transport.work, NUM_WORKERS)
        self._workers.start()
        self._keeper.start()

    def _finish_jobs(self) -> None:
        done = self._workers.done
        while done:
            job = done.popleft()
            self._end_job(job)
            if job.kind is PROBE:
                self._health.finish_probe(time.monotonic(), job.ok)
                if self._health.is_open:
                    self._catalog.hide(False)
            elif job.ok:
                self._health.record_success()
            else:
                self._record_failure(job.reason)

    def _end_job(self, job: DiskJob) -> None:
        """Finish a job, executed or cancelled; called exactly once per job."""
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
            self._counts["stores"] += 1
            self._stores_s += job.seconds
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
            self._counts["loads"] += 1
            self._loads_s += job.seconds
        elif job.reason in _BAD_RECORD:
            self._counts[job.reason] += 1
            self._failure_log.add(time.monotonic(), job.reason)
            self._catalog.forget(job.cell, job.key, job.sequence)

    def _adopt_records(self) -> None:
        records = self._keeper.records
        while records:
            cell, key, sequence = records.popleft()
            if key not in self._storing and self._catalog.adopt(cell, key, sequence):
                self._sequence = max(self._sequence, sequence + 1)

    # -- health --------------------------------------------------------------------------------------------

    def _check_health(self) -> None:
        now_s = time.monotonic()
        if self._health.check_stall(now_s, self._workers.oldest_started_s()):
            self._bypass()
        elif self._health.start_probe(now_s):
            self._workers.add(DiskJob(PROBE))

    def _record_failure(self, reason: str) -> None:
        """Count a failed job. A bad record or a full file system does not count against the health of the disk."""
        self._failures[reason] += 1
        if reason not in (CORRUPT, STALE, NO_ROOM) and self._health.record_failure(time.monotonic(), reason):
            self._bypass()

    def _bypass(self) -> None:
        """Enter the bypass: report all keys as lost and cancel the queued jobs."""
        self._catalog.hide(True)
        self._cancel("bypassed")

    def _cancel(self, reason: str) -> None:
        for job in self._workers.cancel():
            job.reason = reason
            self._end_job(job)
