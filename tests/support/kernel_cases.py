"""Parts that tests of kernels share: the dtypes, which cases are fast, and how near to its twin a kernel must come."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pytest
import torch
from benchmarks.gpu import twin_part
from benchmarks.gpu.cases import TWINS, Case, Kernels, Kit

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# float16 differs from bfloat16 by its rounding alone.
DTYPES = [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow_in_interpreter), torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])

# Attention and products are compared with twins that compute in float64 from the very same values.
WIDE_TWINS = TWINS._replace(wide_dtype=torch.float64)


def matrix(names: str, *axes: Iterable[Any], hardest: Collection[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize with every combination. In the interpreter `make test` runs the hardest, `-m slow` the others."""
    cases = list(itertools.product(*axes))
    assert all(case in cases for case in hardest), "a hardest case that is none of the matrix"
    slow = pytest.mark.slow_in_interpreter
    marked = [pytest.param(*case, marks=() if case in hardest else slow) for case in cases]
    return pytest.mark.parametrize(names, marked, ids=lambda each: str(each) if isinstance(each, torch.dtype) else None)


def close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype | None = None,
    tolerances: dict[torch.dtype, float] = TOLERANCE,
) -> None:
    """Compare results; `expected` may be more precise. `dtype` is the one that the kernel computed in, if not that of
    `actual`."""
    tolerance = tolerances[dtype or actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


def triton_kernels(device: torch.device) -> Kernels:
    kernels = twin_part.open_kernels(device)
    assert kernels is not None, "no triton here"
    return kernels


def check(
    kernels: Kernels, kit: Kit, tolerance: dict[torch.dtype, float], build: Callable[..., Iterator[Case]], *shape: Any
) -> None:
    """Compare the calls of one operation (benchmarks/gpu/cases.py) with their twins, number by number."""
    torch.manual_seed(0)
    for case in build(kit, "", *shape):
        pairs = zip(twin_part.flat(case.call(kernels)), twin_part.flat(case.call(WIDE_TWINS)), strict=True)
        for actual, expected in pairs:
            if case.error == 0.0 or case.is_choice:
                assert torch.equal(actual, expected), case.name
            else:
                close(actual, expected, kit.dtype, tolerance)
