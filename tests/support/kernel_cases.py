"""What tests of kernels share: the dtypes, which cases are fast, and how near to its twin a kernel must come."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# float16 differs from bfloat16 by its rounding alone.
DTYPES = [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow_in_interpreter), torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])


def matrix(names: str, *axes: Iterable[Any], hardest: Collection[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize with every combination. In the interpreter `make test` runs the hardest, `-m slow` the others."""
    cases = list(itertools.product(*axes))
    assert all(case in cases for case in hardest), "a hardest case that is none of the matrix"
    slow = pytest.mark.slow_in_interpreter
    marked = [pytest.param(*case, marks=() if case in hardest else slow) for case in cases]
    return pytest.mark.parametrize(names, marked, ids=lambda each: str(each) if isinstance(each, torch.dtype) else None)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """`expected` may be more precise, and `dtype` names what the kernel computed in where `actual` does not show it."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)
