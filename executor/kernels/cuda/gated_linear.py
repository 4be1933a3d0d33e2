"""The gated half of an MLP in one kernel where rows are few: gate and up projections, activation, their product.

It reads the weight once, which is all the time that it takes; between products and activation nothing goes to memory,
and a launch is saved. Beyond `FEW_ROWS` cuBLAS has better products, and the launch saved is lost in them.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation
from penstock.executor.kernels.cuda.dependent import take_turn
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.pages import load_inside
from penstock.executor.kernels.cuda.rows import gate, gated
from penstock.executor.kernels.cuda.tiles import few_rows_tile

FEW_ROWS = 32
DEPTH = 128  # of the products at a time


def gated_linear(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    rows, depth = x.shape
    if rows > FEW_ROWS:
        return gate(F.linear(x, weight), activation)
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype is weight.dtype and weight.shape[1] == depth
    width = weight.shape[0] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        tile = few_rows_tile(rows, width, x.element_size())
        _gated_linear[(triton.cdiv(width, tile.columns),)](
            x,
            weight,
            out,
            rows,
            K=depth,
            WIDTH=width,
            ACTIVATION=activation,
            DEPTH=DEPTH,
            **tile.constants(),
        )
    return out


@kernel
def _gated_linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """All rows, and some columns of both products. These are rounded before the activation, as in the twin."""
    take_turn()
    row = tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + row * K + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64) * K + k[:, None]
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    whole: tl.constexpr = K % DEPTH == 0 and WIDTH % COLUMNS == 0
    for start in range(0, K, DEPTH):
        is_deep = start + k < K
        is_weight = is_deep[:, None] & (column < WIDTH)
        is_x = row < rows
        if not whole:
            is_x &= is_deep[None, :]
        x = tl.load(x_ptrs + start, mask=is_x, other=0.0)
        gate_weight = load_inside(weight_ptrs + start, is_weight, whole)
        up_weight = load_inside(weight_ptrs + start + WIDTH * K, is_weight, whole)
        gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
        up = tl.dot(x, up_weight, up, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    y = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    tl.store(out_ptr + row * WIDTH + column, y.to(dtype), mask=(row < rows) & (column < WIDTH))
