"""How kernels are launched: what chooses a variant, and what is refused. The interpreter stands in for the compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from penstock.executor.kernels.cuda.launch import kernel
from tests.support.refusals import cases
from tests.support.variants import variants


@kernel
def _scale(x_ptr, y_ptr, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < count)


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.ones(64, device=device)


def test_only_constants_dtypes_and_options_make_another_variant(x: torch.Tensor) -> None:
    """Neither a number that is one or divisible by sixteen, nor how wide a pointer is aligned."""
    y = torch.zeros_like(x)
    _scale[(1,)](x, y, 64, 2.0, BLOCK=64)
    seen = len(variants())
    for count, factor in ((1, 3.0), (16, 4.0), (5, 1.0)):
        _scale[(1,)](x[4:], y[8:], count, factor, BLOCK=64)
        assert y[8 : 8 + count].tolist() == [factor] * count
    _scale[(2, 1)](x, y, 3, 5.0, BLOCK=64)
    assert len(variants()) == seen
    for options in ({"BLOCK": 16}, {"BLOCK": 64, "num_warps": 8}):
        _scale[(1,)](x, y, 64, 2.0, **options)
    _scale[(1,)](x, y.half(), 64, 2.0, BLOCK=64)
    new = variants()[seen:]
    assert [variant.options for variant in new] == [{"BLOCK": 16}, {"BLOCK": 64, "num_warps": 8}, {"BLOCK": 64}]
    assert new[-1].kernel == "_scale" and new[-1].dtypes == (torch.float32, torch.float16)


@pytest.mark.parametrize(("arguments", "message"), cases(__file__, "refused launches"))
def test_a_launch_of_another_variant_is_refused(x: torch.Tensor, arguments: tuple[Any, ...], message: str) -> None:
    """The first two arguments are where the tensors begin in `x`."""
    first, second, *rest = arguments
    with pytest.raises(AssertionError, match=f"_scale: {message}"):
        _scale[(1,)](x[first:], x[second:], *rest, BLOCK=32)


@pytest.mark.slow
def test_a_variant_is_searched_once_and_each_launch_passes_its_arguments(request: pytest.FixtureRequest) -> None:
    """Eight launches of three variants reach an idle driver. The search is most of a launch's time on the host."""
    script = Path(__file__).parents[2] / "support/idle_gpu.py"
    environment = os.environ | {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton"))}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *launches, counts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(launches) == 8
    for launch in launches:
        assert launch["received"] == launch["sent"]
    assert counts == {"searched": 3, "loaded": 3}
