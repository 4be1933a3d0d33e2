"""The flat arrangement of a step's rows, in numpy: the position of every token, before anything becomes a tensor.

Rows with fewer tokens come first, regardless of their order in the step; `order` maps back. All work is done on whole
arrays, because a step of 256 rows must cost the host much less time than the device.
"""

import numpy as np

from penstock.executor.protocol import Row


class Layout:
    """R rows with T tokens in total. Arrays are in the layout's order; `order[r]` is the row's index in the step."""

    def __init__(self, rows: list[Row], adapters: np.ndarray | None = None) -> None:
        """`adapters` [slots]: with them, rows with equally many tokens are grouped by adapter."""
        columns = np.array([(r.slot, r.start, r.count, r.write_from, r.sample, r.drafts) for r in rows], dtype=np.int64)
        columns = columns.reshape(-1, 6)
        self.has_drafts = len({row.slot for row in rows}) < len(rows)
        self.order = np.arange(len(rows))
        if self.has_drafts or adapters is not None or (columns[1:, 2] < columns[:-1, 2]).any():
            slots, counts = columns[:, 0], columns[:, 2]
            is_drafted = np.bincount(slots)[slots] > 1
            # A slot's rows with draft tokens are adjacent, after the single rows of other slots.
            ranked = (is_drafted, counts) if adapters is None else (adapters[slots], is_drafted, counts)
            self.order = np.lexsort((slots * is_drafted, *ranked))
            columns = columns[self.order]
        self.slots, self.starts, self.counts, self.write_from, samples, self.drafts = np.ascontiguousarray(columns.T)
        self.samples = samples.astype(bool)
        self.num_single_rows = int(np.count_nonzero(self.counts == 1))
        self.context_lens = self.starts + self.counts
        self.query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(self.counts, out=self.query_starts[1:])
        self.num_tokens = int(self.query_starts[-1])
        if self.num_tokens == len(rows):
            self.row_of, self.positions = np.arange(len(rows)), self.starts
        else:
            self.row_of = np.repeat(np.arange(len(rows)), self.counts)  # [T]
            self.positions = np.arange(self.num_tokens) - (self.query_starts[:-1] - self.starts)[self.row_of]

    @property
    def longest(self) -> int:
        """The end of the longest context, with the positions of drafts."""
        return int((self.context_lens + np.maximum(self.drafts - 1, 0)).max())

    def chains(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first row of each slot, and the start of its tokens, followed by the total number of tokens."""
        firsts = np.flatnonzero(np.diff(self.slots, prepend=-1))
        return firsts, np.append(self.query_starts[firsts], self.num_tokens)
