"""KV blocks on a local disk: fixed slots in preallocated files, found by key, checked whenever they are read.

The caller's thread owns the index and does nothing that can block: a lookup is a dict's, a `put` takes a slot and
appends to a queue. Worker threads move the bytes (transport.py), a keeper writes the index down (keeper.py); what
they finish comes back through `poll`. Whatever goes wrong on the disk is a miss. docs/tiers.md tells the whole.

    put ─▶ writes ─┐               ┌─▶ done ─▶ poll: index, counters, completions
    start_load ─▶ reads ─▶ workers ┘          └▶ rows ─▶ keeper ─▶ journal, index
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.cache.tiers.disk.admission import Admission
from penstock.cache.tiers.disk.calls import DIRECTORY_MODE, Calls
from penstock.cache.tiers.disk.catalog import Catalog
from penstock.cache.tiers.disk.directory import SLAB_BYTES, Slabs, lock, open_directory, takes_direct
from penstock.cache.tiers.disk.journal import ROWS, Geometry, Journal, read_index, room_bytes
from penstock.cache.tiers.disk.keeper import Keeper
from penstock.cache.tiers.disk.record import KEY_BYTES, PAGE, namespace_of, slot_bytes
from penstock.cache.tiers.disk.transport import CORRUPT, NO_ROOM, STALE, Transport
from penstock.cache.tiers.disk.workers import LOAD, PROBE, STORE, Job, Workers
from penstock.cache.tiers.health import Health, HealthLimits
from penstock.cache.tiers.measures import Measures

MAX_CHUNK_BYTES = 2**30
MAX_SLOTS = 2**28  # each takes some 50 bytes of memory; the index counts them in 32 bits
NUM_WORKERS = 3  # two keep the disk busy, one checks or hashes meanwhile
_BAD_RECORD = (CORRUPT, STALE, "EIO")  # trying again will not mend it


class Completion(NamedTuple):
    """The end of a load or store: from here on the tier does not touch its buffer."""

    kind: Literal["load", "store"]
    ticket: int  # of a store: its sequence number
    key: bytes
    ok: bool


class Limits(NamedTuple):
    """Bounds that suit every disk we know; tests have tighter ones."""

    queue_bytes: int = 256 * 2**20  # of stores that wait or are under way
    queue_s: float = 2.0  # the same, by how fast the disk has been
    grow_pause_s: float = 30.0  # after the file system was full
    close_s: float = 10.0
    slab_bytes: int = SLAB_BYTES
    health: HealthLimits = HealthLimits()


class DiskTier:
    """One namespace's records below `path`, at most `capacity_bytes` with everything that belongs to them.

    Payloads have `chunk_bytes` bytes and keys 32. `fingerprint` names whatever gives the bytes their meaning; other
    fingerprints and chunk sizes live in directories of their own. One thread at a time may call. Raises OSError if
    the directory cannot be used (DirectoryInUse if another process does), ValueError for what cannot work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        chunk_bytes: int,
        fingerprint: bytes,
        limits: Limits = Limits(),  # noqa: B008  (a constant)
        calls: Calls | None = None,
    ) -> None:
        num_slots = slots_within(capacity_bytes, chunk_bytes)
        namespace = namespace_of(fingerprint, chunk_bytes)
        self.directory = os.path.join(os.fspath(path), namespace.hex()[:32])
        self._limits = limits
        self._capacity_bytes = capacity_bytes
        self._chunk_bytes = chunk_bytes
        self._calls = calls or Calls()
        self._admission = Admission(num_slots)
        self._health = Health(_scaled(limits.health, chunk_bytes))
        self._measures = Measures()
        self._storing: set[bytes] = set()
        self._num_jobs = 0  # given to the workers and not taken back yet
        self._store_s = 0.0  # moving average of one store
        self._completions: list[Completion] = []
        self._next_ticket = 1
        self._sequence = 1  # of the next record
        self._event = -1
        self._is_closed = False
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
        with contextlib.ExitStack() as undo:
            self._open(Geometry(namespace, slot_bytes(chunk_bytes), num_slots), undo)
            self._files = undo.pop_all()
        self._max_storing = self._store_room()

    @property
    def is_open(self) -> bool:
        """Not bypassed."""
        return self._health.is_open

    # -- what is there -------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Whether there is a record. No system call."""
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def keys(self) -> list[bytes]:
        """Of all records, in no particular order."""
        return list(self._slots)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that can be read and could not at the last call, and the other way round."""
        return self._catalog.changes()

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used, the head of the chain first."""
        for key in keys:
            self._admission.saw(key)
            slot = self._slots.get(key)
            if slot is not None:
                self._catalog.use(slot)

    def pin(self, key: bytes) -> bool:
        """Keep a record until as many `unpin`; False if it is not there."""
        if key not in self._slots:
            return False
        self._catalog.pins[key] = self._catalog.pins.get(key, 0) + 1
        return True

    def unpin(self, key: bytes) -> None:
        """A record that turned out to be bad meanwhile is gone, and its pins with it."""
        _count_down(self._catalog.pins, key)

    # -- storing -------------------------------------------------------------------------------------------

    def put(self, key: bytes, buffer: Any) -> bool:
        """Queue a store. True borrows the buffer until `poll` yields its completion; False does not, and none comes.

        False says that it is there already or on its way, or that it was dropped (`stats` counts why): the disk is
        behind, bypassed, full of what is in use, or does not find the block worth it. Never blocks.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"key: {len(key)} bytes given; {KEY_BYTES} are expected")
        payload = memoryview(buffer)
        if payload.nbytes != self._chunk_bytes or not payload.c_contiguous:
            raise ValueError(f"buffer: {payload.nbytes} bytes given; a chunk has {self._chunk_bytes}, in one piece")
        self._admission.saw(key)
        if key in self._storing:
            return False
        if key in self._slots:
            self._catalog.use(self._slots[key])
            return False
        if len(self._storing) >= self._max_storing:
            self._measures.drops[self._why_no_room()] += 1
            return False
        catalog = self._catalog
        if catalog.is_full and not self._admission.admits(key):
            self._measures.drops["not seen before"] += 1
            return False
        slot = catalog.take(self._keeper.scan_left > 0)
        if slot is None:
            self._measures.drops["all in use"] += 1
            return False
        sequence = self._sequence
        self._sequence = sequence + 1
        self._storing.add(key)
        self._num_jobs += 1
        self._workers.store(Job(STORE, key, slot, sequence, payload, sequence))
        return True

    def _store_room(self) -> int:
        """How many stores may wait or be under way: bounded by bytes, and by the time that they will take."""
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
        """A ticket, and `out` borrowed until `poll` yields its completion; None if there is nothing to read.

        `out` holds the payload if the completion is ok, and anything if it is not. A load that hangs keeps its
        ticket and `out` until the system lets go of both, however long: nobody may use memory that a late read can
        still write to. Wait no longer than is worth it, and put `out` to no other use.
        """
        into = memoryview(out)
        if into.readonly:
            raise ValueError("out: a buffer that can be written to is expected")
        if into.nbytes != self._chunk_bytes or not into.c_contiguous:
            raise ValueError(f"out: {into.nbytes} bytes given; a chunk has {self._chunk_bytes}, in one piece")
        self._admission.saw(key)
        slot = self._slots.get(key)
        if slot is None:
            self._measures.counts["misses"] += 1
            return None
        if self._is_closed or not self._health.is_open:
            self._measures.counts["loads refused"] += 1
            return None
        catalog = self._catalog
        catalog.use(slot)
        catalog.loading[slot] = catalog.loading.get(slot, 0) + 1
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._num_jobs += 1
        self._workers.load(Job(LOAD, key, slot, catalog.sequences[slot], into, ticket))
        return ticket

    # -- what the threads have done ------------------------------------------------------------------------

    def poll(self) -> list[Completion]:
        """What has ended since the last call. Looks after slots for the next stores and the disk's health besides.

        Never blocks.
        """
        if self._event >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        self._settle()
        if self._keeper.found:
            self._adopt()
        if not self._is_closed:
            self._watch()
            self._catalog.prepare(self._keeper.scan_left > 0)
        self._max_storing = self._store_room()
        completions, self._completions = self._completions, []
        return completions

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something to tell, for select and its kind.

        Once asked for it, every `poll` makes a system call to reset it.
        """
        if self._event < 0:
            self._event = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._files.callback(os.close, self._event)
        return self._event

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all that is queued has ended and the journal tells of it; False if that takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._completions = self.poll()
            if self._num_jobs == 0:
                return self._keeper.save(max(0.0, deadline_s - time.monotonic()))
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.0005)

    def close(self) -> None:
        """Drop what no thread has begun, wait for the rest, write the index. Completions can still be polled.

        If the disk hangs, threads and files are left to the end of the process: a descriptor that is closed under
        a thread could be somebody else's by the time it is used.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._cancel("closed")
        ended = self._workers.stop(self._limits.close_s)
        self._settle()
        if self._keeper.stop(self._limits.close_s) and ended:
            self._event = -1
            self._files.close()

    def __enter__(self) -> "DiskTier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- telling -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the tier was opened, and how things stand. Numbers, and dicts of numbers."""
        return {
            "entries": len(self._slots),
            "slots": self._slabs.num_slots,
            "workers": NUM_WORKERS,
            "used_bytes": len(self._slots) * self._slabs.slot_bytes,
            "capacity_bytes": self._capacity_bytes,
            "queue_bytes": len(self._storing) * self._chunk_bytes,
            "pinned": len(self._catalog.pins),
            "loading": len(self._catalog.loading),
            "is_open": self._health.is_open,
            "is_direct": self._slabs.is_direct,
            "is_picky": self._admission.is_picky,
            "bypasses": self._health.num_bypasses,
            "index_errors": self._keeper.num_errors,
            "scan_left": self._keeper.scan_left,
            "recovery_s": self._recovery_s,
            "retention_s": self._catalog.retention_s,
            "evictions": self._catalog.num_evictions,
            **self._measures.as_dict(self._chunk_bytes),
        }

    def check(self) -> None:
        """What holds between any two calls."""
        self._catalog.check(len(self._storing))
        assert not self._storing & self._slots.keys()
        assert self._num_jobs >= len(self._storing) + sum(self._catalog.loading.values())

    # -- beneath -------------------------------------------------------------------------------------------

    def _open(self, geometry: Geometry, undo: contextlib.ExitStack) -> None:
        started_s = time.monotonic()
        directory = open_directory(self.directory, create=True)
        undo.callback(os.close, directory)
        undo.callback(os.close, lock(self._calls, directory, self.directory))
        self._slabs = Slabs(
            self._calls,
            directory,
            slot_bytes=geometry.slot_bytes,
            num_slots=geometry.num_slots,
            slab_bytes=self._limits.slab_bytes,
            direct=takes_direct(self._calls, directory),
        )
        undo.callback(self._slabs.close)
        self._transport = Transport(self._calls, directory, self._slabs, geometry.namespace, self._chunk_bytes)
        undo.callback(self._transport.close)
        num_backed = self._slabs.trim()

        known = read_index(self._calls, directory, geometry.namespace)
        rows_to_keep: deque[bytes] = deque()
        self._catalog = Catalog(geometry.num_slots, num_backed, rows_to_keep)
        self._slots = self._catalog.slots
        journal = Journal(self._calls, directory, geometry, known.generation if known else 0)
        undo.callback(journal.close)
        is_clean, is_whole, rows = False, False, np.empty(0, ROWS)
        if known is not None:
            rows = self._catalog.restore(known.rows)
            self._sequence = known.next_sequence
            is_clean = known.is_clean
            is_whole = is_clean and known.geometry == geometry
        if is_clean:
            journal.begin()  # not in order any more, should the process end now
        else:  # beyond what records may lie there that the index does not tell of
            self._sequence = max(self._sequence, int(time.time()) << 32)
        self._keeper = Keeper(journal, self._transport, geometry.num_slots, rows_to_keep, is_whole)
        self._workers = Workers(self._transport.work, NUM_WORKERS, self._on_done)
        self._workers.start()
        self._keeper.start(rows, self._sequence, [] if is_clean else self._catalog.to_scan())
        self._recovery_s = time.monotonic() - started_s

    def _on_done(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def _settle(self) -> None:
        done = self._workers.done
        while done:
            job = done.popleft()
            self._end(job)
            if job.kind is PROBE:
                self._health.probed(time.monotonic(), job.ok)
                if self._health.is_open:
                    self._catalog.show()
            elif job.ok:
                self._health.worked()
            else:
                self._blame(job.reason)

    def _end(self, job: Job) -> None:
        """Every job comes here once, whether it was done or taken back."""
        self._num_jobs -= 1
        if job.kind is STORE:
            self._end_store(job)
        elif job.kind is LOAD:
            self._end_load(job)

    def _end_store(self, job: Job) -> None:
        self._storing.remove(job.key)
        if job.ok:
            self._store_s = 0.9 * self._store_s + 0.1 * job.seconds if self._store_s else job.seconds
            self._measures.stored(job.seconds)
            self._catalog.publish(job.slot, job.key, job.sequence)
        else:
            self._measures.drops[job.reason] += 1
            self._catalog.release(job.slot, job.key)
            if job.reason == NO_ROOM:
                self._catalog.stop_growing(time.monotonic() + self._limits.grow_pause_s, self._slabs.is_backed)
        self._completions.append(Completion("store", job.ticket, job.key, job.ok))

    def _end_load(self, job: Job) -> None:
        _count_down(self._catalog.loading, job.slot)
        if job.ok:
            self._measures.loaded(job.seconds)
        elif job.reason in _BAD_RECORD:
            self._measures.counts[job.reason] += 1
            self._catalog.forget(job.slot, job.key, job.sequence)
        self._completions.append(Completion("load", job.ticket, job.key, job.ok))

    def _adopt(self) -> None:
        found = self._keeper.found
        while found:
            slot, key, sequence = found.popleft()
            if key not in self._storing and self._catalog.adopt(slot, key, sequence):
                self._sequence = max(self._sequence, sequence + 1)

    # -- health --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        now_s = time.monotonic()
        was_open = self._health.is_open
        self._health.watch(now_s, self._workers.oldest_started_s())
        if was_open and not self._health.is_open:
            self._withdraw()
        elif self._health.wants_probe(now_s):
            self._num_jobs += 1
            self._workers.load(Job(PROBE, b"", -1, 0, None, 0))

    def _blame(self, reason: str) -> None:
        """A job has failed. A bad record, or a file system without room to grow, says nothing about the disk."""
        self._measures.failures[reason] += 1
        was_open = self._health.is_open
        if reason not in (CORRUPT, STALE, NO_ROOM):
            self._health.failed(time.monotonic(), reason)
        if was_open and not self._health.is_open:
            self._withdraw()

    def _withdraw(self) -> None:
        """The tier is bypassed: nothing is queued any more, and nothing can be read until it is back."""
        self._catalog.hide()
        self._cancel("bypassed")

    def _cancel(self, reason: str) -> None:
        for job in self._workers.cancel():
            job.reason = reason
            self._end(job)


def _count_down(counts: dict[Any, int], name: Any) -> None:
    count = counts.pop(name, 0)
    if count > 1:
        counts[name] = count - 1


def slots_within(capacity_bytes: int, chunk_bytes: int) -> int:
    """How many records fit with everything around them: index, journal, small files, the file system's own blocks."""
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes: {chunk_bytes} given; 1 to {MAX_CHUNK_BYTES} are possible")
    around = 3 * PAGE + capacity_bytes // 8192  # directory, lock and probe; extents: less than 128 KiB for a slab
    per_slot = slot_bytes(chunk_bytes)
    num_slots = (capacity_bytes - around - room_bytes(0)) // (per_slot + room_bytes(1) - room_bytes(0))
    if num_slots < 1:
        raise ValueError(f"capacity_bytes: {capacity_bytes} given; at least {least_capacity(chunk_bytes)} are needed")
    if num_slots > MAX_SLOTS:
        most = MAX_SLOTS * per_slot
        raise ValueError(f"capacity_bytes: {capacity_bytes} given; at most {most} can be used, {MAX_SLOTS} records")
    return num_slots


def least_capacity(chunk_bytes: int) -> int:
    return (3 * PAGE + room_bytes(1) + slot_bytes(chunk_bytes)) * 8192 // 8191 + 1


def _scaled(limits: HealthLimits, chunk_bytes: int) -> HealthLimits:
    """A call that moves much may take longer: 10 MB/s are slow, not hanging."""
    return limits._replace(stall_s=max(limits.stall_s, chunk_bytes / 10e6))
