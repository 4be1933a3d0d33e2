"""Adapters over the rows of products: y += (x down) up for each run of rows that have one, all of a product in one call.

On the CPU in C (csrc/cpu_low_rank.h), straight from each adapter's own weights; on a GPU over places of one size that
hold as many adapters as a step may have (places.py and cuda/adapter_products.py).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import _csrc
from penstock.executor.kernels.cpu_ops import addresses, describe_cpu

MOST_RANKS = 800  # of all parts of a product, as csrc/cpu_level.h has room for: three of 256, aligned
ALIGNED = 16  # numbers of which a row of a weight has a multiple


class LowRankPart(NamedTuple):
    up: Tensor  # [rank, width], scaled
    down: Tensor  # [rank, depth]
    column: int  # of y, where it begins


LowRank = Sequence[LowRankPart]  # of one adapter for one product; none: it changes nothing


def find_runs(numbers: np.ndarray) -> np.ndarray:
    """Return the runs of neighbouring rows [T] with the same adapter (0: none): [runs, 3] of first row, count, adapter."""
    bounds = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
    first = bounds[:-1]
    runs: np.ndarray = np.stack((first, np.diff(bounds), numbers[first]), 1)[numbers[first] != 0]
    return runs


class CpuAdapter:
    """One adapter's weights for all of a model's products."""

    def __init__(self, products: Sequence[LowRank]) -> None:
        self._kept: list[Any] = []  # what the structs point to
        self.structs = _csrc.ffi.new("struct penstock_adapter[]", len(products))
        for struct, parts in zip(self.structs, products, strict=True):
            if parts:
                self._describe(struct, parts)

    def _describe(self, struct: Any, parts: LowRank) -> None:
        dtype = torch.bfloat16 if all(map(_is_narrow, [t for p in parts for t in (p.up, p.down)])) else torch.float32
        shared = {id(part.down): part.down for part in parts}  # parts of one joined module have the same
        firsts = dict(zip(shared, accumulate((len(each) for each in shared.values()), initial=0), strict=False))
        down = _aligned(torch.cat([*shared.values()]).T, dtype)
        described = _csrc.ffi.new("struct penstock_adapter_part[]", len(parts))
        for each, part in zip(described, parts, strict=True):
            up, (rank, width) = _aligned(part.up, dtype), part.up.shape
            each.up, each.up_stride, each.first = up.data_ptr(), up.stride(0), firsts[id(part.down)]
            each.rank, each.column, each.width = rank, part.column, width
            self._kept.append(up)
            struct.num_weights += up.numel()
        self._kept += [down, described]
        assert down.stride(0) <= MOST_RANKS
        struct.down, struct.down_stride = down.data_ptr(), down.stride(0)
        struct.parts, struct.num_parts, struct.is_bfloat16 = described, len(parts), dtype is torch.bfloat16
        struct.num_weights += down.numel()


class CpuAdapters:
    """Those that are held, by number."""

    num_bytes = 0  # on a device

    def __init__(self, dtype: torch.dtype) -> None:
        self._held: dict[int, CpuAdapter] = {}
        self._dtype = dtype

    def hold(self, number: int, products: Sequence[LowRank]) -> None:
        self._held[number] = CpuAdapter(products)

    def forget(self, number: int) -> None:
        del self._held[number]

    def runs(self, numbers: np.ndarray) -> "CpuRuns":
        """numbers [T] of the tokens' adapters"""
        adapters = {number: self._held[number] for number in np.unique(numbers).tolist() if number}
        return CpuRuns(adapters, describe_cpu(self._dtype, None, None), numbers)


class CpuRuns:
    """Those of a step, as the C kernels take them."""

    def __init__(self, adapters: dict[int, CpuAdapter], cpu: Any, numbers: np.ndarray) -> None:
        self._adapters, self._cpu = adapters, cpu
        self._runs = find_runs(numbers)
        self.structs = _csrc.ffi.new("struct penstock_run[]", len(self._runs))
        for struct, (first, count, number) in zip(self.structs, self._runs.tolist(), strict=True):
            struct.first, struct.count, struct.adapters = first, count, adapters[number].structs
        self._lib: Any = _csrc.lib

    def __len__(self) -> int:
        return len(self.structs)

    def add(self, product: int, x: Tensor, y: Tensor) -> None:
        """x [T, depth], y [T, width], to which is added."""
        assert x.stride(1) == y.stride(1) == 1 and x.dtype is y.dtype
        strides = x.stride(0), y.stride(0)
        (at_x, at_y), depth = addresses(x, y), x.shape[1]
        self._lib.penstock_adapt(self._cpu, at_x, strides[0], at_y, strides[1], depth, len(self), self.structs, product)


def _is_narrow(weight: Tensor) -> bool:
    """Whether bfloat16 loses nothing of it: many adapters were trained so, and half as much is read."""
    return torch.equal(weight.bfloat16().float(), weight)


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % ALIGNED)).to(dtype).contiguous()
