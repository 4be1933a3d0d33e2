"""One forward pass as tensors: what a model and its kernels get to know about the tokens they compute.

The runner makes it from a `Step`; it is immutable and passed down `forward`, so no layer looks anything up in
a global. A batch is flat: T tokens of R rows, one row per request, prefill and decode mixed. Rows with a
single token come first, so a kernel may treat them as one rectangle, and those with more tokens later.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch


class StatePages(NamedTuple):
    """Where one layer's part of the states lies. Unit u of a request, counted over all layers, is in the page at place
    u // units_per_page of its table, from byte u % units_per_page * unit_bytes on."""

    base: torch.Tensor  # [num_blocks, bytes of a page] uint8
    first_unit: int
    units_per_page: int
    unit_bytes: int


# Per layer its key pages and value pages, each [blocks, block_size, kv heads * head_dim] with a page stride that
# spans all layers of a page; or where its states lie.
LayerPages = tuple[torch.Tensor, torch.Tensor] | StatePages
KvPages = list[LayerPages]


class StateBatch(NamedTuple):
    """The pages of each row's state, or of each chain's. Those that share pages only read them; padding reads and writes
    page 0."""

    read: torch.Tensor  # [R, pages] int32
    write: torch.Tensor  # [R, pages] int32; may be those of `read`
    is_new: torch.Tensor  # [R] bool: nothing is read, the state before the first token is zero


class AdaptedRows(Protocol):
    """What the adapters of a step's rows add to products."""

    runs: Any  # as kernels take them

    def add(self, linear: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        """To y [T, out], what the layer made of x [T, in]."""

    @property
    def wanted(self) -> "AdaptedRows":
        """Of the tokens `ForwardBatch.wanted` alone."""


class Chains(NamedTuple):
    """How recurrent layers see a batch with drafts: a request's rows are one, for its state goes through all of them."""

    query_starts: torch.Tensor  # as a batch has them, of fewer rows
    num_single_rows: int
    query_lens: tuple[int, ...]


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
    # Of the attention groups after the first: kv_slots and block_tables, as `by_layer` shares them out.
    other_groups: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    group_of: tuple[int, ...] = ()  # each layer's group; (): all are in the first
    states: StateBatch | None = None
    adapters: AdaptedRows | None = None  # None: no row has one
    chains: Chains | None = None  # None: there are no drafts, or no states
    # Set only for a graph of steps with prompts, where the device alone knows the rows. [R] int32: the context of each row
    # of one token, 0 for every other row. `query_lens` then holds all tokens in its first place, and `query_contexts` holds
    # the longest context that is possible.
    single_contexts: torch.Tensor | None = None
    # What the kernels of one layer found out about the rows, for those of the next (kernels/cuda/work.py).
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def singles(self) -> "ForwardBatch":
        """The batch as attention over the rows of one token needs it."""
        if self.single_contexts is None:
            return self
        return replace(
            self,
            context_lens=self.single_contexts,
            num_single_rows=len(self.single_contexts),
            query_lens=(),
            query_contexts=(),
        )

    def by_layer(self, num_layers: int) -> "Sequence[ForwardBatch]":
        """For each layer the batch with the block tables of its group."""
        if not self.group_of:
            return (self,) * num_layers
        views = [self, *(replace(self, kv_slots=slots, block_tables=tables) for slots, tables in self.other_groups)]
        # A recurrent layer has no blocks, and takes any.
        if self.chains is not None:
            views.append(replace(self, **self.chains._asdict()))
        return [views[min(group, len(views) - 1)] for group in self.group_of]

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
