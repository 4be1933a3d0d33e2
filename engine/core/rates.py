"""Estimates from measured rates whether loading KV blocks is faster than recomputing them.

Until something has been measured, blocks are loaded, which yields the first measurements.
"""

from collections.abc import Iterable, Mapping

MIN_PATIENCE_S = 0.01  # minimum time before a read counts as late …
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
        self.reads = {store: Rate(full_weight) for store in stores}  # blocks, as the stores report them
        self.copies = Rate(full_weight)  # blocks
        self.prefill = Rate(full_weight=1024)  # tokens
        self.step_s = 0.0  # duration of a decoding step
        self._block_size = block_size

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
        """Tell whether reading the blocks `queued` at each store is faster than computing the `num_gained` blocks that
        become usable."""
        if self._is_new(queued):
            return True
        load_s = self._read_s(queued) + self.copies.seconds(sum(queued.values()) + num_host)
        return load_s + self.step_s < self._compute_s(num_gained)

    def patience_s(self, queued: Mapping[str, int], num_gained: int) -> float:
        """Return the time limit for reads that have just been queued."""
        if self._is_new(queued):
            return UNKNOWN_PATIENCE_S
        longest = min(PATIENCE * self._read_s(queued) + 2 * self.step_s, self._compute_s(num_gained))
        return max(longest, MIN_PATIENCE_S)

    def _is_new(self, stores: Iterable[str]) -> bool:
        return self.prefill.per_s is None or any(self.reads[store].per_s is None for store in stores)

    def _read_s(self, queued: Mapping[str, int]) -> float:
        """Return the time of the slowest store, since stores work in parallel."""
        return max((self.reads[store].seconds(count) for store, count in queued.items()), default=0.0)

    def _compute_s(self, num_blocks: int) -> float:
        return self.prefill.seconds(num_blocks * self._block_size)
