"""Whether a new record is worth evicting an old one for. Knows keys, no slots and no bytes.

A disk that is large for its load does best when everything is written. One that thrashes does better, and wears
out far less, when a key is written only at its second appearance. Which of the two it is shows only in use: two
shadow disks of keys alone, one for each policy, see a sample of all keys, and the policy with more hits rules.
"""

from collections import OrderedDict

_SAMPLE_SLOTS = 64  # a shadow has at least so many slots, and stands for up to 32 times as many
_MARGIN = 1.02  # writing everything has to earn its wear


class Admission:
    """For a disk of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self.is_picky = False
        self._num_seen_kept = num_slots
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # turned away lately
        stride = 1
        while stride < 32 and num_slots // (stride * 2) >= _SAMPLE_SLOTS:
            stride *= 2
        self._sample_mask = stride - 1
        slots = max(num_slots // stride, 1)
        self._eager, self._picky = _Shadow(slots, 1), _Shadow(slots, 2)
        self._judge_every = 4 * slots
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
        if not self.is_picky:
            return True
        if key in self._seen:
            del self._seen[key]
            return True
        self._seen[key] = None
        if len(self._seen) > self._num_seen_kept:
            self._seen.popitem(last=False)
        return False

    def _judge(self) -> None:
        self.is_picky = self._eager.hits <= self._picky.hits * _MARGIN
        self._num_sampled = 0
        self._eager.hits /= 2  # the past counts, less and less
        self._picky.hits /= 2


class _Shadow:
    """An LRU cache without content that takes a key at its n-th appearance."""

    def __init__(self, slots: int, appearances: int) -> None:
        self.hits = 0.0
        self._slots = slots
        self._appearances = appearances
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def saw(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)
            self.hits += 1
        elif self._appearances == 1 or key in self._seen:
            self._seen.pop(key, None)
            self._keys[key] = None
            if len(self._keys) > self._slots:
                self._keys.popitem(last=False)
        else:
            self._seen[key] = None
            if len(self._seen) > self._slots:
                self._seen.popitem(last=False)
