"""The steps of multi-head latent attention between projections and scores, in one kernel: the latent's norm, the
rotation of keys and queries, and writing the latents to the pages (executor/models/latent.py).

Checkpoints rotate neighbours (2 i, 2 i + 1); pages and queries hold these pairs as (i, i + half).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import LatentStore
from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.pages import cell_offset, layout_of
from penstock.executor.kernels.cuda.rope_and_store import check_inputs, convert, copy, load_shared, shape_of
from penstock.executor.kernels.cuda.rows import normalize
from penstock.executor.kernels.cuda.tiles import power_of_2, rope_tile


def latent_rope_and_store(
    goal: Tensor, q: Tensor, down: Tensor, store: LatentStore, first: int, is_whole: bool
) -> None:
    tokens, num_heads, width = goal.shape
    (weight, eps), (cos, sin, positions), latents, kv_cells = store
    rank, half = len(weight), cos.shape[1]
    assert q.stride()[1:] == (q.shape[2], 1) and down.stride(1) == 1 and down.shape[1] == rank + 2 * half
    assert goal.is_contiguous() and goal.dtype is q.dtype is down.dtype
    assert weight.dtype is torch.float32 and weight.is_contiguous()
    check_inputs(store.rotation, kv_cells)
    if not tokens:
        return
    tile = rope_tile(min(16, num_heads), power_of_2(half))
    shape = shape_of(num_heads, 1, q.shape[2], half, tile)
    _latent_rope[(triton.cdiv(tokens, tile.rows), shape.q_programs + 1)](
        *(goal, q, down, weight, cos, sin, positions, latents, kv_cells),
        *(first, tokens, eps),
        GOAL_DIM=width,
        Q_STRIDE=q.stride(0),
        DOWN_STRIDE=down.stride(0),
        PAGES=layout_of(latents),
        SHAPE=shape,
        RANK=rank,
        IS_WHOLE=is_whole,
        num_warps=tile.num_warps,
    )


@kernel
def _latent_rope(
    goal_ptr,
    q_ptr,
    down_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    latents_ptr,
    kv_cells_ptr,
    first,
    tokens,
    eps,
    GOAL_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    DOWN_STRIDE: tl.constexpr,
    PAGES: tl.constexpr,
    SHAPE: tl.constexpr,
    RANK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Process some tokens of some query heads; the last programs process the keys, which all heads share."""
    wait_and_allow_next()
    row = tl.program_id(0).to(tl.int64) * SHAPE.tokens + tl.arange(0, SHAPE.tokens)[:, None, None]  # row of `goal`
    is_row = row < tokens
    token = first + row
    position = tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int64)
    cos_ptr += position * SHAPE.half
    sin_ptr += position * SHAPE.half
    program = tl.program_id(1)
    if program < SHAPE.q_programs:
        head = program * SHAPE.heads + tl.arange(0, SHAPE.heads)[None, :, None]
        is_head = is_row & (head < SHAPE.q_heads)
        query = q_ptr + token * Q_STRIDE + head * SHAPE.dim
        goal = goal_ptr + (row * SHAPE.q_heads + head) * GOAL_DIM
        _rotate_neighbours(query + SHAPE.dim - 2 * SHAPE.half, goal, is_head, cos_ptr, sin_ptr, SHAPE)
        if IS_WHOLE:
            rest = tl.arange(0, SHAPE.block_rest)[None, None, :]
            copy(query + rest, goal + 2 * SHAPE.half + rest, is_head & (rest < SHAPE.dim - 2 * SHAPE.half))
    else:
        kv_cell = tl.load(kv_cells_ptr + token, mask=is_row, other=0)
        cell = latents_ptr + cell_offset(kv_cell, PAGES)
        key = down_ptr + token * DOWN_STRIDE
        _rotate_neighbours(key + RANK, cell, is_row, cos_ptr, sin_ptr, SHAPE)
        rank = tl.arange(0, triton.next_power_of_2(RANK))[None, None, :]
        is_rank = is_row & (rank < RANK)
        latent = tl.load(key + rank, mask=is_rank, other=0.0)
        y = normalize(latent.to(tl.float32), load_shared(weight_ptr + rank, is_rank), eps, RANK)
        tl.store(cell + 2 * SHAPE.half + rank, convert(y.to(latent.dtype), cell), mask=is_rank)


@triton.jit
def _rotate_neighbours(source, goal, mask, cos_ptr, sin_ptr, SHAPE: tl.constexpr):
    """Rotate the pairs (2 i, 2 i + 1) of heads [tokens, heads, 1] and store them as (i, i + half)."""
    BLOCK_HALF: tl.constexpr = SHAPE.block_half
    both = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
    half = tl.arange(0, BLOCK_HALF)[None, None, :]
    inside = mask & (half < SHAPE.half)
    pairs = tl.load(source + both, mask=mask & (both < 2 * SHAPE.half), other=0.0)
    x, y = tl.split(tl.reshape(pairs.to(tl.float32), [inside.shape[0], inside.shape[1], BLOCK_HALF, 2]))
    cos = load_shared(cos_ptr + half, inside)
    sin = load_shared(sin_ptr + half, inside)
    tl.store(goal + half, convert((x * cos - y * sin).to(pairs.dtype), goal), mask=inside)
    tl.store(goal + SHAPE.half + half, convert((y * cos + x * sin).to(pairs.dtype), goal), mask=inside)
