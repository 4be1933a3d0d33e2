"""Gauges and counters by tier, from the index and from the ranks' stores."""

from collections.abc import Mapping

from penstock.cache.tiers.base import PEER, SERVED, tier_of
from penstock.cache.tiers.index import TierIndex
from penstock.engine.core.rates import Rates


def tier_stats(
    index: TierIndex,
    counts: Mapping[str, int],
    rates: Rates,
    stores: Mapping[str, Mapping[str, float]],
    block_bytes: int,
) -> dict[str, dict[str, float]]:
    """Return the figures of each tier. `counts` are those of engine/core/tiered_kv.py, `stores` the last report of each
    store. Peers are one tier: their figures are added up."""
    tiers: dict[str, dict[str, float]] = {
        "host": {
            "hit_tokens": counts["hits_host"],
            "used_blocks": index.host.num_cached,
            "capacity_blocks": index.host.num_usable,
            "pinned_blocks": index.host.num_usable - index.host.num_free,
            "stored_blocks": index.counts["saves"],
            "loaded_blocks": counts["restores"],
            "evicted_blocks": index.counts["evictions"],
            "dropped_host_full": index.counts["drops_host_full"],
            "dropped_evicted": index.counts["drops_evicted"],
            "queued_blocks": len(index.offers),
            "bytes_per_s": (rates.copies.per_s or 0.0) * block_bytes,
        }
    }
    for name, keys in index.stores.items():
        of_store = {
            "hit_tokens": counts[f"hits_{name}"],
            "used_blocks": len(keys),
            "loaded_blocks": index.counts[f"reads_{name}"],
            "failed_loads": index.counts[f"failed_reads_{name}"],
            "loading_blocks": sum(read.store == name for read in index.reads.values()),
            **stores.get(name, {}),
            "bytes_per_s": (rates.reads[name].per_s or 0.0) * block_bytes,
        }
        tier = tiers.setdefault(tier_of(name), {})
        for figure, value in of_store.items():
            tier[figure] = tier.get(figure, 0) + value
    if "disk" in tiers:
        tiers["disk"] |= {
            "stored_blocks": index.counts["writes"],
            "storing_blocks": len(index.writes),
            "dropped_by_disk": index.counts["drops_disk"],
            "dropped_unwritten": index.counts["drops_unwritten"],
        }
    if SERVED in stores:
        served = {f"{SERVED}_{name}": value for name, value in stores[SERVED].items()}
        tiers[PEER] = tiers.get(PEER, {}) | served
    return tiers
