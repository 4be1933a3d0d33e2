"""Estimates from measured rates whether loading KV blocks is faster than computing them again.

Before anything has been measured, loading is tried, and brings the first figures.
"""

from collections.abc import Iterable, Mapping

MIN_PATIENCE_S = 0.01  # a read gets at least this long before it counts as late …
UNKNOWN_PATIENCE_S = 2.0  # … this long while nothing has been measured
PATIENCE = 3.0  # … else this many times its expected time, and never longer than computing


class Rate:
    """Amount per second, as a moving average in which large samples weigh more."""

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
        """Return how long this amount takes; 0 while nothing has been measured."""
        return 0.0 if self.per_s is None else amount / self.per_s


class Rates:
    def __init__(self, block_bytes: int, block_size: int, stores: Iterable[str]) -> None:
        full_weight = max(32 * 2**20 // max(block_bytes, 1), 1)
        self.reads = {store: Rate(full_weight) for store in stores}  # blocks, as the stores report them
        self.copies = Rate(full_weight)  # blocks
        self.prefill = Rate(full_weight=1024)  # tokens
        self.step_s = 0.0  # of a decoding step
        self._block_size = block_size

    def note_step(self, num_tokens: int, num_rows: int, elapsed_s: float) -> None:
        """Add a step: one that is mostly prompts measures prefill, any other one the cost of waiting for a step.

        While steps of prompts follow each other, a request that waits makes room for another prompt: nothing is lost.
        """
        if num_tokens >= 4 * num_rows:
            self.prefill.add(num_tokens, elapsed_s)
        elif num_rows:
            self.step_s += 0.2 * (elapsed_s - self.step_s)

    def is_load_faster(self, queued: Mapping[str, int], num_gained: int, num_host: int) -> bool:
        """Compare reading the blocks `queued` at each store, with earlier ones, to computing the `num_gained` blocks that
        become usable."""
        if self._is_new(queued):
            return True
        load_s = self._read_s(queued) + self.copies.seconds(sum(queued.values()) + num_host)
        return load_s + self.step_s < self._compute_s(num_gained)

    def is_restore_faster(self, num_host: int, num_gained: int, is_busy: bool) -> bool:
        """Compare copying blocks from the host, and one step more if other requests compute meanwhile, to computing them."""
        if self.copies.per_s is None or self.prefill.per_s is None:
            return True
        restore_s = self.copies.seconds(num_host) + (self.step_s if is_busy else 0.0)
        return restore_s < self._compute_s(num_gained)

    def patience_s(self, queued: Mapping[str, int], num_gained: int) -> float:
        """Return how long to wait for reads that have just been queued."""
        if self._is_new(queued):
            return UNKNOWN_PATIENCE_S
        longest = min(PATIENCE * self._read_s(queued) + 2 * self.step_s, self._compute_s(num_gained))
        return max(longest, MIN_PATIENCE_S)

    def _is_new(self, stores: Iterable[str]) -> bool:
        return self.prefill.per_s is None or any(self.reads[store].per_s is None for store in stores)

    def _read_s(self, queued: Mapping[str, int]) -> float:
        """Return the time of the slowest store: they work in parallel."""
        return max((self.reads[store].seconds(count) for store, count in queued.items()), default=0.0)

    def _compute_s(self, num_blocks: int) -> float:
        return self.prefill.seconds(num_blocks * self._block_size)
