"""Adapters on a device: as many places as a step may have adapters, all of one size, and what of a step goes where.

What a step needs and has no place yet is copied before it runs, over what was longest unused: work on a device is done in
order, so no earlier step still reads there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.executor.kernels.low_rank import AdapterRun, LowRank
from penstock.executor.staging import send

ROWS = 16  # of a tile: what a product of tensor cores takes at least
Shape = tuple[int, list[int]]  # of a product: inputs, and outputs of each part


def add_low_rank(x: Tensor, y: Tensor, tiles: Tensor, down: Tensor, up: Tensor, widths: Sequence[int]) -> None:
    """The twin of cuda/adapter_products.py. To y [T, width] is added what x [T, depth] gives for the rows of each tile.

    tiles [n, 3] int32: the first row, how many, and the place; down [places, parts, R, depth]; up [places, width, R], whose
    columns fall into parts of these widths.
    """
    for first, num_rows, place in tiles.tolist():
        rows = slice(first, first + num_rows)
        inner = torch.einsum("td,prd->tpr", x[rows].float(), down[place].float()).to(x.dtype)
        sums = [inner[:, part].float() @ each.float().T for part, each in enumerate(up[place].split(list(widths)))]
        y[rows] = (y[rows].float() + torch.cat(sums, 1)).to(y.dtype)


class AdapterPlaces:
    def __init__(
        self, shapes: Sequence[Shape], most: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = max(16, 1 << (max_rank - 1).bit_length())
        self._device, self._add = device, _choose(device)
        self._widths = [widths for _, widths in shapes]
        self._down = [
            torch.zeros(most, len(widths), size, depth, dtype=dtype, device=device) for depth, widths in shapes
        ]
        self._up = [torch.zeros(most, sum(widths), size, dtype=dtype, device=device) for _, widths in shapes]
        self._at: dict[int, int] = {}  # the place of each adapter that has one, the last used one last
        self._free = list(range(most))
        for number in {(depth, *widths): number for number, (depth, widths) in enumerate(shapes)}.values():
            self._warm_up(number)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._down, *self._up))

    def forget(self, number: int) -> None:
        if number in self._at:
            self._free.append(self._at.pop(number))

    def runs(self, runs: Sequence[AdapterRun], held: Mapping[int, Sequence[LowRank]]) -> "PlacedRuns":
        for number in held:  # first those that have one, so that none of the step's is taken
            if number in self._at:
                self._at[number] = self._at.pop(number)
        for number, products in held.items():
            if number not in self._at:
                place = self._free.pop() if self._free else self._at.pop(next(iter(self._at)))
                self._fill(place, products)
                self._at[number] = place
        tiles = [
            (first, min(ROWS, run.first + run.num_rows - first), self._at[run.adapter])
            for run in runs
            for first in range(run.first, run.first + run.num_rows, ROWS)
        ]
        return PlacedRuns(self, torch.tensor(tiles, dtype=torch.int32).view(-1, 3))

    def _fill(self, place: int, products: Sequence[LowRank]) -> None:
        for parts, widths, all_down, all_up in zip(products, self._widths, self._down, self._up, strict=True):
            down, up = all_down[place].zero_(), all_up[place].zero_()
            columns = {sum(widths[:index]): index for index in range(len(widths))}
            for part in parts:
                rank, width = part.up.shape
                down[columns[part.column], :rank].copy_(part.down)
                up[part.column : part.column + width, :rank].copy_(part.up.T)

    def add(self, product: int, x: Tensor, y: Tensor, tiles: Tensor) -> None:
        self._add(x, y, tiles, self._down[product], self._up[product], self._widths[product])

    def _warm_up(self, product: int) -> None:
        """The kernels for a product of this shape, before requests wait for them; all places are zeros yet."""
        down, up = self._down[product], self._up[product]
        x, y = (down.new_zeros(1, size) for size in (down.shape[-1], up.shape[1]))
        self.add(product, x, y, send(torch.tensor([[0, 1, 0]], dtype=torch.int32).numpy(), self._device))


class PlacedRuns:
    def __init__(self, places: AdapterPlaces, tiles: Tensor) -> None:
        self._places, self._tiles = places, send(tiles.numpy(), places._device)

    def add(self, product: int, x: Tensor, y: Tensor) -> None:
        if len(self._tiles):
            self._places.add(product, x, y, self._tiles)


def _choose(device: torch.device) -> Callable[..., Any]:
    from penstock.executor.kernels import has_expert_products

    if not has_expert_products(device):
        return add_low_rank
    from penstock.executor.kernels.cuda import adapter_products

    return adapter_products.add_low_rank
