"""The keys that a peer has announced, written by the link's thread and read by the engine's thread. Memory is bounded: the
number of keys has a limit, and changes that nobody reads are merged."""

import threading
from collections.abc import Iterable
from itertools import islice

from penstock.cache.keys import KeyChanges

_AT_ONCE = 256  # keys per acquisition of the lock, so that the other thread does not wait long


class AnnouncedKeys:
    """The set of keys that the peer has announced and not withdrawn, at most `max_keys`."""

    def __init__(self, max_keys: int) -> None:
        self.num_ignored = 0  # keys beyond the limit
        self._max_keys = max_keys
        self._keys: set[bytes] = set()
        self._changes = KeyChanges()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys added and the keys removed since the last call."""
        with self._lock:
            return self._changes.take()

    def note(self, keys: Iterable[bytes], is_there: bool) -> None:
        waiting = iter(keys)
        while some := list(islice(waiting, _AT_ONCE)):
            with self._lock:
                for key in some:
                    self._note(key, is_there)

    def clear(self) -> None:
        self.note(list(self._keys), False)

    def check(self) -> None:
        with self._lock:
            assert len(self._keys) <= self._max_keys
            self._changes.check(self._keys)

    def _note(self, key: bytes, is_there: bool) -> None:
        if (key in self._keys) == is_there:
            return
        if not is_there:
            self._keys.remove(key)
        elif len(self._keys) < self._max_keys:
            self._keys.add(key)
        else:
            self.num_ignored += 1
            return
        self._changes.note(key, is_there)
