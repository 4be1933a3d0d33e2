"""Runs every kernel under compute-sanitizer's memcheck, at tiny shapes, to find out-of-bounds accesses that neither the
interpreter nor a comparison of results detects.

The allocator's cache is off, so that each tensor is its own allocation with a checked end.
"""

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import open_device, report
from benchmarks.gpu.processes import MARGIN_S, follow

NAME = "compute-sanitizer"
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
MAX_LINES = 60  # of the tool's output


def main(job: dict[str, Any]) -> None:
    started_s, tool = time.monotonic(), find_sanitizer()
    name = f"memcheck {job['share'][0]}"
    if tool is None:
        report("memcheck", skipped=f"no {NAME}: not on the PATH, with the CUDA toolkit or in a package of nvidia's")
        return
    open_device(job)
    part = [sys.executable, "-m", "benchmarks.gpu", "twin_part", json.dumps(job | {"tiny": True})]
    command = [tool, "--tool", "memcheck", "--target-processes", "application-only", "--error-exitcode", "99"]
    command += ["--print-limit", "20", *part]
    said: list[str] = []

    def take(line: str) -> None:
        print(line, flush=True)  # its figures pass through
        if line.startswith("=========") and len(said) < MAX_LINES:
            said.append(line.strip("= "))

    code = follow(command, started_s + job["limit_s"] - MARGIN_S, take, os.environ | NO_CACHE)
    errors = sum("Invalid" in line or line.startswith("Program hit") for line in said)
    figures: dict[str, Any] = {} if code is not None else {"skipped": "its time was over before the end"}
    report(name, ok=not errors and code in (0, None), errors=errors, exit_code=code, said=said, **figures)


def find_sanitizer() -> str | None:
    """Find the tool on the PATH, in an installed toolkit, or in the wheels of torch and triton."""
    if found := shutil.which(NAME):
        return found
    roots = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(root) / "bin" for root in roots if root]
    places += sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    places += sorted(Path("/opt/nvidia").glob("**/compute-sanitizer"))
    if (spec := importlib.util.find_spec("triton")) is not None and spec.origin is not None:
        site = Path(spec.origin).parents[1]
        places += [site / "triton/backends/nvidia/bin", *site.glob("nvidia/**/bin")]
    for place in places:
        for path in (place / NAME, place.parent / NAME / NAME):
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    return None
