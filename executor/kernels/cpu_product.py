"""Matrix products on a CPU in C (csrc/cpu_linear.h and csrc/cpu_quantized.h), with weights that are packed once.

A row's result is bitwise the same whatever the other rows and the number of threads, in float32 and in bfloat16. With
unquantized weights the kernels are 1.0 to 1.3 times as fast as oneDNN's prepacked product at 1 and 16 rows of the
default model's layers and 1.02 to 1.05 times at 512 (two cores of Zen 5, bfloat16), and need no private operators of
torch. With weights quantized to 2 to 8 bits, inputs are rounded to integers up to 32,512 with one scale per 32
neighbours, which is more precise than bfloat16, and products are summed exactly: the result agrees with the dequantized
weights' to five digits.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import _csrc
from penstock.executor.code_types import CodeType, has_vectors
from penstock.executor.kernels.cpu_ops import DTYPES, addresses, describe_cpu
from penstock.executor.kernels.weight import Format, Weight
from penstock.executor.weight_memory import allocate

_lib: Any = _csrc.lib
WIDEST_PANEL = 256  # rows of a weight; panels of every level are divisors of it
NARROW_COLUMNS = 16  # in blocks of the rest, as in csrc/cpu_level.h


@dataclass(frozen=True, slots=True)
class Panels(Format):
    """A weight packed for C: codes of a type (csrc/codes.h), or blocks of transposed numbers if `type` is None."""

    is_packed: ClassVar[bool] = True
    type: CodeType | None
    width: int
    depth: int

    def shape(self, weight: Weight) -> tuple[int, ...]:  # noqa: ARG002
        return self.width, self.depth


class CpuProduct:
    """A product [T, in] -> [T, out] with weights whose outputs are concatenated, and bias [out]. Copies the weights."""

    def __init__(
        self,
        weights: Sequence[Weight],
        dtype: torch.dtype,
        bias: Tensor | None = None,
        num_threads: int | None = None,
        level: str | None = None,
    ) -> None:
        """Pack weights that `Format.codes_for_cpu` or `is_repacked` accepts; raise ExecutorError if a scale is not finite."""
        assert dtype in DTYPES
        assert dtype is torch.float32 or all(not each.is_numbers or each.codes.dtype is dtype for each in weights)
        self._dtype, self._depth = dtype, weights[0].shape[1]
        self._cpu = describe_cpu(dtype, num_threads, level)
        self.bias = None if bias is None else bias.float().contiguous()
        self.weights = [_pack(weight, self._cpu.level) for weight in weights]
        self._width = sum(weight.shape[0] for weight in weights)
        self.parts = _csrc.ffi.new("struct penstock_part[]", self._describe(0, -1))  # for all rows of an input

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.parts)

    @staticmethod
    def each(products: "Sequence[CpuProduct]", counts: Sequence[int], x: Tensor) -> Tensor:
        """Multiply the first counts[0] rows by products[0], the next counts[1] by products[1], and so on, with the same
        bits as separate calls. This is one C call over all threads.

        The structs are built anew, because an expert that moved to this rank may have replaced the tensors.
        """
        starts = [sum(counts[:index]) for index in range(len(counts))]
        described = zip(products, starts, counts, strict=True)
        parts = [part for one, start, count in described for part in one._describe(start, count)]
        return products[0]._multiply(x, _csrc.ffi.new("struct penstock_part[]", parts))

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [T] of the single weight as [T, in], dequantized and rounded to the dtype."""
        ((form, panels, *_),) = self.weights
        assert isinstance(form, Panels)
        indices = indices.long().contiguous()
        rows, kind = len(indices), form.type
        if kind is None:
            out = torch.empty((rows, form.depth), dtype=self._dtype)
            sizes = rows, form.depth // _elements_per_word(self._dtype), form.width
            failed = _lib.penstock_linear_rows(self._cpu, [(*addresses(panels, indices, out), *sizes)])
        else:
            out = torch.empty((rows, form.depth))
            columns = _lib.penstock_coded_columns(self._cpu.level)
            given = kind.number, panels.data_ptr(), form.width, form.depth, columns
            failed = _lib.penstock_code_rows(*given, indices.data_ptr(), rows, out.data_ptr())
        assert not failed, "a number that none of the rows has"
        return out.to(self._dtype)

    def first(self, width: int) -> "CpuProduct":
        """Return the product with only the first outputs of its single weight, in the same memory. The width must be one at
        which a panel of every level ends."""
        (weight,) = self.weights
        assert isinstance(weight.format, Panels) and width % WIDEST_PANEL == 0
        other = copy(self)
        other.weights, other._width = [weight._replace(format=replace(weight.format, width=width))], width
        other.parts = _csrc.ffi.new("struct penstock_part[]", other._describe(0, -1))
        return other

    def describe(self, projection: Any) -> None:
        """Fill in a struct penstock_projection."""
        projection.parts, projection.num_parts = self.parts, len(self.weights)
        projection.depth, projection.width = self._depth, self._width

    def _describe(self, first_row: int, num_rows: int) -> list[tuple[int, ...]]:
        """Return the fields of a struct penstock_part for each weight."""
        column, parts = 0, list[tuple[int, ...]]()
        for weight in self.weights:
            assert isinstance(weight.format, Panels)
            kind = weight.format.type
            number = _lib.PENSTOCK_NUMBERS if kind is None else kind.number
            if kind is None and self._dtype is torch.float32 and weight.codes.dtype is torch.int32:
                number = _lib.PENSTOCK_PAIRS  # a bfloat16 weight
            bias = 0 if self.bias is None else self.bias[column:].data_ptr()
            parts.append((number, weight.codes.data_ptr(), bias, column, weight.shape[0], first_row, num_rows))
            column += weight.shape[0]
        return parts

    def _multiply(self, x: Tensor, parts: Any) -> Tensor:
        assert x.dtype is self._dtype and x.shape[1] == self._depth
        rows = len(x)
        y = torch.empty((rows, self._width), dtype=self._dtype)
        stride, element = x.stride()
        if element != 1 or stride % _elements_per_word(self._dtype):
            x = x.contiguous()
            stride = self._depth
        size = _lib.penstock_product_scratch(len(parts), parts, rows, self._depth)
        scratch = torch.empty(size, dtype=torch.uint8)
        product = *addresses(x, scratch, y), parts, len(parts), stride, rows, self._depth, self._width
        if _lib.penstock_product(self._cpu, [product]):
            raise MemoryError
        return y


def is_repacked(weight: Tensor) -> bool:
    """Tell whether C supports this unquantized weight and is faster than torch, which wins without AVX2."""
    return weight.device.type == "cpu" and weight.dtype in DTYPES and weight.shape[1] % 2 == 0 and has_vectors()


def _pack(weight: Weight, level: int) -> Weight:
    width, depth = weight.shape
    if (coded := weight.format.codes_for_cpu(weight)) is None:
        assert weight.is_numbers
        return Weight(Panels(None, width, depth), _pack_numbers(weight.codes, _lib.penstock_cpu_columns(level)))
    kind, weight = coded
    columns = _lib.penstock_coded_columns(level)
    panels = torch.frombuffer(allocate(_lib.penstock_code_bytes(kind.number, width, depth, columns)), dtype=torch.uint8)
    weight.format.pack_for_cpu(weight, kind, columns, panels)
    return Weight(Panels(kind, width, depth), panels)


def _pack_numbers(weight: Tensor, columns: int) -> Tensor:
    """Pack [out, in] in blocks [in, columns], one after the other, and what is left of `out` in narrower blocks, zero-padded
    (csrc/cpu_level.h); pairs of bfloat16 along `in` stay together."""
    width, depth = weight.shape
    assert weight.dtype in DTYPES and depth % 2 == 0
    words = weight.contiguous().view(torch.int32 if weight.dtype is torch.bfloat16 else weight.dtype)
    whole, narrow = width // columns * columns, min(columns, NARROW_COLUMNS)
    rest = F.pad(words[whole:], (0, 0, 0, (whole - width) % narrow))
    shape = whole + len(rest), words.shape[1]
    packed = torch.frombuffer(allocate(math.prod(shape) * 4), dtype=words.dtype).view(shape)
    for first, size, rows in ((0, columns, words[:whole]), (whole, narrow, rest)):
        blocks = packed[first : first + len(rows)].view(len(rows) // size, words.shape[1], size)
        blocks.copy_(rows.unflatten(0, (len(rows) // size, size)).transpose(1, 2))
    return packed


def _elements_per_word(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.bfloat16 else 1
