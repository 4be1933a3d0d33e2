"""Quantizes rows to FP8, alone or as the end of a norm or of a gate, for products with block-scaled FP8 weights."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Quantized
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.rows import GROUP, activate, launch_norm, quantize_groups
from penstock.executor.kernels.eight_bits import make_quantized
from penstock.executor.kernels.stored_formats import BLOCK

GROUPS = tl.constexpr(8)  # groups of 128 numbers per program: 16 bytes for each thread of four warps


def quantize(x: Tensor, is_gated: bool = False) -> Quantized:
    """Quantize x or, with `is_gated`, SiLU(first half of a row) * second half."""
    assert x.stride(1) == 1
    width = x.shape[1] // 2 if is_gated else x.shape[1]
    values, scales = make_quantized(len(x), width, x.device)
    grid = (len(x), triton.cdiv(width // BLOCK, GROUPS.value))
    _quantize_rows[grid](
        *(x, values, scales, scales.stride(1)), STRIDE=x.stride(0), WIDTH=width, GATED=is_gated, num_warps=4
    )
    return values, scales


silu_mul_quantize = partial(quantize, is_gated=True)


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    values, scales = make_quantized(len(x), x.shape[1], x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_norm(x, residual, weight, values, total, eps, adds=True, scales=scales)
    return (values, scales), total


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
