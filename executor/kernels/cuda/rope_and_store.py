"""Norms of query and key heads, rotation, and the way of keys and values into their pages, in one kernel.

A program has some tokens and some heads of each, so that four warps have 16 bytes to read per thread and tensor.
"""

import torch
import triton
import triton.language as tl

from penstock.executor.kernels.cuda.dependent import launching, take_turn
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.tiles import power_of_2, rope_tile

FP8_MAX = tl.constexpr(448.0)  # the largest finite float8_e4m3fn


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    kv_slots: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalize q and k per head if weights are given, rotate them, write k and v into their pages; returns q."""
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    half = cos.shape[1]
    values = k if v is None else v
    page_stride, slot_stride, _ = k_pages.stride()
    assert v_pages.stride() == (page_stride, slot_stride, 1) and v_pages.dtype is k_pages.dtype
    assert q.stride(2) == k.stride(2) == values.stride(2) == 1 and q.dtype is k.dtype is values.dtype
    assert k.shape[2] == values.shape[2] == dim
    check_places(cos, sin, positions, kv_slots)
    rotated = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return rotated
    tile = rope_tile(kv_heads, power_of_2(max(half, dim - 2 * half)))
    q_programs = triton.cdiv(q_heads, tile.columns)
    _rope_and_store[(triton.cdiv(tokens, tile.rows), q_programs + triton.cdiv(kv_heads, tile.columns))](
        q,
        k,
        values,
        cos,
        sin,
        positions,
        k_pages,
        v_pages,
        kv_slots,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        rotated,
        tokens,
        eps,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        K_STRIDE=k.stride(0),
        K_HEAD_STRIDE=k.stride(1),
        V_STRIDE=values.stride(0),
        V_HEAD_STRIDE=values.stride(1),
        PAGE_STRIDE=page_stride,
        SLOT_STRIDE=slot_stride,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        Q_PROGRAMS=q_programs,
        DIM=dim,
        HALF=half,
        TOKENS=tile.rows,
        HEADS=tile.columns,
        BLOCK_HALF=power_of_2(half),
        BLOCK_REST=power_of_2(dim - 2 * half),
        PAGE=k_pages.shape[1],
        HAS_V=v is not None,
        NORMS_Q=q_weight is not None,
        NORMS_K=k_weight is not None,
        num_warps=tile.num_warps,
        **launching(),
    )
    return rotated


def check_places(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, kv_slots: torch.Tensor) -> None:
    """As the kernels take them."""
    assert cos.dtype is sin.dtype is torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    assert positions.dtype is torch.int32 and kv_slots.dtype is torch.int64
    assert positions.is_contiguous() and kv_slots.is_contiguous()


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
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rotated_ptr,
    tokens,
    eps,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_V: tl.constexpr,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some tokens of some heads: first the query heads, then the key heads, which take their values along."""
    take_turn(DEPENDENT)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    is_token = token < tokens
    position = tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.int64)
    cos_ptr += position * HALF
    sin_ptr += position * HALF
    head = tl.arange(0, HEADS)[None, :, None]
    program = tl.program_id(1)
    if program < Q_PROGRAMS:
        head += program * HEADS
        mask = is_token & (head < Q_HEADS)
        source = q_ptr + token * Q_STRIDE + head * Q_HEAD_STRIDE
        goal = rotated_ptr + (token * Q_HEADS + head) * DIM
        _rotate(
            source,
            goal,
            mask,
            cos_ptr,
            sin_ptr,
            q_weight_ptr,
            eps,
            DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
            NORMS_Q,
        )
    else:
        head += (program - Q_PROGRAMS) * HEADS
        mask = is_token & (head < KV_HEADS)
        slot = tl.load(slots_ptr + token, mask=is_token, other=0)
        cell = slot // PAGE * PAGE_STRIDE + slot % PAGE * SLOT_STRIDE + head * DIM
        _rotate(
            k_ptr + token * K_STRIDE + head * K_HEAD_STRIDE,
            k_pages_ptr + cell,
            mask,
            cos_ptr,
            sin_ptr,
            k_weight_ptr,
            eps,
            DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
            NORMS_K,
        )
        if HAS_V:
            source = v_ptr + token * V_STRIDE + head * V_HEAD_STRIDE
            _copy_heads(source, v_pages_ptr + cell, mask, DIM, HALF, BLOCK_HALF, BLOCK_REST)


@triton.jit
def _rotate(
    source,
    goal,
    mask,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NORMS: tl.constexpr,
):
    """The pairs (i, i + HALF) of heads [tokens, heads, 1]; what lies beyond 2 HALF is only normalized."""
    first = tl.arange(0, BLOCK_HALF)[None, None, :]
    inside = mask & (first < HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
    is_rest = mask & (rest < DIM)
    x = tl.load(source + first, mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = tl.load(source + HALF + first, mask=inside, other=0.0).to(tl.float32)
    if DIM > 2 * HALF:
        z = tl.load(source + rest, mask=is_rest, other=0.0).to(tl.float32)
    if NORMS:
        square = tl.sum(x * x, 2, keep_dims=True) + tl.sum(y * y, 2, keep_dims=True)
        if DIM > 2 * HALF:
            square += tl.sum(z * z, 2, keep_dims=True)
        scale = 1.0 / tl.sqrt(square / DIM + eps)
        # Rounded to the model's dtype between norm and rotation, as in the twin.
        x = (x * scale * load_shared(weight_ptr + first, inside)).to(dtype).to(tl.float32)
        y = (y * scale * load_shared(weight_ptr + HALF + first, inside)).to(dtype).to(tl.float32)
        if DIM > 2 * HALF:
            z = (z * scale * load_shared(weight_ptr + rest, is_rest)).to(dtype).to(tl.float32)
    if HALF > 0:
        cos = load_shared(cos_ptr + first, inside)
        sin = load_shared(sin_ptr + first, inside)
        tl.store(goal + first, narrow((x * cos - y * sin).to(dtype), goal), mask=inside)
        tl.store(goal + HALF + first, narrow((y * cos + x * sin).to(dtype), goal), mask=inside)
    if DIM > 2 * HALF:
        tl.store(goal + rest, narrow(z.to(dtype), goal), mask=is_rest)


@triton.jit
def _copy_heads(
    source,
    goal,
    mask,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """In the pieces that `_rotate` has: each is a power of two wide, with a mask."""
    first = tl.arange(0, BLOCK_HALF)[None, None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
    if HALF > 0:
        copy(source + first, goal + first, mask & (first < HALF))
        copy(source + HALF + first, goal + HALF + first, mask & (first < HALF))
    if DIM > 2 * HALF:
        copy(source + rest, goal + rest, mask & (rest < DIM))


@triton.jit
def load_shared(ptrs, mask):
    """What several heads have in common, each thread its own part: one load for all would be passed on in shared memory."""
    return tl.load(tl.broadcast_to(ptrs, mask.shape), mask=mask, other=0.0)


@triton.jit
def copy(source, goal, mask):
    tl.store(goal, narrow(tl.load(source, mask=mask, other=0.0), goal), mask=mask)


@triton.jit
def narrow(x, goal):
    """To the dtype that `goal` points to; eight-bit pages take what they can hold, never infinity or NaN for it."""
    if goal.dtype.scalar.element_ty == tl.float8e4nv:
        return tl.minimum(tl.maximum(x.to(tl.float32), -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
    return x.to(goal.dtype.scalar.element_ty)
