"""Weights of four or eight bits as numbers, in registers for products or, for cuBLAS, in memory.

With few rows, the time of a product is that of turning codes into numbers, so a code takes about two instructions.
Two bytes with four bits become two numbers at once: the bits are moved into numbers whose last mantissa bit counts ones,
and what is too much is subtracted, which is exact. If all codes of a column share a scale, small tiles scale their sum
instead of the numbers.
"""

import triton
import triton.language as tl

from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.gpu_formats import MXFP4_BLOCK

IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no assembly and no bfloat16 sums
MX_BLOCK = tl.constexpr(MXFP4_BLOCK)
MAX_SCALED_ROWS = tl.constexpr(32)  # of tiles whose sums are scaled


@triton.jit
def load_scales(weight, start, half: tl.constexpr, column, SHIFT: tl.constexpr, SPEC: tl.constexpr):
    """Load scales and zeros for one half of the step from input `start` on, [1, columns] or [groups, 1, columns], or the
    exponents of MXFP4 for all of it, [blocks, columns]. Without zeros, the second result is not used."""
    if SPEC.kind == "mxfp4":
        block = start // MX_BLOCK + tl.arange(0, SPEC.step // MX_BLOCK)[:, None]
        at = (SHIFT + column)[None, :] * (SPEC.depth // MX_BLOCK) + block
        inside = (block < SPEC.depth // MX_BLOCK) & (column < SPEC.width)[None, :]
        scales = tl.load(weight[1] + at, mask=inside, other=0)
        zeros = scales
    else:
        GROUPS: tl.constexpr = half_groups(SPEC.half, SPEC.group)
        start += half * SPEC.half
        at = (start // SPEC.group * SPEC.rows + SHIFT + column)[None, :]
        inside = ((column < SPEC.width) & (start < SPEC.depth))[None, :]
        if GROUPS > 1:
            at = at[None, :, :] + tl.arange(0, GROUPS)[:, None, None] * SPEC.rows
            inside = inside[None, :, :]
        scales = tl.load(weight[1] + at, mask=inside, other=0.0).to(tl.float32)
        zeros = scales
        if SPEC.has_zeros:
            zeros = tl.load(weight[2] + at, mask=inside, other=0.0).to(tl.float32)
    return scales, zeros


@triton.constexpr_function
def half_groups(half, group):
    """Return the number of quantization groups in one half of a step."""
    return max(1, half // group)


@triton.jit
def add_groups(acc, x, codes, half: tl.constexpr, scales_and_zeros, ARE_MINIMA: tl.constexpr, SPEC: tl.constexpr):
    """Add the product of x with codes [half, columns]; of four bits, `half` selects the part of each byte."""
    IS_ALONE: tl.constexpr = half_groups(SPEC.half, SPEC.group) == 1 and not (SPEC.has_zeros and ARE_MINIMA)
    SCALES_SUM: tl.constexpr = IS_ALONE and x.shape[0] <= MAX_SCALED_ROWS
    values = dequantize_groups(codes, half, scales_and_zeros, x.dtype, not SCALES_SUM, ARE_MINIMA, SPEC)
    if SCALES_SUM:
        acc += tl.dot(x, values, input_precision="ieee") * scales_and_zeros[0]
    else:
        acc = tl.dot(x, values, acc, input_precision="ieee")
    return acc


@triton.jit
def dequantize_groups(
    codes,
    half: tl.constexpr,
    scales_and_zeros,
    dtype: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ARE_MINIMA: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Dequantize codes [half, columns]; unless IS_SCALED, return the codes less their zeros."""
    GROUPS: tl.constexpr = half_groups(SPEC.half, SPEC.group)
    scales, zeros = scales_and_zeros
    values = numbers_of(codes, half, dtype, SPEC)
    if GROUPS > 1:
        values = tl.reshape(values, [GROUPS, SPEC.group, codes.shape[1]])
    if codes.dtype != tl.float8e4nv:
        below = tl.full(scales.shape, excess_of(values.dtype, SPEC.per_byte, SPEC.has_zeros), tl.float32)
        if SPEC.has_zeros and not ARE_MINIMA:
            below += zeros
        values -= below.to(values.dtype)
    if IS_SCALED:
        values = values.to(tl.float32) * scales
        if SPEC.has_zeros and ARE_MINIMA:
            values -= zeros
    return tl.reshape(values, [codes.shape[0], codes.shape[1]]).to(dtype)


@triton.jit
def numbers_of(codes, half: tl.constexpr, dtype: tl.constexpr, SPEC: tl.constexpr):
    """Return codes as numbers; integers are too large by `excess_of` the numbers' dtype."""
    if codes.dtype == tl.float8e4nv:
        values = codes.to(tl.float32)
    elif SPEC.per_byte == 2 and IS_COMPILED and dtype != tl.float32:
        values = _spread(codes, half, dtype)
    else:
        bits = (codes >> (4 * half)) & (15 if SPEC.per_byte == 2 else 255)
        values = (bits.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return values


@kernel
def dequantize_piece(codes_ptr, scales_ptr, zeros_ptr, out_ptr, first, SPEC: tl.constexpr, COLUMNS: tl.constexpr):
    """Dequantize one step of some rows of a weight, from row `first` on, which is the first of `out_ptr`. SPEC: that of a
    product with the weight."""
    wait_and_allow_next()
    PER_BYTE: tl.constexpr = SPEC.per_byte
    start = tl.program_id(0) * SPEC.step
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = first + row
    byte = tl.arange(0, SPEC.step // PER_BYTE)[:, None]
    inside = (column < SPEC.width)[None, :]
    codes_ptrs = codes_ptr + column.to(tl.int64)[None, :] * (SPEC.depth // PER_BYTE) + start // PER_BYTE + byte
    codes = tl.load(codes_ptrs, mask=inside, other=0.0)
    out_ptrs = out_ptr + row.to(tl.int64)[None, :] * SPEC.depth + start + byte
    ARE_MINIMA: tl.constexpr = zeros_ptr.dtype.element_ty != tl.uint8
    for half in tl.static_range(PER_BYTE):
        scales = load_scales((codes_ptr, scales_ptr, zeros_ptr), start, half, column, 0, SPEC)
        values = dequantize_groups(codes, half, scales, out_ptr.dtype.element_ty, True, ARE_MINIMA, SPEC)
        tl.store(out_ptrs + half * SPEC.half, values, mask=inside)


@triton.constexpr_function
def ones_of(dtype):
    """Return the number whose last mantissa bit counts ones, with no other mantissa bit set."""
    return {"bf16": 2.0**7, "fp16": 2.0**10, "fp32": 2.0**23}[str(dtype)]


@triton.constexpr_function
def excess_of(dtype, per_byte, has_zeros):
    """Return by how much `numbers_of` exceeds the codes' values."""
    return ones_of(dtype) + (0 if has_zeros else 8 if per_byte == 2 else 128)


@triton.jit
def _spread(codes, half: tl.constexpr, dtype: tl.constexpr):
    """Return ones_of(dtype) + the four bits in one half of each byte."""
    assembly: tl.constexpr = spread_assembly(half, dtype)
    return tl.inline_asm_elementwise(assembly, "=r,=r,r", [codes], dtype=dtype.value, is_pure=True, pack=4)


@triton.constexpr_function
def spread_assembly(half, dtype):
    """Put each code below the upper byte of ones_of(dtype)."""
    return f"""{{
        .reg .b32 codes, ones;
        shr.u32 codes, $2, {4 * half};
        and.b32 codes, codes, 0x0f0f0f0f;
        mov.b32 ones, {0x43434343 if str(dtype) == "bf16" else 0x64646464};
        prmt.b32 $0, codes, ones, 0x4140;
        prmt.b32 $1, codes, ones, 0x4342;
    }}"""


@triton.jit
def dequantize_mxfp4(codes, exponents, half: tl.constexpr, dtype: tl.constexpr):
    """Dequantize the four-bit floats in one half of codes [bytes, columns] by exponents [blocks, columns]."""
    scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # an exponent of 0 gives 0, not 2 ** -127
    IS_SHORT: tl.constexpr = IS_COMPILED and dtype == tl.bfloat16
    if IS_SHORT:  # every product is exact
        assembly: tl.constexpr = float_assembly(half)
        number = tl.inline_asm_elementwise(assembly, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        number *= tl.full([1, 1], 2.0**126, tl.bfloat16)
        scales = scales.to(tl.bfloat16)
    else:
        codes = codes.to(tl.int32) >> 4 * half & 15
        size = codes & 7
        number = ((size + 252) << 22).to(tl.float32, bitcast=True)  # from 2 on, the bits are those of a short float
        number = tl.where(size < 2, size.to(tl.float32) * 0.5, number)
        number = tl.where(codes >= 8, -number, number)
    BLOCKS: tl.constexpr = exponents.shape[0]
    number = tl.reshape(number, [BLOCKS, codes.shape[0] // BLOCKS, codes.shape[1]]) * scales[:, None, :]
    return tl.reshape(number, [codes.shape[0], codes.shape[1]])


@triton.constexpr_function
def float_assembly(half):
    """Put the sign of each code where bfloat16 has it, and its exponent and mantissa at the end of the exponent and the
    begin of the mantissa: the number times 2 ** -126, even where it is smaller than 1."""
    lines = ""
    for number, selector in enumerate(("0x4140", "0x4342")):
        lines += f"""
        prmt.b32 both, $2, 0, {selector};
        and.b32 size, both, {0x00070007 << 4 * half};
        and.b32 sign, both, {0x00080008 << 4 * half};
        shl.b32 size, size, {6 - 4 * half};
        shl.b32 sign, sign, {12 - 4 * half};
        or.b32 ${number}, size, sign;"""
    return "{.reg .b32 both, size, sign;" + lines + "}"
