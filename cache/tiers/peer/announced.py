"""What a peer has announced, and how that changed: written by the thread that hears it, read by the engine's.

Bounded both ways: no more keys than the limit, and changes that nobody asks for are kept as their sum.
"""

import threading
from collections.abc import Iterable
from itertools import islice

_AT_ONCE = 256  # keys between two chances for the other thread


class Announced:
    def __init__(self, max_keys: int) -> None:
        self.num_unheard = 0  # beyond the limit
        self._max_keys = max_keys
        self._keys: set[bytes] = set()
        self._changed: dict[bytes, bool] = {}  # since the last `take_changes`: whether it is there now
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that came since the last call, and keys that went."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return [key for key, has in changed.items() if has], [key for key, has in changed.items() if not has]

    def come(self, keys: Iterable[bytes]) -> None:
        waiting = iter(keys)
        while some := list(islice(waiting, _AT_ONCE)):
            with self._lock:
                for key in some:
                    self._come(key)

    def go(self, keys: Iterable[bytes]) -> None:
        waiting = iter(keys)
        while some := list(islice(waiting, _AT_ONCE)):
            with self._lock:
                for key in some:
                    if key in self._keys:
                        self._keys.remove(key)
                        self._note(key, False)

    def clear(self) -> None:
        self.go(list(self._keys))

    def check(self) -> None:
        with self._lock:
            assert len(self._keys) <= self._max_keys
            assert all((key in self._keys) == has for key, has in self._changed.items())

    def _come(self, key: bytes) -> None:
        if key in self._keys:
            return
        if len(self._keys) >= self._max_keys:
            self.num_unheard += 1
            return
        self._keys.add(key)
        self._note(key, True)

    def _note(self, key: bytes, has: bool) -> None:
        """A key that went and came back, or came and went, has not changed."""
        if self._changed.get(key, has) == has:
            self._changed[key] = has
        else:
            del self._changed[key]
