"""Notes which variants of kernels are launched: one that is new after the warm-up would be compiled while requests wait."""

from typing import Any, NamedTuple

import torch

from penstock.executor.kernels.cuda.launch import Kernel


class Variant(NamedTuple):
    """Where kernels are interpreted nothing is compiled, and a variant is what a GPU would have compiled."""

    kernel: str
    given: dict[str, Any]  # constants and options
    dtypes: tuple[torch.dtype, ...]  # of its tensors


_LAUNCHED: dict[tuple[Any, ...], Variant] = {}
_launch = Kernel._launch


def variants() -> list[Variant]:
    """Return what this process has launched since this module was imported, by the time of the first launch."""
    return list(_LAUNCHED.values())


def _note(self: Kernel, grid: tuple[int, ...], *arguments: Any, **given: Any) -> None:
    _launch(self, grid, *arguments, **given)
    dtypes = tuple(tensor.dtype for tensor in arguments[: self.num_pointers])
    _LAUNCHED.setdefault((self.name, dtypes, *given.items()), Variant(self.name, given, dtypes))


Kernel._launch = _note  # type: ignore[method-assign]
