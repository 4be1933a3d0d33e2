"""Block-scaled FP8 matrix products, and the kernels before them that quantize their output.

For few tokens our own kernel is used, for many cuBLAS through `torch.nn.functional.scaled_mm`: on an H20, the former
was faster up to 256 tokens, the latter beyond 1,000 (vLLM's issue 49932). On cards without scaled_mm all products use
our kernel.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Quantized
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.rows import activate, normalize
from penstock.executor.kernels.cuda.tiles import block_linear_tile, depth_splits, power_of_2, row_warps
from penstock.executor.kernels.eight_bits import FP8_MAX, TINY, make_quantized, pad_rows
from penstock.executor.kernels.weight import BLOCK

MAX_OWN_TOKENS = 256
LIMIT, LEAST, GROUP = tl.constexpr(FP8_MAX), tl.constexpr(TINY), tl.constexpr(BLOCK)
GROUPS = tl.constexpr(8)  # groups of 128 numbers per program: 16 bytes for each thread of four warps
JOIN_BLOCK = tl.constexpr(1024)


def quantize(x: Tensor) -> Quantized:
    return _quantize(x, x.shape[1], is_gated=False)


def silu_mul_quantize(gate_up: Tensor) -> Quantized:
    return _quantize(gate_up, gate_up.shape[1] // 2, is_gated=True)


def _quantize(x: Tensor, width: int, is_gated: bool) -> Quantized:
    assert x.stride(1) == 1
    values, scales = make_quantized(len(x), width, x.device)
    grid = (len(x), triton.cdiv(width // BLOCK, GROUPS.value))
    _quantize_rows[grid](
        x,
        values,
        scales,
        scales.stride(1),
        STRIDE=x.stride(0),
        WIDTH=width,
        GATED=is_gated,
        num_warps=4,
    )
    return values, scales


def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    rows, width = x.shape
    assert x.stride(1) == residual.stride(1) == 1 and x.dtype is residual.dtype and weight.is_contiguous()
    values, scales = make_quantized(rows, width, x.device)
    total = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = power_of_2(width)
    pointers = x, residual, weight, values
    numbers = scales, total, scales.stride(1), eps
    _norm_quantize[(rows,)](
        *pointers,
        *numbers,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=residual.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=row_warps(block),
    )
    return (values, scales), total


def block_linear(
    x: Quantized, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype, is_fixed: bool = False
) -> Tensor:
    values, scales = x
    if values.is_cuda and not is_fixed and is_cublas(len(values), len(weight)):
        return scaled_mm(x, weight, weight_scales, dtype)
    rows, depth = values.shape
    width = len(weight)
    assert values.is_contiguous() and weight.is_contiguous() and weight_scales.is_contiguous() and scales.stride(0) == 1
    tile = block_linear_tile(rows, width, is_fixed)
    grid = (triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows))
    splits = 1 if is_fixed else depth_splits(grid[0] * grid[1], depth)
    out = torch.empty((rows, width), dtype=dtype, device=values.device)
    parts = out if splits == 1 else out.new_empty((splits, rows, width), dtype=torch.float32)
    pointers = values, scales, weight, weight_scales, parts
    _block_linear[(*grid, splits)](
        *pointers,
        rows,
        scales.stride(1),
        WIDTH=width,
        DEPTH=depth,
        SCALES_STRIDE=weight_scales.stride(0),
        SPLITS=splits,
        **tile.constants(),
    )
    if splits > 1:
        join(parts, out)
    return out


def join(parts: Tensor, out: Tensor) -> None:
    """Add up the splits of a product, [splits, rows, width], to `out`."""
    size = out.numel()
    _join[(triton.cdiv(size, JOIN_BLOCK.value),)](parts, out, size, SPLITS=len(parts), num_warps=4)


def is_cublas(rows: int, width: int) -> bool:
    """Tell whether cuBLAS computes the product: with many rows, and if every block of the weight is whole. DeepSeek's
    projection to its latent, 576 wide, ends with half a block."""
    return rows > MAX_OWN_TOKENS and width % BLOCK == 0 and current_card().has_scaled_mm


def scaled_mm(x: Quantized, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply with cuBLAS. It takes the second factor and its scales in column order: the checkpoint's rows,
    transposed. The first factor's scales are columns aligned to 16 bytes, hence the padding to 4 rows."""
    values, scales = pad_rows(x)
    product = F.scaled_mm(
        values,
        weight.t(),
        scales,
        F.ScalingType.BlockWise1x128,
        weight_scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return product[: len(x[0])]


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


@kernel
def _block_linear(
    x_ptr,
    scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    parts_ptr,
    rows,
    scales_stride,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute one split of the depth. Each step is one scale block: its product is scaled once, in float32."""
    wait_and_allow_next()
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < WIDTH
    groups: tl.constexpr = DEPTH // GROUP
    each: tl.constexpr = (groups + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * each
    k = first * GROUP + tl.arange(0, GROUP)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * DEPTH + k[:, None]
    weight_scales_ptr += tl.program_id(0) * COLUMNS // GROUP * SCALES_STRIDE
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(first, tl.minimum(first + each, groups)):
        x = tl.load(x_ptrs, mask=is_row[:, None], other=0.0)
        weight = tl.load(weight_ptrs, mask=is_column[None, :], other=0.0)
        x_scale = tl.load(scales_ptr + group * scales_stride + row, mask=is_row, other=0.0)
        acc += tl.dot(x, weight) * (x_scale * tl.load(weight_scales_ptr + group))[:, None]
        x_ptrs += GROUP
        weight_ptrs += GROUP
    out_row = tl.program_id(2).to(tl.int64) * rows + row
    out_ptrs = parts_ptr + out_row[:, None] * WIDTH + column[None, :]
    tl.store(out_ptrs, acc.to(parts_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@kernel
def _join(parts_ptr, out_ptr, size, SPLITS: tl.constexpr):
    """Add up the splits of a product in order of depth."""
    wait_and_allow_next()
    index = tl.program_id(0).to(tl.int64) * JOIN_BLOCK + tl.arange(0, JOIN_BLOCK)
    inside = index < size
    total = tl.zeros([JOIN_BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + index + split * size.to(tl.int64), mask=inside, other=0.0)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=inside)
