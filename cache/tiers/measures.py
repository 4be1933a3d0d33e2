"""What stores count. Times go into histograms with fixed bounds, so that adding one costs a few comparisons."""

from bisect import bisect_left
from collections import Counter
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

    def as_dict(self) -> dict[str, Any]:
        return {"bounds_ms": BOUNDS_MS, "counts": tuple(self.counts), "sum_s": self.sum_s}


class DiskMeasures:
    """Since the tier was opened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()  # puts that were refused or failed, by reason
        self.failures: Counter[str] = Counter()  # of calls, by errno or kind
        self.store_times, self.load_times = TimeCounts(), TimeCounts()

    def stored(self, seconds: float) -> None:
        self.counts["stores"] += 1
        self.store_times.add(seconds)

    def loaded(self, seconds: float) -> None:
        self.counts["hits"] += 1
        self.load_times.add(seconds)

    def as_dict(self, chunk_bytes: int) -> dict[str, Any]:
        counts = self.counts
        return {
            "hits": counts["hits"],
            "misses": counts["misses"],
            "stores": counts["stores"],
            "loaded_bytes": counts["hits"] * chunk_bytes,
            "stored_bytes": counts["stores"] * chunk_bytes,
            "corrupt_reads": counts["corrupt"],
            "stale_reads": counts["stale"],
            "loads_refused": counts["loads refused"],
            "drops": dict(self.drops),
            "failures": dict(self.failures),
            "store_times": self.store_times.as_dict(),
            "load_times": self.load_times.as_dict(),
        }
