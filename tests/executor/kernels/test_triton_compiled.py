"""Every kernel as the launchers launch it for models people serve, compiled for Hopper: what the interpreter cannot see.

No GPU is needed. Compiled code is kept in pytest's cache, by the source's and the compiler's digest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = 227 << 10  # that one block of threads may have
HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=["quick", pytest.param("all", marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    root = HERE.parents[2]
    environment = os.environ | {
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton")),
    }
    command = [sys.executable, str(HERE / "aot.py"), request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_nothing_spills_and_shared_memory_suffices(compiled: list[dict[str, Any]]) -> None:
    assert compiled
    for kernel in compiled:
        assert kernel["stack"] == kernel["LDL"] == kernel["STL"] == 0, kernel
        assert kernel["shared"] <= SHARED_BYTES, kernel


@pytest.mark.timeout(600)
def test_products_run_on_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    halves = [kernel for kernel in compiled if "float32" not in kernel["case"]]
    prefills = [kernel for kernel in halves if kernel["kernel"] in ("_prefill", "_expanded")]
    decodes = [kernel for kernel in halves if kernel["kernel"] == "_decode"]
    assert prefills and decodes
    for kernel in prefills:  # a warpgroup's product, four times as wide as HMMA's
        assert kernel["HGMMA"] > 0 and kernel["HMMA"] == 0, kernel
    for kernel in decodes:
        assert kernel["HMMA"] > 0, kernel
    for kernel in halves:
        is_wide = "prompts" in kernel["case"] or "a batch" in kernel["case"]
        if kernel["kernel"] == "_multiply":
            assert kernel["HGMMA" if is_wide else "HMMA"] > 0, kernel
        if kernel["kernel"] == "_block_linear":
            assert kernel["QGMMA" if is_wide else "HMMA"] > 0, kernel


@pytest.mark.timeout(600)
def test_kernels_that_start_early_touch_nothing_before_their_turn(compiled: list[dict[str, Any]]) -> None:
    early = [kernel for kernel in compiled if kernel["is_dependent"]]
    assert {"_decode", "_combine", "_rope_and_store", "_norm", "_gate_rows"} <= {kernel["kernel"] for kernel in early}
    for kernel in compiled:
        expected = (1, 1, 0) if kernel["is_dependent"] else (0, 0, None)
        assert (kernel["waits"], kernel["launches"], kernel["early"]) == expected, kernel
        assert kernel["is_dependent"] == ("dependent" in kernel["case"]), kernel


@pytest.mark.timeout(600)
def test_pages_are_copied_asynchronously(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        if kernel["kernel"] in ("_decode", "_prefill") and "float32" not in kernel["case"]:
            assert kernel["LDGSTS"] > 0, kernel
