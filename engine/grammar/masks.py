"""The token masks of a step: one bit per token of the vocabulary for every constrained row. Many rows are filled by several
threads. Two buffers alternate: the executor may read one while the other is filled.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from penstock.engine.core.grammars import GrammarState, StepMasks
from penstock.engine.grammar.matcher import Matcher
from penstock.executor.machine import usable_cores

MAX_THREADS = 16
POOL_ROWS = 48  # one thread fills fewer rows (20 µs each) before other threads would have woken up


class MaskFiller:
    """Fills the masks of one step at a time."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: list[np.ndarray] = []  # allocated once the vocabulary is known; unused pages cost nothing
        self._ends: np.ndarray | None = None  # [words]: bits of all tokens except end tokens
        self._plain = (0, 0)  # the longest range of words without the bit of an end token
        self._pool: Any = None  # llguidance's threads, started for the first large step

    def fill(self, states: Sequence[tuple[int, GrammarState]]) -> StepMasks:
        assert len(states) <= self._max_rows
        rows = cast("Sequence[tuple[int, Matcher]]", states)  # the states of a filler's compiler are its matchers
        if not rows:
            return StepMasks(np.empty(0, np.int32), np.empty((0, 0), np.int32), [], {})
        buffer = self._next_buffer(rows[0][1])
        self._compute(rows, buffer)
        bits = buffer[: len(rows)]
        errors: dict[int, str] = {}
        for place in [place for place, (_, matcher) in enumerate(rows) if matcher.backend.is_error()]:
            row, matcher = rows[place]
            if matcher.renew():
                matcher.backend.unsafe_compute_mask_ptr(bits[place].ctypes.data, bits.strides[0])
            if matcher.backend.is_error():
                errors[row] = matcher.error
                bits[place] = -1
        ended = []
        for place in self._at_an_end(bits):
            row, matcher = rows[place]
            if matcher.backend.is_accepting():
                ended.append(row)
            else:  # the grammar has a dead end, or only a special token with another meaning could follow
                errors.setdefault(row, "no token of the vocabulary can follow")
            bits[place] = -1
        return StepMasks(np.array([row for row, _ in rows], np.int32), bits, ended, errors)

    def _at_an_end(self, bits: np.ndarray) -> list[int]:
        """Return the positions of rows that allow only end tokens. Nearly all rows allow some token in the long range
        of words without end tokens, so the first non-zero byte there decides."""
        begin, end = self._plain
        doubtful = np.flatnonzero(~bits[:, begin:end].view(np.bool_).any(axis=1))
        if not len(doubtful):
            return []
        assert self._ends is not None
        places: list[int] = doubtful[~(bits[doubtful] & self._ends).any(axis=1)].tolist()
        return places

    def _compute(self, rows: Sequence[tuple[int, Matcher]], buffer: np.ndarray) -> None:
        address, row_bytes = buffer.ctypes.data, buffer.strides[0]
        if len(rows) < POOL_ROWS:
            for place, (_, matcher) in enumerate(rows):
                matcher.backend.unsafe_compute_mask_ptr(address + place * row_bytes, row_bytes)
            return
        if self._pool is None:
            from llguidance import LLExecutor

            self._pool = LLExecutor(min(MAX_THREADS, usable_cores()))
        matchers = [(matcher.backend, place) for place, (_, matcher) in enumerate(rows)]
        self._pool.unsafe_compute_mask_ptr(matchers, address, row_bytes, len(buffer))

    def _next_buffer(self, matcher: Matcher) -> np.ndarray:
        vocabulary = matcher.vocabulary
        if not self._buffers:
            self._buffers = [np.zeros((self._max_rows, vocabulary.num_words), np.int32) for _ in range(2)]
            ends = np.full(32 * vocabulary.num_words, True)
            ends[[*vocabulary.eos_ids, *range(vocabulary.size, len(ends))]] = False
            self._ends = np.packbits(ends, bitorder="little").view(np.int32)
            bounds = [-1, *np.flatnonzero(self._ends != -1).tolist(), vocabulary.num_words]
            self._plain = max(
                zip((low + 1 for low in bounds), bounds[1:], strict=False), key=lambda run: run[1] - run[0]
            )
        self._buffers.reverse()
        return self._buffers[0]
