"""Counters of the router, as text for /metrics. Labels are routes, statuses, replicas and reasons: bounded sets.

With several workers each knows what the others counted a second ago (router/workers.py), and whichever is asked
answers with the sums. States, caches and load are its own view.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.http.distribution import Distribution, family
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import State
from penstock.router.http.heads import ClientRequest

if TYPE_CHECKING:
    from penstock.engine.http.otlp import Exporter

FIRST_BYTE_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)

# name → what it counts, and its labels
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Answers, by route and status.", ("route", "status")),
    "refused": ("Refused before there was a request, by status.", ("status",)),
    "retries": ("Requests sent to another replica, by reason.", ("reason",)),
    "not_retried": ("Failures passed on for want of budget, by reason.", ("reason",)),
    "split_requests": ("Answers in a fleet with prefill replicas, by where the prompt was computed.", ("path",)),
    "prefills": ("Prompts sent to a prefill replica, by what came of it.", ("outcome",)),
    "shadows": ("Requests for a shadow, by what it answered.", ("outcome",)),
    "tokenized": ("Prompts given to a replica's /tokenize, by whether it said.", ("answered",)),
    "client_gone": ("Clients that left before the end.", ()),
    "broken_streams": ("Answers that broke after their first byte.", ()),
    "trace_spans": ("Spans, by what became of them.", ("outcome",)),
    "replica_requests": ("Requests sent to a replica.", ("replica",)),
    "replica_failures": ("Failures seen of a replica.", ("replica",)),
    "replica_ejections": ("Times that a replica was ejected for its conduct.", ("replica",)),
}
PREFIX = "penstock:router_"
SEPARATOR = "\x1f"  # between a counter's name and its labels in a report
STORED = "/v1/responses/"  # before the id of a response that a replica stores


def new_histograms() -> tuple[Distribution, Distribution]:
    return (
        Distribution(f"{PREFIX}first_byte_seconds", "Request complete to first byte relayed.", FIRST_BYTE_S),
        Distribution(f"{PREFIX}loop_lag_seconds", "How late a timer ran.", LAG_S),
    )


class RouterMetrics(Collector):
    def __init__(self, fleet: Fleet, refused: Counter[int], exporter: "Exporter | None" = None) -> None:
        self.fleet = fleet
        self._exporter = exporter
        # By name and labels; those without labels are shown from the start.
        self.counts: Counter[tuple[object, ...]] = Counter({("client_gone",): 0, ("broken_streams",): 0})
        self.first_byte, self.loop_lag = self._histograms = new_histograms()
        self.others: dict[int, dict[str, float]] = {}  # worker → what it last reported
        self._refused = refused  # status → what never became a request
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count(self, request: ClientRequest, status: int) -> None:
        self.counts["requests", route_of(request), status] += 1

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def own_counters(self) -> dict[str, float]:
        """What this process has counted, flat: a name with its labels → the value."""
        found: dict[str, float] = {_key(*key): count for key, count in self.counts.items()}
        found |= {_key("refused", status): count for status, count in self._refused.items()}
        if self._exporter is not None:
            found[_key("trace_spans", "sent")] = self._exporter.num_sent
            found[_key("trace_spans", "dropped")] = self._exporter.num_dropped
        for replica in self.fleet.replicas.values():
            for name in ("requests", "failures", "ejections"):
                found[_key(f"replica_{name}", replica.url)] = getattr(replica, f"num_{name}")
        for histogram in self._histograms:
            found |= {_key(histogram.name, place): count for place, count in enumerate(histogram.counts)}
            found[_key(histogram.name, "sum")] = histogram.total
        for role, group in self.fleet.all_groups():
            found |= {
                _key("placement", group.root, role, name): value for name, value in group.placement.metrics().items()
            }
        return found

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        summed: Counter[str] = Counter()
        for counters in (self.own_counters(), *self.others.values()):
            summed.update(counters)
        by_name: dict[str, list[tuple[list[str], float]]] = {}
        for key, value in sorted(summed.items()):
            name, *labels = key.split(SEPARATOR)
            by_name.setdefault(name, []).append((labels, value))
        for name, (help_text, names) in COUNTERS.items():
            yield family(CounterMetricFamily, f"{PREFIX}{name}", help_text, names, by_name.get(name, ()))
        for histogram in new_histograms():  # of all workers together
            counts = {labels[0]: value for labels, value in by_name[histogram.name]}
            histogram.total = counts.pop("sum")
            histogram.counts = [counts[str(place)] for place in range(len(counts))]
            yield histogram.family({})
        yield from _placement(by_name.get("placement", []))
        yield from self._of_replicas()

    def _of_replicas(self) -> Iterator[Metric]:
        replicas = self.fleet.replicas.values()
        states = [((each.url, name), float(each.state == name)) for each in replicas for name in get_args(State)]
        yield family(GaugeMetricFamily, f"{PREFIX}replica_state", "1: its state.", ("replica", "state"), states)
        in_flight = [((each.url,), each.num_in_flight) for each in replicas]
        yield family(GaugeMetricFamily, f"{PREFIX}under_way", "Requests in flight.", ("replica",), in_flight)


def route_of(request: ClientRequest) -> str:
    """Return the request's route for the metrics. The request has passed admission, so its path is one of the router's own
    or proxied ones, or that of a stored response, whose id is left out."""
    return STORED if request.path.startswith(STORED) else request.path


def is_counter(key: str) -> bool:
    """Of a report: of the placement's figures some are gauges."""
    return not key.startswith("placement" + SEPARATOR) or key.endswith("_total")


def _key(*parts: object) -> str:
    return SEPARATOR.join(map(str, parts))


def _placement(found: list[tuple[list[str], float]]) -> Iterator[Metric]:
    """The placement's own counters and gauges, per model: predicted against actual cached tokens among them."""
    by_name: dict[str, list[tuple[list[str], float]]] = {}
    for (root, role, name), value in found:
        by_name.setdefault(name, []).append(([root, role], value))
    for name, rows in by_name.items():
        kind, plain = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily, name.removesuffix("_total")
        yield family(kind, f"{PREFIX}{plain}", f"See docs: {plain}.", ("model", "role"), rows)
