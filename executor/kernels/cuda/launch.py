"""How a kernel is declared and launched.

What is compiled depends on a kernel's constants and on its tensors' dtypes, and on nothing else: numbers that differ from
step to step never choose another variant, and every pointer is aligned. So the variants that traffic can ask for are
known at the start, and a launch finds its variant by a short key.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

ALIGNMENT = 16  # bytes: what a pointer must be a multiple of for the wide loads that kernels are compiled with


class Kernel:
    """In place of `triton.jit`, for functions that a launcher launches; those called in kernels keep `triton.jit`.

    Strides that wide loads depend on are constants (`tl.constexpr`): a number that is not one is taken to be anything.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters
        self.name = function.__name__
        self._pointers = [name for name in parameters if name.endswith("_ptr")]
        numbers = [
            name
            for name, parameter in parameters.items()
            if parameter.annotation is not tl.constexpr and not name.endswith("_ptr")
        ]
        self._jit = triton.jit(function, do_not_specialize=numbers)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **options: Any) -> Any:
        """Pointers come first among a kernel's parameters, by position."""
        for name, tensor in zip(self._pointers, arguments, strict=False):
            assert isinstance(tensor, torch.Tensor), f"{self.name}: {name} is no tensor"
            assert tensor.data_ptr() % ALIGNMENT == 0, f"{self.name}: {name} is not aligned to {ALIGNMENT} bytes"
        return self._jit[grid](*arguments, **options)


kernel = Kernel
