"""Runs a part in its own process, which prints figures line by line and is ended when its time is over."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gpu.machine import ROOT, environment
from benchmarks.pairs import MARK

MARGIN_S = 4.0  # of a part's time, to report partial results
Figures = dict[str, dict[str, Any]]


def run_part(
    module: str, argument: dict[str, Any], limit_s: float, hear: Callable[[str], None] = print
) -> tuple[Figures, str | None]:
    """Return what benchmarks.gpu.<module> printed until it ended or its time was over, and why there is not more."""
    ends_s = time.monotonic() + limit_s
    argument = argument | {"started_s": time.time(), "limit_s": limit_s}
    found: Figures = {}
    last = ""

    def take(line: str) -> None:
        nonlocal last
        if line.startswith(MARK):
            figure = json.loads(line.removeprefix(MARK))
            found[figure.pop("name")] = figure
        else:
            last = line.strip() or last
        hear(f"   {line.removeprefix(MARK)}")

    command = [sys.executable, "-m", "benchmarks.gpu", module, json.dumps(argument)]
    code = follow(command, ends_s, take, environment(), process_group=0)
    if code is None:
        return found, f"its {limit_s:.0f} s were over"
    return found, None if code == 0 else last or f"it ended with {code}"


def run_shares(
    module: str, argument: dict[str, Any], count: int, limit_s: float, hear: Callable[[str], None] = print
) -> tuple[Figures, str | None]:
    """Call `run_part` in several parallel processes, each with its share of the work."""
    shares = [argument | {"share": [index, count]} for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(lambda share: run_part(module, share, limit_s, hear), shares))
    figures = {name: figure for said, _ in parts for name, figure in said.items()}
    return figures, "; ".join(sorted({problem for _, problem in parts if problem is not None})) or None


def follow(
    command: Sequence[str],
    ends_s: float,
    take: Callable[[str], None],
    env: Mapping[str, str],
    process_group: int | None = None,
) -> int | None:
    """Run a process and handle its lines as they arrive; return its exit code, or None if its time was over. With
    process group 0, the processes that it has started end with it."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=process_group,
    )
    try:
        for line in lines(process, ends_s):
            take(line)
        return process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill() if process_group is None else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def lines(process: subprocess.Popen[bytes], ends_s: float) -> Iterator[str]:
    """Yield the process's output line by line, until it closes its output or the time is over."""
    assert process.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := ends_s - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(left_s)
                break
            *whole, pending = (pending + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    if pending:
        yield pending.decode(errors="replace")
