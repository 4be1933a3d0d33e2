"""One forward pass as tensors: what a model and its kernels get to know about the tokens they compute.

The runner makes it from a `Step`; it is immutable and passed down `forward`, so no layer looks anything up in
a global. A batch is flat: T tokens of R rows, one row per request, prefill and decode mixed. Rows with a
single token come first, so a kernel may treat them as one rectangle, and those with more tokens later.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

# Per layer its key pages and value pages, each [blocks, block_size, kv heads * head_dim] with a page stride that
# spans all layers.
KvPages = list[tuple[torch.Tensor, torch.Tensor]]


class StatePages(NamedTuple):
    """Where a recurrent layer keeps its units, equal pieces of what each row carries along: unit u of a row is on the page
    table[(first_unit + u) // units_per_page], (first_unit + u) % units_per_page * unit_bytes from its beginning."""

    base: torch.Tensor  # [pages, bytes of a page] uint8
    first_unit: int
    units_per_page: int
    unit_bytes: int  # a multiple of 64


class StateBatch(NamedTuple):
    """The pages of each row's state before its first token, and where the state goes after its last one."""

    read: torch.Tensor  # [R, pages of a state] int32
    write: torch.Tensor  # the same pages: in place
    is_new: torch.Tensor  # [R] bool: nothing is read, the state is zero


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    tokens: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32, inside the request
    # [T] int64: block * block_size + offset where the token's key and value go. Skipped writes go to block 0.
    kv_slots: torch.Tensor
    query_starts: torch.Tensor  # [R + 1] int32: row r's tokens are query_starts[r] … query_starts[r + 1] - 1
    context_lens: torch.Tensor  # [R] int32: positions the row's last token may see, itself included
    block_tables: torch.Tensor  # [R, blocks of the longest context] int32; past a row's context: any valid block
    wanted: torch.Tensor | None  # [W] int64: tokens whose hidden state is asked for; None means all T
    num_single_rows: int  # how many of the first rows have one token
    query_lens: tuple[int, ...]  # of the rows after those, ascending
    query_contexts: tuple[int, ...]  # context_lens of the rows after those
    max_single_context: int  # the longest context among the single-token rows; 0 without any
    states: StateBatch | None = None
    # What the kernels of one layer found out about the rows, for those of the next (kernels/cuda/work.py).
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def first_rows(self, count: int) -> "ForwardBatch":
        """As much as attention asks of a batch without the rows after the first `count`, all single ones among these."""
        several = count - self.num_single_rows
        assert several >= 0
        return replace(
            self,
            query_starts=self.query_starts[: count + 1],
            context_lens=self.context_lens[:count],
            block_tables=self.block_tables[:count],
            query_lens=self.query_lens[:several],
            query_contexts=self.query_contexts[:several],
        )
