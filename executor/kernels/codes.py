"""Weights that are kept as codes of 2 to 8 bits, as GGUF files store them, and products with them in C (csrc/codes.h).

An input is rounded to integers up to 32,512 with a scale for 32 neighbours, which is nearer to it than bfloat16; products
with codes are summed exactly. So a product is that of the file's own numbers, to five digits, and a row's result is the
same bits whatever other rows there are, on any number of threads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.code_types import CodeType
from penstock.executor.kernels.cpu_ops import DTYPES, describe_cpu
from penstock.executor.protocol import ExecutorError
from penstock.executor.weight_memory import take

_lib: Any = _csrc.lib
VALUES_AT_ONCE = 1 << 22


class Coded(NamedTuple):
    """Rows of a weight, or all of it, as a file has them."""

    name: str
    type: CodeType
    rows: Tensor  # uint8 [rows, bytes]
    packed: tuple[int, memoryview] | None = None  # where that was done ahead: columns of a panel, panels

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.rows.shape[1] // self.type.size_bytes * self.type.block

    def narrow(self, dim: int, start: int, size: int) -> "Coded | None":
        """None: a block would be cut."""
        if dim == 0:
            return self._replace(rows=self.rows.narrow(0, start, size), packed=None)
        if start % self.type.block or size % self.type.block:
            return None
        first, count = (at // self.type.block * self.type.size_bytes for at in (start, size))
        return self._replace(rows=self.rows.narrow(1, first, count), packed=None)

    def numbers(self, device: torch.device, dtype: torch.dtype, copy: bool = False) -> Tensor:  # noqa: ARG002  (as every part)
        """A few rows at a time, so that no float32 copy is made. Always a copy."""
        rows, columns = self.shape
        out = torch.empty((rows, columns), dtype=dtype, device=device)
        at_once = max(VALUES_AT_ONCE // columns, 1)
        for start in range(0, rows, at_once):
            some = self.rows[start : start + at_once].contiguous()
            values = torch.empty((len(some), columns))
            blocks = some.numel() // self.type.size_bytes
            bad = _lib.penstock_code_values(self.type.number, some.data_ptr(), blocks, values.data_ptr())
            if bad >= 0:
                raise self.error(start + bad * self.type.block // columns)
            out[start : start + at_once] = values
        return out

    def error(self, row: int) -> ExecutorError:
        return ExecutorError(f"tensor {self.name!r}: row {row} has a scale of {self.type.name} that is not finite")


class CodedLinear:
    """[T, in] -> [T, out] by these weights, their outputs side by side, and bias [out]. They are copied."""

    def __init__(
        self,
        weights: Sequence[Coded],
        dtype: torch.dtype,
        bias: Tensor | None = None,
        num_threads: int | None = None,
        level: str | None = None,
    ) -> None:
        """Raises ExecutorError where a scale is infinite or no number."""
        assert dtype in DTYPES
        self._dtype, self._depth = dtype, weights[0].shape[1]
        self._cpu = describe_cpu(dtype, num_threads, level)
        self._bias = None if bias is None else bias.float().contiguous()
        self._columns = _lib.penstock_coded_columns(self._cpu.level)
        self._panels = [_pack(weight, self._columns) for weight in weights]
        self._types = [weight.type for weight in weights]
        self._widths = [weight.shape[0] for weight in weights]
        self._width = sum(self._widths)
        self._parts = _csrc.ffi.new("struct penstock_coded[]", self._describe(0, -1))

    def _describe(self, first_row: int, num_rows: int) -> list[tuple[int, ...]]:
        parts: list[tuple[int, ...]] = []
        column = 0
        for kind, panels, width in zip(self._types, self._panels, self._widths, strict=True):
            bias = 0 if self._bias is None else self._bias[column:].data_ptr()
            parts.append((kind.number, panels.data_ptr(), bias, column, width, first_row, num_rows))
            column += width
        return parts

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._parts)

    @staticmethod
    def each(linears: "Sequence[CodedLinear]", counts: Sequence[int], x: Tensor) -> Tensor:
        """The first counts[0] rows through the first of these, the next through the second, in one call."""
        parts: list[tuple[int, ...]] = []
        first = 0
        for linear, count in zip(linears, counts, strict=True):
            parts += linear._describe(first, count)
            first += count
        return linears[0]._multiply(x, _csrc.ffi.new("struct penstock_coded[]", parts))

    def _multiply(self, x: Tensor, parts: Any) -> Tensor:
        assert x.dtype is self._dtype and x.shape[1] == self._depth
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = len(x)
        scratch = torch.empty(_lib.penstock_coded_scratch(rows, self._depth), dtype=torch.uint8)
        y = torch.empty((rows, self._width), dtype=self._dtype)
        failed = _lib.penstock_coded(
            self._cpu,
            x.data_ptr(),
            x.stride(0),
            scratch.data_ptr(),
            len(parts),
            parts,
            y.data_ptr(),
            rows,
            self._depth,
            self._width,
        )
        if failed:
            raise MemoryError
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """[T] -> [T, in]: these rows of the one weight there is, rounded to the dtype."""
        (panels,), (kind,) = self._panels, self._types
        indices = indices.long().contiguous()
        out = torch.empty((len(indices), self._depth))
        given = kind.number, panels.data_ptr(), self._width, self._depth, self._columns
        failed = _lib.penstock_code_rows(*given, indices.data_ptr(), len(indices), out.data_ptr())
        assert not failed, "a number that none of the rows has"
        return out.to(self._dtype)

    def describe(self, projection: Any) -> None:
        """Fill in a struct penstock_projection."""
        projection.parts, projection.num_parts = self._parts, len(self._parts)
        projection.depth, projection.width = self._depth, self._width

    def tensors(self) -> list[Tensor]:
        return [*self._panels, *([] if self._bias is None else [self._bias])]


def _pack(weight: Coded, columns: int) -> Tensor:
    (rows, depth), kind = weight.shape, weight.type
    if weight.packed is not None and weight.packed[0] == columns:
        return torch.frombuffer(weight.packed[1], dtype=torch.uint8)
    panels = torch.frombuffer(take(_lib.penstock_code_bytes(kind.number, rows, depth, columns)), dtype=torch.uint8)
    stored = weight.rows.contiguous()
    bad = _lib.penstock_code_pack(kind.number, stored.data_ptr(), rows, depth, columns, panels.data_ptr())
    if bad >= 0:
        raise weight.error(bad)
    return panels
