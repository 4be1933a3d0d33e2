"""Matrix products in eight bits with a scale per block, and the kernels before them that quantize as they write.

For few tokens the product is ours, for many it is cuBLAS's behind `torch.nn.functional.scaled_mm`: on a relative of
this GPU the one was faster up to 256 tokens, the other beyond 1,000 (facts of vLLM's issue 49932, on an H20).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from penstock.executor.kernels.cuda.rows import SILU, activate, normalize
from penstock.executor.kernels.cuda.tiles import block_linear_tile, power_of_2, row_warps
from penstock.executor.kernels.torch_fp8 import BLOCK, FP8_MAX, TINY, Quantized

MAX_OWN_TOKENS = 256
LIMIT, LEAST, GROUP = tl.constexpr(FP8_MAX), tl.constexpr(TINY), tl.constexpr(BLOCK)


def quantize(x: torch.Tensor) -> Quantized:
    """x [T, K], K a multiple of 128; as the twins in `torch_fp8`."""
    values, scales = _make_quantized(x, x.shape[1])
    _quantize_rows[_grid(x, x.shape[1])](x, values, scales, x.stride(0), x.shape[1], len(x), num_warps=1)
    return values, scales


def silu_mul_quantize(gate_up: torch.Tensor) -> Quantized:
    width = gate_up.shape[1] // 2
    values, scales = _make_quantized(gate_up, width)
    _gate_quantize[_grid(gate_up, width)](
        gate_up, values, scales, gate_up.stride(0), width, len(gate_up), ACTIVATION=SILU, num_warps=1
    )
    return values, scales


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[Quantized, torch.Tensor]:
    rows, width = x.shape
    values, scales = _make_quantized(x, width)
    total = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = power_of_2(width)
    _norm_quantize[(rows,)](
        x,
        residual,
        weight,
        values,
        scales,
        total,
        x.stride(0),
        residual.stride(0),
        rows,
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=row_warps(block),
    )
    return (values, scales), total


def block_linear(x: Quantized, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values, scales = x
    if values.is_cuda and is_cublas(len(values), len(weight)):
        return _scaled_mm(values, scales, weight, weight_scales, dtype)
    rows, width = len(values), len(weight)
    out = torch.empty((rows, width), dtype=dtype, device=values.device)
    tile = block_linear_tile(rows)
    grid = (triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows))
    _block_linear[grid](
        values,
        scales,
        weight,
        weight_scales,
        out,
        rows,
        width,
        values.shape[1],
        scales.stride(1),
        weight_scales.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def is_cublas(rows: int, width: int) -> bool:
    """Whether cuBLAS computes the product: of many rows, and only where every block of the weight is whole. DeepSeek's
    projection to its latent, 576 wide, has a block of half as many rows as the others."""
    return rows > MAX_OWN_TOKENS and width % BLOCK == 0


def _scaled_mm(
    values: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The second factor by columns, its scales [depth, width] too: a checkpoint's rows, transposed."""
    return F.scaled_mm(
        values,
        weight.t(),
        scales,
        F.ScalingType.BlockWise1x128,
        weight_scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )


def _make_quantized(x: torch.Tensor, width: int) -> Quantized:
    assert x.stride(1) == 1 and width % BLOCK == 0
    values = torch.empty((len(x), width), dtype=torch.float8_e4m3fn, device=x.device)
    return values, torch.empty((width // BLOCK, len(x)), dtype=torch.float32, device=x.device).t()


def _grid(x: torch.Tensor, width: int) -> tuple[int, int]:
    return len(x), width // BLOCK


@triton.jit
def _store_quantized(x, values_ptr, scale_ptr):
    """One block of 128 numbers, float32."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), LEAST) / LIMIT
    tl.store(values_ptr + tl.arange(0, GROUP), _to_fp8(x / scale))
    tl.store(scale_ptr, scale)


@triton.jit
def _to_fp8(x):
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["rows"])
def _quantize_rows(x_ptr, values_ptr, scales_ptr, stride, width, rows):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = tl.load(x_ptr + row * stride + group * GROUP + tl.arange(0, GROUP)).to(tl.float32)
    _store_quantized(x, values_ptr + row * width + group * GROUP, scales_ptr + group.to(tl.int64) * rows + row)


@triton.jit(do_not_specialize=["rows"])
def _gate_quantize(gate_up_ptr, values_ptr, scales_ptr, stride, width, rows, ACTIVATION: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pointers = gate_up_ptr + row * stride + group * GROUP + tl.arange(0, GROUP)
    gate = tl.load(pointers)
    up = tl.load(pointers + width).to(tl.float32)
    y = (activate(gate.to(tl.float32), ACTIVATION) * up).to(gate.dtype).to(tl.float32)  # rounded, as in the twin
    _store_quantized(y, values_ptr + row * width + group * GROUP, scales_ptr + group.to(tl.int64) * rows + row)


@triton.jit(do_not_specialize=["rows"])
def _norm_quantize(
    x_ptr,
    residual_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = x.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * WIDTH + column, total, mask=inside)
    y = normalize(total.to(tl.float32), tl.load(weight_ptr + column, mask=inside, other=0.0), eps, WIDTH)
    y = y.to(total.dtype).to(tl.float32)
    blocks = tl.reshape(y, [BLOCK // GROUP, GROUP])
    scales = tl.maximum(tl.max(tl.abs(blocks), 1), LEAST) / LIMIT
    values = tl.reshape(_to_fp8(blocks / scales[:, None]), [BLOCK])
    tl.store(values_ptr + row * WIDTH + column, values, mask=inside)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scales_ptr + group.to(tl.int64) * rows + row, scales, mask=group < WIDTH // GROUP)


@triton.jit(do_not_specialize=["rows", "scales_stride"])
def _block_linear(
    x_ptr,
    scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    out_ptr,
    rows,
    width,
    depth,
    scales_stride,
    weight_scales_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A step of the depth is one block of scales: its product is scaled once, in float32."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < width
    k = tl.arange(0, GROUP)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * depth + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(0, depth // GROUP):
        x = tl.load(x_ptrs, mask=is_row[:, None], other=0.0)
        weight = tl.load(weight_ptrs, mask=is_column[None, :], other=0.0)
        x_scale = tl.load(scales_ptr + group * scales_stride + row, mask=is_row, other=0.0)
        weight_scale = tl.load(weight_scales_ptr + tl.program_id(0) * COLUMNS // GROUP * weight_scales_stride + group)
        acc += tl.dot(x, weight) * (x_scale * weight_scale)[:, None]
        x_ptrs += GROUP
        weight_ptrs += GROUP
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
