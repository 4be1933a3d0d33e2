"""The thread that keeps the index on disk, and after a crash looks into slots that the index does not tell of.

It has its own copy of what is in which slot, fed by rows that the tier hands over, so that neither a snapshot nor
a slow disk ever holds up whoever stores and loads.
"""

import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from penstock.cache.tiers.disk.journal import ROW, ROWS, Journal, journal_limit
from penstock.cache.tiers.disk.transport import Transport

TICK_S = 0.2
SNAPSHOT_S = 30.0
SCAN_STRIDE = 128  # slots between two ticks


class Found(NamedTuple):
    """A record that the scan came across."""

    slot: int
    key: bytes
    sequence: int


class Keeper:
    """Takes what others append to `rows`; take what the scan found from `found`."""

    def __init__(
        self, journal: Journal, transport: Transport, num_slots: int, rows: deque[bytes], is_whole: bool
    ) -> None:
        self.found: deque[Found] = deque()
        self.scan_left = 0  # slots still to look into
        self.num_errors = 0
        self._rows = rows
        self._journal = journal
        self._transport = transport
        self._table = np.zeros(num_slots, ROWS)
        self._journal_limit = journal_limit(num_slots)
        self._next_sequence = 1
        self._to_scan: deque[int] = deque()
        self._is_dirty = False
        self._is_whole = is_whole  # snapshot and journal on disk make up the table; otherwise only a snapshot helps
        self._snapshot_s = time.monotonic()
        self._lock = threading.Lock()  # of everything but the deques
        self._wake = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._serve, name="penstock-disk-keeper", daemon=True)

    def start(self, known: np.ndarray, next_sequence: int, to_scan: list[int]) -> None:
        self._next_sequence = next_sequence
        self._table[known["slot"]] = known
        self._to_scan.extend(to_scan)
        self.scan_left = len(to_scan)
        self._thread.start()

    def save(self, timeout_s: float) -> bool:
        """Bring the journal up to date; False if that takes too long."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._write_rows()
        finally:
            self._lock.release()
        return True

    def stop(self, timeout_s: float) -> bool:
        """Write the last snapshot and end; False if the disk hangs."""
        self._is_ending = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while not self._is_ending:
            if not self._to_scan:
                self._wake.wait(TICK_S)
            with self._lock:
                self._write_rows()
                if not self._is_whole or (self._is_dirty and time.monotonic() - self._snapshot_s > SNAPSHOT_S):
                    self._snapshot(clean=False)
            for _ in range(min(SCAN_STRIDE, len(self._to_scan))):
                self._scan(self._to_scan.popleft())
        with self._lock:
            self._write_rows()
            self._snapshot(clean=not self._to_scan)
            self._journal.close()

    def _write_rows(self) -> None:
        rows = b"".join([self._rows.popleft() for _ in range(len(self._rows))])
        if not rows:
            return
        changes = np.frombuffer(rows, ROWS)
        self._table[changes["slot"]] = changes  # of several rows for one slot the last one stays
        self._next_sequence = max(self._next_sequence, int(changes["sequence"].max()) + 1)
        self._is_dirty = True
        if not self._is_whole or self._journal.size_bytes + len(rows) + ROW.size > self._journal_limit:
            self._snapshot(clean=False)
            return
        try:
            self._journal.append(rows)
        except OSError:
            self.num_errors += 1
            self._is_whole = False

    def _snapshot(self, clean: bool) -> None:
        self._snapshot_s = time.monotonic()
        try:
            self._journal.snapshot(self._table[self._table["live"] == 1], self._next_sequence, clean=clean)
            self._is_dirty = False
            self._is_whole = True
        except OSError:
            self.num_errors += 1

    def _scan(self, slot: int) -> None:
        try:
            header = self._transport.header_at(slot)
        except OSError:
            header = None
        row = self._table[slot]
        if header is not None and not (row["live"] and row["sequence"] == header.sequence):
            self.found.append(Found(slot, header.key, header.sequence))
        self.scan_left -= 1
