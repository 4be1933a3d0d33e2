"""Row-wise kernels: RMSNorm, optionally with the residual's addition, and the gated activations. Each may end with the
quantization of its rows to FP8, for products with block-scaled FP8 weights, which also exists alone.

Narrow rows share a program, so that each thread of four warps always has 16 bytes to read.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation, NormedRows, Quantized
from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.tiles import gate_tile, power_of_2, row_warps
from penstock.executor.kernels.eight_bits import FP8_MAX, TINY, make_quantized
from penstock.executor.kernels.stored_formats import BLOCK

NORM_BLOCK = 1024  # minimum number of elements per program
GROUPS = tl.constexpr(8)  # groups of 128 numbers per program: 16 bytes for each thread of four warps
LIMIT, LEAST, GROUP = tl.constexpr(FP8_MAX), tl.constexpr(TINY), tl.constexpr(BLOCK)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_norm(x, x, weight, y, y, eps, adds=False)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.shape == residual.shape
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return add_rms_norm_to(NormedRows(x, residual, total, weight, eps)), total


def add_rms_norm_to(rows: NormedRows) -> Tensor:
    """Return the normed sum, like `add_rms_norm`, and write the sum to `rows.total`."""
    y = torch.empty_like(rows.total)
    launch_norm(rows.update, rows.residual, rows.weight, y, rows.total, rows.eps, adds=True)
    return y


def launch_norm(x, residual, weight, y, total, eps: float, adds: bool, scales: Tensor | None = None) -> None:
    """Norm x to y, which is quantized to FP8 if it has `scales`; if `adds`, write the sum with the residual to `total`."""
    rows, width = x.shape
    assert x.stride(1) == residual.stride(1) == 1 and x.dtype is residual.dtype and weight.is_contiguous()
    assert weight.shape == (width,) and weight.dtype is torch.float32
    if not rows:
        return
    block = power_of_2(width)
    together = max(1, NORM_BLOCK // block)
    _norm[(triton.cdiv(rows, together),)](
        *(x, residual, weight, y, total, x if scales is None else scales),
        *(rows, eps, 0 if scales is None else scales.stride(1)),
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=residual.stride(0),
        WIDTH=width,
        BLOCK=block,
        ROWS=together,
        ADDS=adds,
        QUANTIZES=scales is not None,
        num_warps=row_warps(together * block),
    )


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        tile = gate_tile(width)
        _gate_rows[(triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.columns))](
            *(gate_up, out, rows), WIDTH=width, ACTIVATION=activation, **tile.constants()
        )
    return out


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


def quantize_whole_rows(x: Tensor) -> Quantized:
    """Quantize each row of x with one scale; return the rows and their scales [T, 1]."""
    rows, width = x.shape
    assert x.stride(1) == 1
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = power_of_2(width)
    _quantize_whole_rows[(rows,)](
        *(x, values, scales), STRIDE=x.stride(0), WIDTH=width, BLOCK=block, num_warps=row_warps(block)
    )
    return values, scales


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    values, scales = make_quantized(len(x), x.shape[1], x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_norm(x, residual, weight, values, total, eps, adds=True, scales=scales)
    return (values, scales), total


@kernel
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    scales_ptr,
    rows,
    eps,
    scales_stride,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    QUANTIZES: tl.constexpr,
):
    """Add the residual (ADDS), normalize, and quantize (QUANTIZES). The sum is rounded to the model's dtype first, and
    the result before it is quantized, like in the reference."""
    wait_and_allow_next()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    x = tl.load(x_ptr + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row * RESIDUAL_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + column, total, mask=inside)
        x = total.to(tl.float32)
    y = normalize(x, tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0), eps, WIDTH)
    if QUANTIZES:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        values, scales = quantize_groups(tl.reshape(y, [ROWS * (BLOCK // GROUP), GROUP]))
        y = tl.reshape(values, [ROWS, BLOCK])
        group = tl.arange(0, BLOCK // GROUP)[None, :]
        scale_ptrs = scales_ptr + group.to(tl.int64) * scales_stride + row
        mask = (row < rows) & (group < WIDTH // GROUP)
        tl.store(scale_ptrs, tl.reshape(scales, [ROWS, BLOCK // GROUP]), mask=mask)
    tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=inside)


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
def _quantize_whole_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_and_allow_next()
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row[:, None] * STRIDE + column[None, :], mask=column[None, :] < WIDTH, other=0.0)
    values, scales = quantize_groups(x.to(tl.float32))
    tl.store(values_ptr + row[:, None] * WIDTH + column[None, :], values, mask=column[None, :] < WIDTH)
    tl.store(scales_ptr + row, scales)


@triton.jit
def quantize_groups(x):
    """Quantize x [R, N] from float32 to FP8 with a scale per row. NaN stays NaN, so that checks for NaN find it."""
    scales = tl.maximum(tl.max(tl.abs(x), 1), LEAST) / LIMIT
    clamped = tl.clamp(x / scales[:, None], -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return clamped.to(tl.float8e4nv), scales


@triton.jit
def normalize(x, weight, eps, WIDTH: tl.constexpr):
    """Apply RMSNorm to each row of x, or to all of x if it is one row; float32, zero beyond WIDTH."""
    square = tl.sum(x * x, len(x.shape) - 1, keep_dims=True)
    return x * (1.0 / tl.sqrt(square / WIDTH + eps)) * weight


@kernel
def _gate_rows(
    gate_up_ptr,
    out_ptr,
    rows,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    wait_and_allow_next()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < WIDTH)
    gate_ptrs = gate_up_ptr + row * (2 * WIDTH) + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=inside, other=0.0).to(tl.float32)
    y = gated(gate, up, ACTIVATION)
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swish":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * up
    else:
        y = activate(gate, ACTIVATION) * up
    return y


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply SiLU, or GELU by its tanh formula. Both are x times a sigmoid, which saturates without overflow."""
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # twice the argument of tanh
    else:
        inner = x
    return x / (1.0 + tl.exp(-inner))
