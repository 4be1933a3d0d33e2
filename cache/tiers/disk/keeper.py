"""The thread that writes the index to disk and, after a crash, scans the cells for records missing in the index.

It reads the table of rows without a lock while the tier's thread changes it. A half-written row is harmless, because
records are verified when they are read. So neither a snapshot nor a slow disk ever blocks the caller.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from penstock.cache.tiers.disk.snapshot import Table
from penstock.cache.tiers.disk.transport import Transport

TICK_S = 0.2
# The limit of snapshot writes: 100,000 records every 1.6 s. After a crash, the scan finds records missing in a snapshot.
SNAPSHOT_BYTES_PER_S = 4e6
USES_S = 60.0  # interval if records were only used: a crash loses at most so much of the eviction order
SCAN_STRIDE = 128  # cells scanned per tick


class Keeper:
    """The keeper thread. `write(rows, clean)` writes a snapshot or raises OSError; the scan appends to `found`."""

    def __init__(self, write: Callable[[np.ndarray, bool], None], table: Table, transport: Transport) -> None:
        self.found: deque[tuple[int, bytes, int]] = deque()  # (cell, key, sequence) of found records
        self.scan_left = 0  # cells still to be scanned
        self._write = write
        self._table = table
        self._transport = transport
        self._to_scan: deque[int] = deque()
        self._saved = -1, -1  # numbers of changes and uses in the latest snapshot
        self._due_s = self._uses_due_s = 0.0  # when the next snapshot is due
        self._lock = threading.Lock()  # held while a snapshot is written
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock-disk-keeper", daemon=True)

    def start(self, to_scan: list[int], is_saved: bool) -> None:
        """Start the thread; `is_saved` means that the snapshot on disk equals the table."""
        self._to_scan.extend(to_scan)
        self.scan_left = len(to_scan)
        if is_saved:
            self._saved = self._table.num_changes, self._table.num_uses
        self._thread.start()

    def save(self, timeout_s: float) -> bool:
        """Write a snapshot now if the last is outdated; return False if one in progress takes too long."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._save()
        finally:
            self._lock.release()
        return True

    def stop(self, timeout_s: float) -> bool:
        """Write the final snapshot and end the thread; return False if the disk hangs."""
        self._ending.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while not self._ending.is_set():
            if not self._to_scan:
                self._ending.wait(TICK_S)
            now_s = time.monotonic()
            if now_s >= (self._due_s if self._table.num_changes != self._saved[0] else self._uses_due_s):
                with self._lock:
                    self._save()
            for _ in range(min(SCAN_STRIDE, len(self._to_scan))):
                self._scan(self._to_scan.popleft())
        with self._lock:
            self._save(clean=not (self._to_scan or self.found))

    def _save(self, clean: bool = False) -> None:
        stand = self._table.num_changes, self._table.num_uses
        if stand == self._saved and not clean:
            return
        rows, now_s = self._table.whole_rows(), time.monotonic()
        self._due_s, self._uses_due_s = now_s + rows.nbytes / SNAPSHOT_BYTES_PER_S, now_s + USES_S
        with contextlib.suppress(OSError):  # the next snapshot is tried later
            self._write(rows, clean)
            self._saved = stand

    def _scan(self, cell: int) -> None:
        try:
            header = self._transport.header_at(cell)
        except OSError:
            header = None
        row = self._table.rows[cell]
        if header is not None and not (row["live"] and row["sequence"] == header.sequence):
            self.found.append((cell, header.key, header.sequence))
        self.scan_left -= 1
