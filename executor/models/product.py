"""How a linear layer came to be of a checkpoint's matrices: what adapters of these have to follow."""

from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.executor.parallel import RankGroup

# Which dimension of a weight the ranks share out: output rows (then each has part of the result), input
# columns (then the results are summed), or none.
Split = Literal["rows", "columns"] | None
# Into how many indivisible parts the dimension falls that is shared out, heads for instance: None, into single ones. Or
# the sizes of sections, each of which is shared out by itself.
Units = int | tuple[int, ...] | None
Span = tuple[int, int]


class Product(NamedTuple):
    """The arguments of `Weights.linear`, each one's own."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    splits: tuple[Split, ...]
    units: tuple[Units, ...]
    pieces: tuple[tuple[int, ...] | None, ...]

    def shape(self, group: RankGroup) -> tuple[int, list[int]]:
        """The rank's inputs, and the outputs of each part."""
        depth = self.columns if self.splits[0] != "columns" else _size(self._inputs(group))
        return depth, [_size(self._outputs(index, group)) for index in range(len(self.names))]

    def cut(self, index: int, up: Tensor, down: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
        """Of an adapter's B [rows, rank] and A [rank, columns] the rank's part, as [rank, width] and [rank, depth]."""
        if self.splits[index] == "columns":
            down = torch.cat([down[:, first:end] for first, end in self._inputs(group)], 1)
        up = torch.cat([up[first:end] for first, end in self._outputs(index, group)])
        if (kinds := self.pieces[index]) is not None:
            up = sorted_rows(up, kinds)
        return up.T.contiguous(), down.contiguous()

    def _outputs(self, index: int, group: RankGroup) -> list[Span]:
        size = self.rows[index]
        return shares(size, self.units[index], group) if self.splits[index] == "rows" else [(0, size)]

    def _inputs(self, group: RankGroup) -> list[Span]:
        return shares(self.columns, self.units[0], group)


def shares(size: int, units: Units, group: RankGroup) -> list[Span]:
    """The rank's of so many rows or columns, one span for each section."""
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
    """Rows that come in turns of so many of one kind, then so many of the next: all of a kind together."""
    turns = rows.unflatten(0, (-1, sum(kinds))).split(kinds, dim=1)
    return torch.cat([each.flatten(0, 1) for each in turns])
