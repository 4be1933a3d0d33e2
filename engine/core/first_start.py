"""Measures the one-time costs of a first start in a fresh environment: bytecode and a cold page cache.

The core process, which imports most of the packages, installs the clock before it opens the executor.
"""

import os
import resource
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from types import CodeType
from typing import Any

from penstock.engine.messages import StartCost

BLOCK_BYTES = 512  # of getrusage
LEAST_COMPILE_S = 0.2  # less is not worth a line
LEAST_READ_BYTES = 64 * 2**20


def start_note(cost: StartCost) -> str | None:
    """Return a line for the user; None if the start had no one-time costs."""
    parts = []
    if cost.compile_s >= LEAST_COMPILE_S:
        parts.append(f"compiled {cost.num_compiled:,} Python files in {cost.compile_s:.1f} s")
    if cost.read_bytes >= LEAST_READ_BYTES:
        parts.append(f"read {cost.read_bytes / 2**20:,.0f} MiB from the disk")
    return f"This start {' and '.join(parts)}, which the next one usually need not." if parts else None


class CompileClock:
    """Times the compilation of Python files that have no valid bytecode, from `install` on."""

    def __init__(self) -> None:
        self._num = 0
        self._seconds = 0.0
        self._last_path = ""

    def install(self) -> None:
        compile_source = SourceFileLoader.source_to_code

        def timed(loader: SourceFileLoader, data: Any, path: Any, **options: Any) -> CodeType:
            begun_s = time.perf_counter()
            code: CodeType = compile_source(loader, data, path, **options)
            self._seconds += time.perf_counter() - begun_s
            self._num += 1
            self._last_path = os.fsdecode(path)
            return code

        SourceFileLoader.source_to_code = timed  # type: ignore[method-assign, assignment]

    def cost(self) -> StartCost:
        read_bytes = BLOCK_BYTES * resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        if not self._num or sys.dont_write_bytecode or not os.path.exists(cache_from_source(self._last_path)):
            return StartCost(read_bytes=read_bytes)  # compiled anew at every start: nothing to promise
        return StartCost(self._num, self._seconds, read_bytes)
