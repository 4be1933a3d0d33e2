"""The row that each tile of multi-token rows belongs to, and the order in which tiles are computed.

A program finds its tile on the GPU. Context lengths are neither host values nor constants, so one compiled variant, and
one captured graph, serve all of them.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.cuda.tiles import Tile
from penstock.executor.kernels.state import MAX_SEVERAL

Made = TypeVar("Made")


def count_tiles(batch: ForwardBatch, lens: Sequence[int], per_token: int, tile: Tile) -> int:
    """Return the most tiles that rows of so many tokens may have. Each token has `per_token` rows of a tile, and every row
    may end with a partially filled tile. In a padded batch, `lens` begins with the number of all tokens."""
    num_partial = len(lens) if batch.row_counts is None else MAX_SEVERAL
    return once(batch, ("tiles", lens, per_token, tile.rows), lambda: sum(lens) * per_token // tile.rows + num_partial)


def once(batch: ForwardBatch, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what `make` returned for the first layer of this step that asked for `key`."""
    if key not in batch.memo:
        tables, starts, contexts = batch.block_tables, batch.query_starts, batch.context_lens
        assert tables.dtype is starts.dtype is contexts.dtype is torch.int32
        assert tables.stride(1) == 1 and starts.is_contiguous() and contexts.is_contiguous()
        assert len(tables) == len(contexts) == len(starts) - 1 == batch.num_single_rows + len(batch.query_lens)
        batch.memo[key] = make()
    made: Made = batch.memo[key]
    return made


@triton.jit
def take_tile(number, num_tiles, starts_ptr, first, num_rows, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr):
    """Return the row of the tile that is computed as the `number`-th, its number in the row, the row's first token, and the
    row's number of tokens, 0 if no row has the tile. Tiles are computed from the last one of the last row on: the last row
    has the most tokens and its last tile the most positions, and a long tile that starts last would run alone."""
    row, tile = find_row(num_tiles - 1 - number, starts_ptr, first, num_rows, PER_TOKEN, ROWS)
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1, mask=num_rows > 0, other=0) - begin
    return row, tile, begin, tl.where((num_rows > 0) & (tile * ROWS < count * PER_TOKEN), count, 0)


@triton.jit
def find_row(tile, starts_ptr, first, num_rows, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr):
    """Return the row of a tile, among `num_rows` from `first` on, and the tile's number in it. The first tile of the
    r-th row is (tokens before it) * PER_TOKEN // ROWS + r; the tile's row is the last whose first tile is not beyond
    it."""
    low = 0
    high = num_rows
    starts_ptr += first
    begin = tl.load(starts_ptr)
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) - begin
        if before * PER_TOKEN // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    before = tl.load(starts_ptr + low) - begin
    return first + low, tile - (before * PER_TOKEN // ROWS + low)
