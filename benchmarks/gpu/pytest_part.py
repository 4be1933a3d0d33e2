"""Runs tests that need a GPU on many cores: a test that hangs is ended with its process, failures are printed at once.

python -m benchmarks.gpu pytest_part '{"device": "cuda", "paths": ["tests/executor/kernels"], "marks": "gpu"}'
"""

import importlib.util
import os
import re
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.gpu.figures import open_device, report
from benchmarks.gpu.processes import MARGIN_S, follow

TEST_LIMIT_S = 90
MAX_PROCESSES = 8  # each has its own context on the device
REHEARSAL = {"paths": ["tests/executor/kernels/test_environment.py"], "marks": "not gpu"}
OUTCOME = re.compile(
    r"(PASSED|FAILED|ERROR|SKIPPED)\s+(tests/\S+)|(tests/\S+(?: \S+)*?)\s+(PASSED|FAILED|ERROR|SKIPPED)"
)


def main(job: dict[str, Any]) -> None:
    started_s = time.monotonic()
    open_device(job)
    if job["tiny"]:
        job = job | REHEARSAL
    # Overrides for a bare machine: settings that only a plugin knows, and deprecations of other versions.
    command = [sys.executable, "-m", "pytest", "-v", "-rN", "--tb=short", "-W", "default", "-m", job["marks"]]
    command += ["-p", "no:cacheprovider", *([] if job["tiny"] else plugins()), *job["paths"]]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes()))}
    counts: Counter[str] = Counter()
    failed: list[str] = []

    def take(line: str) -> None:
        print(line, flush=True)
        # The summary repeats what failed, in words that are not these.
        if (found := OUTCOME.search(line)) is not None and not line.startswith(("FAILED", "ERROR", "SKIPPED")):
            outcome, test = found[1] or found[4], found[2] or found[3]
            counts[outcome.lower()] += 1
            if outcome in ("FAILED", "ERROR"):
                failed.append(test)
                report(test, ok=False)

    code = follow(command, started_s + job["limit_s"] - MARGIN_S, take, os.environ | threads)
    report("tests", "", ok=code == 0, **counts, exit_code=code, was_ended=code is None, failures=failed)


def num_processes() -> int:
    return min(MAX_PROCESSES, os.cpu_count() or 1)


def plugins() -> list[str]:
    """Return the installed plugins' options; only the thread method ends tests that wait for the device forever."""
    options = []
    if importlib.util.find_spec("xdist"):
        options += ["-n", str(num_processes()), "--dist", "load", "--max-worker-restart", str(MAX_PROCESSES)]
    if importlib.util.find_spec("pytest_timeout"):
        options += ["--timeout", str(TEST_LIMIT_S), "--timeout-method", "thread"]
    return options
