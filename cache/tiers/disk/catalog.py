"""The allocation state of the cells of a disk tier: records, free cells, eviction order, changes. No file access.

    new ─take─▶ written to ─publish─▶ readable ─evict─▶ (taken again)
     ▲           │                      │
    free ◀───────┴────── release ◀──────┴─ forget

Every operation takes constant time. The least recently used record is evicted first. Callers report the use of a chain
from its end to its start, so that its end is evicted first: without its start, the rest of a chain cannot be matched.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np

from penstock.cache.keys import KeyChanges
from penstock.cache.tiers.disk.snapshot import KEY, ROWS

_MAX_PASSED = 64  # how many records being loaded eviction skips before it gives up


class Catalog:
    """The state of `num_cells` cells, of which the first `num_backed` may hold records of an earlier run."""

    def __init__(self, num_cells: int, num_backed: int) -> None:
        # key → the cell with its readable record, least recently used first
        self.cells: OrderedDict[bytes, int] = OrderedDict()
        self._sequences = np.zeros(num_cells, np.uint64)  # of the last record in each cell
        self.changes = KeyChanges()  # changes of the readable keys
        self.loading: Counter[int] = Counter()  # cell → loads in flight
        self.is_full = False  # the next `take` has to evict
        self.num_evictions = 0
        self._free: dict[int, None] = dict.fromkeys(range(num_backed - 1, -1, -1))  # popitem returns cell 0 first
        self._frontier, self._end = num_backed, num_cells  # cells in this range were never used
        self._num_lost = 0  # cells for which the file system has no space
        self._is_hidden = False

    def restore(self, rows: np.ndarray) -> None:
        """Load the rows of an index, written by `rows`."""
        rows = rows[rows["cell"] < self._frontier]
        self.cells.update(zip(rows["key"].tolist(), rows["cell"].tolist(), strict=True))
        self._sequences[rows["cell"]] = rows["sequence"]
        self.changes = KeyChanges(self.cells)
        is_free = np.ones(self._frontier, bool)
        is_free[rows["cell"]] = False
        self._free = dict.fromkeys(np.flatnonzero(is_free)[::-1].tolist())

    def rows(self) -> np.ndarray:
        """Return the rows of the index: all records, least recently used first."""
        rows = np.empty(len(self.cells), ROWS)
        rows["key"] = np.frombuffer(b"".join(self.cells), KEY)
        rows["cell"] = np.fromiter(self.cells.values(), np.uint32, len(self.cells))
        rows["sequence"] = self._sequences[rows["cell"]]
        return rows

    # -- allocation ----------------------------------------------------------------------------------------

    def take(self, keep_free: bool) -> int | None:
        """Return a cell for a store; None if all are in use. With `keep_free`, prefer never-used cells to free ones."""
        self.is_full = False
        if self._frontier < self._end and (keep_free or not self._free):
            self._frontier += 1
            return self._frontier - 1
        if self._free:
            return self._free.popitem()[0]
        self.is_full = True
        return self._evict()

    def _evict(self) -> int | None:
        for passed, (key, cell) in enumerate(self.cells.items()):
            if cell not in self.loading:
                self.num_evictions += 1
                self._drop(key)
                return cell
            if passed == _MAX_PASSED:
                break
        return None

    # -- cell states ---------------------------------------------------------------------------------------

    def publish(self, cell: int, key: bytes, sequence: int) -> None:
        """Register the record that was written to the cell: it can be found from now on."""
        self.cells[key] = cell
        self._sequences[cell] = sequence
        self._note(key, True)

    def release(self, cell: int) -> None:
        """Free a cell whose store has failed."""
        self._free[cell] = None

    def stop_growing(self, is_backed: Callable[[int], bool]) -> None:
        """Give up the cells for which the file system has no space, until the next start.

        A tier without records has nothing to evict, so it keeps trying to grow.
        """
        if not self.cells:
            return
        unbacked = [cell for cell in self._free if not is_backed(cell)]
        for cell in unbacked:
            del self._free[cell]
        self._num_lost += len(unbacked) + self._end - self._frontier
        self._end = self._frontier

    def forget(self, cell: int, key: bytes, sequence: int) -> None:
        """Drop a bad record and free its cell, unless the cell holds another record by now."""
        if self.cells.get(key) == cell and self.sequence_in(cell) == sequence:
            self._drop(key)
            self.release(cell)

    def adopt(self, cell: int, key: bytes, sequence: int) -> bool:
        """Register a record that the scan found, unless the cell is in use or the key has a newer record."""
        elsewhere = self.cells.get(key)
        if cell not in self._free or (elsewhere is not None and self.sequence_in(elsewhere) >= sequence):
            return False
        if elsewhere is not None:
            self._drop(key)
            self.release(elsewhere)
        del self._free[cell]
        self.publish(cell, key, sequence)
        return True

    def use(self, key: bytes) -> int | None:
        """Mark the record of this key as used; return its cell, None without a record."""
        cell = self.cells.get(key)
        if cell is not None:
            self.cells.move_to_end(key)
        return cell

    def sequence_in(self, cell: int) -> int:
        """Return the sequence of the record in the cell, or of the last one if the cell was taken since."""
        return int(self._sequences[cell])

    def _drop(self, key: bytes) -> None:
        del self.cells[key]
        self._note(key, False)

    # -- changes for subscribers ---------------------------------------------------------------------------

    def hide(self, is_hidden: bool) -> None:
        """Report all keys as lost while the tier cannot be read (`is_hidden`), and as found again afterwards."""
        self._is_hidden = is_hidden
        for key in self.cells:
            self.changes.note(key, not is_hidden)

    def _note(self, key: bytes, is_there: bool) -> None:
        if not self._is_hidden:
            self.changes.note(key, is_there)

    def check(self, num_busy: int) -> None:
        used = set(self.cells.values())
        assert len(used) == len(self.cells), "two keys share a cell"
        free = [*self._free, *range(self._frontier, self._end)]
        assert len(free) == len({*free} - used), "a cell is free twice, or free and readable"
        assert len(free) + len(used) + num_busy + self._num_lost == len(self._sequences)
        if not self._is_hidden:
            self.changes.check(self.cells)
