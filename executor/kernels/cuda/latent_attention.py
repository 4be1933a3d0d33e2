"""Multi-head latent attention over paged latents: all heads read the same vector, whose end is both key and value.

Queries are absorbed, i.e. already projected to the latent space (executor/models/latent.py). A tile's rows are (token,
head) pairs, so that a latent is read once for many heads. Single-token rows use split-KV, as in `paged_attention`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.pages import block_of, layout_of, page_rows
from penstock.executor.kernels.cuda.softmax import LOG2_E, empty_softmax, softmax_step
from penstock.executor.kernels.cuda.tiles import latent_tile
from penstock.executor.kernels.cuda.work import order_tiles, share_singles, span, store_item, take_share, take_tile


class LatentSizes(NamedTuple):
    heads: int
    rope: int
    rank: int


def latent_attention(q: Tensor, latents: Tensor, batch: ForwardBatch, scale: float, rope_dim: int) -> Tensor:
    tokens, num_heads, width = q.shape
    rank = width - rope_dim
    out = torch.empty((tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    assert q.is_contiguous() and tokens == batch.num_single_rows + sum(batch.query_lens)
    assert latents.shape[2] == width
    read = q, latents, batch.block_tables
    numbers = batch.block_tables.stride(0), scale * LOG2_E
    sizes = LatentSizes(num_heads, rope_dim, rank)
    constants = {"SIZES": sizes, "PAGES": layout_of(latents)}
    if batch.num_single_rows:
        tile = latent_tile(num_heads, True, q.element_size(), latents.element_size())
        num_tiles = triton.cdiv(num_heads, tile.rows)
        shares = share_singles(batch, num_tiles, None, tile, tile.rows, rank)
        _latent_singles[(len(shares.plan),)](
            *read, batch.context_lens, out, *shares, *numbers, TILES=num_tiles, **constants, **tile.constants()
        )
    if batch.query_lens:
        tile = latent_tile(num_heads, False, q.element_size(), latents.element_size())
        order = order_tiles(batch, batch.num_single_rows, len(batch.context_lens), num_heads, tile)
        _latent[(len(order),)](
            *read, batch.query_starts, batch.context_lens, order, out, *numbers, **constants, **tile.constants()
        )
    return out


@kernel
def _latent_singles(
    q_ptr,
    latents_ptr,
    tables_ptr,
    contexts_ptr,
    out_ptr,
    plan_ptr,
    parts_ptr,
    sums_ptr,
    arrivals_ptr,
    table_stride,
    scale,
    TILES: tl.constexpr,
    SIZES: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Process this program's share of blocks, which may span several (row, tile of heads) items."""
    wait_and_allow_next()
    shares = plan_ptr, parts_ptr, sums_ptr, arrivals_ptr
    row, tile, block, left, context = take_share(plan_ptr)
    taken = 0
    member = tl.arange(0, ROWS)
    rank = tl.arange(0, block_of(SIZES.rank))
    while left > 0:
        _, blocks = span(context, 0, COLUMNS, False)
        count = tl.minimum(left, blocks - block)
        begin = row.to(tl.int64) * SIZES.heads + tile * ROWS
        num_heads = tl.minimum(ROWS, SIZES.heads - tile * ROWS)
        is_head = member < num_heads
        low = block * COLUMNS
        high = tl.minimum(context, low + count * COLUMNS)
        queries = q_ptr + begin * (SIZES.rope + SIZES.rank), member, is_head, tl.full([ROWS], 0, tl.int32) + high
        pages = latents_ptr, tables_ptr + row.to(tl.int64) * table_stride
        softmax_state = _attend(queries, pages, low, high, scale, SIZES, PAGES, COLUMNS)
        inner = member[:, None] * SIZES.rank + rank[None, :]
        places = inner, is_head[:, None] & (rank < SIZES.rank)[None, :], member, is_head
        item = begin, taken, block, count, blocks
        store_item(shares, out_ptr, softmax_state, places, item, num_heads, ROWS, SIZES.rank)
        left -= count
        taken += count
        block = 0
        tile += 1
        if tile == TILES:
            tile = 0
            row += 1
            context = tl.load(contexts_ptr + row, mask=left > 0, other=0)


@kernel
def _latent(
    q_ptr,
    latents_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    order_ptr,
    out_ptr,
    table_stride,
    scale,
    SIZES: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Attend for one tile of ROWS (token, head) pairs of one row."""
    wait_and_allow_next()
    row, tile, begin, count = take_tile(order_ptr, tl.program_id(0), starts_ptr)
    before = tl.load(contexts_ptr + row) - count
    pair = tile * ROWS + tl.arange(0, ROWS)
    token = pair // SIZES.heads
    is_pair = token < count
    begin = begin.to(tl.int64) * SIZES.heads
    q_ptr += begin * (SIZES.rope + SIZES.rank)
    pages = latents_ptr, tables_ptr + row.to(tl.int64) * table_stride
    high = before + tl.minimum(count, (tile * ROWS + ROWS - 1) // SIZES.heads + 1)  # end of the last token's context
    queries = q_ptr, pair, is_pair, before + token
    _, total, acc = _attend(queries, pages, 0, high, scale, SIZES, PAGES, COLUMNS)
    rank = tl.arange(0, block_of(SIZES.rank))
    mask = is_pair[:, None] & (rank < SIZES.rank)[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + begin * SIZES.rank + pair[:, None] * SIZES.rank + rank[None, :], out, mask=mask)


@triton.jit
def _attend(queries, pages, low, high, scale, SIZES: tl.constexpr, PAGES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the softmax state of queries over a row's positions low … high - 1. `pair` are indices of (token, head)
    vectors from q_ptr on; each attends to positions up to its own `position`."""
    q_ptr, pair, is_pair, position = queries
    latents_ptr, table_ptr = pages
    rope = tl.arange(0, block_of(SIZES.rope))
    rank = tl.arange(0, block_of(SIZES.rank))
    is_rope = rope < SIZES.rope
    is_rank = rank < SIZES.rank
    q_ptr += pair[:, None] * (SIZES.rope + SIZES.rank)
    q_rope = tl.load(q_ptr + rope[None, :], mask=is_pair[:, None] & is_rope[None, :], other=0.0)
    q_rank = tl.load(q_ptr + SIZES.rope + rank[None, :], mask=is_pair[:, None] & is_rank[None, :], other=0.0)
    best, total, acc = empty_softmax(pair.shape[0], block_of(SIZES.rank))
    for start in range(low, high, COLUMNS):
        seen = start + tl.arange(0, COLUMNS)
        inside = seen < high
        cells = page_rows(table_ptr, seen, inside, PAGES)
        values = tl.load(
            latents_ptr + SIZES.rope + cells[:, None] + rank[None, :],
            mask=inside[:, None] & is_rank[None, :],
            other=0.0,
        )
        rotated = tl.load(
            latents_ptr + cells[None, :] + rope[:, None], mask=inside[None, :] & is_rope[:, None], other=0.0
        )
        values = values.to(q_rank.dtype)
        scores = tl.dot(q_rank, tl.trans(values), input_precision="ieee")
        scores = tl.dot(q_rope, rotated.to(q_rope.dtype), scores, input_precision="ieee") * scale
        visible = inside[None, :] & (seen[None, :] <= position[:, None])
        best, total, acc = softmax_step(tl.where(visible, scores, -float("inf")), values, best, total, acc)
    return best, total, acc
