"""Linear layers: products with one or several weights whose outputs are concatenated, in the device's fastest format.

`LinearMaker` chooses the format of each weight once, when it is loaded.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from penstock.executor.kernels import Fp8Rows, Ops, Rows
from penstock.executor.kernels.cpu_product import CpuProduct, is_repacked
from penstock.executor.kernels.eight_bits import pad_scales
from penstock.executor.kernels.stored_formats import BLOCK, BLOCKS
from penstock.executor.kernels.weight import EIGHT_BITS, GpuFormats, Weight, plain_weight

# The quantized weights that are not dequantized, besides `Packed` ones: on a CPU all, on a GPU MXFP4 or none.
KeptCodes = Literal["all", "MXFP4"] | None
# The memory of all tensors except codes and their scales, the part of it that was dequantized at load time, and codes.
MemoryKind = Literal["numbers", "widened", "codes"]


class Linear:
    """A linear layer [T, in] -> [T, out] with a bias [out]. C computes it if `product` is set, else `ops` by weight."""

    number = -1  # among the layers of the model that LoRA adapters may change

    def __init__(
        self, weights: Sequence[Weight], bias: Tensor | None, ops: Ops, product: CpuProduct | None = None
    ) -> None:
        self.weights, self.bias, self.product, self._ops = list(weights), bias, product, ops

    def __call__(self, x: Rows) -> Tensor:
        if self.product is not None:
            assert isinstance(x, Tensor)
            return self.product(x)
        if len(self.weights) == 1:
            return self._multiply(x, self.weights[0], self.bias)
        sizes = [weight.shape[0] for weight in self.weights]
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        return torch.cat([self._multiply(x, *each) for each in zip(self.weights, biases, strict=True)], 1)

    def _multiply(self, x: Rows, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(x, Tensor) and weight.format.multiplies_eight_bits and len(x) > self._ops.max_plain_rows:
            assert self._ops.blocks is not None
            x = Fp8Rows(self._ops.blocks.quantize(x), x.dtype)
        return self._ops.linear(x, weight, bias)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [T] of the single weight as [T, in], dequantized: an embedding lookup."""
        if self.product is not None:
            return self.product.rows(indices)
        (weight,) = self.weights
        return weight.format.look_up(weight, indices, dtype)

    def first(self, width: int) -> "Linear":
        """Return a layer with only the first outputs, in the same memory; the layer itself if its weight is packed."""
        if self.product is not None and len(self.weights) == 1:
            product = self.product.first(width)
            return Linear(product.weights, product.bias, self._ops, product)
        if self.plain is None:
            return self
        return Linear([self.weights[0].narrow(0, 0, width)], None, self._ops)

    @property
    def takes_normed(self) -> bool:
        """True if `ops` computes the layer as one product, and so accepts `NormedRows` inputs."""
        return self.product is None and len(self.weights) == 1

    @property
    def plain(self) -> Tensor | None:
        """The single weight if it is unquantized and computed by `ops`, else None."""
        return self.weights[0].codes if self.takes_normed and self.weights[0].is_numbers else None

    @property
    def kind(self) -> tuple[object, ...] | None:
        """A key that is equal for layers that can be stacked; None if this layer cannot be stacked."""
        if self.product is not None or len(self.weights) > 1:
            return None
        return *self.weights[0].kind, self.bias is None

    @property
    def takes_fp8(self) -> bool:
        """True if the layer multiplies in FP8, and so accepts `Fp8Rows` inputs."""
        return len(self.weights) == 1 and self.weights[0].format.multiplies_eight_bits

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the layer. Replacing their contents makes it another layer of the same shape."""
        tensors = [tensor for weight in self.weights for tensor in weight.tensors()]
        return tensors if self.bias is None else [*tensors, self.bias]


def multiply_each(linears: Sequence[Linear], counts: Sequence[int], x: Tensor) -> Tensor:
    """Apply linears[0] to the first counts[0] rows, linears[1] to the next counts[1], and so on: [T, in] -> [T, out].

    All layers have the same shape, and no count is 0.
    """
    products = [linear.product for linear in linears if linear.product is not None]
    if len(products) == len(linears):
        return CpuProduct.each(products, counts, x)
    return torch.cat([linear(part) for linear, part in zip(linears, x.split(list(counts)), strict=True)])


def make_linear(weight: Tensor, bias: Tensor | None, ops: Ops) -> Linear:
    """Return a linear layer with weight [out, in] and bias [out]; on a CPU the weight may be copied."""
    if is_repacked(weight):
        product = CpuProduct([plain_weight(weight)], weight.dtype, bias)
        return Linear(product.weights, product.bias, ops, product)
    return Linear([plain_weight(weight)], bias, ops)


class LinearMaker:
    """Builds linear layers from stored weights and counts their memory. Thread-safe."""

    def __init__(self, ops: Ops, kept_codes: KeptCodes, dtype: torch.dtype, device: torch.device) -> None:
        """`kept_codes` and `ops` select the weights that are not dequantized."""
        self._ops, self._kept, self._dtype, self._device = ops, kept_codes, dtype, device
        self.num_bytes: Counter[MemoryKind] = Counter()
        self.stored_bytes: Counter[str] = Counter()  # of weights that stay quantized, by the name of their storage
        self._lock = threading.Lock()

    def __call__(self, parts: Sequence[Weight], bias: Tensor | None) -> Linear:
        """Return a layer of these weights with concatenated outputs. Adjacent weights of one kind are joined."""
        if self._ops.blocks is not None and (blocks := join_blocks(parts, self._device)) is not None:
            for tensor in blocks.tensors():
                self.count(tensor)
            return Linear([blocks], bias, self._ops)
        weights: list[Weight] = []
        computed = [(part, self._as_codes(part)) for part in parts]
        for kind, run in groupby(
            computed, key=lambda pair: None if pair[1] is None else pair[1].format.join_key(pair[1])
        ):
            pairs = list(run)
            codes = [each for _, each in pairs if each is not None]
            self._note_storage(part for part, each in pairs if each is not None)
            if kind is None:
                weights.append(plain_weight(self.count(torch.cat([self.dequantize(part) for part, _ in pairs]))))
            elif self._kept == "all":
                weights += codes
            else:
                weights.append(codes[0].format.pack_for_gpu(codes, self._device))
        if all(is_repacked(each.codes) if each.is_numbers else self._kept == "all" for each in weights):
            product = CpuProduct(weights, self._dtype, bias)
            self._count_codes(own for each, own in zip(weights, product.weights, strict=True) if not each.is_numbers)
            return Linear(product.weights, product.bias, self._ops, product)
        self._count_codes(each for each in weights if not each.is_numbers)
        return Linear(weights, bias, self._ops)

    def table(self, part: Weight, is_head: bool) -> Linear:
        """Return a layer for embedding lookups. With `is_head` it is also the tied LM head, stored once for both."""
        codes = self._as_codes(part)
        if codes is not None and (self._kept == "all" or codes.format.has_lookup):
            return self([part], None)
        values = self.count(self.dequantize(part, copy=not is_head))
        if not is_head:
            return Linear([plain_weight(values)], None, self._ops)
        if values.device.type == "cpu" and not is_repacked(values):
            values = values.clone()  # it may be a view of a mapped file
        return make_linear(values, None, self._ops)

    def dequantize(self, part: Weight, copy: bool = False) -> Tensor:
        """Return a weight dequantized to the model's dtype on its device."""
        values = part.dequantize(self._device, self._dtype, copy)
        if not part.is_numbers:
            self.add_bytes("widened", values.nbytes)
        return values

    def count(self, tensor: Tensor) -> Tensor:
        self.add_bytes("numbers", tensor.nbytes)
        return tensor

    def add_bytes(self, kind: MemoryKind, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes[kind] += num_bytes

    def _note_storage(self, parts: Iterable[Weight]) -> None:
        with self._lock:
            for part in parts:
                self.stored_bytes[part.format.storage_name] += part.codes.nbytes

    def _count_codes(self, weights: Iterable[Weight]) -> None:
        self.add_bytes("codes", sum(tensor.nbytes for weight in weights for tensor in weight.tensors()))

    def _as_codes(self, part: Weight) -> Weight | None:
        """Return the quantized weight in a format that the device computes with; None if it must be dequantized."""
        if self._kept == "all":
            return part if part.format.codes_for_cpu(part) is not None else None
        # GPUs without FP8 conversion in registers have no FP8 products either (`ops.blocks` is None).
        computed = GpuFormats(self._kept == "MXFP4", self._ops.has_packed, self._ops.blocks is not None)
        return part.format.codes_for_gpu(part, computed)


def join_blocks(parts: Sequence[Weight], device: torch.device) -> Weight | None:
    """Concatenate the rows of `Blocks` weights, with scales in cuBLAS's layout. None if a weight has another format, if
    any but the last ends within a block, or if the kernels do not support the shape."""
    rows = [part.shape[0] for part in parts]
    if not all(part.format is BLOCKS for part in parts) or any(size % BLOCK for size in rows[:-1]):
        return None
    if sum(rows) % 16 or parts[0].shape[1] % BLOCK:
        return None
    codes = torch.cat([part.codes.to(device).view(torch.uint8) for part in parts]).view(EIGHT_BITS)
    scales = torch.cat([part.scales for part in parts if part.scales is not None])
    return Weight(BLOCKS, codes, pad_scales(scales.to(device)))
