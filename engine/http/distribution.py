"""Building blocks of the server's and the router's metrics: the text of a process, histograms and metric families."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

HistogramRow = tuple[str, str, tuple[float, ...]]  # in a metrics.json: the arguments of `Distribution`


class MetricRow(NamedTuple):
    """A counter or gauge in a metrics.json."""

    kind: Literal["counter", "gauge"]
    name: str  # without the _total of counters
    labels: tuple[str, ...]
    text: str  # the HELP text


class ProcessMetrics(Collector):
    """The metrics that a subclass yields from `collect`, and those of the process itself."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in the exposition format, version 0.0.4."""
        return generate_latest(self._registry)


class Distribution:
    """A histogram. `bounds` are the upper limits of its buckets; the last bucket is open."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name, self.help_text, self.bounds = name, help_text, bounds
        self.counts: list[float] = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        buckets = list(zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True))
        found = HistogramMetricFamily(self.name, self.help_text, labels=[*labels])
        found.add_metric([*labels.values()], buckets, sum_value=self.total)
        return found


def family(row: MetricRow, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Return a metric family. `samples`: label values, and the number."""
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    found = kind(row.name, row.text, labels=row.labels)
    for values, figure in samples:
        found.add_metric(values, figure)
    return found
