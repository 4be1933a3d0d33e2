"""The experts of a layer in four kernels, whatever their number: sort, gate and up with activation, down, weighted sum.

Rows are gathered by the sorted entries of `routing`. Nothing returns to the host, so the layer can be part of a CUDA
graph. The result of an entry does not depend on its tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation
from penstock.executor.kernels.cuda import fp8
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.fp8 import quantize_groups
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.mxfp4_experts import coded_products
from penstock.executor.kernels.cuda.pages import load_inside
from penstock.executor.kernels.cuda.routing import SortedEntries, load_slots, sort_entries
from penstock.executor.kernels.cuda.rows import gated
from penstock.executor.kernels.cuda.tiles import Tile, expert_step, expert_tile
from penstock.executor.kernels.eight_bits import are_quantized, make_quantized
from penstock.executor.kernels.weight import BLOCK, EIGHT_BITS, Weight

Scaled = tuple[Tensor, Tensor | None]  # rows, and their scales if they have eight bits
GROUP = tl.constexpr(BLOCK)
SUM_BLOCK = tl.constexpr(512)  # columns per program of the weighted sum


def fused_experts(
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
    """Compute the experts of a layer. FP8 weights with few entries are dequantized in registers, and activations stay
    unquantized; with many entries, or with is_fixed, the products are FP8. MXFP4 weights are always dequantized."""
    num_slots, width, inner = len(down.codes), hidden.shape[1], gate_up.shape[1] // 2
    entries = slots.numel()
    x: Scaled = hidden, None
    if down.codes.dtype is EIGHT_BITS and (is_fixed or are_quantized(entries, num_slots)):
        x = fp8.quantize(hidden)
        inside: Scaled = make_quantized(entries, inner, hidden.device)
    else:
        inside = torch.empty((entries, inner), dtype=hidden.dtype, device=hidden.device), None
    sizes = x[0].element_size(), gate_up.codes.element_size()
    up_tile, down_tile = (expert_tile(entries, num_slots, columns, *sizes, is_fixed) for columns in (inner, width))
    order = sort_entries(slots, num_slots, first, up_tile.rows)
    parts = torch.empty((entries, width), dtype=hidden.dtype, device=hidden.device)
    given = {"ACTIVATION": activation}
    _launch(order, up_tile, x, gate_up, biases[0], inside, slots.shape[1], hidden, GATED=True, **given)
    _launch(order, down_tile, inside, down, biases[1], (parts, None), 1, hidden, GATED=False, **given)
    return weighted_sum(parts, slots, shares, num_slots, first, added)


def _launch(
    order: SortedEntries,
    tile: Tile,
    x: Scaled,
    weight: Weight,
    bias: Tensor | None,
    y: Scaled,
    shared_by: int,
    like: Tensor,
    **given: bool | str,
) -> None:
    """Launch `_multiply`. `shared_by`: entries per row of x; `like`: a tensor of the compute dtype."""
    (rows, x_scales), values, scales, (out, y_scales) = x, weight.codes, weight.scales, y
    width, is_coded = out.shape[1], values.dtype is torch.uint8
    depth = values.shape[2] * (2 if is_coded else 1)
    assert rows.stride(1) == 1 and values.is_contiguous() and out.is_contiguous()
    assert rows.shape[1] == depth and values.shape[1] == width * (2 if given["GATED"] else 1)
    assert x_scales is not None or rows.dtype is like.dtype
    assert scales is None or scales.is_contiguous()
    assert is_coded or scales is None or width % BLOCK == depth % BLOCK == 0
    assert bias is None or (bias.is_contiguous() and bias.shape == values.shape[:2])
    pointers = *_pointers(x), *_pointers((values, scales)), *_pointers(y), *order, like, like if bias is None else bias
    strides = (0 if part is None else part.stride(1) for part in (x_scales, y_scales))
    _multiply[(triton.cdiv(width, tile.columns), len(order.tiles))](
        *pointers,
        *strides,
        STRIDE=rows.stride(0),
        WIDTH=width,
        DEPTH=depth,
        SCALES_STRIDE=0 if scales is None else scales.stride(1),
        SHARED_BY=shared_by,
        STEP=expert_step(rows.element_size()),
        SCALED=scales is not None and not is_coded,
        CODED=is_coded,
        BIASED=bias is not None,
        QUANTIZED=x_scales is not None,
        QUANTIZES=y_scales is not None,
        **tile.constants(),
        **given,
    )


def _pointers(x: Scaled) -> tuple[Tensor, Tensor]:
    """Return the values and the scales; without scales, the values twice, because the kernel needs two pointers."""
    values, scales = x
    return values, values if scales is None else scales


def weighted_sum(
    parts: Tensor, slots: Tensor, shares: Tensor, num_slots: int, first: int, added: Tensor | None
) -> Tensor:
    (tokens, top_k), width = slots.shape, parts.shape[1]
    assert shares.shape == slots.shape and shares.is_contiguous() and shares.dtype is torch.float32
    assert added is None or (added.is_contiguous() and added.shape == (tokens, width))
    out = torch.empty((tokens, width), dtype=parts.dtype, device=parts.device)
    pointers = parts, slots, shares, parts if added is None else added, out
    _add_shares[(tokens, triton.cdiv(width, SUM_BLOCK.value))](
        *pointers,
        slots.numel(),
        first,
        WIDTH=width,
        TOP_K=top_k,
        NUM_SLOTS=num_slots,
        ADDS=added is not None,
        num_warps=4,
    )
    return out


@kernel
def _multiply(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    y_ptr,
    y_scales_ptr,
    ids_ptr,
    tiles_ptr,
    like_ptr,
    bias_ptr,
    x_scales_stride,
    y_scales_stride,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    SHARED_BY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SCALED: tl.constexpr,
    CODED: tl.constexpr,
    BIASED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    QUANTIZES: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiply a tile's rows of x by their expert's weight [WIDTH, DEPTH]; if GATED: WIDTH rows of gate, then of up."""
    wait_and_allow_next()
    tile = tl.program_id(1)
    num_rows = tl.load(tiles_ptr + 2 * tile + 1)
    if num_rows == 0:
        return
    slot = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    is_entry = tl.arange(0, ROWS) < num_rows
    entry = tl.load(ids_ptr + tile * ROWS + tl.arange(0, ROWS), mask=is_entry, other=0)
    row = entry // SHARED_BY
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    factor: tl.constexpr = 2 if GATED else 1
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * STRIDE + k[None, :]
    weight_ptrs = weight_ptr + slot * (factor * WIDTH * DEPTH) + column[None, :] * DEPTH + k[:, None]
    gate_scales = scales_ptr + (slot * (factor * WIDTH // GROUP) + tl.program_id(0) * COLUMNS // GROUP) * SCALES_STRIDE
    up_scales = gate_scales + WIDTH // GROUP * SCALES_STRIDE
    whole: tl.constexpr = DEPTH % STEP == 0 and WIDTH % COLUMNS == 0
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    if CODED:
        values_ptr = weight_ptr + slot * (factor * WIDTH * (DEPTH // 2))
        exponents_ptr = scales_ptr + slot * (factor * WIDTH * (DEPTH // 32))
        rows_ptr = x_ptr + row.to(tl.int64) * STRIDE
        given = values_ptr, exponents_ptr, column
        acc, up = coded_products(rows_ptr, is_entry, given, acc, up, WIDTH, DEPTH, STEP, GATED)
    else:
        for start in range(0, DEPTH, STEP):
            group = start // GROUP
            x_scale = tl.full([ROWS], 1.0, tl.float32)
            if QUANTIZED:
                x_scale = tl.load(x_scales_ptr + group * x_scales_stride + row, mask=is_entry, other=0.0)
            is_deep = start + k < DEPTH
            is_weight = is_deep[:, None] & (column < WIDTH)[None, :]
            is_x = is_entry[:, None]
            if not whole:
                is_x = is_x & is_deep[None, :]
            x = tl.load(x_ptrs, mask=is_x, other=0.0)
            weight = load_inside(weight_ptrs, is_weight, whole)
            acc = _add_product(acc, x, x_scale, weight, gate_scales + group, SCALED, QUANTIZED)
            if GATED:
                weight = load_inside(weight_ptrs + WIDTH * DEPTH, is_weight, whole)
                up = _add_product(up, x, x_scale, weight, up_scales + group, SCALED, QUANTIZED)
            x_ptrs += STEP
            weight_ptrs += STEP
    if BIASED:
        bias_ptrs = bias_ptr + slot * (factor * WIDTH) + column
        acc += tl.load(bias_ptrs, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptrs + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, up, ACTIVATION)
    y_ptrs = y_ptr + entry.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if QUANTIZES:  # the columns of a tile are one quantization group
        values, scales = quantize_groups(acc.to(like_ptr.dtype.element_ty).to(tl.float32))
        tl.store(y_ptrs, values, mask=is_entry[:, None])
        tl.store(y_scales_ptr + tl.program_id(0) * y_scales_stride + entry, scales, mask=is_entry)
    else:
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_entry[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _add_product(acc, x, x_scale, weight, scale_ptr, SCALED: tl.constexpr, QUANTIZED: tl.constexpr):
    """Add one depth step to acc. The step and the tile's columns lie within one block of scales."""
    if QUANTIZED:
        return acc + tl.dot(x, weight) * (x_scale * tl.load(scale_ptr))[:, None]
    if SCALED:  # converts through float32: before 9.0 there is no shorter way
        weight = weight.to(tl.float32).to(x.dtype)
        return acc + tl.dot(x, weight, input_precision="ieee") * tl.load(scale_ptr)
    return tl.dot(x, weight, acc, input_precision="ieee")


@kernel
def _add_shares(
    parts_ptr,
    slots_ptr,
    shares_ptr,
    added_ptr,
    out_ptr,
    entries,
    first,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Add up the weighted outputs of a token's entries on this rank, in the order of its top-k choice."""
    wait_and_allow_next()
    token = tl.program_id(0)
    column = tl.program_id(1) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    inside = column < WIDTH
    total = tl.zeros([SUM_BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        entry = token * TOP_K + choice
        _, ours = load_slots(slots_ptr, entry, entries, first, NUM_SLOTS)
        part = tl.load(parts_ptr + entry.to(tl.int64) * WIDTH + column, mask=inside & ours, other=0.0).to(tl.float32)
        total += part * tl.load(shares_ptr + entry)
    row = token.to(tl.int64) * WIDTH + column
    if ADDS:
        total += tl.load(added_ptr + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=inside)
