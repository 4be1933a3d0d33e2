"""Applies LoRA adapters to products: y += (x down) up for each run of rows with an adapter, in one call per product.

On a CPU these are products of runs of rows with different weights, as those of experts (cpu_product.py). On a GPU a
Triton kernel (cuda/adapter_products.py) reads slots of equal size, as many as a step may have adapters.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import _csrc
from penstock.executor.kernels.cpu_ops import addresses, describe_cpu
from penstock.executor.kernels.cpu_product import CpuProduct
from penstock.executor.kernels.select import cuda_kernels
from penstock.executor.kernels.weight import plain_weight
from penstock.executor.staging import send_list

ROWS = 16  # rows of a tile on a GPU: the minimum for a tensor-core product
Shape = tuple[int, list[int]]  # the shape of a product: number of inputs, and number of outputs of each part


class LoraPart(NamedTuple):
    up: Tensor  # [rank, width], scaled
    down: Tensor  # [rank, depth]
    column: int  # the first column of y that this part changes


LoraProduct = Sequence[LoraPart]  # one adapter's parts for one product; empty: the adapter does not change it


def find_runs(adapter_numbers: np.ndarray) -> np.ndarray:
    """Return runs of adjacent rows with the same adapter: [T] numbers (0: none) -> [runs, 3] first, count, number."""
    bounds = np.flatnonzero(np.diff(adapter_numbers, prepend=-1, append=-1))
    first = bounds[:-1]
    runs: np.ndarray = np.stack((first, np.diff(bounds), adapter_numbers[first]), 1)[adapter_numbers[first] != 0]
    return runs


class CpuAdapter:
    """One adapter's weights for all products of a model, as C structs."""

    def __init__(self, products: Sequence[LoraProduct], dtype: torch.dtype) -> None:
        self._dtype = dtype  # of the model
        self._kept: list[Any] = []  # keeps alive the objects that the structs point to
        self.structs = _csrc.ffi.new("struct penstock_adapter[]", len(products))
        for struct, parts in zip(self.structs, products, strict=True):
            if parts:
                self._describe(struct, parts)

    def _describe(self, struct: Any, parts: LoraProduct) -> None:
        # bfloat16, in which many adapters were trained, halves the bytes to read.
        is_exact = all(torch.equal(each.bfloat16().float(), each) for part in parts for each in (part.up, part.down))
        dtype = torch.bfloat16 if is_exact else self._dtype
        shared = {id(part.down): _even(part.down.T).T for part in parts}  # parts of one joined module share it
        firsts = dict(zip(shared, accumulate((len(each) for each in shared.values()), initial=0), strict=False))
        described = _csrc.ffi.new("struct penstock_part[]", len(parts))
        for index, part in enumerate(parts):
            up = _even(part.up.T)
            described[index] = self._pack(up, dtype)
            each = described[index]
            each.column, each.input, each.depth = part.column, firsts[id(part.down)], up.shape[1]
        struct.down = self._pack(_even(torch.cat([*shared.values()])), dtype)
        struct.ups, struct.num_ups = described, len(parts)
        self._kept.append(described)

    def _pack(self, weight: Tensor, dtype: torch.dtype) -> Any:
        """Pack a weight [out, in] once, converted to `dtype`; return its struct penstock_part."""
        product = CpuProduct([plain_weight(weight.to(dtype))], self._dtype)
        self._kept.append(product)
        return product.parts[0]


class CpuAdapters:
    """The loaded adapters by number, for a CPU."""

    num_bytes = 0  # device memory

    def __init__(self, dtype: torch.dtype) -> None:
        self._held: dict[int, CpuAdapter] = {}
        self._dtype, self._cpu = dtype, describe_cpu(dtype, None, None)

    def hold(self, number: int, products: Sequence[LoraProduct]) -> None:
        self._held[number] = CpuAdapter(products, self._dtype)

    def forget(self, number: int) -> None:
        del self._held[number]

    def runs(self, adapter_numbers: np.ndarray) -> "CpuRuns":
        """Return the runs of tokens with the same adapter. adapter_numbers [T]: 0 for none."""
        runs = [(first, count, self._held[number]) for first, count, number in find_runs(adapter_numbers).tolist()]
        return CpuRuns(runs, self._cpu)


class CpuRuns:
    """The runs of a step's rows with adapters, as the C kernels read them."""

    def __init__(self, runs: list[tuple[int, int, CpuAdapter]], cpu: Any) -> None:
        self._runs, self._cpu = runs, cpu  # keeps alive the adapters that the structs point to
        self.structs = _csrc.ffi.new("struct penstock_run[]", [(*run, adapter.structs) for *run, adapter in runs])
        self._lib: Any = _csrc.lib

    def __len__(self) -> int:
        return len(self.structs)

    def add(self, product: int, x: Tensor, y: Tensor) -> None:
        """Add the adapters' contribution for x [T, depth] to y [T, width]."""
        assert x.stride(1) == y.stride(1) == 1 and x.dtype is y.dtype
        if x.stride(0) % 2 or x.shape[1] % 2:
            x = _even(x)
        sizes = x.stride(0), y.stride(0), x.shape[1], len(self), product
        if self._lib.penstock_adapt(self._cpu, [(*addresses(x, y), self.structs, *sizes)]):
            raise MemoryError(f"no memory for the adapters of {len(x)} rows")


def _even(x: Tensor) -> Tensor:
    """Return x with an even number of columns, the last one zero where it is added."""
    return F.pad(x, (0, x.shape[1] % 2))


class LoraSlots:
    """The loaded adapters, and as many slots of equal size on the device as a step may have adapters.

    Before a step runs, each of its adapters without a slot is copied to a free slot, or over the least recently used
    adapter. The device runs work in order, so no earlier step still reads that slot.
    """

    def __init__(
        self, shapes: Sequence[Shape], most: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = max(16, 1 << (max_rank - 1).bit_length())
        self._device, self._add, self._shapes = device, _load_kernel(), shapes
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._down = [torch.zeros(most, len(widths), size, depth, **options) for depth, widths in shapes]
        self._up = [torch.zeros(most, sum(widths), size, **options) for _, widths in shapes]
        self._held: dict[int, Sequence[LoraProduct]] = {}
        self._at: dict[int, int] = {}  # adapter → its slot, the most recently used last
        self._free = list(range(most))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._down, *self._up))

    def hold(self, number: int, products: Sequence[LoraProduct]) -> None:
        self._held[number] = products

    def forget(self, number: int) -> None:
        del self._held[number]
        if number in self._at:
            self._free.append(self._at.pop(number))

    def runs(self, adapter_numbers: np.ndarray) -> "SlotRuns":
        """Return the runs of tokens with the same adapter. adapter_numbers [T]: 0 for none."""
        return SlotRuns(self, send_list(self.tiles(adapter_numbers), torch.int32, self._device))

    def fixed_runs(self, most_tiles: int) -> "SlotRuns":
        """Return runs at a fixed address, for a graph; `SlotRuns.set` writes them before a replay."""
        return SlotRuns(self, torch.zeros(most_tiles, 3, dtype=torch.int32, device=self._device))

    def tiles(self, adapter_numbers: np.ndarray) -> list[tuple[int, int, int]]:
        """Return the first row, number of rows and slot of every tile, after giving each adapter a slot."""
        runs = find_runs(adapter_numbers).tolist()
        needed = dict.fromkeys(number for _, _, number in runs)
        for number in needed:  # first mark those with a slot as used, so that no slot of this step is reused
            if number in self._at:
                self._at[number] = self._at.pop(number)
        for number in needed:
            if number not in self._at:
                adapter_slot = self._free.pop() if self._free else self._at.pop(next(iter(self._at)))
                self._fill(adapter_slot, self._held[number])
                self._at[number] = adapter_slot
        return [
            (first, min(ROWS, start + count - first), self._at[number])
            for start, count, number in runs
            for first in range(start, start + count, ROWS)
        ]

    def _fill(self, adapter_slot: int, products: Sequence[LoraProduct]) -> None:
        for (_, widths), all_down, all_up, parts in zip(self._shapes, self._down, self._up, products, strict=True):
            if not parts:
                all_down[adapter_slot], all_up[adapter_slot] = 0, 0
                continue
            down, up = (torch.zeros_like(each[adapter_slot], device="cpu") for each in (all_down, all_up))
            columns = {sum(widths[:index]): index for index in range(len(widths))}
            for part in parts:
                rank, width = part.up.shape
                down[columns[part.column], :rank] = part.down
                up[part.column : part.column + width, :rank] = part.up.T
            all_down[adapter_slot], all_up[adapter_slot] = down, up

    def add(self, product: int, x: Tensor, y: Tensor, tiles: Tensor) -> None:
        self._add(x, y, tiles, self._down[product], self._up[product], self._shapes[product][1])


class SlotRuns:
    """The runs of a step's rows with adapters, cut into tiles for the GPU kernel."""

    def __init__(self, of: LoraSlots, tiles: Tensor) -> None:
        self._of, self._tiles = of, tiles

    def set(self, adapter_numbers: np.ndarray, starts: np.ndarray) -> None:
        """Change the runs in place to those of rows with adapter_numbers [R] and token starts [R + 1]. Tiles that are
        left over have no rows."""
        tiles = self._of.tiles(np.repeat(adapter_numbers, np.diff(starts)))
        spare = len(self._tiles) - len(tiles)
        self._tiles.copy_(send_list([*tiles, *[(0, 0, 0)] * spare], torch.int32, self._tiles.device))

    def add(self, product: int, x: Tensor, y: Tensor) -> None:
        if len(self._tiles):
            self._of.add(product, x, y, self._tiles)


def _load_kernel() -> Callable[..., None]:
    add: Callable[..., None] = cuda_kernels().adapter_products.add_lora
    return add
