"""The per-slot state of requests on the GPU, in one flat tensor: tokens, block tables, state pages, sampling options.

The host only sends changes, as *runs*: consecutive numbers and their offset. All runs of a step are sent in the step's
one copy (executor/step/inputs.py) and applied by one kernel.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.executor.cache_layout import CacheLayout
from penstock.executor.protocol import ExecutorError, Sampling

# Maximum number of multi-token rows in a graph of a step with prompts: attention launches a tile more for each.
MAX_SEVERAL = 32
HEADER = 4  # numbers before a step's rows: of rows, of rows with one token, of others; one is unused
OPTIONS = 8  # numbers per slot: temperature, min_p, top_p as bits, top_k, two halves of the seed; two are unused


class PackedStep(NamedTuple):
    """The block that a step sends to the device, and where its parts are. For R rows, padding included:

    header (4) | query starts (R + 1) | slots (R) | first positions (R) | write_from (R) | more, and the runs
    """

    values: Tensor  # [n] int32
    rows: int

    @staticmethod
    def size(rows: int) -> int:
        """Return the length of the parts up to `write_from`."""
        return HEADER + 1 + 4 * rows

    @property
    def row_counts(self) -> Tensor:
        """Return the numbers of rows that are not padding, of those with one token, and of the others, [4]."""
        return self.values[:HEADER]

    @property
    def query_starts(self) -> Tensor:
        return self.values[HEADER : HEADER + 1 + self.rows]

    @property
    def columns(self) -> Tensor:
        """Return slots, first positions and `write_from`, [3, rows]."""
        return self.values[HEADER + 1 + self.rows : self.size(self.rows)].view(3, self.rows)

    def more(self, first: int, count: int) -> Tensor:
        """Return `count` of the numbers behind `write_from`, from the number `first` on."""
        begin = self.size(self.rows) + first
        return self.values[begin : begin + count]


class StateLayout(NamedTuple):
    """Offsets and sizes in the flat tensor for one attention group, passed to kernels."""

    width: int  # tokens per slot; a slot's tokens start at slot * width
    blocks_at: int
    max_blocks: int  # per slot
    options_at: int
    spare: int  # index of a number that is never read, where padding stores its tokens
    block_size: int
    ahead: int = 0  # positions beyond a row's context whose blocks are in its table too


class DeviceState:
    def __init__(
        self,
        num_slots: int,
        width: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        layout: CacheLayout = CacheLayout(),  # noqa: B008  (immutable)
        ahead: int = 0,
    ) -> None:
        blocks_at = (num_slots + 1) * width  # of the last slot's tokens only the first is used: the spare number
        # For each attention group the tables of all slots, then the pages that states are read from and written to.
        tables_at = range(
            blocks_at, blocks_at + (layout.attention_groups + 1) * num_slots * max_blocks, num_slots * max_blocks
        )
        states_at = tables_at[-1]
        options_at = states_at + num_slots * 2 * layout.state_pages
        size = options_at + num_slots * OPTIONS
        if size >= 2**31:  # kernels use 32-bit indices
            raise ExecutorError(
                f"max_num_seqs: the tables of {num_slots} requests of up to {width - 1} tokens would take {size} numbers "
                "on the GPU, more than 2^31: lower max_num_seqs or max_model_len"
            )
        self.groups = [
            StateLayout(width, table_at, max_blocks, options_at, num_slots * width, block_size, ahead)
            for table_at in tables_at[:-1]
        ]
        self.offsets, self._num_slots, self._state_pages = self.groups[0], num_slots, layout.state_pages
        self._states = slice(states_at, options_at)
        self.flat = torch.zeros(size, dtype=torch.int32, device=device)
        self._runs: list[tuple[int, np.ndarray]] = []

    @property
    def tokens(self) -> Tensor:
        """Return the token table, [slots + 1, width]."""
        return self.flat[: self.offsets.blocks_at].view(-1, self.offsets.width)

    @property
    def states(self) -> Tensor:
        """Return the state pages [slots, 2, pages] that a slot's rows read from and write to."""
        return self.flat[self._states].view(self._num_slots, 2, self._state_pages)

    def write_tokens(self, slot: int, first: int, tokens: np.ndarray) -> None:
        self._write(slot * self.offsets.width + first, tokens)

    def write_blocks(self, slot: int, first: int, blocks: Iterable[int], group: int = 0) -> None:
        offsets = self.groups[group]
        self._write(offsets.blocks_at + slot * offsets.max_blocks + first, np.fromiter(blocks, dtype=np.int32))

    def write_states(self, slot: int, is_written: bool, pages: Sequence[int]) -> None:
        at = self._states.start + (2 * slot + is_written) * self._state_pages
        self._write(at, np.array(pages, dtype=np.int32))

    def write_options(self, slot: int, sampling: Sampling) -> None:
        floats = np.array([sampling.temperature, sampling.min_p, sampling.top_p], dtype=np.float32)
        seed = np.array([sampling.seed], dtype=np.uint64)
        values = np.concatenate([floats.view(np.int32), np.array([sampling.top_k], np.int32), seed.view(np.int32)])
        self._write(self.offsets.options_at + slot * OPTIONS, values)

    def take(self) -> list[tuple[int, np.ndarray]]:
        """Return the runs since the last call. They are applied in parallel, so no two may write the same number."""
        taken, self._runs = self._runs, []
        return taken

    def _write(self, at: int, values: np.ndarray) -> None:
        self._runs.append((at, values))
