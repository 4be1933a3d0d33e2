"""Matrix products with weights: the fastest form that the device offers, chosen once, when the weight arrives."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from penstock.executor.kernels import BlockOps, NormedRows, Ops
from penstock.executor.kernels.codes import CodedLinear
from penstock.executor.kernels.cpu_linear import CpuLinear, is_repacked
from penstock.executor.kernels.grouped import GroupedLinear


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        ...

    def tensors(self) -> list[Tensor]:
        """All there is of the layer; with others in their place it is another layer of the same shape."""
        ...


class Narrow(NamedTuple):
    """Rows that were quantized as they were written, on their way into products of eight bits alone."""

    rows: tuple[Tensor, Tensor]  # [T, K] float8_e4m3fn, [T, K / 128] scales
    dtype: torch.dtype  # that the rows had, and that the products have


Rows = Tensor | Narrow | NormedRows  # what a layer's first products take


def multiply(linear: Linear, x: Rows) -> Tensor:
    """[T, in] -> [T, out]"""
    if isinstance(x, NormedRows):
        assert isinstance(linear, Plain), "rows without their norm for a layer that does not take them"
        return linear.multiply(x)
    if isinstance(x, Narrow):
        assert isinstance(linear, BlockLinear), "rows of eight bits for a layer that does not take them"
        return linear.multiply(x)
    return linear(x)


def multiply_each(linears: Sequence[Linear], counts: Sequence[int], x: Tensor) -> Tensor:
    """[T, in] -> [T, out]: the first counts[0] rows through the first of these layers, the next through the second.

    They are alike in kind and shape, and none of the counts is 0.
    """
    if all(isinstance(each, CodedLinear) for each in linears):
        return CodedLinear.each(cast("Sequence[CodedLinear]", linears), counts, x)
    if all(isinstance(each, CpuLinear) for each in linears):
        return CpuLinear.each(cast("Sequence[CpuLinear]", linears), counts, x)
    return torch.cat([linear(part) for linear, part in zip(linears, x.split(list(counts)), strict=True)])


def take_narrow(*linears: Linear | None) -> bool:
    """Whether all of these layers, as far as there are any, compute in eight bits."""
    return all(linear is None or isinstance(linear, BlockLinear) for linear in linears)


def make_linear(weight: Tensor, bias: Tensor | None, ops: Ops) -> Linear:
    """A linear layer [T, in] -> [T, out] from weight [out, in] and bias [out]; on the CPU `weight` may go then."""
    if is_repacked(weight):
        return CpuLinear(weight, bias)
    return Plain(weight, bias, ops)


def tied(table: Tensor | CodedLinear | GroupedLinear, ops: Ops) -> tuple[Linear, Callable[[Tensor], Tensor]]:
    """The head that shares an embedding's weight [size, width], and the embedding: tokens [T] -> [T, width]. Where
    the layer has repacked the weight its rows are gathered from there, so that it is kept once. Else it is copied where it
    may be a view of a mapped file."""
    if isinstance(table, CodedLinear | GroupedLinear):
        return table, table.rows
    if not is_repacked(table):
        table = table.clone() if table.device.type == "cpu" else table
        return Plain(table, None, ops), partial(table.index_select, 0)
    head = CpuLinear(table)
    return head, head.rows


class Plain:
    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        self.weight, self.bias, self._ops = weight, bias, ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.weight, self.bias)

    def multiply(self, x: NormedRows) -> Tensor:
        assert self._ops.norming is not None
        return self._ops.norming.linear(x, self.weight, self.bias)

    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class BlockLinear:
    """A weight [out, in] of eight bits with a scale per block; what is multiplied by it is quantized on the way."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, ops: BlockOps) -> None:
        self._weight, self._scales, self.bias = weight, scales, bias
        self._quantize, self._multiply = ops.quantize, ops.block_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(Narrow(self._quantize(x), x.dtype))

    def multiply(self, x: Narrow) -> Tensor:
        out = self._multiply(x.rows, self._weight, self._scales, x.dtype)
        return out if self.bias is None else out + self.bias

    def tensors(self) -> list[Tensor]:
        return [self._weight, self._scales] if self.bias is None else [self._weight, self._scales, self.bias]


class Reordered:
    """A layer whose weight's columns are in another order than its inputs."""

    def __init__(self, linear: CodedLinear, order: Tensor) -> None:
        self._linear, self._order = linear, order

    def __call__(self, x: Tensor) -> Tensor:
        # Not the layer's own call: another expert may have taken its tensors' place since.
        return CodedLinear.each([self._linear], [len(x)], x.index_select(1, self._order))

    def tensors(self) -> list[Tensor]:
        return [*self._linear.tensors(), self._order]


class SideBySide:
    """Layers of the same inputs that no one kernel computes, their outputs side by side."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self._linears], 1)

    def tensors(self) -> list[Tensor]:
        return [tensor for linear in self._linears for tensor in linear.tensors()]
