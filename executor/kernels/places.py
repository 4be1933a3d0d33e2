"""Adapters on a device: as many places as a step may have adapters, all of one size, and what of a step goes where.

What a step needs and has no place yet is copied before it runs, over what was longest unused: work on a device is done in
order, so no earlier step still reads there.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels.low_rank import LowRank, find_runs
from penstock.executor.staging import send, send_list

ROWS = 16  # of a tile: what a product of tensor cores takes at least
Shape = tuple[int, list[int], int]  # of products alike: inputs, and outputs of each part; how many there are


def add_low_rank(
    x: Tensor,
    y: Tensor,
    tiles: Tensor,
    down: Tensor,
    up: Tensor,
    widths: Sequence[int],
    order: Tensor | None = None,
) -> None:
    """The twin of cuda/adapter_products.py. To y [T, width] is added what x [T, depth] gives for the rows of each tile.

    tiles [n, 3] int32: the first row, how many, and the place; down [places, parts, R, depth]; up [places, width, R], whose
    columns fall into parts of these widths. With an order [T] int64 a tile's rows are those that stand there, and a row of
    x is for as many of y as there are more of these.
    """
    for first, num_rows, place in tiles.tolist():
        rows = torch.arange(first, first + num_rows, device=y.device)
        rows = rows if order is None else order[rows]
        inner = torch.einsum("td,prd->tpr", x[rows // (len(y) // len(x))].float(), down[place].float()).to(x.dtype)
        sums = [inner[:, part].float() @ each.float().T for part, each in enumerate(up[place].split(list(widths)))]
        y[rows] = (y[rows].float() + torch.cat(sums, 1)).to(y.dtype)


class AdapterPlaces:
    def __init__(
        self, shapes: Sequence[Shape], most: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = max(16, 1 << (max_rank - 1).bit_length())
        self._device, self._add, self._shapes = device, _choose(device), shapes
        given: dict[str, Any] = {"dtype": dtype, "device": device}
        # Of products alike the places of one adapter lie together.
        self._down = [torch.zeros(most * num, len(widths), size, depth, **given) for depth, widths, num in shapes]
        self._up = [torch.zeros(most * num, sum(widths), size, **given) for _, widths, num in shapes]
        # By the number of the first of them, by which all are asked for.
        self._stacks = {
            number: stack for stack, number in enumerate(accumulate((num for *_, num in shapes), initial=0))
        }
        self._held: dict[int, Sequence[LowRank]] = {}
        self._at: dict[int, int] = {}  # the place of each adapter that has one, the last used one last
        self._free = list(range(most))
        for stack in {(num > 1, depth, *widths): stack for stack, (depth, widths, num) in enumerate(shapes)}.values():
            self._warm_up(stack)

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
        needed = dict.fromkeys(number for _, _, number, _ in runs)
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
            for start, count, number, _ in runs
            for first in range(start, start + count, ROWS)
        ]
        places = np.zeros(numbers.max(initial=0) + 1, dtype=np.int64) - 1
        places[[*needed]] = [self._at[number] for number in needed]
        return PlacedRuns(self, send_list(tiles, torch.int32, self._device), send(places[numbers], self._device))

    def _fill(self, place: int, products: Sequence[LowRank]) -> None:
        given = iter(products)
        for (_, widths, num), all_down, all_up in zip(self._shapes, self._down, self._up, strict=True):
            own, parts_of = slice(place * num, (place + 1) * num), list(islice(given, num))
            if not any(parts_of):
                all_down[own], all_up[own] = 0, 0
                continue
            down, up = (torch.zeros_like(each[own], device="cpu") for each in (all_down, all_up))
            columns = {sum(widths[:index]): index for index in range(len(widths))}
            for index, parts in enumerate(parts_of):
                for part in parts:
                    rank, width = part.up.shape
                    down[index, columns[part.column], :rank] = part.down
                    up[index, part.column : part.column + width, :rank] = part.up.T
            all_down[own], all_up[own] = down, up

    def add(self, product: int, x: Tensor, y: Tensor, tiles: Tensor, order: Tensor | None = None) -> None:
        stack = self._stacks[product]
        self._add(x, y, tiles, self._down[stack], self._up[stack], self._shapes[stack][1], order)

    def _warm_up(self, stack: int) -> None:
        """The kernels for products of this shape, before requests wait for them; all places are zeros yet."""
        (_, widths, num), down, up = self._shapes[stack], self._down[stack], self._up[stack]
        x, y = (down.new_zeros(1, size) for size in (down.shape[-1], up.shape[1]))
        tiles, order = send_list([(0, 1, 0)], torch.int32, self._device), torch.zeros_like(x[:, 0], dtype=torch.int64)
        self._add(x, y, tiles, down, up, widths, None if num == 1 else order)


class PlacedRuns:
    """Those of a step: its tiles, and the place of each token's adapter [T], -1 for none."""

    def __init__(self, of: AdapterPlaces, tiles: Tensor, places: Tensor, order: Tensor | None = None) -> None:
        self._of, self._tiles, self._places, self._order = of, tiles, places, order

    def add(self, product: int, x: Tensor, y: Tensor) -> None:
        if len(self._tiles):
            self._of.add(product, x, y, self._tiles, self._order)

    def of_experts(self, num_slots: int, tokens: Tensor, slots: Tensor) -> "PlacedRuns":
        places = self._places[tokens]
        is_ours = (places >= 0) & (slots >= 0) & (slots < num_slots)
        order, tiles = sort_rows(torch.where(is_ours, places * num_slots + slots, -1), len(self._of) * num_slots)
        return PlacedRuns(self._of, tiles, places, order)


def sort_rows(places: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """places [T] of rows, -1 for none -> an order of the rows [T], and its tiles; those at the end are empty. Nothing comes
    back to the host."""
    num_rows = len(places)
    at, order = places.sort(stable=True)
    index = torch.arange(num_rows, device=places.device)
    first, end = torch.searchsorted(at, at), torch.searchsorted(at, at, right=True)
    begins = (at >= 0) & ((index - first) % ROWS == 0)
    most = num_rows // ROWS + min(num_rows, num_places)  # every place may leave a tile unfilled
    tiles = torch.zeros(most + 1, 3, dtype=torch.int32, device=places.device)
    to = torch.where(begins, begins.cumsum(0) - 1, most)
    tiles[to] = torch.stack((index, (end - index).clamp(max=ROWS), at), 1).int()
    return order, tiles[:most]


def _choose(device: torch.device) -> Callable[..., Any]:
    from penstock.executor.kernels import has_expert_products

    if not has_expert_products(device):
        return add_low_rank
    from penstock.executor.kernels.cuda import adapter_products

    return adapter_products.add_low_rank
