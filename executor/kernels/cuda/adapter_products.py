"""LoRA products for tiles of rows that share an adapter: y += (x · A) · B with two thin products.

The first kernel computes the inner activations of all parts in the model's dtype; the second adds to the output y.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.pages import load_inside

ROWS = 16  # maximum rows of a tile
DEPTH = 128  # depth step of the inner product
COLUMNS = 64  # columns per program of the outer product


def add_lora(x: Tensor, y: Tensor, tiles: Tensor, down: Tensor, up: Tensor, widths: Sequence[int]) -> None:
    """Add to y [T, width] the LoRA term of x [T, depth] for the rows of each tile.

    tiles [n, 3] int32: first row, number of rows, LoRA slot; down [slots, parts, R, depth]; up [slots, width, R], whose
    columns are divided into parts of these widths.
    """
    _, num_parts, rank, depth = down.shape
    width = up.shape[1]
    assert x.is_contiguous() and y.is_contiguous() and x.dtype is y.dtype is down.dtype is up.dtype
    assert x.shape[1] == depth and y.shape[1] == width == sum(widths) and tiles.is_contiguous()
    inner = torch.empty(len(y), num_parts * rank, dtype=x.dtype, device=x.device)
    _inner[(len(tiles), num_parts * (rank // 16))](
        x, tiles, down, inner, K=depth, INNER=num_parts * rank, ROWS=ROWS, DEPTH=DEPTH, num_warps=4, num_stages=3
    )
    _outer[(len(tiles), sum(triton.cdiv(size, COLUMNS) for size in widths))](
        inner,
        tiles,
        up,
        y,
        WIDTHS=tuple(widths),
        RANK=rank,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
        num_stages=2,
    )


@kernel
def _inner(
    x_ptr,
    tiles_ptr,
    down_ptr,
    inner_ptr,
    K: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute 16 inner activations of a tile's rows. Each part has a multiple of 16 of them."""
    wait_and_allow_next()
    if tl.load(tiles_ptr + tl.program_id(0) * 3 + 1) == 0:  # unused: a graph has as many tiles as a step may need
        return
    row, is_row, place = _rows_of(tiles_ptr, ROWS)
    at = (tl.program_id(1) * 16 + tl.arange(0, 16))[None, :]
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + row * K + k[None, :]
    down_ptrs = down_ptr + (place.to(tl.int64) * INNER + at) * K + k[:, None]
    sums = tl.zeros([ROWS, 16], tl.float32)
    whole: tl.constexpr = K % DEPTH == 0
    for start in range(0, K, DEPTH):
        is_deep = start + k < K
        is_x = is_row
        if not whole:
            is_x &= is_deep[None, :]
        x = tl.load(x_ptrs + start, mask=is_x, other=0.0)
        down = load_inside(down_ptrs + start, is_deep[:, None], whole)
        sums = tl.dot(x, down, sums, input_precision="ieee")
    to = inner_ptr + row * INNER + at
    tl.store(to, sums.to(inner_ptr.dtype.element_ty), mask=is_row)


@kernel
def _outer(
    inner_ptr,
    tiles_ptr,
    up_ptr,
    y_ptr,
    WIDTHS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add some output columns of one part to a tile's rows."""
    wait_and_allow_next()
    if tl.load(tiles_ptr + tl.program_id(0) * 3 + 1) == 0:
        return
    row, is_row, place = _rows_of(tiles_ptr, ROWS)
    NUM_PARTS: tl.constexpr = len(WIDTHS)
    WIDTH: tl.constexpr = first_column(WIDTHS, NUM_PARTS)
    columns = tl.program_id(1)
    part, first, end = 0, 0, WIDTHS[0]
    for other in tl.static_range(1, NUM_PARTS):
        is_later = columns >= first_tile(WIDTHS, COLUMNS, other)
        part += is_later.to(tl.int32)
        first = tl.where(is_later, first_column(WIDTHS, other) - COLUMNS * first_tile(WIDTHS, COLUMNS, other), first)
        end = tl.where(is_later, first_column(WIDTHS, other + 1), end)
    rank = tl.arange(0, RANK)
    column = (first + columns * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inner_ptrs = inner_ptr + row * (NUM_PARTS * RANK) + part * RANK + rank[None, :]
    inner = tl.load(inner_ptrs, mask=is_row, other=0.0)
    up_ptrs = up_ptr + (place.to(tl.int64) * WIDTH + column) * RANK + rank[:, None]
    up = load_inside(up_ptrs, column < end, first_tile(WIDTHS, COLUMNS, NUM_PARTS) * COLUMNS == WIDTH)
    sums = tl.dot(inner, up, input_precision="ieee")
    y_ptrs = y_ptr + row * WIDTH + column
    is_inside = is_row & (column < end)
    sums += tl.load(y_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=is_inside)


@triton.constexpr_function
def first_column(widths, part):
    """Return the first column of a part, or the number of columns."""
    return sum(widths[:part])


@triton.constexpr_function
def first_tile(widths, columns, part):
    """Return the first tile of so many columns of a part, or the number of tiles; no tile belongs to two parts."""
    return sum(triton.cdiv(width, columns) for width in widths[:part])


@triton.jit
def _rows_of(tiles_ptr, ROWS: tl.constexpr):
    """Return the rows [ROWS, 1] of the program's tile, a mask of valid rows, and the LoRA slot."""
    tile = tiles_ptr + tl.program_id(0) * 3
    row = tl.arange(0, ROWS)[:, None]
    is_row = row < tl.load(tile + 1)
    return (tl.load(tile) + row).to(tl.int64), is_row, tl.load(tile + 2)
