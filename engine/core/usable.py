"""Which block keys are reported to those who route by them, where layers keep different things.

A pool has keys of pages that no router can name, and a block of one group is of no use without those of the others. So a
key is reported while every group has what lies at its block: then a run of keys from the first block on can be hit, up to its end.
That says too little rather than too much: windows need fewer blocks, and a state only the last checkpoint.
"""

from penstock.cache.pool import BlockPool
from penstock.engine.core.groups import Groups


class UsableKeys:
    """Stands for the pool where its changes are listened to."""

    def __init__(self, pool: BlockPool, groups: Groups) -> None:
        self._pool, self._groups = pool, groups
        self._needs: dict[bytes, list[bytes]] = {}  # what is reported now → the keys of the other groups' pages
        self._needed: dict[bytes, bytes] = {}  # the other way round
        self._net: dict[bytes, bool] | None = None

    @property
    def changes(self) -> dict[bytes, bool] | None:
        if self._net is None or self._pool.changes is None or self._groups.registered is None:
            return None
        gone = [key for key, is_cached in self._pool.changes.items() if not is_cached]
        new, self._groups.registered, self._pool.changes = self._groups.registered, [], {}
        for key in gone:
            if (block := self._needed.get(key, key)) in self._needs:
                for other in self._needs.pop(block):
                    del self._needed[other]
                self._note(block, is_usable=False)
        for key in new:
            if key not in self._needs and self._add(key):
                self._note(key, is_usable=True)
        return self._net

    @changes.setter
    def changes(self, changes: dict[bytes, bool] | None) -> None:
        """None: the changes are not asked for any more. Else those that have been taken."""
        if changes is None or self._net is None:
            self._pool.changes = changes
            self._groups.registered = None if changes is None else []
            self._needs.clear()
            self._needed.clear()
        self._net = changes

    def cached_keys(self) -> list[bytes]:
        for key in self._pool.cached_keys():
            if key not in self._needs:
                self._add(key)
        return list(self._needs)

    def _add(self, key: bytes) -> bool:
        needs = self._groups.keys_at(key)
        if not all(map(self._pool.find, (key, *needs))):
            return False
        self._needs[key] = needs
        self._needed.update(dict.fromkeys(needs, key))
        return True

    def _note(self, key: bytes, is_usable: bool) -> None:
        assert self._net is not None
        if self._net.get(key, is_usable) != is_usable:
            del self._net[key]  # there and gone again
        else:
            self._net[key] = is_usable
