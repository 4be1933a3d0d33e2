"""Where Triton is found, and in which of its two ways it runs: on a GPU, or interpreted on the CPU.

`make test` puts the Triton of the GPU machines into .venv/triton, out of sight of everything but these tests; a machine
with a GPU has its own. Which way kernels run is settled when triton is first imported, so it is settled here.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

PINNED = Path(sys.prefix) / "triton"
HAS_GPU = torch.cuda.is_available()

if PINNED.is_dir() and not HAS_GPU:
    sys.path.insert(0, str(PINNED))

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_triton_*.py"]

if HAS_TRITON and not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    from tests.support import interpreter

    # The variable would follow into the processes that other tests start.
    del os.environ["TRITON_INTERPRET"]
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    interpreter.mend()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what takes long in the interpreter; a GPU runs it in milliseconds."""
    for item in items:
        spec = getattr(item, "callspec", None)
        is_on_gpu = spec is not None and spec.params.get("device") == "cuda"
        if item.get_closest_marker("slow_in_interpreter") and not is_on_gpu:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test with it is two: on the CPU, and with `-m gpu` the same on the GPU."""
    return torch.device("cpu" if request.param == "interpreter" else "cuda")


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For interpreted whole models: a product of few rows has one program for every 64 columns instead of every two."""
    from penstock.executor.kernels.cuda import few_rows

    if not HAS_GPU:
        for name, value in (("columns_of", lambda _: 64), ("DEPTH", 128), ("UNROLL", 1)):
            monkeypatch.setattr(few_rows, name, value)


@pytest.fixture(autouse=True)
def _numpy_like_a_gpu() -> Iterator[None]:
    """exp(200) is infinity, without a warning."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        yield
