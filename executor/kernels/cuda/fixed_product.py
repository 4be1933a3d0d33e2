"""Matrix products that sum every output in a fixed order, independent of the other rows: for `batch_invariant`.

The depth is divided into splits by the weight's shape alone. Each is summed from zero, and the splits are added in
order. With few rows each split has its own program, so that all read at once; with many rows one program computes all
of them. Small and large tiles use the same tensor core instruction: each warp has as many rows and columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.fp8 import join
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.pages import load_inside
from penstock.executor.kernels.cuda.tiles import FIXED_PROGRAMS, fixed_tile

TOGETHER = tl.constexpr(8)  # row tiles that read a weight side by side, so that it is read from memory once for all


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] by weight [N, K] to [T, N]; the bias is added to the rounded product."""
    (rows, depth), width = x.shape, len(weight)
    x = x if x.stride(1) == 1 else x.contiguous()
    assert weight.is_contiguous() and x.dtype is weight.dtype and weight.shape[1] == depth
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile, splits = fixed_tile(rows, width, depth, x.element_size())
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns)
    is_cut = splits > 1 and tiles < FIXED_PROGRAMS
    goal = out.new_empty((splits, rows, width), dtype=torch.float32) if is_cut else out
    _linear[(tiles, splits if is_cut else 1)](
        *(x, weight, goal),
        rows,
        STRIDE=x.stride(0),
        WIDTH=width,
        DEPTH=depth,
        SPLITS=splits,
        CUT=is_cut,
        STEP=32 if x.element_size() == 4 else 64,
        **tile.constants(),
    )
    if is_cut:
        join(goal, out)
    return out if bias is None else out.add_(bias)


@kernel
def _linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    CUT: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile of the output or, if CUT, one split of it, to [SPLITS, rows, WIDTH]."""
    wait_and_allow_next()
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    first = number // (TOGETHER * across) * TOGETHER
    side_by_side = tl.minimum(TOGETHER, tl.cdiv(rows, ROWS) - first)
    number = number % (TOGETHER * across)
    row = (first + number % side_by_side) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (number // side_by_side * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    k = tl.arange(0, STEP)
    is_row = row < rows
    x_ptrs = x_ptr + row.to(tl.int64) * STRIDE + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64) * DEPTH + k[:, None]
    whole: tl.constexpr = DEPTH % STEP == 0 and WIDTH % COLUMNS == 0
    steps: tl.constexpr = (DEPTH + STEP - 1) // STEP
    part: tl.constexpr = (steps + SPLITS - 1) // SPLITS * STEP
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first_split = tl.program_id(1)
    # Triton 3.6 miscompiles a variable that the outer loop carries into the bounds of the inner one; these use `later`.
    for later in range(1 if CUT else SPLITS):
        begin = (first_split + later) * part
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(begin, tl.minimum(begin + part, DEPTH), STEP):
            is_deep = start + k < DEPTH
            is_x = is_row
            if not whole:
                is_x = is_row & is_deep[None, :]
            x = tl.load(x_ptrs + start, mask=is_x, other=0.0)
            weight = load_inside(weight_ptrs + start, is_deep[:, None] & (column < WIDTH), whole)
            acc = tl.dot(x, weight, acc, input_precision="ieee")
        total += acc
    out_row = row.to(tl.int64)
    if CUT:
        out_row += tl.program_id(1).to(tl.int64) * rows
    mask = is_row & (column < WIDTH)
    tl.store(out_ptr + out_row * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=mask)
