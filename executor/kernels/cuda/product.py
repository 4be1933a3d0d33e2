"""The tile kernel for all matrix products: x times a weight of any format, for linear layers and for a layer's experts.

A program computes a tile of the output. Each step reads a part of the depth: x and the weight's codes, which are
dequantized in registers to the dtype of x, for ordinary tensor core products. FP8 rows are multiplied by FP8 weights as
they are. A byte holds the four-bit codes of two inputs that are `half` apart, so each half of the bytes is multiplied by
its own piece of x without a shuffle.

With few rows, reading the weight is the bottleneck: the depth may be split among programs. Callers choose tile and
splits; with a fixed tile and fixed splits a sum does not depend on the other rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import UNGATED, Activation
from penstock.executor.kernels.cuda.dequantize import MAX_SCALED_ROWS, add_groups, dequantize_mxfp4, load_scales
from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.pages import load_inside
from penstock.executor.kernels.cuda.routing import SortedEntries
from penstock.executor.kernels.cuda.rows import gated, quantize_groups
from penstock.executor.kernels.cuda.tiles import Tile, depth_step
from penstock.executor.kernels.gpu_formats import MXFP4, MXFP4_BLOCK, Packed
from penstock.executor.kernels.stored_formats import BLOCK, BLOCKS
from penstock.executor.kernels.weight import Weight

Scaled = tuple[Tensor, Tensor | None]  # rows, and their scales if they are FP8
GROUP = tl.constexpr(BLOCK)
# Inputs of 16 bits per step in tiles of few rows: a tile of 32 columns then has 16 bytes of codes for each thread.
MXFP4_STEP = 128
TOGETHER = tl.constexpr(8)  # row tiles that read a weight side by side, so that it is read from memory once for all


class ProductSpec(NamedTuple):
    """The constants of a product. weight.py defines the layouts of weights."""

    width: int  # output columns; with a gate, of each of the two products
    rows: int  # of the weight; with a gate, of both products
    depth: int
    step: int  # inputs per step
    half: int  # inputs between the codes that share a byte
    x_stride: int
    has_zeros: bool
    is_whole: bool = False  # no tile and no step reaches beyond the weight's rows and columns
    is_biased: bool = False
    activation: Activation | None = None
    has_gate: bool = False  # the activation is that of a gate
    is_sorted: bool = False  # the rows of a tile are entries of one expert
    entries_per_row: int = 1  # entries that share a row of x
    splits: int = 1
    in_order: bool = False  # one program computes all splits
    is_quantized: bool = False  # x is FP8
    quantizes: bool = False  # y is FP8
    kind: str = "numbers"  # or "blocks" (FP8), "groups" (four or eight bits), "mxfp4"
    per_byte: int = 1  # inputs per byte of codes; 1 for numbers of any size
    group: int = 1  # inputs that share a scale, of "groups"
    expert_scales: int = 0  # number of scales of one expert
    scales_stride: int = 0  # of "blocks": number of scales of 128 rows


def multiply(
    x: Scaled,
    weight: Weight,
    y: Scaled,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    order: SortedEntries | None = None,
    entries_per_row: int = 1,
    splits: int = 1,
    in_order: bool = False,
    like: Tensor | None = None,
) -> None:
    """Multiply x [T, depth] by a weight [width, depth] into y [T, width], or into [splits, T, width] unless `in_order`.

    activation: unless it is in `UNGATED`, the rows of a gate come first in the weight. order: the weight is a stack of
    experts, and y has a row for each entry. like: its dtype is the one that y is rounded to before it is quantized.
    """
    (values, x_scales), (out, y_scales), (_, codes, scales, zeros, *_) = x, y, weight
    *_, rows, depth = weight.shape
    has_gate = activation is not None and activation not in UNGATED
    width, step = rows // 2 if has_gate else rows, depth_step(values.element_size())
    spec = ProductSpec(
        *(width, rows, depth, step, step, values.stride(0), zeros is not None),
        is_whole=width % tile.columns == 0,
        is_biased=bias is not None,
        activation=activation,
        has_gate=has_gate,
        is_sorted=order is not None,
        entries_per_row=entries_per_row,
        splits=splits,
        in_order=in_order,
        is_quantized=x_scales is not None,
        quantizes=y_scales is not None,
    )
    assert values.stride(1) == 1 and values.shape[1] == depth and out.shape[-1] == width
    assert x_scales is None or (x_scales.stride(0) == 1 and weight.format is BLOCKS)
    assert out.is_contiguous() and all(tensor.is_contiguous() for tensor in weight.tensors())
    assert bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:-1])
    across, down = triton.cdiv(width, tile.columns), triton.cdiv(len(values), tile.rows)
    together = max(1, min(TOGETHER.value, down))
    grid = together, across, triton.cdiv(down, together) * (1 if in_order else splits)
    if order is not None:
        grid = across, len(order.tiles), 1 if in_order else splits
    if 0 in grid:
        return
    optional = x_scales, scales, zeros, bias, like, y_scales
    _multiply[grid](
        *(values, codes, *(codes if tensor is None else tensor for tensor in optional), out),
        *((codes, codes) if order is None else order[:2]),
        len(values),
        *(0 if part is None else part.stride(1) for part in (x_scales, y_scales)),
        SPEC=_with_layout(spec, weight, tile.rows),
        **tile.constants(),
    )


def codes_spec(weight: Weight) -> ProductSpec | None:
    """Return the spec of products with FP8 blocks or packed codes, without gates and tiles; None for other weights."""
    if weight.format is not BLOCKS and not isinstance(weight.format, Packed):
        return None
    width, depth = weight.shape
    sizes = width, width, depth, BLOCK, BLOCK, depth, weight.zeros is not None
    return _with_layout(ProductSpec(*sizes, group=BLOCK), weight)


def _with_layout(spec: ProductSpec, weight: Weight, rows: int = 0) -> ProductSpec:
    """Add the layout of codes and scales; `rows` are those of a tile."""
    form, codes, scales = weight[:3]
    if scales is not None:
        spec = spec._replace(expert_scales=scales.numel() // len(codes) if codes.dim() == 3 else 0)
    if form is BLOCKS:
        assert scales is not None and spec.depth % BLOCK == 0
        assert not spec.has_gate or spec.width % BLOCK == 0
        spec = spec._replace(kind="blocks", scales_stride=scales.stride(-2))
    elif form is MXFP4:
        step = MXFP4_STEP if spec.step == 64 and rows <= MAX_SCALED_ROWS.value else spec.step
        spec = spec._replace(kind="mxfp4", per_byte=2, half=MXFP4_BLOCK // 2, step=step)
    elif isinstance(form, Packed):
        assert scales is not None
        per_byte, group = 8 // form.bits, spec.depth // scales.shape[-2]
        spec = spec._replace(kind="groups", step=per_byte * form.half, half=form.half, per_byte=per_byte, group=group)
    return spec._replace(is_whole=spec.is_whole and spec.depth % spec.step == 0)


@kernel
def _multiply(
    x_ptr,
    weight_ptr,
    x_scales_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    like_ptr,
    y_scales_ptr,
    y_ptr,
    ids_ptr,
    tiles_ptr,
    rows,
    x_scales_stride,
    y_scales_stride,
    SPEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile of the output, or one split of it."""
    wait_and_allow_next()
    SPLITS: tl.constexpr = 1 if SPEC.in_order else SPEC.splits  # of which this program computes one
    split = tl.program_id(2) % SPLITS
    if SPEC.is_sorted:
        across = tl.program_id(0)
        tile = tl.program_id(1)
        num_rows = tl.load(tiles_ptr + 2 * tile + 1)
        if num_rows == 0:
            return
        expert_slot = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
        is_row = tl.arange(0, ROWS) < num_rows
        entry = tl.load(ids_ptr + tile * ROWS + tl.arange(0, ROWS), mask=is_row, other=0)
    else:
        across = tl.program_id(1)
        tile = tl.program_id(2) // SPLITS * TOGETHER + tl.program_id(0)
        if tile * ROWS >= rows:
            return
        expert_slot = 0
        entry = tile * ROWS + tl.arange(0, ROWS)
        is_row = entry < rows
    row = entry // SPEC.entries_per_row
    x = x_ptr + row.to(tl.int64) * SPEC.x_stride, x_scales_ptr + row, x_scales_stride, is_row
    weight = _weight_of_tile((weight_ptr, scales_ptr, zeros_ptr, bias_ptr), expert_slot, across * COLUMNS, SPEC)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    acc, up = _sum_splits(x, weight, column, split, SPEC)
    acc = _finish(acc, up, weight[3] + column, column < SPEC.width, split, SPEC)
    y_ptrs = y_ptr + (split.to(tl.int64) * rows + entry)[:, None] * SPEC.width + column[None, :]
    if SPEC.quantizes:  # the columns of a tile are one quantization group
        values, scales = quantize_groups(acc.to(like_ptr.dtype.element_ty).to(tl.float32))
        tl.store(y_ptrs, values, mask=is_row[:, None])
        tl.store(y_scales_ptr + across * y_scales_stride + entry, scales, mask=is_row)
    else:
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (column < SPEC.width)[None, :])


@triton.jit
def _weight_of_tile(weight, expert_slot, first, SPEC: tl.constexpr):
    """Return the pointers to one expert's weight and bias; those to scales of "blocks" begin at the column `first`."""
    weight_ptr, scales_ptr, zeros_ptr, bias_ptr = weight
    weight_ptr += expert_slot * (SPEC.rows * (SPEC.depth // SPEC.per_byte))
    scales_ptr += expert_slot * SPEC.expert_scales
    zeros_ptr += expert_slot * SPEC.expert_scales
    if SPEC.kind == "blocks":  # the tile's columns lie in one block
        scales_ptr += first // GROUP * SPEC.scales_stride
    return weight_ptr, scales_ptr, zeros_ptr, bias_ptr + expert_slot * SPEC.rows


@triton.jit
def _sum_splits(x, weight, column, split, SPEC: tl.constexpr):
    """Return the sum of one split or, `in_order`, of all, and that of the up projection if there is a gate."""
    STEPS: tl.constexpr = (SPEC.depth + SPEC.step - 1) // SPEC.step
    EACH: tl.constexpr = (STEPS + SPEC.splits - 1) // SPEC.splits
    if SPEC.splits == 1:
        acc, up = _sum_steps(x, weight, column, 0, STEPS, SPEC)
    elif SPEC.in_order:
        acc = tl.zeros([x[3].shape[0], column.shape[0]], tl.float32)
        up = acc
        # Triton 3.6 miscompiles a variable that this loop carries into the bounds of the inner one.
        for later in range(SPEC.splits):
            part, _ = _sum_steps(x, weight, column, later * EACH, tl.minimum((later + 1) * EACH, STEPS), SPEC)
            acc += part
    else:
        acc, up = _sum_steps(x, weight, column, split * EACH, tl.minimum((split + 1) * EACH, STEPS), SPEC)
    return acc, up


@triton.jit
def _sum_steps(x, weight, column, begin, end, SPEC: tl.constexpr):
    """Return the sum of the steps `begin` to `end` - 1, and that of the up projection if there is a gate."""
    row_ptrs, x_scale_ptrs, x_scales_stride, is_row = x
    PER_BYTE: tl.constexpr = SPEC.per_byte
    BYTES: tl.constexpr = SPEC.step // PER_BYTE
    ROW_BYTES: tl.constexpr = SPEC.depth // PER_BYTE
    byte = tl.arange(0, BYTES)
    first = byte
    if SPEC.half < BYTES:  # a step has several blocks of codes
        first = byte // SPEC.half * (PER_BYTE * SPEC.half) + byte % SPEC.half
    CARRIES: tl.constexpr = SPEC.kind != "groups"  # pointers from step to step; with groups, 8.0 spills
    x_ptrs = row_ptrs[:, None] + first[None, :]
    ptrs = weight[0] + column.to(tl.int64)[None, :] * ROW_BYTES + byte[:, None]
    if CARRIES:
        x_ptrs += begin * SPEC.step
        ptrs += begin * BYTES
    is_deep = first >= 0
    # The scales of a group that spans whole steps are loaded a step ahead, so that no product waits for them. In tiles of
    # few rows, zeros loaded ahead would have to change their layout in every step, which takes longer than waiting.
    # Exponents are loaded ahead only there: larger tiles have no registers left for them, nor do tiles with a gate.
    IS_LARGE: tl.constexpr = is_row.shape[0] > MAX_SCALED_ROWS
    IS_GROUP_LONG: tl.constexpr = SPEC.kind == "groups" and SPEC.group % SPEC.step == 0
    IS_FREE: tl.constexpr = (IS_LARGE or not SPEC.has_zeros) if IS_GROUP_LONG else SPEC.kind == "mxfp4" and not IS_LARGE
    AHEAD: tl.constexpr = IS_FREE and not SPEC.has_gate
    scales = column, column
    if AHEAD:
        scales = load_scales(weight, begin * SPEC.step, 0, column, 0, SPEC)
    acc = tl.zeros([is_row.shape[0], column.shape[0]], tl.float32)
    up = acc
    for step in range(begin, end):
        start = step * SPEC.step
        ahead = 0 if CARRIES else step
        is_x = is_row[:, None]
        if SPEC.depth % SPEC.step != 0:
            is_deep = start + first < SPEC.depth
            is_x = is_x & is_deep[None, :]
        x_scale = tl.full([is_row.shape[0]], 1.0, tl.float32)
        if SPEC.is_quantized:
            x_scale = tl.load(x_scale_ptrs + start // GROUP * x_scales_stride, mask=is_row, other=0.0)
        is_code = is_deep[:, None] & (column < SPEC.width)[None, :]
        codes = load_inside(ptrs + ahead * BYTES, is_code, SPEC.is_whole)
        if SPEC.has_gate:
            up_codes = load_inside(ptrs + ahead * BYTES + SPEC.width * ROW_BYTES, is_code, SPEC.is_whole)
        current = scales
        if AHEAD:
            scales = load_scales(weight, start + SPEC.step, 0, column, 0, SPEC)
        for half in tl.static_range(PER_BYTE):
            rows = tl.load(x_ptrs + (ahead * SPEC.step + half * SPEC.half), mask=is_x, other=0.0)
            acc = _add_product(acc, rows, x_scale, codes, half, weight, current, start, column, 0, AHEAD, SPEC)
            if SPEC.has_gate:
                up = _add_product(
                    up, rows, x_scale, up_codes, half, weight, current, start, column, SPEC.width, False, SPEC
                )
        if CARRIES:
            x_ptrs += SPEC.step
            ptrs += BYTES
    return acc, up


@triton.jit
def _finish(acc, up, bias_ptrs, is_column, split, SPEC: tl.constexpr):
    """Add the bias, to the first of an expert's splits and to none of a linear layer's, and apply the activation."""
    ACTIVATION: tl.constexpr = SPEC.activation
    if SPEC.is_biased and (SPEC.splits == 1 or SPEC.in_order or SPEC.is_sorted):
        is_column = is_column & (split == 0)
        acc += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if SPEC.has_gate:
            up += tl.load(bias_ptrs + SPEC.width, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if SPEC.has_gate:
        acc = gated(acc, up, ACTIVATION)
    elif ACTIVATION == "relu2":
        acc = tl.where(acc < 0, 0.0, acc * acc)  # NaN stays NaN
    return acc


@triton.jit
def _add_product(
    acc,
    x,
    x_scale,
    codes,
    half: tl.constexpr,
    weight,
    scales,
    start,
    column,
    SHIFT: tl.constexpr,
    AHEAD: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Add the product of x with the numbers in one half of the loaded bytes. AHEAD: `scales` are loaded."""
    scales_ptr = weight[1]
    if SPEC.kind == "blocks":  # a step lies in one block: its product is scaled once, in float32
        scale = tl.load(scales_ptr + SHIFT // GROUP * SPEC.scales_stride + start // GROUP)
        if SPEC.is_quantized:
            return acc + tl.dot(x, codes) * (x_scale * scale)[:, None]
        # Converts through float32: before 9.0 there is no shorter way.
        return acc + tl.dot(x, codes.to(tl.float32).to(x.dtype), input_precision="ieee") * scale
    if (SPEC.kind == "groups" or SPEC.kind == "mxfp4") and not AHEAD:
        scales = load_scales(weight, start, half, column, SHIFT, SPEC)
    if SPEC.kind == "groups":
        return add_groups(acc, x, codes, half, scales, weight[2].dtype.element_ty != tl.uint8, SPEC)
    if SPEC.kind == "mxfp4":
        codes = dequantize_mxfp4(codes, scales[0], half, x.dtype)
    return tl.dot(x, codes.to(x.dtype), acc, input_precision="ieee")
