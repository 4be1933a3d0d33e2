"""Whether a new record is worth evicting an old one for. Knows keys, no cells and no bytes.

A disk that is large for its load does best when everything is written. One that thrashes does better, and wears
out far less, when a key is written only at its second appearance. Which of the two it is shows only in use: two
shadow disks of keys alone, one for each policy, see a sample of all keys, and the policy with more hits rules.
"""

from collections import OrderedDict

_SAMPLE_CELLS = 64  # a shadow has at least so many cells, and stands for up to 32 times as many
_MARGIN = 1.02  # writing everything has to earn its wear


class AdmissionPolicy:
    """For a disk of `num_cells` cells."""

    def __init__(self, num_cells: int) -> None:
        self.is_picky = False
        self._turned_away = _RecentKeys(num_cells)
        stride = 1
        while stride < 32 and num_cells // (stride * 2) >= _SAMPLE_CELLS:
            stride *= 2
        self._sample_mask = stride - 1
        num_sampled_cells = max(num_cells // stride, 1)
        self._eager, self._picky = _Shadow(num_sampled_cells, 1), _Shadow(num_sampled_cells, 2)
        self._judge_every = 4 * num_sampled_cells
        self._num_sampled = 0

    def saw(self, key: bytes) -> None:
        """A key was asked for or computed; called for every one, stored or not."""
        if key[-1] & self._sample_mask:
            return
        self._eager.saw(key)
        self._picky.saw(key)
        self._num_sampled += 1
        if self._num_sampled >= self._judge_every:
            self._judge()

    def admits(self, key: bytes) -> bool:
        """Asked when storing means evicting."""
        return not self.is_picky or self._turned_away.take(key)

    def _judge(self) -> None:
        self.is_picky = self._eager.hits <= self._picky.hits * _MARGIN
        self._num_sampled = 0
        self._eager.hits /= 2  # the past counts, less and less
        self._picky.hits /= 2


class _RecentKeys(OrderedDict[bytes, None]):
    """The last keys that were added, `limit` at most."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def add(self, key: bytes) -> None:
        self[key] = None
        if len(self) > self._limit:
            self.popitem(last=False)

    def take(self, key: bytes) -> bool:
        """Whether the key was there, which it is no more; else it is from now on."""
        if key in self:
            del self[key]
            return True
        self.add(key)
        return False


class _Shadow:
    """An LRU cache without content that takes a key at its n-th appearance."""

    def __init__(self, num_cells: int, appearances: int) -> None:
        self.hits = 0.0
        self._appearances = appearances
        self._keys, self._seen = _RecentKeys(num_cells), _RecentKeys(num_cells)

    def saw(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)
            self.hits += 1
        elif self._appearances == 1 or self._seen.take(key):
            self._keys.add(key)
