"""In which order slots are given up: least recently used first, and of one chain the tail before the head.

A doubly linked list through arrays, so every operation takes the same few steps at any fill. What is used goes to
the young end, but not to its very end: of the slots used in one generation, those used later are given up first.
Blocks of a chain are stored and loaded from its head on, and a block whose head is gone can never be matched.
"""

from array import array
from collections.abc import Iterator

import numpy as np

_STAMPS_PER_GENERATION = 2**32


class Recency:
    """`num_slots` slots, none of them listed at first. Generations are a sixteenth of the slots long."""

    def __init__(self, num_slots: int) -> None:
        self._end = num_slots  # a slot that does not exist: behind it the youngest, before it the oldest
        self._older = array("q", range(num_slots + 1))
        self._younger = array("q", range(num_slots + 1))
        self._cursor = self._end  # the slot used last
        self._generation = 1
        self._num_used = 0  # in this generation
        self._generation_length = min(max(num_slots // 16, 16), 4096)

    def restore(self, slots: np.ndarray, last_stamp: int) -> None:
        """List these slots, the oldest first; for an empty list."""
        around = np.concatenate([[self._end], slots, [self._end]])
        older, younger = np.frombuffer(self._older, np.int64), np.frombuffer(self._younger, np.int64)
        younger[around[:-1]] = around[1:]
        older[around[1:]] = around[:-1]
        self._generation = last_stamp // _STAMPS_PER_GENERATION + 1

    def use(self, slot: int) -> int:
        """List a slot, or move it; the stamp that puts it there again after a restart."""
        if self._num_used == self._generation_length:
            self._generation += 1
            self._num_used = 0
            self._cursor = self._end
        self.drop(slot)
        younger, older = self._younger, self._older
        behind = self._cursor
        before = older[behind]
        younger[before] = older[behind] = slot
        older[slot], younger[slot] = before, behind
        self._cursor = slot
        self._num_used += 1
        return (self._generation + 1) * _STAMPS_PER_GENERATION - self._num_used

    def drop(self, slot: int) -> None:
        """Take a slot from the list; one that is not in it stays out."""
        older, younger = self._older, self._younger
        before, behind = older[slot], younger[slot]
        younger[before], older[behind] = behind, before
        older[slot] = younger[slot] = slot
        if slot == self._cursor:
            self._cursor = behind

    def oldest(self) -> Iterator[int]:
        """Slots in the order in which they go. The list may not change meanwhile."""
        slot = self._younger[self._end]
        while slot != self._end:
            yield slot
            slot = self._younger[slot]

    def check(self) -> None:
        for slot in self.oldest():
            assert self._older[self._younger[slot]] == slot == self._younger[self._older[slot]], slot
