"""The other files of this folder are collected only where there is a Triton. This one says so."""

import pytest
import torch

from tests.executor.kernels.conftest import HAS_TRITON, PINNED


def test_kernels_are_tested_with_the_triton_of_the_gpu_machines() -> None:
    if not HAS_TRITON:
        pytest.skip("no triton here: `make test` installs it into .venv/triton")
    import triton

    assert triton.__version__ == "3.6.0"
    assert torch.cuda.is_available() or triton.__file__.startswith(str(PINNED))
