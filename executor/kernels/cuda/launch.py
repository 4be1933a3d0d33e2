"""Declares kernels and launches them through Triton's public interface, `kernel[grid](…)`.

Which variant of a kernel is compiled depends on its constants, its options and its tensors' dtypes, and on nothing else:
numbers that differ from step to step never choose another variant, and every pointer is aligned. So the set of variants
that traffic needs is known at the start. A variant that traffic asked for first would be compiled while requests wait;
the tests hold that there is none.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.executor.kernels.cuda.dependent import is_dependent

ALIGNMENT = 16  # bytes: every pointer is a multiple, for the wide loads that kernels are compiled with


class Kernel:
    """Takes the place of `triton.jit` for functions that the host launches; functions called in kernels keep `triton.jit`.

    A launch passes pointers (`x_ptr`), then numbers by position, and constants (`tl.constexpr`) and options by name.
    Sizes that belong together are one constant, a `NamedTuple`. Strides that wide loads depend on are constants, because
    nothing is assumed of a number.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters
        self._names = [name for name, parameter in parameters.items() if parameter.annotation is not tl.constexpr]
        self.name = function.__name__
        pointers = [name for name in self._names if name.endswith("_ptr")]
        self.num_pointers = len(pointers)
        numbers = self._names[self.num_pointers :]
        assert self._names == pointers + numbers, f"{self.name}: a number stands before a pointer"
        self._jit = triton.jit(function, do_not_specialize=numbers)
        self._takes_turns = not {"take_turn", "wait_turn"}.isdisjoint(function.__code__.co_names)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **given: Any) -> None:
        assert len(arguments) == len(self._names), f"{self.name}: {len(arguments)} arguments"
        named = dict(zip(self._names, arguments, strict=True))
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                assert value.data_ptr() % ALIGNMENT == 0, f"{self.name}: {name} not aligned to {ALIGNMENT} bytes"
            else:
                # An integer is 32 bits wide to the compiled kernel: Triton would compile another one for a larger.
                is_fine = isinstance(value, float) or (type(value) is int and -(2**31) <= value < 2**31)
                assert is_fine, f"{self.name}: {name} is {value}, no float and no integer of 32 bits"
        if self._takes_turns:
            given["launch_pdl"] = is_dependent()
        self._jit[grid](**named, **given)


kernel = Kernel
