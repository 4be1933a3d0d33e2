"""The order in which tiles of multi-token rows are computed, and the row that each tile belongs to.

The order is computed on the GPU once per step: the first layer launches a small kernel, and the batch keeps the result
for the other layers. Context lengths are neither host values nor constants, so one compiled variant, and one captured
graph, serve all of them.
"""

from collections.abc import Callable, Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.tiles import Tile
from penstock.executor.kernels.state import MAX_SEVERAL

ROWS_AT_ONCE = tl.constexpr(128)  # rows per step of the kernel that orders tiles


def order_tiles(batch: ForwardBatch, first_row: int, end_row: int, per_token: int, tile: Tile) -> Tensor:
    """Return [tiles, 2] int32: row and tile number of every tile of multi-token rows, tiles with most positions first,
    because a long tile that starts last would run alone. Each token has `per_token` rows of a tile."""

    def make() -> Tensor:
        passed = first_row - batch.num_single_rows
        lens = batch.query_lens[passed : end_row - batch.num_single_rows]
        device = batch.query_starts.device
        tiles, is_padded = sum(-(-count * per_token // tile.rows) for count in lens), batch.single_contexts is not None
        if is_padded:  # every row may end with a partially filled tile
            tiles += MAX_SEVERAL
        order = torch.full((tiles, 2), -1, dtype=torch.int32, device=device)
        # Every row may end with a partially filled tile.
        _order[(sum(lens) * per_token // tile.rows + len(lens),)](
            *(batch.query_starts, batch.context_lens, order),
            *(first_row, len(lens)),
            PER_TOKEN=per_token,
            ROWS=tile.rows,
            IS_PADDED=is_padded,
            num_warps=4,
        )
        return order

    return once(batch, ("order", first_row, end_row, per_token, tile.rows), make)


def once(batch: ForwardBatch, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Return what `make` returned for the first layer of this step that asked for `key`."""
    if key not in batch.memo:
        tables, starts, contexts = batch.block_tables, batch.query_starts, batch.context_lens
        assert tables.dtype is starts.dtype is contexts.dtype is torch.int32
        assert tables.stride(1) == 1 and starts.is_contiguous() and contexts.is_contiguous()
        assert len(tables) == len(contexts) == len(starts) - 1 == batch.num_single_rows + len(batch.query_lens)
        batch.memo[key] = make()
    made: Tensor = batch.memo[key]
    return made


@triton.jit
def take_tile(order_ptr, number, starts_ptr):
    """Return a tile in the order of `_order`: its row, its number, the row's first token and number of tokens."""
    order_ptr += 2 * number
    row, tile = tl.load(order_ptr), tl.load(order_ptr + 1)
    begin = tl.load(starts_ptr + row)
    return row, tile, begin, tl.load(starts_ptr + row + 1) - begin


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


@kernel
def _order(
    starts_ptr,
    contexts_ptr,
    order_ptr,
    first_row,
    num_rows,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    IS_PADDED: tl.constexpr,
):
    """Rank one tile by counting the tiles that come before it. The cost of a tile is the context of its last pair as if
    it were full: within a row each tile costs ROWS more than the previous one, so whole rows are compared at once. In a
    padded batch, single-token rows and rows without a context have no tiles."""
    row, tile = find_row(tl.program_id(0), starts_ptr, first_row, num_rows, PER_TOKEN, ROWS)
    count = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
    context = tl.load(contexts_ptr + row)
    if tile * ROWS >= count * PER_TOKEN:
        return
    if IS_PADDED:
        if (count == 1) | (context == 0):
            return
    cost = (context - count) * PER_TOKEN + (tile + 1) * ROWS
    rank = 0
    for start in range(0, num_rows, ROWS_AT_ONCE):
        other = first_row + start + tl.arange(0, ROWS_AT_ONCE)
        inside = other < first_row + num_rows
        begins = tl.load(starts_ptr + other, mask=inside, other=0)
        counts = tl.load(starts_ptr + other + 1, mask=inside, other=0) - begins
        contexts = tl.load(contexts_ptr + other, mask=inside, other=0)
        if IS_PADDED:
            inside &= (counts > 1) & (contexts > 0)
        least = (contexts - counts) * PER_TOKEN
        tiles = tl.cdiv(counts * PER_TOKEN, ROWS)
        # Tiles of cost `least + ROWS`, … up to and including `cost` do not come before this one.
        cheaper = tl.maximum(0, cost - least)
        longer = tiles - tl.minimum(tiles, cheaper // ROWS)
        is_tie = (cheaper % ROWS == 0) & (cheaper > 0) & (cheaper // ROWS <= tiles) & (other < row)
        rank += tl.sum(tl.where(inside, longer + is_tie.to(tl.int32), 0), 0)
    tl.store(order_ptr + 2 * rank, row)
    tl.store(order_ptr + 2 * rank + 1, tile)
