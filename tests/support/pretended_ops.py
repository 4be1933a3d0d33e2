"""Operations of torch as the pretended GPU sees and repeats them: the tensors that each reads, writes and makes."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from tests.support.races import Place, here

aten = torch.ops.aten


class Op(NamedTuple):
    """One operation on plain tensors, as a graph repeats it."""

    func: Any
    args: Any
    kwargs: Any
    reads: list[tuple[torch.Tensor, Any]]  # and which of its elements, if not all: a function as in PICKING
    writes: list[tuple[torch.Tensor, Any]]
    created: list[tuple[int, torch.Tensor]]  # new tensors: which result, and the memory that it has
    origin: Place

    def repeat(self) -> None:
        results = tree_leaves(self.func(*self.args, **self.kwargs))
        for index, target in self.created:
            target.copy_(results[index])


def written_by(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Return the ids of the arguments that the operation writes."""
    places, names = written_arguments(func)
    return {id(args[place]) for place in places if place < len(args)} | {id(kwargs[n]) for n in names if n in kwargs}


@cache
def written_arguments(func: Any) -> tuple[list[int], list[str]]:
    written = [(at, a.name) for at, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    return [at for at, _ in written], [name for _, name in written]


def _pick_rows(offsets: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> torch.Tensor:
    return offsets.index_select(dim, index)


def _pick_each(offsets: torch.Tensor, indices: list[torch.Tensor | None], *_: Any) -> torch.Tensor:
    picked: torch.Tensor = aten.index.Tensor(offsets, indices)
    return picked


# These operations read or write the picked elements of their first argument.
PICKING: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((aten.index_select, aten.index_copy_, aten.index_add_, aten.index_fill_), _pick_rows),
    **dict.fromkeys((aten.index, aten.index_put_), _pick_each),
    aten.gather: lambda offsets, dim, index, *_: offsets.gather(dim, index),
}
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
WAITING = {aten.item, aten._local_scalar_dense, aten.equal, aten.is_nonzero}


def here_name() -> str:
    return here()[0][0].co_filename.rpartition("/")[2]


def is_kernel() -> bool:
    """Return whether the twin of a kernel runs, which reads numbers of the device where the kernel does: there."""
    name = here()[0][0].co_filename
    return "/twins/" in name
