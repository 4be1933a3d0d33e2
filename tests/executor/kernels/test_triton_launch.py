"""How kernels are launched: what chooses a variant, and what is refused. The interpreter stands in for the compiler."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl

from penstock.executor.kernels import cuda
from penstock.executor.kernels.cuda.launch import kernel
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


def test_pointers_are_aligned(x: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="_scale: y_ptr not aligned to 16 bytes"):
        _scale[(1,)](x, x[1:], 3, 1.0, BLOCK=64)


@pytest.mark.parametrize("count", [2**31, -(2**31) - 1, True])
def test_an_integer_that_would_be_another_type_is_refused(x: torch.Tensor, count: int) -> None:
    with pytest.raises(AssertionError, match="_scale: count is"):
        _scale[(1,)](x, x, count, 1.0, BLOCK=32)


def test_a_constant_goes_by_name(x: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="_scale: 5 arguments"):
        _scale[(1,)](x, x, 3, 1.0, 64)


@pytest.mark.slow
def test_a_variant_is_searched_once_and_each_launch_passes_its_arguments(
    request: pytest.FixtureRequest,
) -> None:
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


def test_whatever_is_launched_is_declared_as_a_kernel() -> None:
    """And what is declared as one is launched, not called in another: there it would not be a device function."""
    launched, declared = set(), set()
    for path in Path(cuda.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
        modules = {name.asname: name.name for name in names if name.asname}
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and "kernel" in map(ast.unparse, node.decorator_list):
                declared.add((path.stem, node.name))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                module, _, name = ast.unparse(node.func.value).rpartition(".")
                launched.add((modules.get(module, module) or path.stem, name))
    assert {each for each in launched if each[0] not in ("self", "launch")} == declared
