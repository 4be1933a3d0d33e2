"""How evenly experts' work is spread over the ranks, and what moving them took, for /metrics."""

from array import array
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.executor.protocol import ExpertUpdate

COUNTERS = {
    "num_rebalances": ("rebalances", "Plans carried out."),
    "num_skipped": ("rebalances_skipped", "Looks at the load after which nothing moved."),
    "num_aborted": ("rebalances_aborted", "Plans given up; the one before holds."),
    "num_moved": ("moved", "Experts moved."),
    "moved_bytes": ("moved_bytes", "Bytes of experts sent between ranks."),
    "plan_s": ("plan_seconds", "Time spent planning, beside the steps."),
    "stall_s": ("stall_seconds", "Time that steps waited at their boundaries."),
}


def expert_families(update: ExpertUpdate, model_name: str) -> Iterator[Metric]:
    balance = GaugeMetricFamily(
        "penstock:expert_balance",
        "Mean load of a rank over the load of the fullest, mean over the layers.",
        labels=["model_name"],
    )
    balance.add_metric([model_name], update.balance)
    yield balance
    yield _shares("penstock:expert_rank_load", "rank", update.rank_load, model_name)
    yield _shares("penstock:expert_load", "expert", update.expert_load, model_name)
    for field, (name, text) in COUNTERS.items():
        family = CounterMetricFamily(f"penstock:expert_{name}", text, labels=["model_name"])
        family.add_metric([model_name], getattr(update, field))
        yield family


def _shares(name: str, of: str, shares: bytes, model_name: str) -> Metric:
    text = f"Share of the experts' tokens at the last look, by {of}; all layers together."
    family = GaugeMetricFamily(name, text, labels=["model_name", of])
    for place, share in enumerate(array("f", shares)):
        family.add_metric([model_name, str(place)], share)
    return family
