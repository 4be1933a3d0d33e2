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
from array import array
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.cache.tiers.admission import Admission
from penstock.cache.tiers.calls import DIRECTORY_MODE, Calls
from penstock.cache.tiers.directory import SLAB_BYTES, Slabs, lock, open_directory, takes_direct
from penstock.cache.tiers.health import Health, HealthLimits
from penstock.cache.tiers.journal import ROW, ROWS, Geometry, Journal, Known, read_index, room_bytes
from penstock.cache.tiers.keeper import Keeper
from penstock.cache.tiers.measures import Measures
from penstock.cache.tiers.recency import Recency
from penstock.cache.tiers.record import KEY_BYTES, PAGE, namespace_of, slot_bytes
from penstock.cache.tiers.transport import CORRUPT, STALE, Transport
from penstock.cache.tiers.workers import LOAD, PROBE, STORE, Job, Workers

MAX_CHUNK_BYTES = 2**30
NUM_WORKERS = 2
_FREE, _BUSY, _READY = 0, 1, 2  # states of a slot
_BAD_RECORD = (CORRUPT, STALE, "EIO")  # trying again will not mend it
_MAX_PINNED_PASSED = 64  # that eviction looks past


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
        self._limits = limits
        self._chunk_bytes = chunk_bytes
        self._capacity_bytes = capacity_bytes
        num_slots = slots_within(capacity_bytes, chunk_bytes)
        namespace = namespace_of(fingerprint, chunk_bytes)
        self.directory = os.path.join(os.fspath(path), namespace.hex()[:32])
        self._calls = calls or Calls()
        self._state = bytearray(num_slots)
        self._keys: list[bytes | None] = [None] * num_slots
        self._sequences = array("Q", bytes(8 * num_slots))
        self._used_s = array("d", bytes(8 * num_slots))  # when it was last used
        self._slots: dict[bytes, int] = {}  # READY ones
        self._recency = Recency(num_slots)
        self._admission = Admission(num_slots)
        self._loading: dict[int, int] = {}  # slot → loads under way
        self._pins: dict[bytes, int] = {}
        self._storing: set[bytes] = set()
        self._free: dict[int, None] = {}  # a set that gives back what was put in last
        self._unbacked: list[int] = []  # free, but their slab could not be made
        self._num_jobs = 0  # given to the workers and not taken back yet
        self._num_storing = 0
        self._completions: list[Completion] = []
        self._found: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}
        self._next_ticket = 1
        self._grow_at_s = 0.0
        self._store_s = 0.0  # moving average of one store
        self._event = -1
        self._is_closed = False
        self._sequence = 1  # of the next record
        self._health = Health(_scaled(limits.health, chunk_bytes))
        self._measures = Measures()
        with contextlib.ExitStack() as undo:
            self._open(os.fspath(path), Geometry(namespace, slot_bytes(chunk_bytes), num_slots), undo)
            self._files = undo.pop_all()

    # -- what is there -------------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Whether a load may be started. No system call."""
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def keys(self) -> list[bytes]:
        """Of all records that can be read, in no particular order."""
        return list(self._slots)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that can be read and could not at the last call, and the other way round."""
        found, self._found = list(self._found), {}
        lost, self._lost = list(self._lost), {}
        return found, lost

    def touch(self, keys: list[bytes]) -> None:
        """These were used, the head of the chain first."""
        for key in keys:
            self._admission.saw(key)
            slot = self._slots.get(key)
            if slot is not None:
                self._use(slot)

    def pin(self, key: bytes) -> bool:
        """Keep a record until as many `unpin`; False if it is not there."""
        if key not in self._slots:
            return False
        self._pins[key] = self._pins.get(key, 0) + 1
        return True

    def unpin(self, key: bytes) -> None:
        """A record that turned out to be bad meanwhile is gone, and its pins with it."""
        count = self._pins.pop(key, 0)
        if count > 1:
            self._pins[key] = count - 1

    # -- storing -------------------------------------------------------------------------------------------

    def put(self, key: bytes, buffer: Any) -> bool:
        """Queue a store. True borrows the buffer until `poll` yields its completion; False does not, and none comes.

        False says that it is there already or on its way, or that it was dropped (`stats` counts why): the disk is
        behind, bypassed, full of what is in use, or does not find the block worth it. Never blocks.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"key: {len(key)} bytes given; {KEY_BYTES} are expected")
        payload = self._bytes_of(buffer, "buffer")
        self._admission.saw(key)
        if key in self._storing:
            return False
        slot = self._slots.get(key)
        if slot is not None:
            self._use(slot)
            return False
        if not self._may_store():
            return False
        slot = self._take_slot(key)
        if slot is None:
            return False
        sequence = self._sequence
        self._sequence = sequence + 1
        self._storing.add(key)
        self._num_storing += 1
        self._submit(Job(STORE, key, slot, sequence, payload, sequence))
        return True

    def _may_store(self) -> bool:
        if self._is_closed or not self._health.is_open:
            self._measures.drops["closed" if self._is_closed else "bypassed"] += 1
        elif (self._num_storing + 1) * self._chunk_bytes > self._limits.queue_bytes and self._num_storing:
            self._measures.drops["queue bytes"] += 1
        elif self._num_storing >= NUM_WORKERS and self._num_storing * self._store_s > (
            NUM_WORKERS * self._limits.queue_s
        ):
            self._measures.drops["queue time"] += 1
        else:
            return True
        return False

    def _take_slot(self, key: bytes) -> int | None:
        """A free slot, one that was never used, or that of the oldest record: in this order, but while free slots
        may still hold records that the scan has not come to, new slots go first."""
        if self._free and not self._keeper.scan_left:
            return self._free.popitem()[0]
        if self._grow_at_s and time.monotonic() >= self._grow_at_s:
            self._grow_at_s = 0.0
        if not self._grow_at_s:
            if self._unbacked:
                return self._unbacked.pop()
            if self._frontier < len(self._state):
                self._frontier += 1
                return self._frontier - 1
        if self._free:
            return self._free.popitem()[0]
        if not self._admission.admits(key):
            self._measures.drops["not seen before"] += 1
            return None
        return self._evict()

    def _evict(self) -> int | None:
        for passed, slot in enumerate(self._recency.oldest()):
            if slot not in self._loading and self._keys[slot] not in self._pins:
                self._measures.counts["evictions"] += 1
                age_s = time.monotonic() - self._used_s[slot]
                self._measures.retention_s += 0.01 * (age_s - self._measures.retention_s)
                # No row tells the keeper: the one of the next record will, and until then a stale row is a miss.
                self._forget(slot)
                return slot
            if passed == _MAX_PINNED_PASSED:
                break
        self._measures.drops["all in use"] += 1
        return None

    # -- loading -------------------------------------------------------------------------------------------

    def start_load(self, key: bytes, out: Any) -> int | None:
        """A ticket, and `out` borrowed until `poll` yields its completion; None if there is nothing to read.

        `out` holds the payload if the completion is ok, and anything if it is not. A load that hangs keeps its
        ticket and `out` until the system lets go of both, however long: nobody may use memory that a late read can
        still write to. Wait no longer than is worth it, and put `out` to no other use.
        """
        slot = self._slots.get(key)
        if slot is None:
            self._admission.saw(key)
            self._measures.counts["misses"] += 1
            return None
        into = self._bytes_of(out, "out")
        if into.readonly:
            raise ValueError("out: a buffer that can be written to is expected")
        if self._is_closed or not self._health.is_open:
            self._measures.counts["loads refused"] += 1
            return None
        self._admission.saw(key)
        self._use(slot)
        self._loading[slot] = self._loading.get(slot, 0) + 1
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._submit(Job(LOAD, key, slot, self._sequences[slot], into, ticket))
        return ticket

    # -- what the threads have done ------------------------------------------------------------------------

    def poll(self) -> list[Completion]:
        """What has ended since the last call; takes care of the disk's health besides. Never blocks."""
        if self._event >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        self._settle()
        if not self._is_closed:
            self._watch()
        if self._keeper.found:
            self._adopt()
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
            self._files.close()

    def __enter__(self) -> "DiskTier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- telling -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the tier was opened, and how things stand. Numbers, and dicts of numbers."""
        measures = self._measures
        return {
            "entries": len(self._slots),
            "slots": len(self._state),
            "workers": NUM_WORKERS,
            "used_bytes": len(self._slots) * self._slabs.slot_bytes,
            "capacity_bytes": self._capacity_bytes,
            "queue_bytes": self._num_storing * self._chunk_bytes,
            "pinned": len(self._pins),
            "loading": len(self._loading),
            "is_open": self._health.is_open,
            "is_direct": self._slabs.is_direct,
            "is_picky": self._admission.is_picky,
            "bypasses": self._health.num_bypasses,
            "index_errors": self._keeper.num_errors,
            "scan_left": self._keeper.scan_left,
            "recovery_s": self._recovery_s,
            "retention_s": measures.retention_s,
            "hits": measures.counts["hits"],
            "misses": measures.counts["misses"],
            "stores": measures.counts["stores"],
            "loaded_bytes": measures.counts["hits"] * self._chunk_bytes,
            "stored_bytes": measures.counts["stores"] * self._chunk_bytes,
            "corrupt_reads": measures.counts["corrupt"],
            "stale_reads": measures.counts["stale"],
            "loads_refused": measures.counts["loads refused"],
            "evictions": measures.counts["evictions"],
            "drops": dict(measures.drops),
            "failures": dict(measures.failures),
            "store_times": measures.store_times.as_dict(),
            "load_times": measures.load_times.as_dict(),
        }

    def check(self) -> None:
        """What holds between any two calls."""
        self._recency.check()
        ready = [slot for slot, state in enumerate(self._state) if state == _READY]
        assert sorted(self._recency.oldest()) == ready == sorted(self._slots.values())
        assert all(self._keys[slot] == key for key, slot in self._slots.items())
        assert self._pins.keys() <= self._slots.keys()
        free = [*self._free, *self._unbacked, *range(self._frontier, len(self._state))]
        assert all(self._state[slot] == _FREE for slot in free)
        assert len(free) + len(ready) + self._num_storing == len(self._state)
        assert self._num_storing == len(self._storing) and not self._storing & self._slots.keys()
        assert not self._found.keys() & self._lost.keys()
        assert self._health.is_open or not self._found.keys() - self._slots.keys()

    # -- beneath -------------------------------------------------------------------------------------------

    def _open(self, path: str, geometry: Geometry, undo: contextlib.ExitStack) -> None:
        started_s = time.monotonic()
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
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
        self._frontier = self._slabs.trim()
        self._transport = Transport(self._calls, directory, self._slabs, geometry.namespace, self._chunk_bytes)
        undo.callback(self._transport.close)

        known = read_index(self._calls, directory, geometry.namespace)
        rows = self._recall(known)
        is_clean = known is not None and known.is_clean
        is_whole = is_clean and known is not None and known.geometry == geometry
        if known:
            self._sequence = known.next_sequence
        journal = Journal(self._calls, directory, geometry, known.generation if known else 0)
        undo.callback(journal.close)
        if is_clean:
            journal.begin()  # not in order any more, should the process end now
        self._keeper = Keeper(journal, self._transport, geometry.num_slots, self._sequence, is_whole)
        self._workers = Workers(self._transport.work, NUM_WORKERS, self._on_done)
        self._workers.start()
        self._keeper.start(rows, [] if is_clean else sorted(self._free))
        self._recovery_s = time.monotonic() - started_s

    def _recall(self, known: Known | None) -> np.ndarray:
        """Take over what the index knows, as far as there are slots; the rows of it."""
        rows = np.empty(0, ROWS) if known is None else known.rows[known.rows["slot"] < self._frontier]
        slots: list[int] = rows["slot"].tolist()
        packed = rows["key"].tobytes()
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        self._slots = dict(zip(keys, slots, strict=True))
        if len(self._slots) < len(slots):  # a key was written again elsewhere: its last row counts
            kept = [self._slots[key] == slot for key, slot in zip(keys, slots, strict=True)]
            rows = rows[kept]
            slots, keys = rows["slot"].tolist(), [key for key, keep in zip(keys, kept, strict=True) if keep]
        for slot, key in zip(slots, keys, strict=True):
            self._keys[slot] = key
        np.frombuffer(self._state, np.uint8)[slots] = _READY
        np.frombuffer(self._sequences, np.uint64)[slots] = rows["sequence"]
        np.frombuffer(self._used_s)[slots] = time.monotonic()
        self._recency.restore(rows["slot"].astype(np.int64), int(rows["stamp"].max(initial=0)))
        self._found = dict.fromkeys(keys)
        free = np.flatnonzero(np.frombuffer(self._state, np.uint8)[: self._frontier] == _FREE)
        self._free = dict.fromkeys(free[::-1].tolist())  # the first of them first
        return rows

    def _bytes_of(self, buffer: Any, name: str) -> memoryview:
        view = memoryview(buffer)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        if len(view) != self._chunk_bytes:
            raise ValueError(f"{name}: {len(view)} bytes given; a chunk has {self._chunk_bytes}")
        return view

    def _submit(self, job: Job) -> None:
        if job.kind is STORE:
            self._state[job.slot] = _BUSY
        self._num_jobs += 1
        self._workers.submit(job)

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
                    for key in self._slots:
                        self._appear(key)
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
        measures, slot = self._measures, job.slot
        self._storing.remove(job.key)
        self._num_storing -= 1
        if job.ok:
            self._store_s += 0.1 * (job.seconds - self._store_s)
            measures.counts["stores"] += 1
            measures.store_times.add(job.seconds)
            self._publish(slot, job.key, job.sequence)
        else:
            measures.drops[job.reason] += 1
            self._keeper.rows.append(ROW.pack(job.key, job.sequence, 0, slot, 0))
            self._state[slot] = _FREE
            if job.reason == "ENOSPC" and not self._slabs.is_backed(slot):
                self._grow_at_s = time.monotonic() + self._limits.grow_pause_s
                self._unbacked.append(slot)
            else:
                self._free[slot] = None
        self._completions.append(Completion("store", job.ticket, job.key, job.ok))

    def _end_load(self, job: Job) -> None:
        measures, slot = self._measures, job.slot
        count = self._loading.pop(slot) - 1
        if count:
            self._loading[slot] = count
        if job.ok:
            measures.counts["hits"] += 1
            measures.load_times.add(job.seconds)
        elif job.reason in _BAD_RECORD:
            measures.counts[job.reason] += 1
            if self._keys[slot] == job.key and self._sequences[slot] == job.sequence:
                self._forget(slot)
                self._keeper.rows.append(ROW.pack(job.key, job.sequence, 0, slot, 0))
                self._free[slot] = None
        self._completions.append(Completion("load", job.ticket, job.key, job.ok))

    def _publish(self, slot: int, key: bytes, sequence: int) -> None:
        self._slots[key] = slot
        self._keys[slot] = key
        self._sequences[slot] = sequence
        self._state[slot] = _READY
        self._use(slot)
        self._appear(key)

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        assert key is not None
        del self._slots[key]
        self._keys[slot] = None
        self._pins.pop(key, None)
        self._state[slot] = _FREE
        self._recency.drop(slot)
        self._vanish(key)

    def _use(self, slot: int) -> None:
        stamp = self._recency.use(slot)
        self._used_s[slot] = time.monotonic()
        self._keeper.rows.append(ROW.pack(self._keys[slot], self._sequences[slot], stamp, slot, 1))

    def _adopt(self) -> None:
        """Take in what the scan found, where neither slot nor key has another use by now."""
        found = self._keeper.found
        while found:
            slot, key, sequence = found.popleft()
            if slot in self._free and key not in self._slots and key not in self._storing:
                del self._free[slot]
                self._sequence = max(self._sequence, sequence + 1)
                self._publish(slot, key, sequence)

    # -- health --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        now_s = time.monotonic()
        was_open = self._health.is_open
        self._health.watch(now_s, self._workers.oldest_started_s())
        if was_open and not self._health.is_open:
            self._withdraw()
        elif self._health.wants_probe(now_s):
            self._submit(Job(PROBE, b"", -1, 0, None, 0))

    def _blame(self, reason: str) -> None:
        """A job has failed. A bad record, or a file system without room to grow, says nothing about the disk."""
        self._measures.failures[reason] += 1
        if reason in (CORRUPT, STALE) or (reason == "ENOSPC" and self._grow_at_s):
            return
        was_open = self._health.is_open
        self._health.failed(time.monotonic(), reason)
        if was_open and not self._health.is_open:
            self._withdraw()

    def _withdraw(self) -> None:
        """The tier is bypassed: nothing is queued any more, and nothing can be read until it is back."""
        self._cancel("bypassed")
        for key in self._slots:
            self._vanish(key, although_bypassed=True)

    def _cancel(self, reason: str) -> None:
        for job in self._workers.cancel():
            job.reason = reason
            self._end(job)

    def _appear(self, key: bytes) -> None:
        if not self._health.is_open:
            return  # they all appear when it is back
        if key in self._lost:
            del self._lost[key]
        else:
            self._found[key] = None

    def _vanish(self, key: bytes, although_bypassed: bool = False) -> None:
        if not self._health.is_open and not although_bypassed:
            return
        if key in self._found:
            del self._found[key]
        else:
            self._lost[key] = None


def slots_within(capacity_bytes: int, chunk_bytes: int) -> int:
    """How many records fit with everything around them: index, journal, small files, the file system's own blocks."""
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes: {chunk_bytes} given; 1 to {MAX_CHUNK_BYTES} are possible")
    around = 3 * PAGE + capacity_bytes // 8192  # directory, lock and probe; extents: less than 128 KiB for a slab
    per_slot = slot_bytes(chunk_bytes)
    num_slots = (capacity_bytes - around - room_bytes(0)) // (per_slot + room_bytes(1) - room_bytes(0))
    if num_slots < 1:
        raise ValueError(f"capacity_bytes: {capacity_bytes} given; at least {least_capacity(chunk_bytes)} are needed")
    return num_slots


def least_capacity(chunk_bytes: int) -> int:
    return (3 * PAGE + room_bytes(1) + slot_bytes(chunk_bytes)) * 8192 // 8191 + 1


def _scaled(limits: HealthLimits, chunk_bytes: int) -> HealthLimits:
    """A call that moves much may take longer: 10 MB/s are slow, not hanging."""
    return limits._replace(stall_s=max(limits.stall_s, chunk_bytes / 10e6))
