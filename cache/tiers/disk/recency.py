"""In which order cells are given up: least recently used first, and of one chain the tail before the head.

Uses fall into generations. The oldest generation goes first, and of those used within one, what was used last: blocks
of a chain are stored and loaded from its head on, and a block whose head is gone can never be matched.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

_STAMPS_PER_GENERATION = 2**32


class Recency:
    """Of `num_cells` cells, none of them listed at first. Generations are a sixteenth of the cells long."""

    def __init__(self, num_cells: int) -> None:
        self._restored: list[int] = []  # the oldest last; those that were used since are in it, too
        self._is_restored = bytearray(num_cells)  # and was not used since
        self._newest: OrderedDict[int, None] = OrderedDict()
        self._generations = [self._newest]
        self._listed: dict[int, OrderedDict[int, None]] = {}  # cell → the generation that it is in
        self._num_generations = 1
        self._num_used = 0  # in the newest
        self._generation_length = min(max(num_cells // 16, 16), 4096)

    def restore(self, cells: list[int], last_stamp: int) -> None:
        """List these cells, the oldest first; for an empty list."""
        self._restored = cells[::-1]
        np.frombuffer(self._is_restored, np.uint8)[cells] = 1
        self._num_generations = last_stamp // _STAMPS_PER_GENERATION + 1

    def use(self, cell: int) -> int:
        """List a cell, or move it; the stamp that puts it there again after a restart."""
        if self._num_used == self._generation_length:
            self._newest = OrderedDict()
            self._generations = [*filter(None, self._generations), self._newest]
            self._num_generations += 1
            self._num_used = 0
        self.drop(cell)
        self._newest[cell] = None
        self._listed[cell] = self._newest
        self._num_used += 1
        return (self._num_generations + 1) * _STAMPS_PER_GENERATION - self._num_used

    def drop(self, cell: int) -> None:
        """Take a cell from the list; one that is not in it stays out."""
        self._is_restored[cell] = 0
        generation = self._listed.pop(cell, None)
        if generation is not None:
            del generation[cell]

    def oldest(self) -> Iterator[int]:
        """Cells in the order in which they go. The list may not change meanwhile."""
        while self._restored and not self._is_restored[self._restored[-1]]:
            self._restored.pop()
        yield from filter(self._is_restored.__getitem__, reversed(self._restored))
        for generation in self._generations:
            yield from reversed(generation)
