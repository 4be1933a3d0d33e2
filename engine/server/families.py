"""From the engine's `Stats` to metric families for /metrics: the tables say what each figure is called there.

Names are vLLM's where vLLM has the thing. Which tiers there are is decided at the start, so their label has two or
three values.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from penstock.engine.messages import Stats
from penstock.executor.protocol import ExpertUpdate

Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]

GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences in the running batch."),
    "num_waiting": ("vllm:num_requests_waiting", "Sequences in the queue."),
}
COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "num_preemptions": ("vllm:num_preemptions", "Preemptions."),
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens computed or found."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "forced_tokens": ("penstock:forced_tokens", "Generated tokens that a grammar left no choice about."),
    "num_drafts": ("penstock:spec_drafts", "Rows computed with drafts behind them."),
    "draft_tokens": ("penstock:spec_draft_tokens", "Tokens computed before they were sampled."),
    "accepted_tokens": ("penstock:spec_accepted_tokens", "Those of them that were sampled."),
}
EXPERT_COUNTERS = {
    "num_rebalances": ("rebalances", "Plans carried out."),
    "num_skipped": ("rebalances_skipped", "Looks at the load after which nothing moved."),
    "num_aborted": ("rebalances_aborted", "Plans given up; the one before holds."),
    "num_moved": ("moved", "Experts moved."),
    "moved_bytes": ("moved_bytes", "Bytes of experts sent between ranks."),
    "plan_s": ("plan_seconds", "Time spent planning, beside the steps."),
    "stall_s": ("stall_seconds", "Time that steps waited at their boundaries."),
}
# Of a tier, what goes down again. Everything else only grows.
TIER_GAUGES = frozenset(
    {
        *("used_blocks", "capacity_blocks", "pinned_blocks", "queued_blocks", "loading_blocks", "storing_blocks"),
        "bytes_per_s",
        # of the disk itself
        *("capacity_bytes", "entries", "is_direct", "is_open", "is_picky", "loading", "pinned", "queue_bytes"),
        *("recovery_s", "retention_s", "scan_left", "slots", "workers", "used_bytes"),
        # of peers
        "served_clients",
    }
)


def family(
    kind: Kind, name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """`rows`: the values of the labels, and the figure."""
    found = kind(name, text, labels=labels)
    for values, figure in rows:
        found.add_metric(values, figure)
    return found


def stats_families(stats: Stats, model: str) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for field, (name, text) in table.items():
            yield family(kind, name, text, ["model_name"], [((model,), getattr(stats, field))])
    share = stats.num_used_blocks / max(stats.num_blocks, 1)
    text = "Share of KV blocks in use, 0 to 1."
    yield family(GaugeMetricFamily, "vllm:kv_cache_usage_perc", text, ["model_name"], [((model,), share)])
    states = {"all": stats.num_blocks, "held": stats.num_used_blocks, "cached": stats.num_cached_blocks}
    rows = [((model, state), count) for state, count in states.items()]
    text = "KV blocks of the device: all, held by requests, and with content that can be found again."
    yield family(GaugeMetricFamily, "penstock:kv_device_blocks", text, ["model_name", "state"], rows)
    steps = SummaryMetricFamily("penstock:step_seconds", "Time of the engine's steps.", labels=["model_name"])
    steps.add_metric([model], stats.num_steps, stats.step_s)
    yield steps
    yield from _tier_families(stats.tiers, model)
    if stats.experts is not None:
        yield from _expert_families(stats.experts, model)


def _tier_families(tiers: Mapping[str, Mapping[str, float]], model: str) -> Iterator[Metric]:
    for figure in sorted({figure for values in tiers.values() for figure in values}):
        kind = GaugeMetricFamily if figure in TIER_GAUGES else CounterMetricFamily
        text = figure.replace("_", " ").capitalize() + " of a cache tier."
        rows = [((model, tier), values[figure]) for tier, values in tiers.items() if figure in values]
        yield family(kind, f"penstock:kv_tier_{figure}", text, ["model_name", "tier"], rows)


def _expert_families(update: ExpertUpdate, model: str) -> Iterator[Metric]:
    """How evenly experts' work is spread over the ranks, and what moving them took."""
    text = "Mean load of a rank over the load of the fullest, mean over the layers."
    yield family(GaugeMetricFamily, "penstock:expert_balance", text, ["model_name"], [((model,), update.balance)])
    for name, of, shares in (("rank_load", "rank", update.rank_load), ("load", "expert", update.expert_load)):
        text = f"Share of the experts' tokens at the last look, by {of}; all layers together."
        rows = [((model, str(place)), share) for place, share in enumerate(array("f", shares))]
        yield family(GaugeMetricFamily, f"penstock:expert_{name}", text, ["model_name", of], rows)
    for field, (name, text) in EXPERT_COUNTERS.items():
        figure = getattr(update, field)
        yield family(CounterMetricFamily, f"penstock:expert_{name}", text, ["model_name"], [((model,), figure)])
