"""What is written for the tiles of AMX, with tiles in plain C (tests/support/tiles.h): on any CPU with AVX-512 and its
bfloat16. How fast they are, and that the CPU's own do the same, only a CPU with AMX can say."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.executor.kernels.cpu_ops import levels

ROOT = Path(__file__).parents[2]
TESTS = ("test_codes.py", "test_cpu_linear.py")
WITH_TILES = """
import importlib.util, sys
import penstock, pytest
spec = importlib.util.spec_from_file_location("penstock._csrc", sys.argv[1])
penstock._csrc = sys.modules["penstock._csrc"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(penstock._csrc)
from penstock.executor.kernels.cpu_ops import levels
assert levels()[-1] == "amx", levels()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not (portable or avx2 or avx512)", *sys.argv[2:]]))
"""


@pytest.mark.slow  # compiles all of csrc
@pytest.mark.timeout(600)
@pytest.mark.skipif("avx512_bf16" not in levels(), reason="the rest of the level needs AVX-512 with bfloat16")
def test_codes_and_linear_layers_by_tiles_in_c(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("csrc_build", ROOT / "csrc" / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    tiles = str(ROOT / "tests" / "support" / "tiles.h")
    flags = ("-O1", "-D_GNU_SOURCE=", "-include", tiles)
    built = build.describe(str(ROOT / "csrc"), *flags).compile(tmpdir=str(tmp_path))
    asked = [str(ROOT / "tests" / "executor" / name) for name in TESTS]
    ended = subprocess.run([sys.executable, "-c", WITH_TILES, built, *asked], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
