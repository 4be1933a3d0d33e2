"""The weight of a linear layer, in the same type for checkpoint readers, for slicing by rank and for kernels.

A `Weight` holds unquantized numbers, or codes with the scales and zeros that dequantize them; its `format` defines the
layout. Checkpoints store `Numbers`, `Blocks`, `Groups`, `Shuffled` or `Ggml`, which can be sliced and dequantized. For kernels,
weights are packed once as `Packed` or `Mxfp4` (linear.py) or `Panels` (cpu_product.py), except numbers and blocks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.code_types import CodeType
from penstock.executor.protocol import ExecutorError

_lib: Any = _csrc.lib
CPU = torch.device("cpu")
EIGHT_BITS = torch.float8_e4m3fn
BLOCK = 128  # rows and columns that share one scale in `Blocks`
LEAST_GROUP = 16
VALUES_AT_ONCE = 1 << 22  # number of values that are dequantized in float32 at a time


class Format:
    """The layout of a weight's codes, with the operations to slice and dequantize them."""

    def shape(self, weight: "Weight") -> tuple[int, ...]:
        return tuple(weight.codes.shape)

    def covering(self, weight: "Weight", dim: int, start: int, end: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the smallest range that includes this one and can be sliced without dequantizing."""
        return start, end

    def cut(self, weight: "Weight", dim: int, start: int, size: int) -> "Weight":
        raise NotImplementedError

    def rows_of_scales(self, rows: Tensor) -> Tensor | None:
        """Return which rows of the scales these rows need; None if the codes cannot be reordered in this way."""
        return rows

    def rows(self, weight: "Weight", first: int, end: int, device: torch.device) -> Tensor:
        """Return these rows as float32."""
        raise NotImplementedError


class Weight(NamedTuple):
    format: Format
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.format.shape(self)

    @property
    def is_numbers(self) -> bool:
        return isinstance(self.format, Numbers)

    def narrow(self, dim: int, start: int, size: int) -> "Weight":
        """Return a range of rows (dim 0) or columns (1); dequantized to float32 if the codes cannot be sliced there."""
        low, high = self.format.covering(self, dim, start, start + size)
        part = self if (low, high) == (0, self.shape[dim]) else self.format.cut(self, dim, low, high - low)
        if (low, high) == (start, start + size):
            return part
        values = part.dequantize(CPU, torch.float32)
        return numbers(values.narrow(dim, start - low, size), self.name)

    def take(self, rows: Tensor) -> "Weight":
        """Return these rows, in this order; dequantized to float32 if their codes cannot be reordered."""
        by = self.format.rows_of_scales(rows)
        if by is None:
            return numbers(self.dequantize(CPU, torch.float32)[rows], self.name)
        scales, zeros = (None if part is None else part[by] for part in (self.scales, self.zeros))
        codes = self.codes.view(torch.uint8) if self.codes.dtype is EIGHT_BITS else self.codes
        return self._replace(codes=codes[rows].view(self.codes.dtype), scales=scales, zeros=zeros)

    def dequantize(self, device: torch.device, dtype: torch.dtype, copy: bool = False) -> Tensor:
        """Return the weight dequantized in float32 and rounded to `dtype`, a few rows at a time to avoid a float32 copy
        of the whole. Without `copy`, numbers that need no conversion are returned as they are."""
        if self.is_numbers:
            return self.codes.to(device=device, dtype=dtype, copy=copy)
        rows, columns = self.shape
        out = torch.empty((rows, columns), dtype=dtype, device=device)
        at_once = max(VALUES_AT_ONCE // columns, 1)
        for start in range(0, rows, at_once):
            end = min(start + at_once, rows)
            out[start:end] = self.format.rows(self, start, end, device)
        return out

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in self[1:4] if tensor is not None]

    def like(self, tensors: Iterable[Tensor]) -> "Weight":
        """Return a weight of the same format with other `tensors()`."""
        given = iter(tensors)
        codes, scales, zeros = (None if part is None else next(given) for part in self[1:4])
        assert codes is not None
        return Weight(self.format, codes, scales, zeros, self.name)

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for weights that can be stacked."""
        return self.format, *(None if part is None else (part.shape, part.dtype) for part in self[1:4])

    def error(self, row: int) -> ExecutorError:
        kind = self.format.type.name if isinstance(self.format, Ggml) else "its codes"
        return ExecutorError(f"tensor {self.name!r}: row {row} has a scale of {kind} that is not finite")


def stack(weights: Sequence[Weight]) -> Weight:
    """Stack weights of one kind into one weight with a leading dimension; the originals become views of it."""
    return weights[0].like(stack_tensors(each) for each in zip(*(weight.tensors() for weight in weights), strict=True))


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors and make the originals views of the result, so that they are stored once."""
    stacked = torch.stack(list(tensors))
    for tensor, part in zip(tensors, stacked, strict=True):
        tensor.data = part
    return stacked


@dataclass(frozen=True, slots=True)
class Numbers(Format):
    """Numbers of any floating-point dtype."""

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        return weight._replace(codes=weight.codes.narrow(dim, start, size))


@dataclass(frozen=True, slots=True)
class Blocks(Format):
    """float8_e4m3fn with one float32 scale per 128 × 128 block, the format of DeepSeek-V3 and the FP8 Qwen3."""

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:  # noqa: ARG002
        return start // BLOCK * BLOCK, end

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        assert weight.scales is not None and start % BLOCK == 0
        scales = weight.scales.narrow(dim, start // BLOCK, -(-size // BLOCK))
        return weight._replace(codes=weight.codes.narrow(dim, start, size), scales=scales)

    def rows_of_scales(self, rows: Tensor) -> Tensor | None:
        firsts = rows[::BLOCK]
        blocks = (firsts[:, None] + torch.arange(BLOCK)).flatten()
        return None if (firsts % BLOCK).any() or not torch.equal(rows, blocks[: len(rows)]) else firsts // BLOCK

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        assert weight.scales is not None
        # A lookup table, because torch's conversion from FP8 on a CPU has a quarter of its speed.
        table = torch.arange(256, dtype=torch.uint8, device=device).view(EIGHT_BITS).float()
        codes = weight.codes[first:end].to(device).view(torch.uint8)
        values = table.index_select(0, codes.int().flatten()).view(codes.shape)
        row, column = (torch.arange(*span, device=device) // BLOCK for span in ((first, end), (0, codes.shape[1])))
        by: Tensor = weight.scales.to(device, torch.float32)[row[:, None], column]
        return values.mul_(by)


@dataclass(frozen=True, slots=True)
class Groups(Format):
    """Group-quantized codes of four or eight bits, one per byte, with a scale per group of neighbours: [rows, groups].

    A number is (code - zero) · scale with uint8 zeros, or code · scale - minimum with float16 minima in place of the
    zeros; without either, the zero is the middle code. float8_e4m3fn codes are numbers and have no zero. AWQ, GPTQ and
    compressed-tensors store such weights, and GGUF weights can be converted to this format.
    """

    bits: int = 4

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:
        columns = weight.shape[1]
        if dim == 0 or (start, end) == (0, columns):
            return start, end
        group = group_of(weight)
        if group == columns or math.gcd(group, start, end - start) >= LEAST_GROUP:
            return start, end
        unit = LEAST_GROUP if group % LEAST_GROUP == 0 else group
        return start // unit * unit, min(-(-end // unit) * unit, columns)

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        whole, zeros = group_of(weight), weight.zeros
        assert weight.scales is not None
        if dim == 0:
            scales = weight.scales.narrow(0, start, size)
            zeros = None if zeros is None else zeros.narrow(0, start, size)
            return weight._replace(codes=weight.codes.narrow(0, start, size), scales=scales, zeros=zeros)
        codes = weight.codes.narrow(1, start, size)
        if whole == weight.shape[1]:
            return weight._replace(codes=codes)
        group = math.gcd(whole, start, size)

        def cut(values: Tensor) -> Tensor:
            return values.repeat_interleave(whole // group, 1).narrow(1, start // group, size // group)

        return weight._replace(codes=codes, scales=cut(weight.scales), zeros=None if zeros is None else cut(zeros))

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        assert weight.scales is not None
        zeros = None if weight.zeros is None else weight.zeros[first:end].to(device)
        return scaled(weight.codes[first:end].to(device), weight.scales[first:end].to(device), zeros, self.bits)


@dataclass(frozen=True, eq=False, slots=True)
class Shuffled(Format):
    """Codes like those of `Groups`, but the inputs of a group are not neighbours (GPTQ with act-order). No kernel reads
    this format: such weights are dequantized at load time."""

    bits: int
    group_of_input: Tensor  # int64 [columns]

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:
        return (start, end) if dim == 0 else (0, weight.shape[1])

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        assert dim == 0
        return weight.like(tensor.narrow(0, start, size) for tensor in weight.tensors())

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        by = self.group_of_input
        codes, scales, zeros = (None if part is None else part[first:end] for part in weight[1:4])
        assert codes is not None and scales is not None
        return scaled(codes, scales[:, by], None if zeros is None else zeros[:, by], self.bits).to(device)


def group_of(weight: Weight) -> int:
    """Return the group size of a weight of `Groups`: the number of neighbours that share one scale."""
    assert weight.scales is not None
    return weight.codes.shape[1] // weight.scales.shape[1]


def scaled(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """Dequantize codes [rows, columns] with scales and zeros [rows, groups] to float32, as `Groups` defines."""
    values = codes.float().unflatten(1, (scales.shape[1], -1))
    by, zero = scales.float()[..., None], 0.0 if codes.dtype is EIGHT_BITS else float(1 << bits - 1)
    if zeros is not None and zeros.is_floating_point():
        made: Tensor = values * by - zeros[..., None].float()
    else:
        made = (values - (zero if zeros is None else zeros[..., None].float())) * by
    return made.flatten(1)


@dataclass(frozen=True, slots=True)
class Ggml(Format):
    """The quantized blocks of a GGUF file: uint8 [rows, bytes], which C decodes (csrc/codes.c)."""

    type: CodeType

    def shape(self, weight: Weight) -> tuple[int, ...]:
        return weight.codes.shape[0], weight.codes.shape[1] // self.type.size_bytes * self.type.block

    def covering(self, weight: Weight, dim: int, start: int, end: int) -> tuple[int, int]:  # noqa: ARG002
        unit = self.type.block if dim == 1 else 1
        return start // unit * unit, -(-end // unit) * unit

    def cut(self, weight: Weight, dim: int, start: int, size: int) -> Weight:
        if dim == 1:
            start, size = (at // self.type.block * self.type.size_bytes for at in (start, size))
        return weight._replace(codes=weight.codes.narrow(dim, start, size))

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        some = weight.codes[first:end].contiguous()
        blocks, columns = some.numel() // self.type.size_bytes, weight.shape[1]
        values = torch.empty((end - first, columns))
        bad = _lib.penstock_code_values(self.type.number, some.data_ptr(), blocks, values.data_ptr())
        if bad >= 0:
            raise weight.error(first + bad * self.type.block // columns)
        return values.to(device)


def as_groups(weight: Weight) -> Weight:
    """Convert a `Ggml` weight to `Groups`. Each group's scale is multiplied out and rounded to float16, a relative
    error of at most 1/4096; bfloat16 rounds every product to 1/512."""
    assert isinstance(weight.format, Ggml)
    (rows, columns), number = weight.shape, weight.format.type.number
    stored, groups = weight.codes.contiguous(), columns // _lib.penstock_code_group_values(number)
    codes = torch.empty((rows, columns), dtype=torch.uint8)
    halves = [torch.empty((rows, groups)) for _ in range(1 + _lib.penstock_code_has_minima(number))]
    blocks = stored.numel() // weight.format.type.size_bytes
    addresses = [part.data_ptr() for part in (stored, codes, *halves)]
    bad = _lib.penstock_code_groups(number, addresses[0], blocks, *addresses[1:], *(0,) * (2 - len(halves)))
    if bad >= 0:
        raise weight.error(bad * weight.format.type.block // columns)
    scales, *minima = (half.half() for half in halves)
    for half in (scales, *minima):
        if not (finite := half.isfinite().all(1)).all():
            raise weight.error(int((~finite).nonzero()[0, 0]))
    bits = _lib.penstock_code_group_bits(number)
    return Weight(Groups(bits), codes, scales, minima[0] if minima else None, name=weight.name)


@dataclass(frozen=True, slots=True)
class Packed(Format):
    """`Groups` in the layout of the Triton kernels, [N, K] or for several experts [S, N, K]: uint8 [..., N, K · bits /
    8] or float8_e4m3fn, with scales and zeros [..., K / group, N]. A byte holds two four-bit codes whose inputs are
    `half` apart, so that one load serves two products."""

    bits: int
    half: int

    def shape(self, weight: Weight) -> tuple[int, ...]:
        *leading, width, row_bytes = weight.codes.shape
        return (*leading, width, row_bytes * 8 // self.bits)

    def rows(self, weight: Weight, first: int, end: int, device: torch.device) -> Tensor:
        codes = weight.codes[first:end]
        if self.bits == 4:
            runs = codes.unflatten(1, (-1, self.half))
            codes = torch.stack((runs & 15, runs >> 4), 2).flatten(1)
        assert weight.scales is not None
        zeros = None if weight.zeros is None else weight.zeros[:, first:end].t()
        return scaled(codes, weight.scales[:, first:end].t(), zeros, self.bits).to(device)


@dataclass(frozen=True, slots=True)
class Mxfp4(Format):
    """MXFP4 in the layout of the Triton kernels: two 4-bit floats per byte, [..., N, K / 2], times 2 ** (scale - 127)
    with uint8 `scales` [..., N, K / 32]. Byte i of a block of 16 bytes holds the codes i and i + 16."""

    def shape(self, weight: Weight) -> tuple[int, ...]:
        return (*weight.codes.shape[:-1], weight.codes.shape[-1] * 2)


MXFP4_BLOCK = 32

NUMBERS, BLOCKS, MXFP4 = Numbers(), Blocks(), Mxfp4()


def numbers(values: Tensor, name: str = "") -> Weight:
    """Wrap an unquantized tensor as a weight."""
    return Weight(NUMBERS, values, name=name)
