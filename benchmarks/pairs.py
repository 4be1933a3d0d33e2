"""Two things measured by turns, and what may be said about their ratio. Benchmarks share this page.

A busy neighbour, a warm CPU or a slow hour meets both sides when they alternate, so the ratio stands where
the figures drift. It is reported as the median over the pairs with its interval, never as the best of them.
"""

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
CONFIDENCE = 0.95
_LOAD_BEFORE = os.getloadavg()[0]


class Pair(NamedTuple):
    ours: float
    theirs: float


class Verdict(NamedTuple):
    """How many times as good ours is; above 1 is better, whatever the unit."""

    ratio: float  # the median over the pairs
    low: float | None  # the interval of that median; None with fewer than six pairs
    high: float | None
    least: float
    most: float

    def __str__(self) -> str:
        inside = "" if self.low is None else f", {CONFIDENCE:.0%} interval {self.low:.3f} to {self.high:.3f}"
        return f"{self.ratio:.3f}× ({self.least:.3f} to {self.most:.3f}{inside})"


def alternate(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> list[Pair]:
    """Measure both `count` times; whoever was second goes first the next time."""
    pairs = []
    for index in range(count):
        if index % 2 == 0:
            first = ours()
            pairs.append(Pair(first, theirs()))
        else:
            second = theirs()
            pairs.append(Pair(ours(), second))
    return pairs


def judge(pairs: Sequence[Pair], *, higher_is_better: bool) -> Verdict:
    ratios = sorted(pair.ours / pair.theirs if higher_is_better else pair.theirs / pair.ours for pair in pairs)
    rank = _interval_rank(len(ratios))
    low, high = (None, None) if rank is None else (ratios[rank], ratios[-1 - rank])
    return Verdict(statistics.median(ratios), low, high, ratios[0], ratios[-1])


def _interval_rank(count: int) -> int | None:
    """The median lies between the values of this rank from either end, with the confidence asked for.

    By the sign test: how many values fall below a median is a binomial of ½. Nothing is assumed about the
    distribution, so one stalled run does not move it.
    """
    outside, rank = 0.0, None
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        rank = below
    return rank


def record(name: str, figures: dict[str, Any]) -> None:
    """Print one JSON line and add it to results/<name>.jsonl."""
    line = {
        "bench": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": commit(),
        "machine": machine(),
        **figures,
    }
    text = json.dumps(line, ensure_ascii=False)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(text + "\n")


def machine() -> dict[str, Any]:
    """What the figures depend on. Where something else ran before the benchmark did, do not trust them."""
    model = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(_LOAD_BEFORE, 2),
        "python": platform.python_version(),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _command() -> str:
    """As it was typed, with paths cut to their last part: where somebody keeps things is not a result."""
    words = [f"…/{Path(word).name}" if word.startswith(("/", "~", "..")) else word for word in sys.argv[1:]]
    script = Path(sys.argv[0]).parts
    inside = script[-1:] if "benchmarks" not in script[:-1] else script[-script[::-1].index("benchmarks") :]
    return " ".join(["python", "/".join(("benchmarks", *inside)), *words])


def commit() -> str:
    """The commit that was measured, with a + when the tree had changes."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git here
        return "unknown"
    return answer.stdout.strip() or "unknown"
