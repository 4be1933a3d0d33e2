"""The thread that keeps the index on disk, and after a crash looks into cells that the index says nothing of.

It reads the table of rows while the tier's thread changes it: a row that is caught half-written is a wrong one, which
does no harm. So neither a snapshot nor a slow disk ever holds up the caller.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from penstock.cache.tiers.disk.snapshot import Table
from penstock.cache.tiers.disk.transport import Transport

TICK_S = 0.2
# At most: 100,000 records every 1.6 s. What a crash finds in no snapshot is left to the scan.
SNAPSHOT_BYTES_PER_S = 4e6
USES_S = 60.0  # where records were only used: a crash may cost the order of eviction so much
SCAN_STRIDE = 128  # cells between two ticks


class Keeper:
    """`write(rows, clean)` makes a snapshot, or raises OSError. Take what the scan found from `found`."""

    def __init__(self, write: Callable[[np.ndarray, bool], None], table: Table, transport: Transport) -> None:
        self.found: deque[tuple[int, bytes, int]] = deque()  # cell, key and sequence of records
        self.scan_left = 0  # cells still to look into
        self.num_errors = 0
        self._write = write
        self._table = table
        self._transport = transport
        self._to_scan: deque[int] = deque()
        self._saved = -1, -1  # changes and uses that the snapshot has
        self._due_s = self._uses_due_s = 0.0  # for the next one
        self._lock = threading.Lock()  # held while a snapshot is made
        self._wake = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._serve, name="penstock-disk-keeper", daemon=True)

    def start(self, to_scan: list[int], is_saved: bool) -> None:
        """`is_saved`: the snapshot on disk says what the table says."""
        self._to_scan.extend(to_scan)
        self.scan_left = len(to_scan)
        if is_saved:
            self._saved = self._table.num_changes, self._table.num_uses
        self._thread.start()

    def save(self, timeout_s: float) -> bool:
        """Bring the snapshot up to date; False if another one takes too long."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._save()
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
            now_s = time.monotonic()
            if now_s >= (self._due_s if self._table.num_changes != self._saved[0] else self._uses_due_s):
                with self._lock:
                    self._save()
            for _ in range(min(SCAN_STRIDE, len(self._to_scan))):
                self._scan(self._to_scan.popleft())
        with self._lock:
            self._save(clean=not self._to_scan)

    def _save(self, clean: bool = False) -> None:
        stand = self._table.num_changes, self._table.num_uses
        if stand == self._saved and not clean:
            return
        rows, now_s = self._table.whole_rows(), time.monotonic()
        self._due_s, self._uses_due_s = now_s + rows.nbytes / SNAPSHOT_BYTES_PER_S, now_s + USES_S
        try:
            self._write(rows, clean)
            self._saved = stand
        except OSError:
            self.num_errors += 1

    def _scan(self, cell: int) -> None:
        try:
            header = self._transport.header_at(cell)
        except OSError:
            header = None
        row = self._table.rows[cell]
        if header is not None and not (row["live"] and row["sequence"] == header.sequence):
            self.found.append((cell, header.key, header.sequence))
        self.scan_left -= 1
