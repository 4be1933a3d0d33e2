"""Products with four-bit or eight-bit quantized weights, for linear layers and for all experts of a layer.

Each depth step reads codes and scales once and dequantizes them in registers to the inputs' dtype, for ordinary tensor
core products. A byte holds the codes of two inputs that are `half` apart, so each half of the byte is multiplied by its
own piece of x without a shuffle. Few rows are bound by reading codes: the depth is split so that all multiprocessors
read, and the splits are added in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.expert_products import weighted_sum
from penstock.executor.kernels.cuda.fp8 import join
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.pages import load_inside
from penstock.executor.kernels.cuda.routing import SortedEntries, sort_entries
from penstock.executor.kernels.cuda.rows import activate
from penstock.executor.kernels.cuda.tiles import Tile, depth_splits, packed_expert_tile, packed_tile
from penstock.executor.kernels.weight import Packed, Weight

# A float32 whose last mantissa bit counts ones: OR-ing a small integer into it replaces a conversion instruction, whose
# throughput is low.
ONES, ONES_BITS = tl.constexpr(2.0**23), tl.constexpr(0x4B000000)


class CodeSizes(NamedTuple):
    width: int  # output columns; with a gate, of each of the two products
    rows: int  # rows of the weight; with a gate, of both products
    depth: int
    group: int  # depth of a quantization group
    bits: int
    half: int
    has_below: bool
    is_reordered: bool


def packed_linear(x: Tensor, weight: Weight, is_fixed: bool = False) -> Tensor:
    rows, (width, depth) = len(x), weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    tile = packed_tile(rows, width, x.element_size(), is_fixed)
    programs = triton.cdiv(width, tile.columns) * triton.cdiv(rows, tile.rows)
    splits = 1 if is_fixed else depth_splits(programs, depth)
    parts = out if splits == 1 else out.new_empty((splits, rows, width), dtype=torch.float32)
    _launch(x, weight, parts, None, tile, width, 1, splits, GATED=False, ACTIVATION="silu")
    if splits > 1:
        join(parts, out)
    return out


def packed_experts(
    hidden: Tensor,
    slots: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    first: int,
    activation: Activation,
    added: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    is_fixed: bool = False,
) -> Tensor:
    assert biases == (None, None), "experts of codes have no biases"
    (num_slots, width, inner), entries = down.shape, slots.numel()
    given = hidden.element_size(), is_fixed
    up_tile, down_tile = (packed_expert_tile(entries, num_slots, columns, *given) for columns in (inner, width))
    order = sort_entries(slots, num_slots, first, up_tile.rows)
    inside = torch.empty((entries, inner), dtype=hidden.dtype, device=hidden.device)
    parts = torch.empty((entries, width), dtype=hidden.dtype, device=hidden.device)
    top_k = slots.shape[1]
    _launch(hidden, gate_up, inside, order, up_tile, inner, top_k, 1, GATED=True, ACTIVATION=activation)
    _launch(inside, down, parts, order, down_tile, width, 1, 1, GATED=False, ACTIVATION=activation)
    return weighted_sum(parts, slots, shares, num_slots, first, added)


def _launch(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    order: SortedEntries | None,
    tile: Tile,
    width: int,
    shared_by: int,
    splits: int,
    **given: bool | str,
) -> None:
    """Launch the kernel. `shared_by`: entries per row of x; without an order, the rows of x are the product's rows."""
    form, codes, scales, below, places = weight[:5]
    *_, rows, depth = weight.shape
    assert isinstance(form, Packed) and scales is not None
    assert x.stride(1) == 1 and x.shape[1] == depth and y.is_contiguous()
    assert codes.is_contiguous() and scales.is_contiguous() and (below is None or below.is_contiguous())
    assert rows == width * (2 if given["GATED"] else 1)
    tiles = triton.cdiv(len(x), tile.rows) if order is None else len(order.tiles)
    if not tiles:
        return
    beside = scales if below is None else below, scales if places is None else places
    sizes = CodeSizes(
        *(width, rows, depth, depth // scales.shape[-2], form.bits, form.half),
        has_below=below is not None,
        is_reordered=places is not None,
    )
    _multiply_codes[(triton.cdiv(width, tile.columns), tiles, splits)](
        *(x, codes, scales, *beside, y),
        *((scales, scales) if order is None else order),
        len(x),
        SIZES=sizes,
        STRIDE=x.stride(0),
        SHARED_BY=shared_by,
        SPLITS=splits,
        SORTED=order is not None,
        **tile.constants(),
        **given,
    )


@kernel
def _multiply_codes(
    x_ptr,
    codes_ptr,
    scales_ptr,
    below_ptr,
    places_ptr,
    y_ptr,
    ids_ptr,
    tiles_ptr,
    rows,
    SIZES: tl.constexpr,
    STRIDE: tl.constexpr,
    SHARED_BY: tl.constexpr,
    SPLITS: tl.constexpr,
    SORTED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply a tile's rows of x by a weight [width, depth], or by one split of it; GATED: the gate's rows come first.
    SORTED: the tile's rows are entries of one expert."""
    wait_and_allow_next()
    tile = tl.program_id(1)
    per_byte: tl.constexpr = 8 // SIZES.bits
    row_bytes: tl.constexpr = SIZES.depth // per_byte
    if SORTED:
        num_rows = tl.load(tiles_ptr + 2 * tile + 1)
        if num_rows == 0:
            return
        slot = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
        is_row = tl.arange(0, ROWS) < num_rows
        entry = tl.load(ids_ptr + tile * ROWS + tl.arange(0, ROWS), mask=is_row, other=0)
        row = entry // SHARED_BY
        codes_ptr += slot * (SIZES.rows * row_bytes)
        scales_ptr += slot * (SIZES.rows * (SIZES.depth // SIZES.group))
        below_ptr += slot * (SIZES.rows * (SIZES.depth // SIZES.group))
        places_ptr += slot * SIZES.depth
    else:
        row = tile * ROWS + tl.arange(0, ROWS)
        is_row = row < rows
        entry = row
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZES.width
    k = tl.arange(0, SIZES.half)
    x_rows = x_ptr + row.to(tl.int64)[:, None] * STRIDE
    codes_ptrs = codes_ptr + column.to(tl.int64)[None, :] * row_bytes + k[:, None]
    whole: tl.constexpr = SIZES.width % COLUMNS == 0
    steps: tl.constexpr = row_bytes // SIZES.half
    each: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * each
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(first, tl.minimum(first + each, steps)):
        codes = load_inside(codes_ptrs + step * SIZES.half, is_column[None, :], whole)
        if GATED:
            up_ptrs = codes_ptrs + step * SIZES.half + SIZES.width * row_bytes
            up_codes = load_inside(up_ptrs, is_column[None, :], whole)
        for half in tl.static_range(per_byte):
            start = (step * per_byte + half) * SIZES.half
            place = start + k
            if SIZES.is_reordered:
                place = tl.load(places_ptr + place)
            x = tl.load(x_rows + place[None, :], mask=is_row[:, None], other=0.0)
            at = start // SIZES.group * SIZES.rows + column
            weight = _dequantize(codes, half, scales_ptr + at, below_ptr + at, is_column, SIZES)
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="ieee")
            if GATED:
                at += SIZES.width
                weight = _dequantize(up_codes, half, scales_ptr + at, below_ptr + at, is_column, SIZES)
                up = tl.dot(x, weight.to(x.dtype), up, input_precision="ieee")
    if GATED:
        acc = activate(acc, ACTIVATION) * up
    out_row = tl.program_id(2).to(tl.int64) * rows + entry
    y_ptrs = y_ptr + out_row[:, None] * SIZES.width + column[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _dequantize(codes, half: tl.constexpr, scales_ptrs, below_ptrs, is_column, SIZES: tl.constexpr):
    """Dequantize codes [half, COLUMNS] to float32; with four bits, `half` selects the part of each byte."""
    is_float: tl.constexpr = codes.dtype == tl.float8e4nv
    if is_float:
        values = codes.to(tl.float32)
    elif SIZES.bits == 4:
        values = (((codes >> (4 * half)) & 15).to(tl.uint32) | ONES_BITS).to(tl.float32, bitcast=True)
    else:
        values = (codes.to(tl.uint32) | ONES_BITS).to(tl.float32, bitcast=True)
    parts: tl.constexpr = codes.shape[0] // SIZES.group  # number of quantization groups in the codes
    if parts > 1:
        number = tl.arange(0, parts)[:, None] * SIZES.rows
        scales = tl.load(scales_ptrs[None, :] + number, mask=is_column[None, :], other=0.0).to(tl.float32)
        values = tl.reshape(values, [parts, SIZES.group, codes.shape[1]])
        by = scales[:, None, :]
    else:
        by = tl.load(scales_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if SIZES.has_below:
        if parts > 1:
            below = tl.load(below_ptrs[None, :] + number, mask=is_column[None, :], other=0.0).to(tl.float32)[:, None, :]
        else:
            below = tl.load(below_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if below_ptrs.dtype.element_ty == tl.uint8:
            values = (values - (ONES + below)) * by
        else:
            values = (values - ONES) * by - below
    elif is_float:
        values = values * by
    else:
        values = (values - (ONES + (1 << (SIZES.bits - 1)))) * by
    return tl.reshape(values, [codes.shape[0], codes.shape[1]])
