"""How a kernel is declared and launched.

What is compiled depends on a kernel's constants and on its tensors' dtypes, and on nothing else: numbers that differ from
step to step never choose another variant, and every pointer is aligned. So the variants that traffic can ask for are
known at the start, and must not grow with traffic: what is new is compiled while requests wait. A launch finds its
variant by a short key and hands it to Triton's launcher in C itself. Triton's own way there takes several times as long, for every launch of a step.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import cache, partial, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.executor.kernels.cuda.dependent import is_dependent

ALIGNMENT = 16  # bytes: what a pointer must be a multiple of for the wide loads that kernels are compiled with
# What Triton 3.6's launcher takes before a kernel's own arguments: the grid, the stream, the function, whether all
# programs run at once, whether it may start early, two kinds of scratch memory, warps and such, three things for hooks.
KNOWN_INTERFACE = "iiiKKppOOOOOO"

_addresses, _dtypes, _devices = torch.Tensor.data_ptr, attrgetter("dtype"), torch.Tensor.get_device


class Kernel:
    """In place of `triton.jit`, for functions that a launcher launches; those called in kernels keep `triton.jit`.

    A launch gives pointers (`x_ptr`), then numbers by position, and constants (`tl.constexpr`) and options by name.
    Sizes that go together are one constant, a `NamedTuple`.
    Strides that wide loads depend on are constants: a number is taken to be anything.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters
        given = [name for name, parameter in parameters.items() if parameter.annotation is not tl.constexpr]
        self.name = function.__name__
        self._pointers = [name for name in given if name.endswith("_ptr")]
        self._num_pointers = len(self._pointers)
        self._numbers = given[self._num_pointers :]
        assert given == self._pointers + self._numbers, f"{self.name}: a number stands before a pointer"
        # The launcher in C takes all parameters in their order, with anything in the constants' places: the None at -1.
        self._arrange = itemgetter(*(given.index(name) if name in given else -1 for name in parameters))
        self._jit = triton.jit(function, do_not_specialize=self._numbers)
        self._takes_turns = "take_turn" in function.__code__.co_names
        self._known: dict[tuple[Any, ...], _Direct | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **given: Any) -> None:
        runtime = _runtime()
        if self._takes_turns:
            given["launch_pdl"] = is_dependent()
        tensors = arguments[: self._num_pointers]
        addresses = [*map(_addresses, tensors)]
        assert not reduce(or_, addresses) % ALIGNMENT, self._misaligned(tensors)
        device = runtime.current_device()
        key = (device, *map(_dtypes, tensors), *given, *given.values())
        direct = self._known.get(key)
        if direct is None or runtime.is_watched():
            self._launch_slowly(runtime, key, grid, arguments, given)
            return
        assert {*map(_devices, tensors)} == {device}, f"{self.name}: a tensor is not on GPU {device}"
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = runtime.current_stream(device)
        own = self._arrange((*addresses, *arguments[self._num_pointers :], None))
        direct.launch(x, y, z, stream, *direct.given, None, None, None, *own)

    def _launch_slowly(
        self,
        runtime: "_Runtime",
        key: tuple[Any, ...],
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        given: dict[str, Any],
    ) -> None:
        """Triton's way, which compiles what is missing."""
        assert len(arguments) == self._num_pointers + len(self._numbers), f"{self.name}: {len(arguments)} arguments"
        for name, number in zip(self._numbers, arguments[self._num_pointers :], strict=True):
            # An integer is 32 bits wide to the compiled kernel: Triton would compile another one for a larger.
            is_fine = isinstance(number, float) or (type(number) is int and -(2**31) <= number < 2**31)
            assert is_fine, f"{self.name}: {name} is {number}, no float and no integer of 32 bits"
        compiled = self._jit[grid](**dict(zip(self._pointers + self._numbers, arguments, strict=True)), **given)
        if key not in self._known:
            self._known[key] = _find_direct(compiled) if runtime.is_direct else None

    def _misaligned(self, tensors: tuple[torch.Tensor, ...]) -> str:
        wrong = [name for name, tensor in zip(self._pointers, tensors, strict=True) if tensor.data_ptr() % ALIGNMENT]
        return f"{self.name}: {', '.join(wrong)} not aligned to {ALIGNMENT} bytes"


kernel = Kernel


class _Direct(NamedTuple):
    """A compiled kernel's launcher in C, and what it is given for every launch."""

    launch: Callable[..., None]
    given: tuple[Any, ...]


class _Runtime(NamedTuple):
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    is_watched: Callable[[], bool]  # by a profiler, whose hooks Triton calls at every launch
    is_direct: bool


@cache
def _runtime() -> _Runtime:
    if triton.knobs.runtime.interpret:
        return _Runtime(lambda: 0, lambda _: 0, lambda: False, False)
    driver = triton.runtime.driver.active
    return _Runtime(driver.get_current_device, driver.get_current_stream, _is_watched, _is_known_interface())


def _is_known_interface() -> bool:
    from triton.backends.nvidia import driver

    if getattr(driver, "_BASE_ARGS_FORMAT", None) == KNOWN_INTERFACE:
        return True
    warnings.warn(
        f"Triton {triton.__version__} has a launcher that is not known here: kernels are launched in Triton's own way, "
        "which takes the host several times as long",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _is_watched() -> bool:
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook  # chains of calls, or one function or None
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _find_direct(compiled: Any) -> _Direct | None:
    if compiled is None:
        return None  # only compiled, and by someone else
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None  # Triton allocates it for every launch
    given = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    return _Direct(run.launch, given)
