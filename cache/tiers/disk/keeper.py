"""The thread that reads the headers of all cells after a crash, and writes the index at an orderly close, so that neither
a scan nor a slow disk ever blocks the caller."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from penstock.cache.tiers.disk.transport import Transport


class Keeper:
    """The keeper thread. `write()` writes the index or raises OSError; the scan of `cells` appends to `records`."""

    def __init__(self, write: Callable[[], None], transport: Transport, cells: Sequence[int]) -> None:
        self.records: deque[tuple[int, bytes, int]] = deque()  # (cell, key, sequence) of the records that were found
        self.scan_left = len(cells)  # cells still to be scanned
        self._write = write
        self._transport = transport
        self._cells = cells
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock-disk-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write the index and end the thread; return False if the disk hangs. The caller stores nothing any more."""
        self._ending.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        for cell in self._cells:
            if self._ending.is_set():
                break
            self._scan(cell)
        self._ending.wait()
        if not (self.scan_left or self.records):  # otherwise records would be missing: the next start scans again
            with contextlib.suppress(OSError):
                self._write()

    def _scan(self, cell: int) -> None:
        with contextlib.suppress(OSError):
            header = self._transport.header_at(cell)
            if header is not None:
                self.records.append((cell, header.key, header.sequence))
        self.scan_left -= 1
