"""Norms of query and key heads, rotary embedding, and writing keys and values to their pages, in one kernel.

A program has some tokens and some heads of each, so that each thread of four warps reads 16 bytes per tensor.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import KeyStore, Rotation
from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.pages import cell_offset, layout_of
from penstock.executor.kernels.cuda.tiles import Tile, power_of_2, rope_tile
from penstock.executor.kernels.eight_bits import FP8_MAX

LIMIT = tl.constexpr(FP8_MAX)


class HeadShape(NamedTuple):
    """The heads and their division among programs, and the parts of a head: pairs (i, i + half), which are rotated, and
    the rest; blocks are powers of two."""

    q_heads: int
    kv_heads: int
    q_programs: int
    tokens: int  # of a program
    heads: int  # of a program
    dim: int
    half: int
    block_half: int
    block_rest: int


def shape_of(q_heads: int, kv_heads: int, dim: int, half: int, tile: Tile) -> HeadShape:
    programs = triton.cdiv(q_heads, tile.columns), tile.rows, tile.columns
    return HeadShape(q_heads, kv_heads, *programs, dim, half, power_of_2(half), power_of_2(dim - 2 * half))


def rope_and_store(q: Tensor, k: Tensor, v: Tensor | None, store: KeyStore) -> Tensor:
    tokens, q_heads, dim = q.shape
    (cos, sin, positions), (k_pages, v_pages), kv_cells, (q_weight, k_weight, eps) = store
    kv_heads = k.shape[1]
    half = cos.shape[1]
    values = k if v is None else v
    assert v_pages.stride() == k_pages.stride() and v_pages.dtype is k_pages.dtype
    assert q.stride(2) == k.stride(2) == values.stride(2) == 1 and q.dtype is k.dtype is values.dtype
    assert k.shape[2] == values.shape[2] == dim
    check_inputs(store.rotation, kv_cells)
    rotated = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return rotated
    tile = rope_tile(kv_heads, power_of_2(max(half, dim - 2 * half)))
    shape = shape_of(q_heads, kv_heads, dim, half, tile)
    weights = (cos if weight is None else weight for weight in (q_weight, k_weight))
    _rope_and_store[(triton.cdiv(tokens, tile.rows), shape.q_programs + triton.cdiv(kv_heads, tile.columns))](
        *(q, k, values, cos, sin, positions, k_pages, v_pages, kv_cells, *weights, rotated),
        *(tokens, eps),
        Q_STRIDES=q.stride(),
        K_STRIDES=k.stride(),
        V_STRIDES=values.stride(),
        PAGES=layout_of(k_pages),
        SHAPE=shape,
        HAS_V=v is not None,
        NORMS_Q=q_weight is not None,
        NORMS_K=k_weight is not None,
        num_warps=tile.num_warps,
    )
    return rotated


def check_inputs(rotation: Rotation, kv_cells: Tensor) -> None:
    """Assert the dtypes and layouts that the kernels require."""
    cos, sin, positions = rotation
    assert cos.dtype is sin.dtype is torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    assert positions.dtype is torch.int32 and kv_cells.dtype is torch.int64
    assert positions.is_contiguous() and kv_cells.is_contiguous()


@kernel
def _rope_and_store(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    k_pages_ptr,
    v_pages_ptr,
    kv_cells_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rotated_ptr,
    tokens,
    eps,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    PAGES: tl.constexpr,
    SHAPE: tl.constexpr,
    HAS_V: tl.constexpr,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
):
    """Process some tokens of some heads: first the query heads, then the key heads together with their values."""
    wait_and_allow_next()
    token = tl.program_id(0).to(tl.int64) * SHAPE.tokens + tl.arange(0, SHAPE.tokens)[:, None, None]
    is_token = token < tokens
    position = tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.int64)
    tables = cos_ptr + position * SHAPE.half, sin_ptr + position * SHAPE.half
    head = tl.arange(0, SHAPE.heads)[None, :, None]
    program = tl.program_id(1)
    if program < SHAPE.q_programs:
        head += program * SHAPE.heads
        mask = is_token & (head < SHAPE.q_heads)
        source = q_ptr + token * Q_STRIDES[0] + head * Q_STRIDES[1]
        goal = rotated_ptr + (token * SHAPE.q_heads + head) * SHAPE.dim
        _rotate(source, goal, mask, tables, q_weight_ptr, eps, SHAPE, NORMS_Q)
    else:
        head += (program - SHAPE.q_programs) * SHAPE.heads
        mask = is_token & (head < SHAPE.kv_heads)
        kv_cell = tl.load(kv_cells_ptr + token, mask=is_token, other=0)
        cell = cell_offset(kv_cell, PAGES) + head * SHAPE.dim
        source = k_ptr + token * K_STRIDES[0] + head * K_STRIDES[1]
        _rotate(source, k_pages_ptr + cell, mask, tables, k_weight_ptr, eps, SHAPE, NORMS_K)
        if HAS_V:
            source = v_ptr + token * V_STRIDES[0] + head * V_STRIDES[1]
            _copy_heads(source, v_pages_ptr + cell, mask, SHAPE)


@triton.jit
def _rotate(source, goal, mask, tables, weight_ptr, eps, SHAPE: tl.constexpr, NORMS: tl.constexpr):
    """Rotate the pairs (i, i + half) of heads [tokens, heads, 1]; elements beyond 2 half are only normalized."""
    cos_ptr, sin_ptr = tables
    first = tl.arange(0, SHAPE.block_half)[None, None, :]
    inside = mask & (first < SHAPE.half)
    rest = 2 * SHAPE.half + tl.arange(0, SHAPE.block_rest)[None, None, :]
    is_rest = mask & (rest < SHAPE.dim)
    x = tl.load(source + first, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = tl.load(source + SHAPE.half + first, mask=inside, other=0.0).to(tl.float32)
    if SHAPE.dim > 2 * SHAPE.half:
        z = tl.load(source + rest, mask=is_rest, other=0.0).to(tl.float32)
    if NORMS:
        square = tl.sum(x * x, 2, keep_dims=True) + tl.sum(y * y, 2, keep_dims=True)
        if SHAPE.dim > 2 * SHAPE.half:
            square += tl.sum(z * z, 2, keep_dims=True)
        scale = 1.0 / tl.sqrt(square / SHAPE.dim + eps)
        # Rounded to the model's dtype between norm and rotation, like the reference implementation.
        x = (x * scale * load_shared(weight_ptr + first, inside)).to(dtype).to(tl.float32)
        y = (y * scale * load_shared(weight_ptr + SHAPE.half + first, inside)).to(dtype).to(tl.float32)
        if SHAPE.dim > 2 * SHAPE.half:
            z = (z * scale * load_shared(weight_ptr + rest, is_rest)).to(dtype).to(tl.float32)
    if SHAPE.half > 0:
        cos = load_shared(cos_ptr + first, inside)
        sin = load_shared(sin_ptr + first, inside)
        tl.store(goal + first, convert((x * cos - y * sin).to(dtype), goal), mask=inside)
        tl.store(goal + SHAPE.half + first, convert((y * cos + x * sin).to(dtype), goal), mask=inside)
    if SHAPE.dim > 2 * SHAPE.half:
        tl.store(goal + rest, convert(z.to(dtype), goal), mask=is_rest)


@triton.jit
def _copy_heads(source, goal, mask, SHAPE: tl.constexpr):
    """Copy heads in the same masked power-of-two pieces as `_rotate`."""
    first = tl.arange(0, SHAPE.block_half)[None, None, :]
    rest = 2 * SHAPE.half + tl.arange(0, SHAPE.block_rest)[None, None, :]
    if SHAPE.half > 0:
        copy(source + first, goal + first, mask & (first < SHAPE.half))
        copy(source + SHAPE.half + first, goal + SHAPE.half + first, mask & (first < SHAPE.half))
    if SHAPE.dim > 2 * SHAPE.half:
        copy(source + rest, goal + rest, mask & (rest < SHAPE.dim))


@triton.jit
def load_shared(ptrs, mask):
    """Load values that several heads share once per thread; a single load would be passed on through shared memory."""
    return tl.load(tl.broadcast_to(ptrs, mask.shape), mask=mask, other=0.0)


@triton.jit
def copy(source, goal, mask):
    tl.store(goal, convert(tl.load(source, mask=mask, other=0.0), goal), mask=mask)


@triton.jit
def convert(x, goal):
    """Convert to the dtype that `goal` points to. For FP8, values beyond the limit are clamped to it, and NaN stays
    NaN."""
    if goal.dtype.scalar.element_ty == tl.float8e4nv:
        return tl.clamp(x.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return x.to(goal.dtype.scalar.element_ty)
