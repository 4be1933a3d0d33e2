"""Counters of the data plane, as text for /metrics. Labels are routes, statuses, replicas and outcomes: bounded sets."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.router.edge import Edge, Request
from penstock.router.fleet import Fleet

FIRST_BYTE_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
STATES = ("starting", "up", "suspect", "down", "draining", "ejected", "trial", "removing")


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, help_text: str) -> Metric:
        buckets, seen = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self.total)


class Metrics(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.edge: Edge | None = None
        self.requests: Counter[tuple[str, int]] = Counter()  # (route, status)
        self.retries: Counter[str] = Counter()  # why another replica was asked
        self.not_retried: Counter[str] = Counter()  # why it would have been, had the budget allowed
        self.num_client_gone = 0
        self.broken_streams = 0
        self.first_byte = Histogram(FIRST_BYTE_S)
        self.loop_lag = Histogram(LAG_S)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count(self, request: Request, status: int) -> None:
        """`request` has passed admission, so its path is one of ours."""
        self.requests[request.target.partition(b"?")[0].decode("latin-1"), status] += 1

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield _counter("requests", "Answers by route and status.", ("route", "status"), self.requests)
        refused = self.edge.refused if self.edge is not None else Counter[int]()
        yield _counter("refused", "Refused before there was a request, by status.", ("status",), refused)
        yield _counter("retries", "Requests sent to another replica, by reason.", ("reason",), self.retries)
        yield _counter("not_retried", "Failures passed on for want of budget.", ("reason",), self.not_retried)
        yield _counter("client_gone", "Clients that left before the end.", (), Counter({(): self.num_client_gone}))
        yield _counter(
            "broken_streams", "Answers that broke after the first byte.", (), Counter({(): self.broken_streams})
        )
        yield self.first_byte.family("penstock:router_first_byte_seconds", "Request complete to first byte relayed.")
        yield self.loop_lag.family("penstock:router_loop_lag_seconds", "How late the event loop ran a timer.")
        yield from self._of_replicas()

    def _of_replicas(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "penstock:router_replica_state", "1 for the state it is in.", labels=("replica", "state")
        )
        under_way = GaugeMetricFamily("penstock:router_under_way", "Requests under way.", labels=("replica",))
        requests = CounterMetricFamily("penstock:router_replica_requests", "Requests sent.", labels=("replica",))
        failures = CounterMetricFamily("penstock:router_replica_failures", "Failures seen.", labels=("replica",))
        for replica in self.fleet.replicas.values():
            for name in STATES:
                state.add_metric((replica.url, name), float(replica.state == name))
            under_way.add_metric((replica.url,), replica.num_under_way)
            requests.add_metric((replica.url,), replica.num_requests)
            failures.add_metric((replica.url,), replica.num_failures)
        yield from (state, under_way, requests, failures)


def _counter(name: str, help_text: str, labels: Sequence[str], counts: Counter) -> Metric:
    family = CounterMetricFamily(f"penstock:router_{name}", help_text, labels=labels)
    for key, count in sorted(counts.items()):
        family.add_metric([str(part) for part in (key if isinstance(key, tuple) else (key,))], count)
    return family
