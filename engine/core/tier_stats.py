"""Measured rates, which tell whether loading KV blocks is faster than recomputing them; gauges and counters by tier.

Until a rate has been measured, blocks are loaded, which yields the first measurements.
"""

from collections.abc import Iterable, Mapping

from penstock.cache.tiers.index import TierIndex
from penstock.cache.tiers.names import PEER, SERVED, tier_of

MIN_PATIENCE_S = 0.01  # minimum time before a load counts as late …
UNKNOWN_PATIENCE_S = 2.0  # … the time before anything has been measured …
PATIENCE = 3.0  # … otherwise a multiple of the expected time, at most the time to recompute


class Rate:
    """An amount per second, as a moving average in which large samples have more weight."""

    def __init__(self, full_weight: float) -> None:
        self.per_s: float | None = None
        self._full_weight = full_weight

    def add(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        sample = amount / seconds
        weight = min(max(amount / self._full_weight, 0.02), 0.5)
        self.per_s = sample if self.per_s is None else self.per_s + weight * (sample - self.per_s)

    def seconds(self, amount: float) -> float:
        """Return the time for this amount; 0 before the first measurement."""
        return 0.0 if self.per_s is None else amount / self.per_s


class Rates:
    def __init__(self, block_bytes: int, block_size: int, stores: Iterable[str]) -> None:
        full_weight = max(32 * 2**20 // max(block_bytes, 1), 1)
        self.loads = {store: Rate(full_weight) for store in stores}  # blocks, as the stores report them
        self.copies = Rate(full_weight)  # blocks
        self.prefill = Rate(full_weight=1024)  # tokens
        self.step_s = 0.0  # duration of a decoding step
        self.block_bytes, self._block_size = block_bytes, block_size

    def note_step(self, num_tokens: int, num_rows: int, elapsed_s: float) -> None:
        """Add a step: steps with mostly prompt tokens measure prefill, others the cost of waiting for a step.

        While prefill steps follow each other, a waiting request makes room for another prompt, so waiting costs
        nothing.
        """
        if num_tokens >= 4 * num_rows:
            self.prefill.add(num_tokens, elapsed_s)
        elif num_rows:
            self.step_s += 0.2 * (elapsed_s - self.step_s)

    def is_load_faster(self, queued: Mapping[str, int], num_gained: int, num_host: int) -> bool:
        """Tell whether loading the blocks `queued` at each store is faster than computing the `num_gained` blocks that
        become usable."""
        if self._is_new(queued):
            return True
        load_s = self._load_s(queued) + self.copies.seconds(sum(queued.values()) + num_host)
        return load_s + self.step_s < self._compute_s(num_gained)

    def patience_s(self, queued: Mapping[str, int], num_gained: int) -> float:
        """Return the time limit for loads that have just been queued."""
        if self._is_new(queued):
            return UNKNOWN_PATIENCE_S
        longest = min(PATIENCE * self._load_s(queued) + 2 * self.step_s, self._compute_s(num_gained))
        return max(longest, MIN_PATIENCE_S)

    def _is_new(self, stores: Iterable[str]) -> bool:
        return self.prefill.per_s is None or any(self.loads[store].per_s is None for store in stores)

    def _load_s(self, queued: Mapping[str, int]) -> float:
        """Return the time of the slowest store, since stores work in parallel."""
        return max((self.loads[store].seconds(count) for store, count in queued.items()), default=0.0)

    def _compute_s(self, num_blocks: int) -> float:
        return self.prefill.seconds(num_blocks * self._block_size)


def tier_stats(
    index: TierIndex, counts: Mapping[str, int], rates: Rates, stores: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the figures of each tier. `counts` are those of engine/core/tiers.py, `stores` the last report of each
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
            "bytes_per_s": (rates.copies.per_s or 0.0) * rates.block_bytes,
        }
    }
    for name, keys in index.stored_keys.items():
        of_store = {
            "hit_tokens": counts[f"hits_{name}"],
            "used_blocks": len(keys),
            "loaded_blocks": index.counts[f"loads_{name}"],
            "failed_loads": index.counts[f"failed_loads_{name}"],
            "loading_blocks": sum(load.store == name for load in index.loading.values()),
            **stores.get(name, {}),
            "bytes_per_s": (rates.loads[name].per_s or 0.0) * rates.block_bytes,
        }
        tier = tiers.setdefault(tier_of(name), {})
        for figure, value in of_store.items():
            tier[figure] = tier.get(figure, 0) + value
    if "disk" in tiers:
        tiers["disk"] |= {
            "stored_blocks": index.counts["stores"],
            "storing_blocks": len(index.storing),
            "dropped_by_disk": index.counts["drops_disk"],
            "dropped_unwritten": index.counts["drops_unstored"],
        }
    if SERVED in stores:
        served = {f"{SERVED}_{name}": value for name, value in stores[SERVED].items()}
        tiers[PEER] = tiers.get(PEER, {}) | served
    return tiers
