"""Selects the block keys that are reported to routers, for a model with several groups of layers.

A pool also has keys of pages that routers do not know, and a block of one group is useless without the pages of the
other groups. So a key is reported while the pool has the pages of all groups for it. If layers have recurrent states,
these are the keys of checkpoints, each of which can be hit (`ModelInfo.hits_at_ends`). With windows, a sequence of keys
from the first block on can be hit, up to its end; too few keys are reported rather than too many, because windows need
fewer blocks.
"""

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
        self._net: dict[bytes, bool] | None = None

    @property
    def changes(self) -> dict[bytes, bool] | None:
        if self._net is None or self._pool.changes is None:
            return None
        new, self._new = self._new, []
        changed, self._pool.changes = self._pool.changes, {}
        for key in new:
            if key not in self._needs:
                self._add(key)
        for key in dict.fromkeys([*(self._needed.get(key, key) for key in changed), *new]):
            if key in self._needs:
                self._update(key)
        gone = [key for key, is_cached in changed.items() if not is_cached]
        if len(self._needs) > 2 * self._pool.num_blocks:  # the oldest of these keys never reached this tier
            gone += list(self._needs)[: self._pool.num_blocks]
        for key in gone:
            if key in self._needs and key not in self._usable:
                for page in self._needs.pop(key):
                    del self._needed[page]
        return self._net

    @changes.setter
    def changes(self, changes: dict[bytes, bool] | None) -> None:
        """Stop recording changes (None), start again, or take those so far as reported ({})."""
        if changes is None or self._net is None:
            self._pool.changes = changes
            self._needs.clear()
            self._needed.clear()
            self._usable.clear()
            self._new.clear()
            listeners = self._kv.listeners
            listeners[:] = [each for each in listeners if each != self._note]
            if changes is not None:
                listeners.append(self._note)
        self._net = changes

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
        assert self._net is not None
        is_usable = all(map(self._pool.find, (key, *self._needs[key])))
        if is_usable == (key in self._usable):
            return
        (self._usable.add if is_usable else self._usable.remove)(key)
        if self._net.get(key, is_usable) != is_usable:
            del self._net[key]  # added and removed since the last report
        else:
            self._net[key] = is_usable
