"""Multi-head latent attention over paged latents: every head reads the same vector, its end being keys and values both.

Absorbed (executor/models/latent.py): queries are in the latent's space already. A tile's rows are (token, head) pairs,
so that a latent is read once for many heads; rows of one token have their context cut into parts, as in `attention`.
"""

import torch
import triton
import triton.language as tl

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.cuda.attention import (
    LOG2_E,
    LOWEST,
    combine,
    find_row,
    make_parts,
    page_rows,
    split_range,
    weigh,
)
from penstock.executor.kernels.cuda.dependent import launching, take_turn
from penstock.executor.kernels.cuda.tiles import choose_splits, latent_tile, power_of_2


def latent_attention(
    q: torch.Tensor, latents: torch.Tensor, batch: ForwardBatch, scale: float, rope_dim: int
) -> torch.Tensor:
    """q [T, H, rope + rank], latents [pages, PAGE, rope + rank] -> [T, H, rank], causal."""
    tokens, num_heads, width = q.shape
    rank = width - rope_dim
    out = torch.empty((tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    singles, prompts = batch.num_single_rows, len(batch.query_lens)
    if singles:
        tile = latent_tile(num_heads, True, q.element_size(), latents.element_size())
        num_tiles = triton.cdiv(num_heads, tile.rows)
        splits = choose_splits(singles * num_tiles, batch.max_single_context)
        parts, sums = make_parts(q[:singles], splits, rank) if splits > 1 else (out, out)
        _launch((singles, num_tiles, splits), q, latents, batch, scale, rope_dim, out, parts, sums, splits, tile, True)
        if splits > 1:
            combine(parts, sums, batch.context_lens, out, None, tile.columns)
    if prompts:
        tile = latent_tile(num_heads, False, q.element_size(), latents.element_size())
        num_tiles = (tokens - singles) * num_heads // tile.rows + prompts
        _launch((num_tiles, 1, 1), q, latents, batch, scale, rope_dim, out, out, out, 1, tile, False)
    return out


def _launch(grid, q, latents, batch, scale, rope_dim, out, parts, sums, splits, tile, is_single) -> None:
    num_heads, width = q.shape[1:]
    assert q.is_contiguous()
    _latent[grid](
        q,
        latents,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        out,
        parts,
        sums,
        latents.stride(0),
        latents.stride(1),
        batch.block_tables.stride(0),
        scale * LOG2_E,
        batch.num_single_rows,
        len(batch.query_lens),
        HEADS=num_heads,
        ROPE=rope_dim,
        RANK=width - rope_dim,
        BLOCK_ROPE=max(16, power_of_2(rope_dim)),
        BLOCK_RANK=max(16, power_of_2(width - rope_dim)),
        PAGE=latents.shape[1],
        SPLITS=splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        IS_SINGLE=is_single,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launching(),
    )


@triton.jit(do_not_specialize=["singles", "num_rows", "table_stride"])
def _latent(
    q_ptr,
    latents_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    page_stride,
    slot_stride,
    table_stride,
    scale,
    singles,
    num_rows,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    take_turn(DEPENDENT)
    if IS_SINGLE:
        row = tl.program_id(0)
        tile = tl.program_id(1)
        begin = row
        count = 1
    else:
        row, tile = find_row(tl.program_id(0), starts_ptr, singles, num_rows, HEADS, ROWS)
        begin = tl.load(starts_ptr + row)
        count = tl.load(starts_ptr + row + 1) - begin
    split = tl.program_id(2)
    context = tl.load(contexts_ptr + row)
    low, high = split_range(context, split, 0, SPLITS, COLUMNS, False)
    if not IS_SINGLE:
        low = 0
        high = context - count + tl.minimum(count, (tile * ROWS + ROWS - 1) // HEADS + 1)  # of the tile's last token
    if (not IS_SINGLE and tile * ROWS >= count * HEADS) or (SPLITS > 1 and low >= high):
        return
    pair = tile * ROWS + tl.arange(0, ROWS)
    token = pair // HEADS
    is_pair = token < count
    position = context - count + token
    head = (begin + token).to(tl.int64) * HEADS + pair % HEADS
    rope = tl.arange(0, BLOCK_ROPE)
    rank = tl.arange(0, BLOCK_RANK)
    is_rope = rope < ROPE
    is_rank = rank < RANK
    q_ptr += head[:, None] * (ROPE + RANK)
    q_rope = tl.load(q_ptr + rope[None, :], mask=is_pair[:, None] & is_rope[None, :], other=0.0)
    q_rank = tl.load(q_ptr + ROPE + rank[None, :], mask=is_pair[:, None] & is_rank[None, :], other=0.0)
    best = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_RANK], tl.float32)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    for start in range(low, high, COLUMNS):
        seen = start + tl.arange(0, COLUMNS)
        inside = seen < high
        cells = page_rows(table_ptr, seen, inside, page_stride, slot_stride, PAGE)
        values = tl.load(
            latents_ptr + ROPE + cells[:, None] + rank[None, :], mask=inside[:, None] & is_rank[None, :], other=0.0
        )
        rotated = tl.load(
            latents_ptr + cells[None, :] + rope[:, None], mask=inside[None, :] & is_rope[:, None], other=0.0
        )
        values = values.to(q_rank.dtype)
        scores = tl.dot(q_rank, tl.trans(values), input_precision="ieee")
        scores = tl.dot(q_rope, rotated.to(q_rope.dtype), scores, input_precision="ieee") * scale
        visible = inside[None, :] & (seen[None, :] <= position[:, None])
        best, total, acc = weigh(tl.where(visible, scores, -float("inf")), values, best, total, acc)
    out = acc / tl.maximum(total, 1.0)[:, None]
    mask = is_pair[:, None] & is_rank[None, :]
    if SPLITS > 1:
        part = head * SPLITS + split
        tl.store(parts_ptr + part[:, None] * RANK + rank[None, :], out, mask=mask)
        tl.store(sums_ptr + part, best + tl.log2(total), mask=is_pair)
    else:
        tl.store(out_ptr + head[:, None] * RANK + rank[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
