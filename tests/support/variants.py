"""Notes which variants of kernels are launched: one that is new after the warm-up would be compiled while requests wait."""

from typing import Any, NamedTuple

import torch

from penstock.executor.kernels.cuda.launch import Kernel


class Variant(NamedTuple):
    """Where kernels are interpreted nothing is compiled, and a variant is what a GPU would have compiled."""

    kernel: str
    options: dict[str, Any]  # constants too
    dtypes: tuple[torch.dtype, ...]  # of its tensors
    number_types: tuple[type, ...]


_LAUNCHED: dict[tuple[Any, ...], Variant] = {}
_launch = Kernel._launch


def variants() -> list[Variant]:
    """Return the variants that were launched since `forget_variants`, by the time of their first launch."""
    return list(_LAUNCHED.values())


def forget_variants() -> None:
    _LAUNCHED.clear()


def _note(self: Kernel, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    _launch(self, grid, *arguments, **options)
    dtypes = tuple(tensor.dtype for tensor in arguments[: self.num_pointers])
    number_types = tuple(type(number) for number in arguments[self.num_pointers :])
    variant = Variant(self.name, options, dtypes, number_types)
    _LAUNCHED.setdefault((self.name, dtypes, number_types, *options.items()), variant)


Kernel._launch = _note  # type: ignore[method-assign]
