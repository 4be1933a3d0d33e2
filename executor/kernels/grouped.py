"""Codes of four or eight bits with a scale for each group of neighbours in depth, whatever the file they came from.

AWQ, GPTQ and compressed-tensors store such weights, and of GGUF's types four are of this form. `Grouped` is one as it is
read and cut: a byte for each code. It is computed in one of two forms: on a GPU as `Packed`, which kernels read; on a
CPU as `Coded`, blocks of 32 that C reads.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.executor.code_types import CODE_TYPES
from penstock.executor.kernels import GroupOps, Packed
from penstock.executor.kernels.codes import VALUES_AT_ONCE, Coded

LEAST_GROUP = 16
HALVES = (64, 32, 16)  # how much of the depth a kernel widens at a time
BLOCK = 32  # of codes on a CPU
EIGHT_BIT_FLOATS = torch.float8_e4m3fn
Parts = tuple[Tensor, Tensor, Tensor | None]  # codes [rows, blocks, values], scales and minima [rows, blocks, groups]


class Grouped(NamedTuple):
    """Rows of a weight, or all of it: (code - what stands for zero) · scale, or code · scale - minimum."""

    name: str
    codes: Tensor  # uint8 [rows, columns]; float8_e4m3fn: numbers, without a zero
    scales: Tensor  # [rows, groups], float16, bfloat16 or float32
    below: Tensor | None = (
        None  # like the scales: uint8 codes of zero, or float16 minima; None: zero is the middle code
    )
    bits: int = 4
    order: Tensor | None = None  # int64 [columns]: which input each column is for; None: they are in order

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def is_float(self) -> bool:
        return self.codes.dtype is EIGHT_BIT_FLOATS

    def take(self, rows: Tensor | slice) -> "Grouped":
        below = None if self.below is None else self.below[rows]
        return self._replace(
            codes=self.codes.view(torch.uint8)[rows].view(self.codes.dtype), scales=self.scales[rows], below=below
        )

    def narrow(self, dim: int, start: int, size: int) -> "Grouped | None":
        """None: a group would be cut into pieces that no kernel takes, or inputs are out of order."""
        below = self.below
        if dim == 0:
            return self.take(slice(start, start + size))
        if size == self.shape[1]:
            return self
        if self.order is not None:
            return None
        codes = self.codes.narrow(1, start, size)
        if self.scales.shape[1] == 1:
            return self._replace(codes=codes)
        group = math.gcd(self.group, start, size)
        if group < LEAST_GROUP:
            return None

        def cut(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.group // group, 1).narrow(1, start // group, size // group)

        return self._replace(codes=codes, scales=cut(self.scales), below=None if below is None else cut(below))

    def numbers(self, device: torch.device, dtype: torch.dtype, copy: bool = False) -> Tensor:  # noqa: ARG002  (as every part)
        """In float32, rounded to `dtype`; a few rows at a time, so that no float32 copy is made. Always a copy."""
        rows, columns = self.shape
        out = torch.empty((rows, columns), dtype=dtype, device=device)
        at_once = max(VALUES_AT_ONCE // columns, 1)
        for start in range(0, rows, at_once):
            some = slice(start, start + at_once)
            below = None if self.below is None else self.below[some].to(device)
            values = _numbers(self.codes[some].to(device), self.scales[some].to(device), below, self.bits)
            if self.order is None:
                out[some] = values
            else:
                out[some].index_copy_(1, self.order.to(device), values.to(dtype))
        return out

    def coded(self) -> Coded | None:
        """The same numbers in blocks of 32 for a CPU, in their order; None where groups or scales do not allow it."""
        if self.is_float or self.group % BLOCK or (self.below is not None and self.below.is_floating_point()):
            return None
        scales = _halved(self.scales)
        if scales is None:
            return None
        middle, is_half = 1 << self.bits - 1, scales.dtype is torch.float16
        blocks = self.codes.unflatten(1, (-1, BLOCK))

        def by_block(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.group // BLOCK, 1)[..., None]

        parts = [by_block(scales).view(torch.uint8)]
        if is_half and self.below is None:
            kind = "Q4_0" if self.bits == 4 else "Q8_0"
            blocks = blocks if self.bits == 4 else blocks ^ 128
        else:
            kind = f"G{self.bits}" if is_half else f"G{self.bits}_BF16"
            zeros = torch.zeros_like(scales, dtype=torch.uint8) if self.below is None else self.below - middle
            parts.append(by_block(zeros))
        half = BLOCK // 2
        parts.append(blocks if self.bits == 8 else blocks[..., :half] | blocks[..., half:] << 4)
        return Coded(self.name, CODE_TYPES[kind], torch.cat(parts, -1).flatten(1))


def _halved(scales: Tensor) -> Tensor | None:
    """In 16 bits, if that is exact."""
    if scales.dtype is not torch.float32:
        return scales
    candidates = (scales.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((narrow for narrow in candidates if torch.equal(narrow.float(), scales)), None)


def _numbers(codes: Tensor, scales: Tensor, below: Tensor | None, bits: int) -> Tensor:
    """codes [rows, columns], the others [rows, groups] -> float32 [rows, columns]"""
    values = codes.float().unflatten(1, (scales.shape[1], -1))
    by, zero = scales.float()[..., None], float(1 << bits - 1)
    if codes.dtype is EIGHT_BIT_FLOATS:
        zero = 0.0
    if below is not None and below.is_floating_point():
        numbers: Tensor = values * by - below[..., None].float()
    else:
        numbers = (values - (zero if below is None else below[..., None].float())) * by
    return numbers.flatten(1)


def half_of(part: Grouped) -> int | None:
    """None: kernels do not take the shape."""
    columns, group, per_byte = part.shape[1], part.group, 8 // part.bits
    fits = (half for half in HALVES if not columns % (half * per_byte) and not (group % half and half % group))
    return next(fits, None)


def pack(parts: Sequence[Grouped], device: torch.device) -> Packed:
    """Parts of one kind (`kind_of`), on top of each other."""
    first, half = parts[0], half_of(parts[0])
    assert half is not None
    codes = torch.cat([part.codes.to(device).view(torch.uint8) for part in parts])
    if first.bits == 4:
        low, high = codes.unflatten(1, (-1, 2, half)).unbind(2)
        codes = (low | high << 4).flatten(1)
    elif first.is_float:
        codes = codes.view(EIGHT_BIT_FLOATS)

    def turned(values: list[Tensor]) -> Tensor:
        return torch.cat([each.to(device) for each in values]).t().contiguous()

    below = [part.below for part in parts if part.below is not None]
    order = None if first.order is None else first.order.to(device, torch.int32)
    scales = turned([part.scales for part in parts])
    return Packed(codes, scales, turned(below) if below else None, order, first.bits, half)


def kind_of(part: Grouped) -> tuple[object, ...]:
    """What parts of one product have in common."""
    below = None if part.below is None else part.below.dtype
    order = None if part.order is None else part.order.numpy().tobytes()
    return part.bits, part.codes.dtype, part.group, part.scales.dtype, below, order


def unpack(weight: Packed) -> Tensor:
    """One weight as numbers, float32 [N, K], in the order of its columns."""
    codes, half = weight.codes, weight.half
    if weight.bits == 4:
        blocks = codes.unflatten(1, (-1, half))
        codes = torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)
    below = None if weight.below is None else weight.below.t()
    return _numbers(codes, weight.scales.t(), below, weight.bits)


class GroupedLinear:
    """[T, in] -> [T, out] by such a weight and bias [out]."""

    def __init__(self, weight: Packed, bias: Tensor | None, ops: GroupOps, dtype: torch.dtype) -> None:
        self.weight, self.bias, self._dtype = weight, bias, dtype
        self._multiply = ops.packed_linear

    def __call__(self, x: Tensor) -> Tensor:
        out = self._multiply(x, self.weight)
        return out if self.bias is None else out + self.bias

    def rows(self, indices: Tensor) -> Tensor:
        """[T] -> [T, in]: these rows of the weight."""
        (codes, scales, below, order), indices = self.weight[:4], indices.long()
        assert order is None
        codes = codes.view(torch.uint8).index_select(0, indices).view(codes.dtype)
        below = None if below is None else below.index_select(1, indices)
        scales = scales.index_select(1, indices)
        return unpack(self.weight._replace(codes=codes, scales=scales, below=below)).to(self._dtype)

    def tensors(self) -> list[Tensor]:
        return [*self.weight.tensors(), *([] if self.bias is None else [self.bias])]


def as_groups(weight: Coded) -> Grouped | None:
    """Return GGUF's Q4_0 and Q8_0 as they are, and Q4_K and Q6_K with the scales of their groups multiplied out, in
    float16: off by at most 1/4096 of a scale, where bfloat16 rounds every product to 1/512. None for other types."""
    if weight.type.name not in _READERS:
        return None
    bits, read = _READERS[weight.type.name]
    codes, scales, minima = read(weight.rows.unflatten(1, (-1, weight.type.size_bytes)))
    halves = [part.half().flatten(1) for part in (scales, minima) if part is not None]
    for half in halves:
        if not (finite := half.isfinite().all(1)).all():
            raise weight.error(int((~finite).nonzero()[0, 0]))
    return Grouped(weight.name, codes.flatten(1), halves[0], halves[1] if len(halves) > 1 else None, bits)


def _half_at(blocks: Tensor, at: int) -> Tensor:
    """[rows, blocks, 1]"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(part: Tensor, count: int) -> Tensor:
    """Runs of `count` bytes: the codes in their lower halves, then those in their upper ones."""
    runs = part.unflatten(-1, (-1, count))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[..., 2:], 16), _half_at(blocks, 0), None


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[..., 2:] ^ 128, _half_at(blocks, 0), None


def _q4_k(blocks: Tensor) -> Parts:
    """Scales and minima of six bits: four of each in whole bytes, whose upper two bits belong to the other four."""
    first, second, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (low & 15) | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, low >> 4 | second >> 6 << 4), -1)
    by, under = _half_at(blocks, 0).float(), _half_at(blocks, 2).float()
    return _nibbles(blocks[..., 16:], 32), by * scales, under * minima


def _q6_k(blocks: Tensor) -> Parts:
    """Offset by 32, here as codes of eight bits by 128."""
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = _nibbles(blocks[..., :128], 64) | high.flatten(-3) << 4
    return codes + 96, _half_at(blocks, 208).float() * blocks[..., 192:208].view(torch.int8), None


_READERS: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (4, _q4_0),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q6_K": (8, _q6_k),
}
