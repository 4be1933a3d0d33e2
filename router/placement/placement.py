"""Chooses the replica for a request, from the caches and the load of all replicas of one model.

A `Placement` is called from the event loop; only `prepare` may run in another thread. It does no I/O and starts nothing: the
fleet adds and removes replicas, the feeds hand it cache events, and the exchange reports progress through its charge.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from penstock.engine.http.kv_stream import Frame
from penstock.engine.options import converted
from penstock.router.placement.cache_map import STREAM_COUNTS, CacheMap, ReplicaCache
from penstock.router.placement.index import Keys, KeySpace, prompt_keys
from penstock.router.placement.load import Charge, LoadTable, PolicyConfig, PredictionTotals, ReplicaLoad

log = logging.getLogger("penstock.router")

GUESSED_TOKENS = 2**18  # assumed capacity of a replica that reports none; small, so that a guess is forgotten in time


class ReplicaInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica's report about its cache. The defaults are for a replica that reports nothing: its cache is guessed with
    large blocks, because each key costs half a microsecond and a guess need not be exact.

    `num_blocks` 0: unknown.
    """

    fingerprint: bytes = b""
    block_size: Annotated[int, Meta(ge=1, le=2**20)] = 64
    num_blocks: Annotated[int, Meta(ge=0, le=2**31)] = 0


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The block keys of a prompt, in every key space of the fleet."""

    num_tokens: int
    spaces: tuple[tuple[KeySpace, Keys], ...]
    has_ids: bool = True  # False: its bytes stand for token ids, which are unknown

    def num_ends(self, space: KeySpace) -> int:
        """Return the number of keys that tokens of the prompt follow, so that a state cached there is of use."""
        return max(0, self.num_tokens - 1) // space.block_size


class PlacedReplica(NamedTuple):
    name: str
    load: ReplicaLoad
    cache: ReplicaCache


class Placement:
    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.loads = LoadTable(policy, seed)
        self.caches = CacheMap(policy, clock)
        self.totals = PredictionTotals()
        self._clock = clock
        self._replicas: dict[str, PlacedReplica] = {}
        self._rows: dict[int, PlacedReplica] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    # -- replicas --------------------------------------------------------------------------------------

    def add_replica(self, name: str, info: ReplicaInfo) -> None:
        """Add a replica, which takes no requests before `set_available`. Raises ValueError for information that is invalid."""
        assert name not in self._replicas, name
        info = converted(msgspec.structs.asdict(info), ReplicaInfo)
        space = KeySpace(info.fingerprint, info.block_size)
        capacity = info.num_blocks * info.block_size or np.inf
        row = self.loads.add(capacity)
        cache = self.caches.add(row, space, info.num_blocks or max(GUESSED_TOKENS // info.block_size, 1))
        replica = PlacedReplica(name, ReplicaLoad(self.loads, row, self.totals, self._clock), cache)
        self._replicas[name] = self._rows[row] = replica

    def remove_replica(self, name: str) -> None:
        """Remove a replica. Its charges may still be released, without effect."""
        replica = self._replicas.pop(name)
        del self._rows[replica.load.row]
        replica.load.is_gone = True
        self.caches.remove(replica.cache)
        self.loads.remove(replica.load.row)

    def set_available(self, name: str, available: bool) -> None:
        self.loads.is_open[self._replicas[name].load.row] = float(available)

    # -- a request -----------------------------------------------------------------------------------------

    def prepare(self, tokens: Any, salt: str | None = None, adapter: str | None = None, has_ids: bool = True) -> Prompt:
        """Hash a prompt (bytes or a buffer of little-endian int32). Any thread may call this; the GIL is released."""
        raw = tokens if type(tokens) is bytes else bytes(memoryview(tokens).cast("B"))
        keys = []
        for space in self.caches.spaces:
            root = _root(space, adapter) if salt is None else space.root(salt, adapter)
            keys.append((space, prompt_keys(raw, space, root)))
        return Prompt(len(raw) // 4, tuple(keys), has_ids)

    def choose(
        self,
        prompt: Prompt | None,
        *,
        num_tokens: int,
        session: str | None = None,
        exclude: frozenset[str] = frozenset(),
        expects: bool = True,
    ) -> Charge | None:
        """Choose a replica and charge it with the request; return None if no replica may take it. `expects`: count the prompt
        as cached there at once; otherwise the caller does so later, with `expect`."""
        now_s = self._clock()
        self.caches.tick(now_s)
        self._match_prompt(prompt)
        sticky = self._replicas.get(self._sessions.get(session, "")) if session is not None else None
        excluded = [self._replicas[name].load.row for name in exclude if name in self._replicas] if exclude else ()
        row = self.loads.choose(num_tokens, now_s, -1 if sticky is None else sticky.load.row, excluded)
        if row < 0:
            return None
        replica = self._rows[row]
        self._count_unmatched(prompt, replica)
        if session is not None:
            self._remember(session, replica.name)
        charge = Charge(replica.load, replica.name, num_tokens, now_s)
        if expects and prompt is not None:
            self.expect(charge, prompt)
        return charge

    def expect(self, charge: Charge, prompt: Prompt) -> None:
        """Count the prompt as cached at the charged replica, where it is or soon will be."""
        replica = self._replicas.get(charge.replica)
        if replica is None:
            return
        for space, keys in prompt.spaces:
            if space == replica.cache.space and len(keys):
                num_known = charge.predicted_cached_tokens // space.block_size + 1
                self.caches.expect(replica.cache, keys, prompt.num_ends(space), min(num_known, len(keys)))

    def _match_prompt(self, prompt: Prompt | None) -> None:
        """Fill the column `cached` with the cached tokens of the prompt at each replica."""
        self.loads.cached.fill(0.0)
        if prompt is not None:
            for space, keys in prompt.spaces:
                self.caches.cached_tokens(space, keys, prompt.num_ends(space), self.loads.c)

    def _count_unmatched(self, prompt: Prompt | None, replica: PlacedReplica) -> None:
        """Count a choice to which no cache contributed, by its reason."""
        if prompt is None:
            self.totals.no_prompt_decisions_total += 1
        elif not prompt.has_ids and not replica.cache.is_estimated:
            if not self.totals.no_ids_decisions_total:
                log.warning(
                    "%s was chosen without comparing caches: the router does not know the request's token ids, and the "
                    "replica reports blocks of them; check --tokenizer and the route (later cases are only counted)",
                    replica.name,
                )
            self.totals.no_ids_decisions_total += 1
        elif not np.count_nonzero(self.loads.cached):  # `any` would take ten times as long
            self.totals.no_match_decisions_total += 1

    def _remember(self, session: str, name: str) -> None:
        self._sessions[session] = name
        self._sessions.move_to_end(session)
        if len(self._sessions) > self.policy.max_sessions:
            self._sessions.popitem(last=False)

    # -- cache events ---------------------------------------------------------------------------------

    def apply_events(self, name: str, batch: Iterable[Frame]) -> None:
        """Take in frames of the replica's event stream, in their order."""
        cache = self._replicas[name].cache
        for frame in batch:
            self.caches.take(cache, frame)

    def needs_snapshot(self, name: str) -> bool:
        """Return whether an event was missed or no event stream has begun. A new connection begins with a snapshot."""
        return self._replicas[name].cache.needs_snapshot

    # -- views ----------------------------------------------------------------------------------------

    def view(self) -> dict[str, dict[str, Any]]:
        """Return what /replicas shows, by replica."""
        now_s = self._clock()
        return {name: self._view_one(replica, now_s) for name, replica in self._replicas.items()}

    def _view_one(self, replica: PlacedReplica, now_s: float) -> dict[str, Any]:
        row, cache = replica.load.row, replica.cache
        capacity = self.loads.capacity[row]
        return {
            "available": bool(self.loads.is_open[row]),
            "active_requests": int(self.loads.active[row]),
            "queued_tokens": round(self.loads.backlog_of(row, now_s)),
            "held_tokens": int(self.loads.held[row]),
            "capacity_tokens": None if np.isinf(capacity) else int(capacity),
            "prefill_tokens_per_s": round(float(self.loads.speed[row]), 1),
            "delay_per_answer_s": round(float(self.loads.delay[row]), 6),
            "cached_blocks": self.caches.num_held(cache),
            "knowledge": "approximate" if cache.is_estimated else "events",
            "events_seq": cache.seq,
            "events_age_s": round(now_s - cache.last_frame_s, 3),
            "events_gaps": cache.counts["event_gaps_total"],
            "events_stalls": cache.counts["event_stalls_total"],
            "keys_refused": cache.counts["keys_refused_total"],
        }

    def metrics(self) -> dict[str, float]:
        """Return counters and gauges of all replicas together. `view` has those of each replica."""
        return {
            **msgspec.structs.asdict(self.totals),
            "approximate_replicas": sum(replica.cache.is_estimated for replica in self._replicas.values()),
            **{name: self.caches.totals[name] for name in STREAM_COUNTS},
            **{f"index_{name}": value for name, value in self.caches.index.stats().items()},
            "sessions": len(self._sessions),
        }

    def check(self) -> None:
        """Assert every invariant; O(index)."""
        self.caches.check()
        for name, replica in self._replicas.items():
            assert self._rows[replica.load.row] is replica and replica.name == name
            replica.load.check()
        assert len(self._rows) == len(self._replicas)


@lru_cache(maxsize=4096)
def _root(space: KeySpace, adapter: str | None) -> bytes:
    return space.root(None, adapter)
