"""What tests of kernels share: the dtypes, and how near to its twin a kernel must come in each."""

import pytest
import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# float16 differs from bfloat16 by its rounding alone.
DTYPES = [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow_in_interpreter), torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """`expected` may be more precise, and `dtype` names what the kernel computed in where `actual` does not show it."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


def to(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]
