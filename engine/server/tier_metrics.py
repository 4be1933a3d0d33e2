"""Gauges and counters of the cache tiers for /metrics, labelled by tier.

The names are those of `Stats.tiers`, under `penstock:kv_tier_`; which tiers there are is decided at the start, so the
label has two or three values.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# What goes down again. Everything else only grows.
GAUGES = frozenset(
    {
        "used_blocks",
        "capacity_blocks",
        "pinned_blocks",
        "queued_blocks",
        "loading_blocks",
        "storing_blocks",
        "bytes_per_s",
        # of the disk itself
        "capacity_bytes",
        "entries",
        "is_direct",
        "is_open",
        "is_picky",
        "loading",
        "pinned",
        "queue_bytes",
        "recovery_s",
        "retention_s",
        "scan_left",
        "slots",
        "workers",
        "used_bytes",
        # of peers
        "served_clients",
    }
)


def tier_families(tiers: Mapping[str, Mapping[str, float]], model_name: str) -> Iterator[Metric]:
    for name in sorted({name for values in tiers.values() for name in values}):
        kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
        text = name.replace("_", " ").capitalize() + " of a cache tier."
        family = kind(f"penstock:kv_tier_{name}", text, labels=["model_name", "tier"])
        for tier, values in tiers.items():
            if name in values:
                family.add_metric([model_name, tier], values[name])
        yield family
