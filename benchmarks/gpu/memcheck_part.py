"""Every kernel under compute-sanitizer's memcheck, at tiny shapes: reads and writes beyond the end, which neither the
interpreter nor a comparison of results sees.

The allocator's cache is off: each tensor is an allocation, so that its end is one.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.figures import open_device, tell

NAME = "compute-sanitizer"
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
MAX_LINES = 60  # of what the tool says


def main(job: dict) -> None:
    tool = find_sanitizer()
    name = f"memcheck {job['share'][0]}"
    if tool is None:
        tell("memcheck", skipped=f"no {NAME}: not on the PATH, with the CUDA toolkit or in a package of nvidia's")
        return
    open_device(job)
    part = [sys.executable, "-m", "benchmarks.gpu.twin_part", json.dumps(job | {"tiny": True})]
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", "--print-limit", "20", *part]
    said: list[str] = []
    with subprocess.Popen(
        command, env=os.environ | NO_CACHE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)  # its figures pass through
            if line.startswith("=========") and len(said) < MAX_LINES:
                said.append(line.strip("= \n"))
    code = process.returncode
    errors = [int(found[1]) for line in said if (found := re.match(r"ERROR SUMMARY: (\d+) error", line))]
    tell(name, ok=code == 0 and errors == [0], errors=sum(errors), exit_code=code, said=said)


def find_sanitizer() -> str | None:
    """On the PATH, where the toolkit is installed, or in the wheels that torch and triton bring."""
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
