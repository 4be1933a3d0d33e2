"""Quantizes rows to FP8, alone or as the end of a norm or of a gate, for products with block-scaled FP8 weights."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Quantized
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.rows import activate, normalize
from penstock.executor.kernels.cuda.tiles import power_of_2, row_warps
from penstock.executor.kernels.eight_bits import FP8_MAX, TINY, make_quantized
from penstock.executor.kernels.weight import BLOCK

LIMIT, LEAST, GROUP = tl.constexpr(FP8_MAX), tl.constexpr(TINY), tl.constexpr(BLOCK)
GROUPS = tl.constexpr(8)  # groups of 128 numbers per program: 16 bytes for each thread of four warps


def quantize(x: Tensor, is_gated: bool = False) -> Quantized:
    """Quantize x or, with `is_gated`, SiLU(first half of a row) * second half."""
    assert x.stride(1) == 1
    width = x.shape[1] // 2 if is_gated else x.shape[1]
    values, scales = make_quantized(len(x), width, x.device)
    grid = (len(x), triton.cdiv(width // BLOCK, GROUPS.value))
    _quantize_rows[grid](
        *(x, values, scales, scales.stride(1)),
        STRIDE=x.stride(0),
        WIDTH=width,
        GATED=is_gated,
        num_warps=4,
    )
    return values, scales


silu_mul_quantize = partial(quantize, is_gated=True)


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    rows, width = x.shape
    assert x.stride(1) == residual.stride(1) == 1 and x.dtype is residual.dtype and weight.is_contiguous()
    values, scales = make_quantized(rows, width, x.device)
    total = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = power_of_2(width)
    _norm_quantize[(rows,)](
        *(x, residual, weight, values, scales, total, scales.stride(1), eps),
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=residual.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=row_warps(block),
    )
    return (values, scales), total


@triton.jit
def quantize_groups(x):
    """Quantize x [R, 128] from float32 to FP8 with a scale per row. NaN stays NaN, so that checks for NaN find it."""
    scales = tl.maximum(tl.max(tl.abs(x), 1), LEAST) / LIMIT
    clamped = tl.clamp(x / scales[:, None], -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return clamped.to(tl.float8e4nv), scales


@kernel
def _quantize_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    scales_stride,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Quantize some groups of a row. GATED: the values are SiLU(first half of the row) * second half."""
    wait_and_allow_next()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    is_group = group < WIDTH // GROUP
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * STRIDE + column, mask=is_group[:, None], other=0.0)
    y = x.to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * STRIDE + WIDTH + column, mask=is_group[:, None], other=0.0).to(tl.float32)
        y = (activate(y, "silu") * up).to(x.dtype).to(tl.float32)  # rounded like the reference implementation
    values, scales = quantize_groups(y)
    tl.store(values_ptr + row * WIDTH + column, values, mask=is_group[:, None])
    tl.store(scales_ptr + group.to(tl.int64) * scales_stride + row, scales, mask=is_group)


@kernel
def _norm_quantize(
    x_ptr,
    residual_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    total_ptr,
    scales_stride,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_and_allow_next()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row * RESIDUAL_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    total = x.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * WIDTH + column, total, mask=inside)
    y = normalize(total.to(tl.float32), tl.load(weight_ptr + column, mask=inside, other=0.0), eps, WIDTH)
    y = y.to(total.dtype).to(tl.float32)
    values, scales = quantize_groups(tl.reshape(y, [BLOCK // GROUP, GROUP]))
    tl.store(values_ptr + row * WIDTH + column, tl.reshape(values, [BLOCK]), mask=inside)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scales_ptr + group.to(tl.int64) * scales_stride + row, scales, mask=group < WIDTH // GROUP)
