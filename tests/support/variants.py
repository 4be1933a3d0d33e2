"""Which variants of kernels were launched: what is new after the warm-up would be compiled while requests wait."""

from typing import Any, NamedTuple

import torch

from penstock.executor.kernels.cuda.launch import Kernel


class Variant(NamedTuple):
    """Where kernels are interpreted nothing is compiled, and a variant is what a GPU would have compiled."""

    kernel: str
    given: dict[str, Any]  # constants and options
    dtypes: tuple[torch.dtype, ...]  # of its tensors
    device: int


_LAUNCHED: list[Variant] = []
_launch_slowly = Kernel._launch_slowly


def variants() -> list[Variant]:
    """Those launched by this process since this module was imported, by the time of their first launch."""
    return _LAUNCHED.copy()


def _note(
    self: Kernel,
    runtime: Any,
    key: tuple[Any, ...],
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    given: dict[str, Any],
) -> None:
    is_new = key not in self._known
    _launch_slowly(self, runtime, key, grid, arguments, given)
    if is_new:
        dtypes = tuple(tensor.dtype for tensor in arguments[: self._num_pointers])
        _LAUNCHED.append(Variant(self.name, given, dtypes, key[0]))


Kernel._launch_slowly = _note  # type: ignore[method-assign]
