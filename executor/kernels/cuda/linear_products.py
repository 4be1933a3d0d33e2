"""The products of linear layers: tiles and splits by the weight's format, and cuBLAS for many FP8 rows.

Without `torch.nn.functional.scaled_mm` all products use our kernel.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation, Fp8Rows, NormedRows, Quantized, Rows
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda import dequantize, few_rows
from penstock.executor.kernels.cuda.launch import ALIGNMENT, kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.product import Scaled, codes_spec, multiply
from penstock.executor.kernels.cuda.rows import add_rms_norm_to, gate, quantize_whole_rows
from penstock.executor.kernels.cuda.tiles import FIXED_PROGRAMS, Tile, coded_tile, depth_splits, fixed_tile
from penstock.executor.kernels.eight_bits import pad_rows
from penstock.executor.kernels.gpu_formats import Packed
from penstock.executor.kernels.stored_formats import BLOCK, BLOCKS
from penstock.executor.kernels.weight import EIGHT_BITS, Weight, plain_weight

# Beyond this our kernel's tiles have 128 rows, and it no longer reads at the card's speed: on an H100 it takes longer for
# 256 rows than cuBLAS for bfloat16 weights of twice the bytes, and for a layer of 256 rows nearly as long as cuBLAS for 512.
MAX_OWN_TOKENS = 64
# Up to so many rows would be multiplied by FP8 weights in 16 bits, which saves a launch a layer and is more exact, but lets
# answers depend on the number of rows. Both ways read the same bytes; it is off because no GPU has compared them.
MAX_PLAIN_ROWS = 0
# From so many rows on, codes are dequantized once for cuBLAS. This is estimated from bytes: no GPU has compared it.
MIN_DEQUANTIZED_ROWS = 512
# So many rows and weights of eight bits with one scale per output would be multiplied by cuBLAS in FP8, the rows quantized
# with one scale each. It is off because no GPU has compared it, and less exact than to dequantize the weight.
MULTIPLIES_BY_ROW_SCALES = False
PIECE_BYTES = 32 << 20  # of dequantized rows, so that cuBLAS reads them from the L2 cache of 50 MiB
PIECE_COLUMNS = 64
JOIN_BLOCK = tl.constexpr(1024)


def linear(x: Rows, weight: Weight, bias: Tensor | None = None, is_fixed: bool = False) -> Tensor:
    """Multiply x [T, K] by a weight [N, K] and add the bias [N] -> [T, N].

    is_fixed: every output is summed in an order that does not depend on the other rows. The depth is split by the
    weight's shape. With few rows each split has its own program, so that all read at once; with many rows one program
    computes all of them. Small and large tiles use the same tensor core instruction."""
    if isinstance(x, Fp8Rows):
        assert weight.format is BLOCKS and weight.scales is not None
        values, dtype = x.rows[0], x.dtype
        if values.is_cuda and not is_fixed and is_cublas(len(values), len(weight.codes)):
            out = scaled_mm(x.rows, weight.codes, weight.scales, dtype)
            return out if bias is None else out.add_(bias)
        return _multiply(x.rows, weight, dtype, bias, is_fixed)
    if not is_fixed and few_rows.is_ours(x, weight, bias):
        return few_rows.multiply(x, weight, bias, None)
    x = add_rms_norm_to(x) if isinstance(x, NormedRows) else x
    if weight.is_numbers and not is_fixed:
        return F.linear(x, weight.codes, bias)
    if isinstance(weight.format, Packed) and len(x) >= MIN_DEQUANTIZED_ROWS and not is_fixed:
        multiply_many = _multiply_by_row_scales if _has_row_scales(weight) else _multiply_dequantized
        return multiply_many(x, weight, bias)
    return _multiply((x, None), weight, x.dtype, bias, is_fixed)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, is_fixed: bool = False) -> Tensor:
    """Compute `Ops.wide_linear`, with `is_fixed` as in `linear`."""
    plain = plain_weight(weight)
    if not is_fixed and few_rows.is_ours(x, plain, bias):
        return few_rows.multiply(x, plain, bias, None, torch.float32)
    if is_fixed or not x.is_cuda:  # on a CPU, torch has no such product
        return _multiply((x, None), plain, torch.float32, bias, is_fixed)
    out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out.add_(bias)


def gated_linear(x: Tensor | NormedRows, weight: Weight, activation: Activation, is_fixed: bool = False) -> Tensor:
    """Compute `Ops.gated_linear`, with `is_fixed` as in `linear`."""
    if not is_fixed and few_rows.is_ours(x, weight):
        return few_rows.multiply(x, weight, None, activation)
    return gate(linear(x, weight, None, is_fixed), activation)


def _has_row_scales(weight: Weight) -> bool:
    """Tell whether cuBLAS takes the weight's codes as they are, with one scale for each output."""
    assert weight.scales is not None
    is_scaled = weight.codes.dtype is EIGHT_BITS and weight.scales.shape[0] == 1 and weight.zeros is None
    fits = not any(size % 16 for size in weight.shape) and current_card().has_scaled_mm
    return MULTIPLIES_BY_ROW_SCALES and is_scaled and fits


def _multiply_by_row_scales(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    (values, scales), by = quantize_whole_rows(x), F.ScalingType.RowWise
    assert weight.scales is not None
    out = F.scaled_mm(values, weight.codes.t(), scales, by, weight.scales.float(), by, output_dtype=x.dtype)
    return out if bias is None else out.add_(bias)


def _multiply_dequantized(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Dequantize the weight piece by piece into memory that all pieces share, and multiply by each."""
    (width, depth), (_, codes, scales, zeros, *_), spec = weight.shape, weight, codes_spec(weight)
    assert scales is not None and spec is not None
    out = x.new_empty((len(x), width))
    rows = max(1, PIECE_BYTES // (PIECE_COLUMNS * depth * x.itemsize)) * PIECE_COLUMNS
    piece = x.new_empty((min(rows, width), depth))
    for first in range(0, width, rows):
        part = piece[: width - first]
        grid = depth // spec.step, triton.cdiv(len(part), PIECE_COLUMNS)
        tensors = codes, scales, codes if zeros is None else zeros, part
        dequantize.dequantize_piece[grid](*tensors, first, SPEC=spec, COLUMNS=PIECE_COLUMNS, num_warps=4)
        torch.mm(x, part.t(), out=out[:, first : first + rows])
    return out if bias is None else out.add_(bias)


def _multiply(x: Scaled, weight: Weight, dtype: torch.dtype, bias: Tensor | None, is_fixed: bool) -> Tensor:
    (values, scales), (width, _) = x, weight.shape
    values = values if values.stride(1) == 1 else values.contiguous()
    if bias is not None and bias.data_ptr() % ALIGNMENT:  # it may be a part of the bias of several layers
        bias = bias.clone()
    tile, splits, in_order = _divide(len(values), weight, values.element_size(), is_fixed)
    out = torch.empty((len(values), width), dtype=dtype, device=values.device)
    is_joined = splits > 1 and not in_order
    parts = out.new_empty((splits, *out.shape), dtype=torch.float32) if is_joined else out
    multiply((values, scales), weight, (parts, None), tile, bias=bias, splits=splits, in_order=in_order)
    if is_joined and len(values):
        _join_splits[(triton.cdiv(out.numel(), JOIN_BLOCK.value),)](
            *(parts, out if bias is None else bias, out),
            out.numel(),
            SPLITS=splits,
            WIDTH=width,
            IS_BIASED=bias is not None,
            num_warps=4,
        )
    return out


def _divide(rows: int, weight: Weight, itemsize: int, is_fixed: bool) -> tuple[Tile, int, bool]:
    """Return the tile, the number of splits of the depth, and whether one program computes all splits of a tile."""
    width, depth = weight.shape
    if weight.is_numbers:
        tile, splits = fixed_tile(rows, width, depth, itemsize)
    else:
        tile, splits = coded_tile(rows, itemsize, is_fixed), 1
    programs = triton.cdiv(width, tile.columns) * triton.cdiv(rows, tile.rows)
    if not is_fixed:
        splits = depth_splits(programs, depth, tile.rows)
    return tile, splits, splits > 1 and is_fixed and programs >= FIXED_PROGRAMS


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


@kernel
def _join_splits(
    parts_ptr,
    bias_ptr,
    out_ptr,
    size,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_BIASED: tl.constexpr,
):
    """Add up the splits of a product, [splits, rows, WIDTH], in order of depth, and the bias."""
    wait_and_allow_next()
    index = tl.program_id(0).to(tl.int64) * JOIN_BLOCK + tl.arange(0, JOIN_BLOCK)
    inside = index < size
    total = tl.zeros([JOIN_BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + index + split * size.to(tl.int64), mask=inside, other=0.0)
    if IS_BIASED:
        total += tl.load(bias_ptr + index % WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=inside)
