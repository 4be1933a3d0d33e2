"""Provides a model's tensors while it is built: checks name and shape, digests, slices for the rank and converts.

A model's constructor is the only list of its tensors: every tensor that it requests must exist in the expected shape,
and the checkpoint must not contain any other tensor.
"""

import math
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.eplb import Plan
from penstock.executor.kernels import Ops
from penstock.executor.kernels.linear import KeptCodes, Linear, LinearMaker
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import CPU, EIGHT_BITS, Weight, plain_weight
from penstock.executor.loading.checkpoint import Checkpoint
from penstock.executor.loading.dummy import DummyWeights
from penstock.executor.loading.quantization import SUFFIX, scales_shape
from penstock.executor.machine import usable_cores
from penstock.executor.models.digests import Digests
from penstock.executor.parallel import RankGroup
from penstock.executor.progress import quarters
from penstock.executor.protocol import ExecutorError

Layer = TypeVar("Layer")
# The dimension by which a weight is split over the ranks: output rows (each rank has a part of the result), input
# columns (the results are summed), or none.
Split = Literal["rows", "columns"] | None
# The number of indivisible parts, such as heads, of the split dimension; None: single rows or columns. Or the sizes of
# sections, each of which is split separately.
Units = int | tuple[int, ...] | None
Span = tuple[int, int]
LOAD_THREADS = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointReader:
    """Reads tensors of an expected shape from a checkpoint, and records which were read."""

    def __init__(
        self, checkpoint: Checkpoint, where: str, must_be_finite: Callable[[str], bool] = lambda _name: False
    ) -> None:
        """`must_be_finite(name)` tells whether the numbers of a tensor must be checked to be finite."""
        self._checkpoint, self._where, self._must_be_finite = checkpoint, where, must_be_finite
        self._names = set(checkpoint.names())
        self._read: set[str] = set()

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor | Weight:
        is_checked = self._must_be_finite(name)
        name = self.check(name, shape)
        stored = self._checkpoint.read(name)
        if is_checked and not _is_finite(stored):
            raise ExecutorError(f"{self._where}: tensor {name!r} has numbers that are not finite")
        return stored

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """Check that the tensor exists in this shape, without reading it; return its name in the checkpoint."""
        if name not in self._names and name.removeprefix("model.") in self._names:
            name = name.removeprefix("model.")  # embedding models are saved without a head and this prefix
        if name not in self._names:
            raise ExecutorError(f"{self._where}: tensor {name!r} of shape {list(shape)} is missing")
        found = self._checkpoint.shape(name)
        if found != shape:
            raise ExecutorError(
                f"{self._where}: tensor {name!r} has shape {list(found)}; the config calls for {list(shape)}"
            )
        self._read.add(name)
        return name

    def pass_over(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor that another rank reads exists, with its scales if it is stored in FP8."""
        self._read.add(f"{self.check(name, shape)}{SUFFIX}")

    def check_all_read(self, names: Collection[str]) -> None:
        """Raise ExecutorError if some of these tensors are unread."""
        left = sorted(name for name in names if not (name in self._read or self._is_empty_bias(name)))
        if left:
            raise ExecutorError(
                f"{self._where}: {len(left)} tensors that the architecture does not have: "
                f"{', '.join(map(repr, left[:5]))}{' …' if len(left) > 5 else ''}"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Tell whether this is a bias of zeros, which AutoGPTQ wrote for every quantized layer."""
        stored = self._checkpoint.read(name) if name.endswith(".bias") and self._checkpoint.has_codes else None
        return isinstance(stored, Tensor) and not stored.any()


def _is_finite(stored: Tensor | Weight) -> bool:
    if isinstance(stored, Weight):
        stored = stored.dequantize(CPU, torch.float32)
    elif stored.element_size() == 1:  # FP8, where finding a NaN requires a conversion of all numbers
        stored = stored.float() if stored.dtype.is_floating_point else torch.zeros(1)
    return not stored.numel() or all(map(math.isfinite, (float(end) for end in stored.aminmax())))


class Matrix(NamedTuple):
    """One of the checkpoint's matrices in a linear layer."""

    name: str  # without ".weight"
    rows: int
    split: Split = None
    units: Units = None
    has_bias: bool = False
    # Numbers of rows: the stored rows alternate between kinds in runs of these lengths; the layer groups each kind.
    pieces: tuple[int, ...] | None = None


class Product(NamedTuple):
    """The composition of a linear layer: the arguments of `Weights.linear`. LoRA adapters of its matrices are sliced in
    the same way."""

    columns: int
    matrices: tuple[Matrix, ...]

    def shape(self, group: RankGroup) -> tuple[int, list[int]]:
        """Return the rank's number of inputs, and of outputs of each matrix."""
        depth = self.columns if self.matrices[0].split != "columns" else _size(self._inputs(group))
        return depth, [_size(_outputs(matrix, group)) for matrix in self.matrices]

    def cut(self, matrix: Matrix, up: Tensor, down: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
        """Slice an adapter's B [rows, rank] and A [rank, columns] for this rank: [rank, width] and [rank, depth]."""
        if matrix.split == "columns":
            down = torch.cat([down[:, first:end] for first, end in self._inputs(group)], 1)
        up = torch.cat([up[first:end] for first, end in _outputs(matrix, group)])
        if matrix.pieces is not None:
            up = sorted_rows(up, matrix.pieces)
        return up.T.contiguous(), down.contiguous()

    def _inputs(self, group: RankGroup) -> list[Span]:
        return shares(self.columns, self.matrices[0].units, group)


def _outputs(matrix: Matrix, group: RankGroup) -> list[Span]:
    return shares(matrix.rows, matrix.units, group) if matrix.split == "rows" else [(0, matrix.rows)]


class Weights:
    """Provides the rank's part of each tensor in the model's dtype on its device."""

    def __init__(
        self,
        read: CheckpointReader | DummyWeights,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup,
        progress: Callable[[str], None],
        ops: Ops,
        digests: Digests,
        placement: Plan | None = None,
        kept_codes: KeptCodes = None,
        has_adapters: bool = False,
    ) -> None:
        """`kept_codes` says which codes linear layers compute with (`LinearMaker`). Other codes are dequantized to
        `dtype`, as are FP8 weights without `ops.blocks`."""
        self._read, self.dtype, self._device, self._progress = read, dtype, device, progress
        self.group = group
        self.has_adapters = has_adapters
        self.placement = placement  # of whole experts in the ranks' slots; None: every rank has a slice of each expert
        self.ops = ops
        self.linear_maker = LinearMaker(ops, kept_codes, dtype, device)
        # The composition of each layer made by `linear`. Experts' layers are dropped once their weights are stacked.
        self.products: WeakKeyDictionary[Linear, Product] = WeakKeyDictionary()
        self._digests = digests

    def tensor(self, name: str, shape: tuple[int, ...], split: Split = None, units: Units = None) -> Tensor:
        """Return the rank's part of a tensor in the model's dtype."""
        parts = self._cut(self._fetch(name, shape), split, units)
        # Copied even if nothing is converted, because the original may be a view of a mapped file.
        return self.linear_maker.count(_join([self.linear_maker.dequantize(part, copy=True) for part in parts]))

    def table(self, name: str, shape: tuple[int, ...], is_head: bool) -> Linear:
        """Return a layer with the rank's rows of an embedding; with `is_head` it is also the LM head."""
        (part,) = self._cut(self._fetch(name, shape), "rows", None)
        return self.linear_maker.table(part, is_head)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """Return a norm's weight in float32, with `offset` added to the stored values."""
        return self.linear_maker.count(self._fetch(name, (size,)).dequantize(self._device, torch.float32) + offset)

    def float32(self, name: str, shape: tuple[int, ...], split: Split = None, units: Units = None) -> Tensor:
        """Return the rank's part of a tensor that is used in float32 whatever the model's dtype."""
        parts = self._cut(self._fetch(name, shape), split, units)
        values = [part.dequantize(self._device, torch.float32, copy=True) for part in parts]
        return self.linear_maker.count(_join(values))

    def pass_over(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists that only other ranks read."""
        if isinstance(self._read, CheckpointReader):
            self._read.pass_over(name, shape)

    def linear(self, columns: int, *matrices: Matrix) -> Linear:
        """Return a linear layer of one or several matrices with as many columns, outputs concatenated."""
        own = [self._own(matrix, columns) for matrix in matrices]
        layer = self.linear_maker([weight for weights in own for weight in weights], self._bias(matrices, own))
        self.products[layer] = Product(columns, matrices)
        return layer

    def _own(self, matrix: Matrix, columns: int) -> list[Weight]:
        """Return the rank's slices of a matrix, one for each section."""
        cuts = self._cut(self._fetch(f"{matrix.name}.weight", (matrix.rows, columns)), matrix.split, matrix.units)
        if matrix.pieces is None:
            return cuts
        (cut,) = cuts
        by_kind = cut.take(sorted_rows(torch.arange(cut.shape[0]), matrix.pieces))
        self._count_dequantized(cut, [by_kind])
        return [by_kind]

    def _bias(self, matrices: tuple[Matrix, ...], own: list[list[Weight]]) -> Tensor | None:
        """Return the concatenated biases, with zeros for matrices without a bias; None if there are only zeros."""
        if not any(matrix.has_bias for matrix in matrices):
            return None
        biases = []
        for (name, rows, split, units, has_bias, pieces), weights in zip(matrices, own, strict=True):
            assert pieces is None
            if has_bias:
                biases.append(self.tensor(f"{name}.bias", (rows,), "rows" if split == "rows" else None, units))
            else:
                width = sum(weight.shape[0] for weight in weights)
                biases.append(torch.zeros(width, dtype=self.dtype, device=self._device))
        if matrices[0].split == "columns" and not self.group.is_first:
            return None  # only one rank adds the bias to the sum
        return torch.cat(biases)

    def layers(self, num_layers: int, build: Callable[[int], Layer]) -> list[Layer]:
        """Build layers in parallel, so that reading, digesting, converting and reordering overlap."""
        threads = min(LOAD_THREADS, usable_cores())
        with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
            built = pool.map(build, range(num_layers))
            return list(quarters(built, num_layers, "Loaded {} of {} layers", self._progress))

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Weight:
        return read_weight(self._stored, name, shape)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor | Weight:
        stored = self._read(name, shape)
        if isinstance(stored, Tensor):
            stored = stored.contiguous()
        self._digests.add(name, shape, stored)
        return stored

    def _cut(self, part: Weight, split: Split, units: Units) -> list[Weight]:
        """Return the rank's slices of a weight, one for each section."""
        if split is None or self.group.world == 1:
            return [part]
        dim = 0 if split == "rows" else 1
        cuts = [part.narrow(dim, first, end - first) for first, end in shares(part.shape[dim], units, self.group)]
        self._count_dequantized(part, cuts)
        return cuts

    def _count_dequantized(self, before: Weight, after: list[Weight]) -> None:
        """Count the weights that slicing or reordering within a block or a group has dequantized."""
        if not before.is_numbers:
            num_widened = sum(weight.codes.numel() for weight in after if weight.is_numbers)
            self.linear_maker.add_bytes("widened", num_widened * self.dtype.itemsize)


def read_weight(read: Callable[[str, tuple[int, ...]], Tensor | Weight], name: str, shape: tuple[int, ...]) -> Weight:
    """Read a weight as it is stored, with its scales if it is stored in FP8."""
    values = read(name, shape)
    if isinstance(values, Weight):
        return values
    if values.dtype is not EIGHT_BITS:
        return plain_weight(values, name)
    if len(shape) != 2:
        raise ExecutorError(f"tensor {name!r} of shape {list(shape)} is stored in eight bits; only matrices can be")
    scales = read(f"{name}{SUFFIX}", scales_shape(*shape))
    assert isinstance(scales, Tensor)
    return Weight(BLOCKS, values, scales, name=name)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shares(size: int, units: Units, group: RankGroup) -> list[Span]:
    """Return the rank's share of `size` rows or columns, one span for each section."""
    if isinstance(units, tuple):
        starts = accumulate(units, initial=0)
        own = (group.share(section) for section in units)
        return [(start + first, start + end) for start, (first, end) in zip(starts, own, strict=False)]
    first, end = group.share(units or size)
    unit = size // (units or size)
    return [(first * unit, end * unit)]


def _size(spans: list[Span]) -> int:
    return sum(end - first for first, end in spans)


def sorted_rows(rows: Tensor, kinds: tuple[int, ...]) -> Tensor:
    """Reorder rows that alternate between kinds, in runs of the lengths `kinds`, so that each kind is contiguous."""
    turns = rows.unflatten(0, (-1, sum(kinds))).split(kinds, dim=1)
    return torch.cat([each.flatten(0, 1) for each in turns])
