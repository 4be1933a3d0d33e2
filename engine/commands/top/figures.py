"""Prometheus text as numbers, and what changed between two looks at it. The page's metrics.js in Python.

Knows no name of ours but the process's start: what counted from nothing again is another server.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

MINUTE_S = 60.0
RATE_LOOKS = 3  # a rate is over so many intervals
STARTED = "process_start_time_seconds"


class Look(NamedTuple):
    """What a server said at one time: name → the samples, each its labels and its value."""

    at_s: float
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    @classmethod
    def of(cls, text: str, at_s: float) -> "Look":
        """Raises ValueError where this is not the exposition format."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at_s, samples)

    def total(self, name: str) -> float | None:
        """The sum over all labels; None where nothing has this name."""
        values = [value for _, value in self.samples.get(name, ())]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            found[labels.get(label, "")] = found.get(labels.get(label, ""), 0.0) + value
        return found


class Quantile(NamedTuple):
    value: float | None  # None: nothing was observed
    sign: str = ""  # "<" and ">": the first and the last bucket say no more than their bound


class History:
    """The looks of the last minute, oldest first."""

    def __init__(self) -> None:
        self.looks: deque[Look] = deque()

    @property
    def now(self) -> Look:
        return self.looks[-1]

    def add(self, look: Look) -> None:
        if self.looks and self.now.total(STARTED) != look.total(STARTED):
            self.looks.clear()
        self.looks.append(look)
        while len(self.looks) > 2 and look.at_s - self.looks[0].at_s > MINUTE_S:
            self.looks.popleft()

    def rate(self, name: str) -> float | None:
        """Growth per second over the last looks; None with one look alone."""
        first = self.looks[max(len(self.looks) - 1 - RATE_LOOKS, 0)]
        seconds = self.now.at_s - first.at_s
        return self._growth(name, first) / seconds if seconds > 0 else None

    def ratio(self, top: str, bottom: str) -> float | None:
        """How much `top` grew for each of `bottom`: in the last minute, else since the start; None: neither did."""
        grown = self._growth(bottom, self.looks[0])
        if grown > 0:
            return self._growth(top, self.looks[0]) / grown
        whole = self.now.total(bottom)
        return (self.now.total(top) or 0.0) / whole if whole else None

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """A histogram's last minute as (upper bound, count); with one look alone since the start."""
        now = self.now.by_label(f"{name}_bucket", "le")
        before = self.looks[0].by_label(f"{name}_bucket", "le") if len(self.looks) > 1 else {}
        return list(_apart((float(bound), count - before.get(bound, 0.0)) for bound, count in now.items()))

    def _growth(self, name: str, first: Look) -> float:
        return (self.now.total(name) or 0.0) - (first.total(name) or 0.0)


def quantile(buckets: list[tuple[float, float]], share: float) -> Quantile:
    """Evenly spread within its bucket, as Prometheus estimates it."""
    left = share * sum(count for _, count in buckets)
    if left <= 0:
        return Quantile(None)
    lower = None
    for bound, count in buckets:
        if left <= count:
            if lower is None:
                return Quantile(bound, "<")
            return Quantile(lower, ">") if bound == float("inf") else Quantile(lower + (bound - lower) * left / count)
        left -= count
        lower = bound
    return Quantile(lower, ">")


def _apart(cumulated: Iterator[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    seen = 0.0
    for bound, count in cumulated:
        yield bound, count - seen
        seen = count
