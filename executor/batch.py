"""The inputs of one forward pass as tensors, for a model and its kernels.

The runner builds a `ForwardBatch` from a `Step`. It is immutable and passed down through `forward`, so layers read no
global state. A batch is flat: T tokens of R rows, one row per request, prefill and decode mixed. Rows with a single
token come first, so that a kernel may treat them as one rectangle; rows with more tokens follow.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch


class StatePages(NamedTuple):
    """The location of one layer's recurrent states. Unit u of a request, counted over all layers, is in the page at
    index u // units_per_page of the request's table and starts at byte u % units_per_page * unit_bytes."""

    base: torch.Tensor  # [num_blocks, bytes of a page] uint8
    first_unit: int
    units_per_page: int
    unit_bytes: int


# For an attention layer: its key pages and value pages, each [blocks, block_size, kv heads * head_dim] with a page
# stride that spans all layers of a page. For a recurrent layer: the location of its states.
LayerPages = tuple[torch.Tensor, torch.Tensor] | StatePages
KvPages = list[LayerPages]


class StateBatch(NamedTuple):
    """The state pages of each row, or of each chain. Pages that several rows share are only read; padding rows read and
    write page 0."""

    read: torch.Tensor  # [R, pages] int32
    write: torch.Tensor  # [R, pages] int32; may be the same pages as `read`
    is_new: torch.Tensor  # [R] bool: no state is read; the row starts from a zero state


class AdaptedRows(Protocol):
    """The LoRA adapters of a step's rows (executor/kernels/lora.py)."""

    def add(self, product: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' contribution for x [T, in] to y [T, out], the output for x of the layer with this number."""


class Chains(NamedTuple):
    """The rows of a batch with draft tokens for recurrent layers, whose state passes through all rows of a request."""

    query_starts: torch.Tensor  # these four are as in `ForwardBatch`, but with one row per chain
    num_single_rows: int
    query_lens: tuple[int, ...]
    row_counts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    tokens: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32, inside the request
    # [T] int64: block * block_size + offset, where the token's key and value are written; block 0 takes skipped writes.
    kv_cells: torch.Tensor
    query_starts: torch.Tensor  # [R + 1] int32: row r's tokens are query_starts[r] … query_starts[r + 1] - 1
    context_lens: torch.Tensor  # [R] int32: number of positions the row's last token attends to, itself included
    block_tables: torch.Tensor  # [R, blocks of the longest context] int32; past a row's context: any valid block
    num_single_rows: int  # number of rows with one token; these come first
    max_single_context: int  # the longest context among the single-token rows; 0 without any
    output_indices: torch.Tensor | None = None  # [W] int64: tokens whose hidden states are returned; None means all T
    query_lens: tuple[int, ...] = ()  # token counts of the remaining rows, ascending
    query_contexts: tuple[int, ...] = ()  # context_lens of the remaining rows
    # (kv_cells, block_tables) of each attention group after the first; `by_layer` assigns them to layers.
    other_groups: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    group_of: tuple[int, ...] = ()  # each layer's group; (): all layers are in the first group
    states: StateBatch | None = None
    adapters: AdaptedRows | None = None  # None: no row has an adapter
    output_adapters: AdaptedRows | None = None  # `adapters` of only the `output_indices`, where these are not None
    chains: Chains | None = None  # None: the step has no draft tokens, or the model no recurrent states
    # Set only for a CUDA graph of steps with prompts, where only the device knows the rows. [R] int32: the context of
    # each single-token row, 0 for every other row. The first entry of `query_lens` is then the number of all tokens,
    # and the first entry of `query_contexts` is the longest possible context.
    single_contexts: torch.Tensor | None = None
    # [4] int32, set with it: the number of rows without the padding, of those with one token, and of the others.
    row_counts: torch.Tensor | None = None
    # Values that the kernels of one layer derive from the rows, for those of later layers (kernels/cuda/tile_order.py).
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def singles(self) -> "ForwardBatch":
        """The batch in the form that attention over the single-token rows needs."""
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
        """Return, for each layer, the batch with the block tables of the layer's group."""
        if not self.group_of:
            return (self,) * num_layers
        views = [self, *(replace(self, kv_cells=cells, block_tables=tables) for cells, tables in self.other_groups)]
        # A recurrent layer has no KV blocks, so it can be given any group's block tables.
        if self.chains is not None:
            views.append(replace(self, **self.chains._asdict()))
        return [views[min(group, len(views) - 1)] for group in self.group_of]

    def first_rows(self, count: int) -> "ForwardBatch":
        """Return the first `count` rows, all single-token rows included, with only the fields that attention reads."""
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
