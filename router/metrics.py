"""Counters of the router, as text for /metrics. Labels are routes, statuses, replicas and reasons: bounded sets."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client.core import Metric

from penstock.engine.http.distribution import Distribution, HistogramRow, MetricRow, ProcessMetrics, family
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import State
from penstock.router.http.heads import ClientRequest
from penstock.router.routes import route_of


class RouterMetricTable(msgspec.Struct, frozen=True):
    """The metrics of metrics.json."""

    counters: dict[str, MetricRow]  # by the first part of the keys of `RouterMetrics.counts`
    placement: dict[str, MetricRow]  # by figure of `Placement.metrics`
    replicas: dict[str, MetricRow]
    histograms: dict[str, HistogramRow]


METRICS = msgspec.json.decode(Path(__file__).with_name("metrics.json").read_bytes(), type=RouterMetricTable)


class RouterMetrics(ProcessMetrics):
    def __init__(self, fleet: Fleet, refused: Counter[int]) -> None:
        super().__init__()
        self.fleet = fleet
        # By name and labels; those without labels are shown from the start.
        self.counts: Counter[tuple[object, ...]] = Counter({("client_gone",): 0, ("broken_streams",): 0})
        self.first_byte = Distribution(*METRICS.histograms["first_byte"])
        self.loop_lag = Distribution(*METRICS.histograms["loop_lag"])
        self._refused = refused  # status → what never became a request

    def count(self, request: ClientRequest, status: int) -> None:
        self.counts["requests", route_of(request), status] += 1

    def collect(self) -> Iterator[Metric]:
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for (name, *labels), count in sorted(self._counted(), key=str):
            samples.setdefault(str(name), []).append((tuple(map(str, labels)), count))
        for name, row in METRICS.counters.items():
            yield family(row, samples.get(name, ()))
        yield self.first_byte.family({})
        yield self.loop_lag.family({})
        yield from self._of_placements()
        yield from self._of_replicas()

    def _counted(self) -> Iterator[tuple[tuple[object, ...], float]]:
        """Yield all counters, each by its name and labels."""
        yield from self.counts.items()
        for status, count in self._refused.items():
            yield ("refused", status), count
        for replica in self.fleet.replicas.values():
            for name in ("requests", "failures", "ejections"):
                yield (f"replica_{name}", replica.url), getattr(replica, f"num_{name}")

    def _of_placements(self) -> Iterator[Metric]:
        """Yield each placement's own counters and gauges, predicted against actual cached tokens among them."""
        by_name: dict[str, list[tuple[list[str], float]]] = {}
        for role, group in self.fleet.all_groups():
            for name, value in group.placement.metrics().items():
                by_name.setdefault(name, []).append(([group.root, role], value))
        for name, samples in by_name.items():
            yield family(METRICS.placement[name], samples)

    def _of_replicas(self) -> Iterator[Metric]:
        replicas = self.fleet.replicas.values()
        states = [((each.url, name), float(each.state == name)) for each in replicas for name in get_args(State)]
        yield family(METRICS.replicas["state"], states)
        yield family(METRICS.replicas["in_flight"], [((each.url,), each.num_in_flight) for each in replicas])
