"""The router's map of what each replica has cached.

Facts come as frames of a replica's event stream. Predictions are the router's own: blocks that requests which were just
placed there will put into the cache. If a replica publishes no events, its cache is guessed: what was sent to it counts as
cached, in two generations of half its cache each, so that the guess forgets about as fast as the replica does.
docs/router.md has a figure.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock._csrc import ffi, lib
from penstock.engine.http.kv_stream import Alive, Changes, Frame, Hello, Snapshot
from penstock.router.placement.index import Keys, KeySpace, RouteIndex
from penstock.router.placement.load import PolicyConfig

TIERS = ("device", "host", "disk")
OLDER = len(TIERS)  # the fourth slot of a row: the older generation of a guess
SPACE = OLDER + 1  # behind the slots of a row: the number of its key space
I32S = ffi.typeof("int32_t[]")
EMPTY = 0  # a slot that never holds anything
# Faults of event streams. keys_refused_total: keys beyond the limit of a replica.
STREAM_COUNTS = ("event_gaps_total", "event_repeats_total", "event_stalls_total", "keys_refused_total")


class ReplicaCache:
    """One replica's slots in the index, and the state of its event stream."""

    def __init__(self, row: int, space: KeySpace, num_blocks: int, now_s: float) -> None:
        self.row = row
        self.space = space
        self.num_blocks = num_blocks
        self.engine_id: str | None = None
        self.seq: int | None = None  # of the last frame taken in; None: no snapshot yet, or none since a gap
        self.needs_snapshot = True  # and the current connection will not bring one
        self.last_frame_s = now_s
        self.hits_at_ends = False  # as its Hello states
        self.is_estimated = True  # until the first snapshot
        self.counts: Counter[str] = Counter()


class CacheMap:
    """The caches of all replicas, in one index. Only `RouteIndex` is thread-safe: call everything else from the event loop."""

    def __init__(self, config: PolicyConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self.totals: Counter[str] = Counter()  # over all replicas, removed ones included
        self.index = RouteIndex(config.max_facts)
        empty = self.index.add_slot(0)
        assert empty == EMPTY
        self._counts = ffi.new(I32S, 1)  # per slot, of the last prompt that was looked up
        self._slots = np.zeros((SPACE + 1, 8), dtype=np.int64)
        self._c = ffi.new(
            "struct penstock_slots *", {"host_credit": config.host_credit, "disk_credit": config.disk_credit}
        )
        self._name_slots()
        self._caches: dict[int, ReplicaCache] = {}
        self.spaces: tuple[KeySpace, ...] = ()  # replaced as a whole: other threads read it
        self._aged_s = clock()

    def add(self, row: int, space: KeySpace, num_blocks: int) -> ReplicaCache:
        while row >= self._slots.shape[1]:
            self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)], axis=1)
            self._name_slots()
        cache = ReplicaCache(row, space, num_blocks, self._clock())
        self._caches[row] = cache
        self._slots[0, row] = self._add_slot(cache)
        self._number_spaces()
        return cache

    def remove(self, cache: ReplicaCache) -> None:
        self._forget(cache)
        del self._caches[cache.row]
        self._number_spaces()

    def _number_spaces(self) -> None:
        self.spaces = tuple(dict.fromkeys(cache.space for cache in self._caches.values()))
        for row, cache in self._caches.items():
            self._slots[SPACE, row] = self.spaces.index(cache.space)

    # -- cache events ---------------------------------------------------------------------------------

    def take(self, cache: ReplicaCache, frame: Frame) -> None:
        """Take in a frame of a replica's event stream. A wrong frame costs hits and no memory, for each replica has a limit."""
        cache.last_frame_s = self._clock()
        if isinstance(frame, Hello):
            self._take_hello(cache, frame)
        elif isinstance(frame, Snapshot):
            self._take_snapshot(cache, frame)
        elif isinstance(frame, Changes):
            self._take_changes(cache, frame)
        elif isinstance(frame, Alive) and cache.seq is not None and frame.seq != cache.seq:
            self._record_gap(cache)

    def _take_hello(self, cache: ReplicaCache, hello: Hello) -> None:
        cache.seq, cache.needs_snapshot = None, False  # a snapshot follows, perhaps not at once
        is_new = cache.engine_id not in (None, hello.engine_id)  # a new process, with an empty cache
        is_other = cache.hits_at_ends != hello.hits_at_ends  # the guessed keys had another meaning
        cache.engine_id, cache.hits_at_ends = hello.engine_id, hello.hits_at_ends
        if is_new or is_other:
            self._forget(cache)

    def _take_snapshot(self, cache: ReplicaCache, part: Snapshot) -> None:
        if part.is_first:
            self._forget(cache)
        self._store(cache, part.tier, part.keys)
        if part.is_last:
            cache.seq, cache.needs_snapshot = part.seq, False
            cache.is_estimated = False

    def _take_changes(self, cache: ReplicaCache, changes: Changes) -> None:
        if cache.seq is not None:
            if changes.seq <= cache.seq:
                self._count(cache, "event_repeats_total")
                return
            if changes.seq > cache.seq + 1:
                self._record_gap(cache)
            else:
                cache.seq = changes.seq
        layer = _layer(changes.tier)
        if layer is None:
            return
        if changes.cleared:
            self._drop(cache, layer)
        # After a gap these changes are still right. What was missed stays wrong until the snapshot.
        if self._slots[layer, cache.row] != EMPTY:
            self.index.remove(int(self._slots[layer, cache.row]), changes.removed)
        self._store(cache, changes.tier, changes.stored)

    def _record_gap(self, cache: ReplicaCache) -> None:
        self._count(cache, "event_gaps_total")
        cache.seq, cache.needs_snapshot = None, True

    def _store(self, cache: ReplicaCache, tier: str, keys: bytes) -> None:
        layer = _layer(tier)
        if layer is None or not keys:
            return
        if self._slots[layer, cache.row] == EMPTY:
            self._slots[layer, cache.row] = self._add_slot(cache, 16 if layer else 1)
        # The slot EMPTY refuses every key.
        self._count(cache, "keys_refused_total", self.index.store(int(self._slots[layer, cache.row]), keys))

    def _count(self, cache: ReplicaCache, counter: str, number: int = 1) -> None:
        cache.counts[counter] += number
        self.totals[counter] += number

    def _forget(self, cache: ReplicaCache) -> None:
        for layer in range(OLDER + 1):
            self._drop(cache, layer)

    def _drop(self, cache: ReplicaCache, layer: int) -> None:
        slot = int(self._slots[layer, cache.row])
        if slot != EMPTY:
            self._slots[layer, cache.row] = EMPTY
            self.index.retire_slot(slot)

    def _add_slot(self, cache: ReplicaCache, times: int = 1) -> int:
        """Return a new slot, or EMPTY if none is free now; the caller then tries again later."""
        limit = 2 * cache.num_blocks + 1024  # twice its capacity: room for changes in flight
        return max(self.index.add_slot(limit * times, cache.hits_at_ends), EMPTY)

    # -- the router's predictions ---------------------------------------------------------------------

    def expect(self, cache: ReplicaCache, keys: Keys, num_ends: int, num_known: int) -> None:
        """Record that a request with these keys goes to the replica, which should have the first `num_known` of them."""
        slot = int(self._slots[0, cache.row])
        if slot == EMPTY:
            slot = self._slots[0, cache.row] = self._add_slot(cache)
        if slot == EMPTY:
            return
        if cache.hits_at_ends:  # the last checkpoint of a prompt is before its last token
            keys, num_known = keys[max(0, num_ends - 1) : num_ends], int(num_known >= num_ends)
        if not cache.is_estimated:
            self.index.predict(slot, keys, num_known)
            return
        self.index.store(slot, keys)
        if self.index.num_held(slot) >= max(cache.num_blocks // 2, 1):
            self._drop(cache, OLDER)
            self._slots[OLDER, cache.row] = slot
            self._slots[0, cache.row] = self._add_slot(cache)

    def tick(self, now_s: float) -> None:
        """Age the predictions, and estimate the caches of replicas whose events have stalled. Cheap; called for every choice."""
        if now_s - self._aged_s < self._config.prediction_s / 2:
            return
        self._aged_s = now_s
        self.index.age_predictions()
        for cache in self._caches.values():
            if not cache.is_estimated and now_s - cache.last_frame_s > self._config.stall_s:
                cache.is_estimated = cache.needs_snapshot = True
                cache.seq = None
                self._count(cache, "event_stalls_total")

    # -- cached tokens ----------------------------------------------------------------------------------

    def cached_tokens(self, space: KeySpace, keys: Keys, num_ends: int, fleet: Any) -> None:
        """Fill in, per row of the key space, how many tokens of the prompt need not be computed there. Deeper tiers count in
        part. `fleet` is a C structure."""
        if space not in self.spaces:
            return  # its last replica has left
        if len(self._counts) != self.index.num_slots:
            self._counts = ffi.new(I32S, self.index.num_slots)
        self.index.match_into(self._counts, keys, num_ends)
        rows = self._space_of_row, self.spaces.index(space), fleet.num_rows
        lib.penstock_cached_tokens(self._c, self._counts, space.block_size, *rows, fleet.cached)

    def _name_slots(self) -> None:
        start, stride = ffi.from_buffer("int64_t[]", self._slots), self._slots.shape[1]
        for layer, name in enumerate((*TIERS, "older")):
            setattr(self._c, name, start + layer * stride)
        self._space_of_row = start + SPACE * stride

    def num_held(self, cache: ReplicaCache) -> dict[str, int]:
        held = {tier: self.index.num_held(int(self._slots[layer, cache.row])) for layer, tier in enumerate(TIERS)}
        held["device"] += self.index.num_held(int(self._slots[OLDER, cache.row]))
        return held

    def check(self) -> None:
        self.index.check()
        in_use = [int(slot) for slot in self._slots[:SPACE].ravel() if slot != EMPTY]
        assert len(in_use) == len(set(in_use)), "two layers share a slot"
        assert self.index.num_held(EMPTY) == 0


def _layer(tier: str) -> int | None:
    return TIERS.index(tier) if tier in TIERS else None  # None: a tier that this router does not know
