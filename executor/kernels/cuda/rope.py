"""Norms of query and key heads, rotation, and the way of keys and values into their pages, in one kernel."""

import torch
import triton
import triton.language as tl

from penstock.executor.kernels.cuda.dependent import launching, take_turn
from penstock.executor.kernels.cuda.tiles import power_of_2

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
    tokens, q_heads, q_dim = q.shape
    half, dim = cos.shape[1], k.shape[2]
    page_stride, slot_stride, _ = k_pages.stride()
    assert v_pages.stride() == (page_stride, slot_stride, 1) and v_pages.dtype is k_pages.dtype
    assert q.stride(2) == k.stride(2) == 1
    rotated = torch.empty((tokens, q_heads, q_dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return rotated
    values = k if v is None else v
    _rope_and_store[(tokens, q_heads + k.shape[1])](
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
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        values.stride(0),
        values.stride(1),
        page_stride,
        slot_stride,
        eps,
        q_heads,
        Q_DIM=q_dim,
        DIM=dim,
        HALF=half,
        BLOCK_HALF=power_of_2(half),
        BLOCK_Q_REST=power_of_2(q_dim - 2 * half),
        BLOCK_REST=power_of_2(dim - 2 * half),
        PAGE=k_pages.shape[1],
        HAS_V=v is not None,
        NORMS_Q=q_weight is not None,
        NORMS_K=k_weight is not None,
        num_warps=1 if dim <= 256 else 2,
        **launching(),
    )
    return rotated


@triton.jit
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
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    page_stride,
    slot_stride,
    eps,
    q_heads,
    Q_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_Q_REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_V: tl.constexpr,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per token and head: the query heads, then the key heads, which take their values along."""
    take_turn(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    if head < q_heads:
        q_ptr += token * q_stride + head * q_head_stride
        rotated_ptr += (token * q_heads + head) * Q_DIM
        _rotate(
            q_ptr,
            rotated_ptr,
            cos_ptr,
            sin_ptr,
            position,
            q_weight_ptr,
            eps,
            Q_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_Q_REST,
            NORMS_Q,
        )
    else:
        head -= q_heads
        slot = tl.load(slots_ptr + token)
        cell = slot // PAGE * page_stride + slot % PAGE * slot_stride + head * DIM
        k_ptr += token * k_stride + head * k_head_stride
        k_pages_ptr += cell
        _rotate(
            k_ptr,
            k_pages_ptr,
            cos_ptr,
            sin_ptr,
            position,
            k_weight_ptr,
            eps,
            DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
            NORMS_K,
        )
        if HAS_V:
            v_ptr += token * v_stride + head * v_head_stride
            _copy_head(v_ptr, v_pages_ptr + cell, DIM, HALF, BLOCK_HALF, BLOCK_REST)


@triton.jit
def _rotate(
    source,
    goal,
    cos_ptr,
    sin_ptr,
    position,
    weight_ptr,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NORMS: tl.constexpr,
):
    """The pairs (i, i + HALF); what lies beyond 2 HALF is only normalized."""
    first = tl.arange(0, BLOCK_HALF)
    inside = first < HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    is_rest = rest < DIM
    x = tl.load(source + first, mask=inside, other=0.0)
    y = tl.load(source + HALF + first, mask=inside, other=0.0)
    z = tl.load(source + rest, mask=is_rest, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    z = z.to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0) + tl.sum(z * z, 0)) / DIM + eps)
        # Rounded to the model's dtype between norm and rotation, as in the twin.
        x = (x * scale * tl.load(weight_ptr + first, mask=inside, other=0.0)).to(dtype).to(tl.float32)
        y = (y * scale * tl.load(weight_ptr + HALF + first, mask=inside, other=0.0)).to(dtype).to(tl.float32)
        z = (z * scale * tl.load(weight_ptr + rest, mask=is_rest, other=0.0)).to(dtype).to(tl.float32)
    if HALF > 0:
        cos = tl.load(cos_ptr + position * HALF + first, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + first, mask=inside, other=0.0)
        tl.store(goal + first, _narrow((x * cos - y * sin).to(dtype), goal), mask=inside)
        tl.store(goal + HALF + first, _narrow((y * cos + x * sin).to(dtype), goal), mask=inside)
    if DIM > 2 * HALF:
        tl.store(goal + rest, _narrow(z.to(dtype), goal), mask=is_rest)


@triton.jit
def _copy_head(
    source,
    goal,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """In the pieces that `_rotate` has: each is a power of two wide, with a mask."""
    first = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    if HALF > 0:
        _copy(source, goal, first, first < HALF)
        _copy(source, goal, first + HALF, first < HALF)
    if DIM > 2 * HALF:
        _copy(source, goal, rest, rest < DIM)


@triton.jit
def _copy(source, goal, index, mask):
    tl.store(goal + index, _narrow(tl.load(source + index, mask=mask, other=0.0), goal), mask=mask)


@triton.jit
def _narrow(x, goal):
    """To the dtype that `goal` points to; eight-bit pages take what they can hold, never infinity or NaN for it."""
    if goal.dtype.element_ty == tl.float8e4nv:
        return tl.minimum(tl.maximum(x.to(tl.float32), -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
    else:
        return x.to(goal.dtype.element_ty)
