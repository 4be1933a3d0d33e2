"""What the cache holds, for those who route by it: everything once, then the net changes of every step.

A tier that can be listened to has `changes` (None, or a dict from key to whether it is cached now) and `cached_keys`.
While nobody watches, `changes` is None everywhere and nothing is kept or copied.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from penstock.engine.http.kv_stream import KEY_BYTES
from penstock.engine.messages import CacheUpdate


class Source(Protocol):
    changes: dict[bytes, bool] | None

    def cached_keys(self) -> list[bytes]: ...


class CacheLog:
    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._is_new = False  # the next news are snapshots

    def watch(self, is_on: bool) -> None:
        self._is_new = is_on
        for source in self._sources.values():
            source.changes = {} if is_on else None

    def news(self) -> list[CacheUpdate]:
        if self._is_new:
            self._is_new = False
            return [CacheUpdate(tier, shortened(source.cached_keys()), b"", True) for tier, source in self._fresh()]
        return [self._changes(tier, source) for tier, source in self._sources.items() if source.changes]

    def _fresh(self) -> Iterable[tuple[str, Source]]:
        for tier, source in self._sources.items():
            source.changes = {}
            yield tier, source

    def _changes(self, tier: str, source: Source) -> CacheUpdate:
        assert source.changes is not None
        stored = shortened(key for key, is_cached in source.changes.items() if is_cached)
        removed = shortened(key for key, is_cached in source.changes.items() if not is_cached)
        source.changes = {}
        return CacheUpdate(tier, stored, removed)


def shortened(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[:KEY_BYTES] for key in keys])
