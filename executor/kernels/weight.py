"""The weight of a linear layer, in the same type for checkpoint readers, for slicing by rank and for kernels.

A `Weight` holds unquantized numbers, or codes with the scales and zeros that dequantize them; its `format` defines the
layout and everything that depends on it. Checkpoints store `Numbers` and the formats of stored_formats.py, which can be
sliced and dequantized. For kernels, weights are packed once: as a format of gpu_formats.py, or as `Panels`
(cpu_product.py). Numbers and blocks of eight bits are not packed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock.executor.code_types import CodeType
from penstock.executor.protocol import ExecutorError

CPU = torch.device("cpu")
EIGHT_BITS = torch.float8_e4m3fn
VALUES_AT_ONCE = 1 << 22  # number of values that are dequantized in float32 at a time


class GpuFormats(NamedTuple):
    """The quantized formats whose products the kernels of a GPU compute."""

    has_mxfp4: bool
    has_groups: bool
    has_eight_bits: bool  # float8_e4m3fn codes, also those of `Groups`


class Format:
    """The layout of a weight's codes, with the operations to slice, dequantize and pack them."""

    is_packed: ClassVar[bool] = False  # packed for kernels, and so cannot be sliced any more
    multiplies_eight_bits: ClassVar[bool] = False  # products take inputs of eight bits (`Fp8Rows`)
    has_lookup: ClassVar[bool] = False  # rows can be looked up in the format that `pack_for_gpu` returns

    @property
    def storage_name(self) -> str:
        """The name of the storage in `ModelInfo.storage`, for quantized weights."""
        raise NotImplementedError

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

    def look_up(self, weight: "Weight", indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [T] as [T, in], dequantized on the device of `indices`."""
        raise NotImplementedError

    def fingerprint_parts(self, weight: "Weight") -> tuple[str, list[Tensor]]:
        """Return a name of the format and the tensors that together identify a quantized weight."""
        return self.storage_name, weight.tensors()

    def codes_for_cpu(self, weight: "Weight") -> tuple[CodeType, "Weight"] | None:  # noqa: ARG002
        """Return the code type that C uses for this weight, and the weight with 16-bit scales. None if C has no code
        type for it: if the weight is not quantized, or its group size, zeros or scales do not fit."""
        return None

    def pack_for_cpu(self, weight: "Weight", kind: CodeType, columns: int, panels: Tensor) -> None:
        """Pack a weight that `codes_for_cpu` returned into panels of `columns` rows of the weight; raise ExecutorError
        if a scale is not finite."""
        raise NotImplementedError

    def codes_for_gpu(self, weight: "Weight", computed: GpuFormats) -> "Weight | None":  # noqa: ARG002
        """Return the weight in a format that `pack_for_gpu` packs; None if the GPU does not compute with its codes."""
        return None

    def join_key(self, weight: "Weight") -> tuple[object, ...]:
        """Return a key that is equal for quantized weights that `pack_for_gpu` can join into one."""
        raise NotImplementedError

    def pack_for_gpu(self, weights: Sequence["Weight"], device: torch.device) -> "Weight":
        """Concatenate the rows of quantized weights of one kind, in the format that the GPU kernels read."""
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
        return plain_weight(values.narrow(dim, start - low, size), self.name)

    def take(self, rows: Tensor) -> "Weight":
        """Return these rows, in this order; dequantized to float32 if their codes cannot be reordered."""
        by = self.format.rows_of_scales(rows)
        if by is None:
            return plain_weight(self.dequantize(CPU, torch.float32)[rows], self.name)
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
        remaining = iter(tensors)
        codes, scales, zeros = (None if part is None else next(remaining) for part in self[1:4])
        assert codes is not None
        return Weight(self.format, codes, scales, zeros, self.name)

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for weights that can be stacked."""
        return self.format, *(None if part is None else (part.shape, part.dtype) for part in self[1:4])

    def error(self, row: int) -> ExecutorError:
        kind = self.format.storage_name
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

    def look_up(self, weight: Weight, indices: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return weight.codes.index_select(0, indices)


NUMBERS = Numbers()


def plain_weight(values: Tensor, name: str = "") -> Weight:
    """Wrap an unquantized tensor as a weight."""
    return Weight(NUMBERS, values, name=name)
