"""Selects the block keys that are reported to routers, for a model with several groups of layers.

A pool also has keys of pages that routers do not know, and a block of one group is useless without the pages of the
other groups. So a key is reported while the pool has the pages of all groups for it. If layers have recurrent states,
these are the keys of checkpoints, each of which can be hit (`ModelInfo.hits_at_ends`). With windows, a sequence of keys
from the first block on can be hit, up to its end; too few keys are reported rather than too many, because windows need
fewer blocks.
"""

from penstock.cache.keys import KeyChanges
from penstock.cache.pool import BlockPool
from penstock.engine.core.kv import Kv


class UsableKeys:
    """The usable keys of one tier's pool, with the part of the pool's interface that `CacheLog` uses."""

    def __init__(self, pool: BlockPool, kv: Kv) -> None:
        self._pool, self._kv = pool, kv
        self._needs: dict[bytes, list[bytes]] = {}  # key that may be reported → keys of the other groups' pages
        self._needed: dict[bytes, bytes] = {}  # key of such a page → key that may be reported
        self._usable: set[bytes] = set()  # keys that are reported now
        self._new: list[bytes] = []  # keys that were registered since the last update
        self._changes = KeyChanges()

    def watch(self, is_on: bool) -> None:
        """Start or stop recording changes of the usable keys."""
        self._pool.watch(is_on)
        self._changes = KeyChanges()
        self._needs.clear()
        self._needed.clear()
        self._usable.clear()
        self._new.clear()
        listeners = self._kv.listeners
        listeners[:] = [each for each in listeners if each != self._note]
        if is_on:
            listeners.append(self._note)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys that have become usable since the last call, and those that no longer are."""
        new, self._new = self._new, []
        added, removed = self._pool.take_changes()
        for key in new:
            if key not in self._needs:
                self._add(key)
        for key in dict.fromkeys([*(self._needed.get(key, key) for key in (*added, *removed)), *new]):
            if key in self._needs:
                self._update(key)
        if len(self._needs) > 2 * self._pool.num_blocks:  # the oldest of these keys never reached this tier
            removed += list(self._needs)[: self._pool.num_blocks]
        for key in removed:
            if key in self._needs and key not in self._usable:
                for page in self._needs.pop(key):
                    del self._needed[page]
        return self._changes.take()

    def cached_keys(self) -> list[bytes]:
        find = self._pool.find
        for key in self._pool.cached_keys():  # most are not keys of blocks, which the first lookup shows
            if key not in self._usable and all(map(find, self._kv.keys.others_at(key))):
                self._add(key)
                self._usable.add(key)
        return list(self._usable)

    def _note(self, key: bytes) -> None:
        self._new.append(key)

    def _add(self, key: bytes) -> None:
        self._needs[key] = pages = list(self._kv.keys.others_at(key))
        self._needed.update(dict.fromkeys(pages, key))

    def _update(self, key: bytes) -> None:
        is_usable = all(map(self._pool.find, (key, *self._needs[key])))
        if is_usable != (key in self._usable):
            (self._usable.add if is_usable else self._usable.remove)(key)
            self._changes.note(key, is_usable)
