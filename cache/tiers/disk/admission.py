"""The admission policy of the disk tier: decides whether to evict an old record for a new one.

A disk that is large enough for its load has most hits when every block is stored. A disk that thrashes has more hits,
and wears out far less, when a key is stored only at its second appearance. The better policy depends on the traffic:
two shadow caches of keys without data, one per policy, see a sample of all keys, and the one with more hits decides.
"""

from penstock.cache.keys import RecentKeys

_SAMPLE_CELLS = 64  # a shadow cache of a larger disk has at least so many cells, each for up to 32 cells of the disk
_MARGIN = 1.02  # storing every block must raise the hits by so much to be worth the wear


class AdmissionPolicy:
    """The policy for a disk of `num_cells` cells."""

    def __init__(self, num_cells: int) -> None:
        self.is_picky = False
        self._rejected = _RecentKeys(num_cells)
        stride = 1
        while stride < 32 and num_cells // (stride * 2) >= _SAMPLE_CELLS:
            stride *= 2
        self._sample_mask = stride - 1
        num_sampled_cells = max(num_cells // stride, 1)
        self._eager, self._picky = _ShadowCache(num_sampled_cells, 1), _ShadowCache(num_sampled_cells, 2)
        self._judge_every = 4 * num_sampled_cells
        self._num_sampled = 0

    def note_use(self, key: bytes) -> None:
        """Count one use (a lookup or a store) of a key, whether it is stored or not."""
        if key[-1] & self._sample_mask:
            return
        self._eager.note_use(key)
        self._picky.note_use(key)
        self._num_sampled += 1
        if self._num_sampled >= self._judge_every:
            self._judge()

    def admits(self, key: bytes) -> bool:
        """Return whether to store a key when that evicts a record."""
        return not self.is_picky or self._rejected.pop_or_add(key)

    def _judge(self) -> None:
        self.is_picky = self._eager.hits <= self._picky.hits * _MARGIN
        self._num_sampled = 0
        self._eager.hits /= 2  # exponential decay of older samples
        self._picky.hits /= 2


class _RecentKeys(RecentKeys):
    def pop_or_add(self, key: bytes) -> bool:
        """Remove the key and return True if it was there; else add it and return False."""
        if key in self:
            del self[key]
            return True
        self.add(key)
        return False


class _ShadowCache:
    """An LRU cache of keys without data that admits a key at its first or second appearance."""

    def __init__(self, num_cells: int, appearances: int) -> None:
        self.hits = 0.0
        self._appearances = appearances
        self._keys, self._seen = _RecentKeys(num_cells), _RecentKeys(num_cells)

    def note_use(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)
            self.hits += 1
        elif self._appearances == 1 or self._seen.pop_or_add(key):
            self._keys.add(key)
