"""Linear layers on the CPU, in C (csrc/cpu_linear.h), over a weight that is repacked once.

A row's result is the same bits whatever other rows there are and on any number of threads, in float32 and in
bfloat16. Against oneDNN's prepacked product it was 1.0 to 1.3 times as fast at 1 and 16 rows of the default model's
layers and 1.02 to 1.05 times at 512 (two cores of Zen 5, bfloat16, benchmarks/bench_cpu_ops.py), and it needs none of
torch's private operators.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.kernels.cpu_ops import DTYPES, addresses, describe_cpu, levels
from penstock.executor.weight_memory import take


def is_repacked(weight: Tensor) -> bool:
    """Whether `CpuLinear` takes this weight and is the fastest for it: without AVX2, torch is."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.shape[1] % 2 == 0
        and levels()[-1] != "portable"
    )


class CpuLinear:
    """[T, in] -> [T, out] by weight [out, in] and bias [out]. The weight is copied; `in` is even."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, num_threads: int | None = None, level: str | None = None
    ) -> None:
        self._dtype = weight.dtype
        self._width, depth = weight.shape
        assert self._dtype in DTYPES and depth % 2 == 0
        self._lib = _csrc.lib
        self._cpu = describe_cpu(self._dtype, num_threads, level)
        self._elements_per_word = 2 if self._dtype is torch.bfloat16 else 1
        self._depth = depth // self._elements_per_word
        self._weight = _pack(weight, self._lib.penstock_cpu_columns(self._cpu.level))
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x, stride = self._in_words(x)
        y = torch.empty((rows, self._width), dtype=self._dtype)
        self._lib.penstock_linear(
            self._cpu,
            x.data_ptr(),
            stride,
            *addresses(self._weight, self._bias, y),
            rows,
            self._depth,
            self._width,
        )
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """[T] -> [T, in]: these rows of the weight, as they were given."""
        indices = indices.long().contiguous()
        y = torch.empty((len(indices), self._depth * self._elements_per_word), dtype=self._dtype)
        failed = self._lib.penstock_linear_rows(
            self._cpu, self._weight.data_ptr(), indices.data_ptr(), y.data_ptr(), len(indices), self._depth, self._width
        )
        assert not failed, "a number that none of the rows has"
        return y

    @staticmethod
    def each(linears: "Sequence[CpuLinear]", counts: Sequence[int], x: Tensor) -> Tensor:
        """All in one call, whose threads share the work of all layers; the same bits as one by one."""
        one = linears[0]
        assert all(linear._weight.shape == one._weight.shape for linear in linears)
        assert len(linears) == len(counts) and min(counts) > 0 and sum(counts) == len(x)
        x, stride = one._in_words(x)
        y = torch.empty((len(x), one._width), dtype=one._dtype)
        weights = torch.tensor([linear._weight.data_ptr() for linear in linears])
        biases = torch.tensor(addresses(*(linear._bias for linear in linears)))
        rows = torch.tensor(counts)
        failed = one._lib.penstock_linears(
            one._cpu,
            x.data_ptr(),
            stride,
            len(linears),
            *addresses(weights, biases, rows, y),
            one._depth,
            one._width,
        )
        if failed:
            raise MemoryError
        return y

    def _in_words(self, x: Tensor) -> tuple[Tensor, int]:
        """x as the kernel can read it, and the words from one row to the next."""
        assert x.dtype is self._dtype
        stride, element = x.stride()
        if element != 1 or stride % self._elements_per_word:
            x = x.contiguous()
            stride = x.shape[1]
        return x, stride // self._elements_per_word

    def describe(self, projection: Any) -> None:
        """Fill in a struct penstock_projection."""
        projection.weight, projection.bias = addresses(self._weight, self._bias)
        projection.depth, projection.width = self._depth, self._width

    def tensors(self) -> list[Tensor]:
        return [self._weight] if self._bias is None else [self._weight, self._bias]


def _pack(weight: Tensor, columns: int) -> Tensor:
    """[out, in] -> [out / columns, in, columns], zeros at the end; pairs of bfloat16 along `in` stay together."""
    width = weight.shape[0]
    words = weight.contiguous()
    if weight.dtype is torch.bfloat16:
        words = words.view(torch.int32)
    num_blocks = -(-width // columns)
    shape = num_blocks, words.shape[1], columns
    packed = torch.frombuffer(take(math.prod(shape) * 4), dtype=words.dtype).view(shape)
    whole = width // columns
    packed[:whole] = words[: whole * columns].unflatten(0, (-1, columns)).transpose(1, 2)
    if width % columns:
        packed[whole, :, : width % columns] = words[whole * columns :].T
    return packed
