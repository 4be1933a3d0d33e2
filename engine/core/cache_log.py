"""What the cache holds, for those who route by it: everything once, then the net changes of every step.

A pool that can be watched has `changes` (None, or a dict from key to whether it is cached now) and `cached_keys`.
Without a watcher, `changes` is None everywhere and nothing is kept or copied.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from penstock.engine.http.kv_stream import KEY_BYTES
from penstock.engine.messages import CacheUpdate


class LoggedPool(Protocol):
    changes: dict[bytes, bool] | None

    def cached_keys(self) -> list[bytes]: ...


class CacheLog:
    def __init__(self, pools: Mapping[str, LoggedPool]) -> None:
        self._pools = pools
        self._is_new = False  # the next updates are snapshots

    def watch(self, is_on: bool) -> None:
        self._is_new = is_on
        for pool in self._pools.values():
            pool.changes = {} if is_on else None

    def updates(self) -> list[CacheUpdate]:
        found = []
        for tier, pool in self._pools.items():
            changes = pool.changes
            if self._is_new:
                found.append(CacheUpdate(tier, shortened(pool.cached_keys()), b"", True))
            elif changes:
                stored = shortened(key for key, is_cached in changes.items() if is_cached)
                removed = shortened(key for key, is_cached in changes.items() if not is_cached)
                found.append(CacheUpdate(tier, stored, removed))
            if changes:
                pool.changes = {}
        self._is_new = False
        return found


def shortened(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[:KEY_BYTES] for key in keys])
