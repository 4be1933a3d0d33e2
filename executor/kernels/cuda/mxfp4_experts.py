"""Products with MXFP4 weights, whose codes and scales are dequantized in registers.

A block's 32 codes lie in 16 bytes, codes i and i + 16 in the same byte (`Mxfp4` in kernels/weight.py). A tile of bytes
therefore holds two tiles of the weight, for the two halves of each block of x, and no data moves between threads.
"""

import triton
import triton.language as tl


@triton.jit
def coded_products(
    x_ptrs,
    is_entry,
    given,
    acc,
    up,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
):
    """Add the product of rows [ROWS] of x, at x_ptrs, with columns of a weight [WIDTH, DEPTH] (GATED: two)."""
    weight_ptr, scales_ptr, column = given
    byte = tl.arange(0, STEP // 2)
    block = byte // 16
    low = block * 32 + byte % 16
    is_column = column < WIDTH
    weight_ptrs = weight_ptr + column[None, :] * (DEPTH // 2) + byte[:, None]
    scale_ptrs = scales_ptr + column[None, :] * (DEPTH // 32) + block[:, None]
    for start in range(0, DEPTH, STEP):
        is_deep = start + low < DEPTH
        is_x = is_entry[:, None] & is_deep[None, :]
        is_weight = is_deep[:, None] & is_column[None, :]
        first = tl.load(x_ptrs[:, None] + (start + low)[None, :], mask=is_x, other=0.0)
        second = tl.load(x_ptrs[:, None] + (start + 16 + low)[None, :], mask=is_x, other=0.0)
        acc = _add(acc, first, second, weight_ptrs + start // 2, scale_ptrs + start // 32, is_weight)
        if GATED:
            up_ptrs = weight_ptrs + WIDTH * (DEPTH // 2) + start // 2
            up = _add(up, first, second, up_ptrs, scale_ptrs + WIDTH * (DEPTH // 32) + start // 32, is_weight)
    return acc, up


@triton.jit
def _add(acc, first, second, weight_ptrs, scale_ptrs, is_weight):
    codes = tl.load(weight_ptrs, mask=is_weight, other=0).to(tl.int32)
    scales = tl.load(scale_ptrs, mask=is_weight, other=0).to(tl.int32)
    scales = (scales << 23).to(tl.float32, bitcast=True)  # an exponent of 0 gives 0, not 2 ** -127
    acc = tl.dot(first, _dequantize(codes & 15, scales, first.dtype), acc, input_precision="ieee")
    return tl.dot(second, _dequantize(codes >> 4, scales, first.dtype), acc, input_precision="ieee")


@triton.jit
def _dequantize(codes, scales, dtype: tl.constexpr):
    """Dequantize codes 0 … 15 with scales of the same shape. From 2 on, a code's bits are those of a short float."""
    size = codes & 7
    large = ((size + 252) << 22).to(tl.float32, bitcast=True)
    number = tl.where(size < 2, size.to(tl.float32) * 0.5, large)
    number = tl.where(codes >= 8, -number, number)
    return (number * scales).to(dtype)
