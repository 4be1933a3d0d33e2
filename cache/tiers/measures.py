"""How long loads and stores take: a histogram with fixed bounds, so that adding a time costs a few comparisons."""

from bisect import bisect_left
from typing import Any

BOUNDS_MS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1000.0, 5000.0, 30000.0)


class TimeCounts:
    """Cumulative nowhere: `counts[i]` lie at or below `BOUNDS_MS[i]` and above the one before, the last above all."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_MS, seconds * 1e3)] += 1
        self.sum_s += seconds

    @property
    def num(self) -> int:
        return sum(self.counts)

    def as_dict(self) -> dict[str, Any]:
        return {"bounds_ms": BOUNDS_MS, "counts": tuple(self.counts), "sum_s": self.sum_s}
