"""Adapters on a device: as many places as a step may have adapters, all of one size, and what of a step goes where.

What a step needs and has no place yet is copied before it runs, over what was longest unused: work on a device is done in
order, so no earlier step still reads there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels.low_rank import LowRank, find_runs
from penstock.executor.staging import send_list

ROWS = 16  # of a tile: what a product of tensor cores takes at least
Shape = tuple[int, list[int]]  # of a product: inputs, and outputs of each part


class AdapterPlaces:
    def __init__(
        self, shapes: Sequence[Shape], most: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = max(16, 1 << (max_rank - 1).bit_length())
        self._device, self._add, self._shapes = device, _load_kernel(), shapes
        given: dict[str, Any] = {"dtype": dtype, "device": device}
        self._down = [torch.zeros(most, len(widths), size, depth, **given) for depth, widths in shapes]
        self._up = [torch.zeros(most, sum(widths), size, **given) for _, widths in shapes]
        self._held: dict[int, Sequence[LowRank]] = {}
        self._at: dict[int, int] = {}  # the place of each adapter that has one, the last used one last
        self._free = list(range(most))

    def __len__(self) -> int:
        return len(self._at) + len(self._free)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._down, *self._up))

    def hold(self, number: int, products: Sequence[LowRank]) -> None:
        self._held[number] = products

    def forget(self, number: int) -> None:
        del self._held[number]
        if number in self._at:
            self._free.append(self._at.pop(number))

    def runs(self, numbers: np.ndarray) -> "PlacedRuns":
        """numbers [T] of the tokens' adapters"""
        runs = find_runs(numbers).tolist()
        needed = dict.fromkeys(number for _, _, number in runs)
        for number in needed:  # first those that have one, so that none of the step's is taken
            if number in self._at:
                self._at[number] = self._at.pop(number)
        for number in needed:
            if number not in self._at:
                place = self._free.pop() if self._free else self._at.pop(next(iter(self._at)))
                self._fill(place, self._held[number])
                self._at[number] = place
        tiles = [
            (first, min(ROWS, start + count - first), self._at[number])
            for start, count, number in runs
            for first in range(start, start + count, ROWS)
        ]
        return PlacedRuns(self, send_list(tiles, torch.int32, self._device))

    def _fill(self, place: int, products: Sequence[LowRank]) -> None:
        for (_, widths), all_down, all_up, parts in zip(self._shapes, self._down, self._up, products, strict=True):
            if not parts:
                all_down[place], all_up[place] = 0, 0
                continue
            down, up = (torch.zeros_like(each[place], device="cpu") for each in (all_down, all_up))
            columns = {sum(widths[:index]): index for index in range(len(widths))}
            for part in parts:
                rank, width = part.up.shape
                down[columns[part.column], :rank] = part.down
                up[part.column : part.column + width, :rank] = part.up.T
            all_down[place], all_up[place] = down, up

    def add(self, product: int, x: Tensor, y: Tensor, tiles: Tensor) -> None:
        self._add(x, y, tiles, self._down[product], self._up[product], self._shapes[product][1])


class PlacedRuns:
    """The tiles of one step."""

    def __init__(self, of: AdapterPlaces, tiles: Tensor) -> None:
        self._of, self._tiles = of, tiles

    def add(self, product: int, x: Tensor, y: Tensor) -> None:
        if len(self._tiles):
            self._of.add(product, x, y, self._tiles)


def _load_kernel() -> Callable[..., None]:
    from penstock.executor.kernels.cuda.adapter_products import add_low_rank

    return add_low_rank
