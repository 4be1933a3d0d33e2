"""Counters of the router, as text for /metrics. Labels are routes, statuses, replicas and reasons: bounded sets."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engine.http.distribution import Distribution, ProcessMetrics, family
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import State
from penstock.router.http.heads import ClientRequest
from penstock.router.routes import route_of

FIRST_BYTE_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)

# name → what it counts, and its labels
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Answers, by route and status.", ("route", "status")),
    "refused": ("Connections refused before a whole request had arrived, by status.", ("status",)),
    "retries": ("Requests sent to another replica, by reason.", ("reason",)),
    "not_retried": ("Failures returned to the client without another retry, by reason.", ("reason",)),
    "split_requests": ("Answers in a fleet with prefill replicas, by where the prompt was computed.", ("path",)),
    "prefills": ("Prompts sent to a prefill replica, by outcome.", ("outcome",)),
    "client_gone": ("Clients that disconnected before the end of the answer.", ()),
    "broken_streams": ("Answers that broke off after their first byte.", ()),
    "replica_requests": ("Requests sent to a replica.", ("replica",)),
    "replica_failures": ("Requests to a replica that failed.", ("replica",)),
    "replica_ejections": ("Times that a replica was ejected after consecutive failures.", ("replica",)),
}
# Figures of each placement, as `Placement.metrics` names them; those that end in _total are counters.
PLACEMENT = {
    "decisions_total": "Choices of a replica.",
    "no_match_decisions_total": "Choices for prompts that no replica has the beginning of.",
    "no_ids_decisions_total": "Choices for prompts whose token ids are unknown, while replicas report blocks of token ids.",
    "no_prompt_decisions_total": "Choices for requests without a prompt.",
    "requests_ok_total": "Requests that succeeded at the chosen replica.",
    "requests_failed_total": "Requests that failed at the chosen replica.",
    "compared_requests_total": "Answers whose replica reported its cached tokens.",
    "compared_prompt_tokens_total": "Prompt tokens of the answers whose replica reported its cached tokens.",
    "predicted_cached_tokens_total": "Cached tokens that were predicted for these answers.",
    "actual_cached_tokens_total": "Cached tokens that the replicas reported for these answers.",
    "cached_tokens_error_total": "Sum of the differences between predicted and reported cached tokens, without sign.",
    "predicted_ttft_seconds_total": "Sum of the predicted times to the first token.",
    "actual_ttft_seconds_total": "Sum of the measured times to the first token.",
    "approximate_replicas": "Replicas whose cache contents are estimated, because they report none.",
    "event_gaps_total": "Missing sequence numbers in the replicas' cache events.",
    "event_repeats_total": "Repeated frames of the replicas' cache events.",
    "event_stalls_total": "Times that a stream of cache events was silent for 5 s.",
    "keys_refused_total": "Reported keys beyond twice the number of the replica's blocks.",
    "index_facts": "Index entries of blocks that replicas reported.",
    "index_predictions": "Index entries of blocks that replicas are expected to have.",
    "index_evictions_total": "Index entries evicted because the table was full.",
    "index_reserved_bytes": "Memory reserved for the index.",
    "sessions": "Sessions whose last replica is remembered.",
}
PREFIX = "penstock:router_"


class RouterMetrics(ProcessMetrics):
    def __init__(self, fleet: Fleet, refused: Counter[int]) -> None:
        super().__init__()
        self.fleet = fleet
        # By name and labels; those without labels are shown from the start.
        self.counts: Counter[tuple[object, ...]] = Counter({("client_gone",): 0, ("broken_streams",): 0})
        help_text = "Request complete to first byte relayed."
        self.first_byte = Distribution(f"{PREFIX}first_byte_seconds", help_text, FIRST_BYTE_S)
        self.loop_lag = Distribution(f"{PREFIX}loop_lag_seconds", "Delay of a timer of the event loop.", LAG_S)
        self._refused = refused  # status → what never became a request

    def count(self, request: ClientRequest, status: int) -> None:
        self.counts["requests", route_of(request), status] += 1

    def collect(self) -> Iterator[Metric]:
        rows: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for (name, *labels), count in sorted(self._counted(), key=str):
            rows.setdefault(str(name), []).append((tuple(map(str, labels)), count))
        for name, (help_text, names) in COUNTERS.items():
            yield family(CounterMetricFamily, f"{PREFIX}{name}", help_text, names, rows.get(name, ()))
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
        for name, rows in by_name.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            plain = name.removesuffix("_total")
            yield family(kind, f"{PREFIX}{plain}", PLACEMENT[name], ("model", "role"), rows)

    def _of_replicas(self) -> Iterator[Metric]:
        replicas = self.fleet.replicas.values()
        states = [((each.url, name), float(each.state == name)) for each in replicas for name in get_args(State)]
        yield family(
            GaugeMetricFamily,
            f"{PREFIX}replica_state",
            "1 for the current state, else 0.",
            ("replica", "state"),
            states,
        )
        in_flight = [((each.url,), each.num_in_flight) for each in replicas]
        yield family(GaugeMetricFamily, f"{PREFIX}requests_in_flight", "Requests in flight.", ("replica",), in_flight)
