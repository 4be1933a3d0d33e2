"""Products of one or two rows, for decoding steps whose time is spent reading every weight once.

There is no matrix product tile. Each program multiplies some rows of the weight by all rows of x elementwise in
registers, with many 16-byte loads in flight. The operations around the product are fused: the residual's addition and
RMSNorm before it (`NormedRows`), the activation of a gated MLP after it, so a layer takes six launches. With dependent
launch, a program prefetches small weights into the L2 cache while the previous kernel still runs.

Weights of codes, in groups of four or eight bits or in blocks of FP8, have a kernel of their own. There a thread loads
eight codes or pairs of codes at once, which share a scale, so scales and minima are applied to sums instead of numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation, NormedRows
from penstock.executor.kernels.cuda.dequantize import excess_of, numbers_of
from penstock.executor.kernels.cuda.launch import ALIGNMENT, allow_next, is_dependent, kernel, wait_for_previous
from penstock.executor.kernels.cuda.pages import load_inside
from penstock.executor.kernels.cuda.product import codes_spec
from penstock.executor.kernels.cuda.rows import gated
from penstock.executor.kernels.cuda.tiles import power_of_2
from penstock.executor.kernels.weight import Weight

MAX_ROWS = 2
# On an H100 the products of a Qwen3-0.6B layer take 22 µs here and 29 µs in cuBLAS, those of a Llama-3.1-8B layer 180 µs and
# 172 µs, but here the latter prefetched weights of 235 MB into a cache of 50 MB. Without that, and with three launches less
# a layer, they should be faster here, too: EVERY_SIZE lets them, once a card has compared both.
PREFETCH_BYTES = 16 << 20  # the largest weight that is prefetched
EVERY_SIZE = False  # else only weights that are prefetched are multiplied here
# The fastest of eleven tiles measured on an H100 with the shapes of Qwen3-0.6B.
DEPTH = 1024  # numbers of each weight row per step
UNROLL = 4  # steps whose loads are in flight together
# If True, weights of codes are multiplied here, too. No GPU has compared that with tiles of 16 rows, before and behind
# which the norm and the gate are launches of their own; the sizes below were only compiled. FP8 weights are multiplied
# here only if `MAX_PLAIN_ROWS` of linear_products.py allows inputs of 16 bits, too.
TAKES_CODES = False
CODE_COLUMNS = 4  # weight rows per program
CODE_BYTES = tl.constexpr(512)  # of each weight row per step
AT_ONCE = tl.constexpr(8)  # bytes of codes that a thread loads at once
CODE_UNROLL = 2


def is_ours(x: Tensor | NormedRows, weight: Weight, bias: Tensor | None = None) -> bool:
    """Tell whether one of these kernels multiplies. They read only tensors that are contiguous and aligned."""
    rows = x.update if isinstance(x, NormedRows) else x
    if not 0 < len(rows) <= MAX_ROWS:
        return False
    if weight.is_numbers:
        is_taken = EVERY_SIZE or weight.codes.nbytes <= PREFETCH_BYTES
    else:
        is_taken = TAKES_CODES and codes_spec(weight) is not None
    read = (rows, weight.codes) if bias is None else (rows, weight.codes, bias)
    return is_taken and all(each.is_contiguous() and each.data_ptr() % ALIGNMENT == 0 for each in read)


def multiply(
    x: Tensor | NormedRows,
    weight: Weight,
    bias: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply x [1 or 2, K] by weight [N, K] to [rows, N]; with an activation: [2 N, K], the gate's rows first. `dtype`
    is that of the output; None: that of x."""
    update, residual, total, norm, eps = x if isinstance(x, NormedRows) else (x, x, x, x, 0.0)
    (rows, depth), (_, codes, scales, zeros, *_) = update.shape, weight
    assert residual.is_contiguous() and weight.shape[1] == depth
    width = len(codes) if activation is None else len(codes) // 2
    out = torch.empty((rows, width), dtype=dtype or update.dtype, device=update.device)
    before, after = (update, residual, norm, codes), (update if bias is None else bias, total, out, rows, eps)
    constants: dict[str, Any] = {"ACTIVATION": activation, "NORMED": isinstance(x, NormedRows)}
    constants |= {"HAS_BIAS": bias is not None, "ROWS": power_of_2(rows)}
    spec = None if weight.is_numbers else codes_spec(weight)
    if spec is not None:
        _few_codes[(triton.cdiv(width, CODE_COLUMNS),)](
            *(*before, scales, codes if zeros is None else zeros, *after),
            SPEC=spec._replace(width=width),
            COLUMNS=CODE_COLUMNS,
            UNROLL=min(CODE_UNROLL, triton.cdiv(depth, CODE_BYTES.value * spec.per_byte)),
            num_warps=2,
            **constants,
        )
        return out
    assert update.dtype is codes.dtype
    columns = columns_of(width)
    _few_rows[(triton.cdiv(width, columns),)](
        *(*before, *after),
        K=depth,
        WIDTH=width,
        PREFETCHES=codes.nbytes <= PREFETCH_BYTES,
        COLUMNS=columns,
        DEPTH=DEPTH,
        UNROLL=min(UNROLL, triton.cdiv(depth, DEPTH)),
        num_warps=4,
        **constants,
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
            x = _load_rows(update_ptr, residual_ptr, total_ptr, row * K + k[None, :], mask, NORMED)
            if NORMED:
                squares += x * x
                # Not rounded: the row's scale comes after the product, and without it x may exceed float16.
                x *= tl.load(norm_ptr + k, mask=is_deep, other=0.0).to(tl.float32)[None, :]
            inside = is_column[:, None] & is_deep[None, :]
            numbers = load_inside(weight_ptrs + k[None, :], inside, whole).to(tl.float32)
            first += x[:, None, :] * numbers[None, :, :]
            if ACTIVATION is not None:
                numbers = load_inside(weight_ptrs + WIDTH * K + k[None, :], inside, whole).to(tl.float32)
                second += x[:, None, :] * numbers[None, :, :]
    sums = tl.sum(first, 2), tl.sum(second, 2), tl.sum(squares, 1)
    _finish(sums, (bias_ptr, out_ptr, row, rows, column), eps, K, WIDTH, ACTIVATION, NORMED, HAS_BIAS)


@triton.jit
def _load_rows(update_ptr, residual_ptr, total_ptr, at, mask, NORMED: tl.constexpr):
    """Return x, or the residual with the update added, which the first program also stores."""
    x = tl.load(update_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=mask & (tl.program_id(0) == 0))
        x = total.to(tl.float32)
    return x


@triton.jit
def _finish(
    sums,
    at,
    eps,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Scale sums [rows, columns] by the norm, add the bias or apply the gate, and store the columns of the output."""
    y, up, squares = sums
    bias_ptr, out_ptr, row, rows, column = at
    dtype = out_ptr.dtype.element_ty
    is_column = column < WIDTH
    if NORMED:
        scale = 1.0 / tl.sqrt(squares / K + eps)
        y *= scale[:, None]
        if ACTIVATION is not None:
            up *= scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        y = gated(y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    tl.store(out_ptr + row * WIDTH + column[None, :], y.to(dtype), mask=(row < rows) & is_column[None, :])


@triton.jit
def prefetch(row_ptrs, K: tl.constexpr):
    """Prefetch rows of K numbers into the L2 cache, without waiting for them."""
    LINE: tl.constexpr = 1024 // row_ptrs.dtype.element_ty.primitive_bitwidth  # numbers per cache line
    line = tl.arange(0, triton.next_power_of_2((K + LINE - 1) // LINE)) * LINE
    ptrs = row_ptrs + tl.minimum(line, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@kernel
def _few_codes(
    update_ptr,
    residual_ptr,
    norm_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    total_ptr,
    out_ptr,
    rows,
    eps,
    SPEC: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute some columns of the output, or of both gate and up, from codes."""
    allow_next()
    wait_for_previous()
    # Tensors of a step are [columns, rows, runs, parts, AT_ONCE]. A run is the bytes whose codes of one half share a scale;
    # a thread has whole parts of it, of x and of codes.
    PER_BYTE: tl.constexpr = SPEC.per_byte
    RUN: tl.constexpr = SPEC.half if SPEC.half < SPEC.group else SPEC.group
    IS_FINE: tl.constexpr = RUN >= AT_ONCE and RUN <= CODE_BYTES and RUN & (RUN - 1) == 0
    tl.static_assert(IS_FINE, "a run must be a power of two from 8 to 512 bytes")
    RUNS: tl.constexpr = CODE_BYTES // RUN
    ROW_BYTES: tl.constexpr = SPEC.depth // PER_BYTE
    NUM_RUNS: tl.constexpr = ROW_BYTES // RUN
    dtype: tl.constexpr = update_ptr.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)[None, :, None, None, None]
    byte = (tl.arange(0, RUN // AT_ONCE)[:, None] * AT_ONCE + tl.arange(0, AT_ONCE)[None, :])[None, None, None, :, :]
    y = tl.zeros([COLUMNS, ROWS, RUNS, RUN // AT_ONCE], tl.float32)
    up = y
    squares = tl.zeros([1, ROWS, RUNS, RUN // AT_ONCE], tl.float32)
    for start in range(0, NUM_RUNS, UNROLL * RUNS):
        for step in tl.static_range(UNROLL):
            run = start + step * RUNS + tl.arange(0, RUNS)
            inside = (column < SPEC.width)[:, None] & (run < NUM_RUNS)[None, :]
            run_ptrs = codes_ptr + column.to(tl.int64)[:, None] * ROW_BYTES + run[None, :] * RUN
            ptrs = run_ptrs[:, None, :, None, None] + byte
            codes = tl.load(ptrs, mask=inside[:, None, :, None, None], other=0.0)
            if ACTIVATION is not None:
                up_codes = tl.load(ptrs + SPEC.width * ROW_BYTES, mask=inside[:, None, :, None, None], other=0.0)
            for half in tl.static_range(PER_BYTE):
                start_byte = run * RUN
                # The input of each run's first code.
                first = start_byte // SPEC.half * SPEC.step + half * SPEC.half + start_byte % SPEC.half
                k = first[None, None, :, None, None] + byte
                is_k = (run < NUM_RUNS)[None, None, :, None, None]
                mask = is_k & (row < rows)
                x = _load_rows(update_ptr, residual_ptr, total_ptr, row * SPEC.depth + k, mask, NORMED)
                if NORMED:
                    squares += tl.sum(x * x, 4)
                    # Not rounded: the row's scale comes after the product, and without it x may exceed float16.
                    x *= tl.load(norm_ptr + k, mask=is_k, other=0.0).to(tl.float32)
                scales = scales_ptr, zeros_ptr, first, inside
                y += _sum_codes(x, codes, half, scales, column, dtype, SPEC)
                if ACTIVATION is not None:
                    up += _sum_codes(x, up_codes, half, scales, column + SPEC.width, dtype, SPEC)
    sums = _sum_runs(y).trans(), _sum_runs(up).trans(), tl.sum(_sum_runs(squares), 0)
    at = bias_ptr, out_ptr, tl.arange(0, ROWS)[:, None], rows, column
    _finish(sums, at, eps, SPEC.depth, SPEC.width, ACTIVATION, NORMED, HAS_BIAS)


@triton.jit
def _sum_runs(sums):
    return tl.sum(tl.sum(sums, 3), 2)


@triton.jit
def _sum_codes(x, codes, half: tl.constexpr, scales, column, dtype: tl.constexpr, SPEC: tl.constexpr):
    """Return the products of x with one half of the codes, summed over each part of a run."""
    scales_ptr, zeros_ptr, first, inside = scales
    if SPEC.kind == "blocks":
        at = (column // SPEC.group * SPEC.scales_stride)[:, None] + (first // SPEC.group)[None, :]
    else:
        at = column[:, None] + (first // SPEC.group * SPEC.rows)[None, :]
    scale = tl.load(scales_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None, :, None]
    numbers = numbers_of(codes, half, dtype, SPEC)
    if codes.dtype != tl.float8e4nv:
        numbers -= excess_of(numbers.dtype, SPEC.per_byte, SPEC.has_zeros)  # exact
    sums = tl.sum(x * numbers.to(tl.float32), 4) * scale
    if SPEC.has_zeros:
        zeros = tl.load(zeros_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None, :, None]
        ARE_MINIMA: tl.constexpr = zeros_ptr.dtype.element_ty != tl.uint8
        sums -= tl.sum(x, 4) * (zeros if ARE_MINIMA else zeros * scale)
    return sums
