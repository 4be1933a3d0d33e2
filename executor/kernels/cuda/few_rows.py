"""Products of one or two rows, for decoding steps whose time is spent reading every weight once.

There is no matrix product tile. Each program multiplies some rows of the weight by all rows of x elementwise in
registers, with many 16-byte loads in flight. The operations around the product are fused: the residual's addition and
RMSNorm before it (`NormedRows`), the activation of a gated MLP after it, so a layer takes six launches. With dependent
launch, a program prefetches small weights into the L2 cache while the previous kernel still runs.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation, NormedRows
from penstock.executor.kernels.cuda.launch import ALIGNMENT, allow_next, is_dependent, kernel, wait_for_previous
from penstock.executor.kernels.cuda.pages import load_inside
from penstock.executor.kernels.cuda.rows import add_rms_norm_to, gate, gated
from penstock.executor.kernels.cuda.tiles import power_of_2

MAX_ROWS = 2
# On an H100 the products of a Qwen3-0.6B layer take 22 µs here and 29 µs in cuBLAS, those of a Llama-3.1-8B layer 180 µs and
# 172 µs, but here the latter prefetched weights of 235 MB into a cache of 50 MB. Without that, and with three launches less
# a layer, they should be faster here, too: EVERY_SIZE lets them, once a card has compared both.
PREFETCH_BYTES = 16 << 20  # the largest weight that is prefetched
EVERY_SIZE = False  # else only weights that are prefetched are multiplied here
# The fastest of eleven tiles measured on an H100 with the shapes of Qwen3-0.6B.
DEPTH = 1024  # numbers of each weight row per step
UNROLL = 4  # steps whose loads are in flight together


def linear(x: Tensor | NormedRows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_ours(x, weight, bias):
        return multiply(x, weight, bias, None)
    return F.linear(_norm(x), weight, bias)


def gated_linear(x: Tensor | NormedRows, weight: Tensor, activation: Activation) -> Tensor:
    if is_ours(x, weight):
        return multiply(x, weight, None, activation)
    return gate(F.linear(_norm(x), weight), activation)


def is_ours(x: Tensor | NormedRows, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Tell whether this kernel multiplies instead of cuBLAS. It reads only tensors that are contiguous and aligned."""
    rows = x.update if isinstance(x, NormedRows) else x
    read = [rows, weight] if bias is None else [rows, weight, bias]
    return (
        0 < len(rows) <= MAX_ROWS
        and (EVERY_SIZE or weight.nbytes <= PREFETCH_BYTES)
        and all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in read)
    )


def _norm(x: Tensor | NormedRows) -> Tensor:
    return add_rms_norm_to(x) if isinstance(x, NormedRows) else x


def multiply(
    x: Tensor | NormedRows,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply x [1 or 2, K] by weight [N, K] to [rows, N]; with an activation: [2 N, K], the gate's rows first. `dtype`
    is that of the output; None: that of x."""
    update, residual, total, norm, eps = x if isinstance(x, NormedRows) else (x, x, x, x, 0.0)
    rows, depth = update.shape
    assert residual.is_contiguous() and update.dtype is weight.dtype and weight.shape[1] == depth
    width = len(weight) if activation is None else len(weight) // 2
    out = torch.empty((rows, width), dtype=dtype or update.dtype, device=update.device)
    columns = columns_of(width)
    _few_rows[(triton.cdiv(width, columns),)](
        *(update, residual, norm, weight, update if bias is None else bias, total, out),
        *(rows, eps),
        K=depth,
        WIDTH=width,
        ACTIVATION=activation,
        PREFETCHES=weight.nbytes <= PREFETCH_BYTES,
        NORMED=isinstance(x, NormedRows),
        HAS_BIAS=bias is not None,
        ROWS=power_of_2(rows),
        COLUMNS=columns,
        DEPTH=DEPTH,
        UNROLL=min(UNROLL, triton.cdiv(depth, DEPTH)),
        num_warps=4,
    )
    return out


def columns_of(width: int) -> int:
    """Return the number of weight rows per program."""
    return 4 if width >= 2048 else 2


@kernel
def _few_rows(
    update_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
    rows,
    eps,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PREFETCHES: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute some columns of the output, or of both gate and up."""
    allow_next()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    weight_ptrs = weight_ptr + tl.minimum(column, WIDTH - 1).to(tl.int64)[:, None] * K
    if PREFETCHES and is_dependent():
        prefetch(weight_ptrs, K)
        if ACTIVATION is not None:
            prefetch(weight_ptrs + WIDTH * K, K)
    wait_for_previous()
    row = tl.arange(0, ROWS)[:, None]
    is_row = row < rows
    first = tl.zeros([ROWS, COLUMNS, DEPTH], tl.float32)
    second = first
    squares = tl.zeros([ROWS, DEPTH], tl.float32)
    whole: tl.constexpr = K % (UNROLL * DEPTH) == 0 and WIDTH % COLUMNS == 0
    for start in range(0, K, UNROLL * DEPTH):
        for step in tl.static_range(UNROLL):
            k = start + step * DEPTH + tl.arange(0, DEPTH)
            is_deep = k < K
            mask = is_row & is_deep[None, :]
            x = tl.load(update_ptr + row * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
            if NORMED:
                x += tl.load(residual_ptr + row * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
                total = x.to(total_ptr.dtype.element_ty)
                tl.store(total_ptr + row * K + k[None, :], total, mask=mask & (tl.program_id(0) == 0))
                x = total.to(tl.float32)
                squares += x * x
                # Not rounded: the row's scale comes after the product, and without it x may exceed float16.
                x *= tl.load(norm_ptr + k, mask=is_deep, other=0.0).to(tl.float32)[None, :]
            inside = is_column[:, None] & is_deep[None, :]
            numbers = load_inside(weight_ptrs + k[None, :], inside, whole).to(tl.float32)
            first += x[:, None, :] * numbers[None, :, :]
            if ACTIVATION is not None:
                numbers = load_inside(weight_ptrs + WIDTH * K + k[None, :], inside, whole).to(tl.float32)
                second += x[:, None, :] * numbers[None, :, :]
    y = tl.sum(first, 2)
    if ACTIVATION is not None:
        up = tl.sum(second, 2)
    dtype = out_ptr.dtype.element_ty
    if NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / K + eps)
        y *= scale[:, None]
        if ACTIVATION is not None:
            up *= scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        y = gated(y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    tl.store(out_ptr + row * WIDTH + column[None, :], y.to(dtype), mask=is_row & is_column[None, :])


@triton.jit
def prefetch(row_ptrs, K: tl.constexpr):
    """Prefetch rows of K numbers into the L2 cache, without waiting for them."""
    LINE: tl.constexpr = 1024 // row_ptrs.dtype.element_ty.primitive_bitwidth  # numbers per cache line
    line = tl.arange(0, triton.next_power_of_2((K + LINE - 1) // LINE)) * LINE
    ptrs = row_ptrs + tl.minimum(line, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )
