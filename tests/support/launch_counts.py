"""Counts what a GPU would be given to run, on a CPU: Triton kernels, and torch operations that make or change numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction


@contextmanager
def launches() -> Iterator[list[str]]:
    """Collect the names of all launches, in order. Views and bare allocations launch nothing."""
    mode = _Launches()

    def run(kernel: InterpretedFunction, *arguments: Any, **options: Any) -> None:
        """Kernels are not interpreted, which takes minutes: what they would write decides no launch."""
        mode.names.append(kernel.fn.__name__)

    with mock.patch.object(InterpretedFunction, "run", run), mode:
        yield mode.names


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # what `reshape` or `linear` is made of shows whether it copies
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if _computes(func, args, kwargs, out):
            self.names.append(func.overloadpacket.__name__)
        return out


def _computes(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    if func._schema.is_mutable:
        return True
    if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
        return False
    given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, tuple(kwargs.values())))}
    return any(tensor.untyped_storage().data_ptr() not in given for tensor in _tensors(out) if tensor.numel())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple | list) else []
