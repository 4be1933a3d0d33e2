"""Explains why a part of a prompt was not found in the prefix cache.

The history has the keys that were evicted, the tokens that followed each block, and the newest namespace of each
beginning. Each of the three holds four times as many entries as the pool has blocks, MAX_ENTRIES at most (about 20 MB
together), and forgets the oldest: a block whose eviction is forgotten counts as new. Only the first missing block of a
prompt is explained, which costs a few lookups per request.
"""

from collections.abc import Callable

import numpy as np

from penstock.cache.keys import RecentKeys
from penstock.engine.core.page_keys import Prefix
from penstock.engine.core.request import Request
from penstock.engine.messages import MissReason, Reuse
from penstock.executor.protocol import ModelInfo

MAX_ENTRIES = 32768
MAX_FOLLOWERS = 4  # different blocks that are known to follow the same block


class CacheHistory:
    def __init__(self, info: ModelInfo, clock: Callable[[], float]) -> None:
        limit = min(4 * info.num_blocks, MAX_ENTRIES)
        self._size, self.clock = info.block_size, clock
        self._has_states = any(group.kind == "state" for group in info.groups)
        self._evicted = RecentKeys(limit)  # key → the tier that it left, and when
        self._followers = RecentKeys(limit)  # key or root → the tokens of blocks that followed it
        self._namespaces = RecentKeys(limit)  # first block's tokens → root, salt and adapter

    def note_eviction(self, tier: str, key: bytes) -> None:
        self._evicted.add(key, (tier, self.clock()))

    def note_block(self, request: Request, block: int) -> None:
        """Record a block of the request whose content is cached from now on."""
        parent, tokens = self._parent(request, block), self._tokens(request, block)
        known = self._followers.get(parent, ())
        self._followers.add(parent, known if tokens in known else (*known[1 - MAX_FOLLOWERS :], tokens))
        if block == 0:
            self._namespaces.add(tokens, (request.kv.root, request.message.cache_salt, request.message.adapter))

    def explain(self, request: Request, prefix: Prefix, cached: dict[str, int], not_loaded: MissReason | None) -> Reuse:
        """Return what a request took from the cache, `cached` tokens by tier, and why it took no more. `not_loaded`: why the
        first missing block was not taken from a tier that has it; None if no tier has it."""
        num = prefix.num_blocks
        if request.kv.skips_cache:
            return Reuse(cached, "cache_disabled")
        if num == prefix.most:
            return Reuse(cached, "partial_block")
        if prefix.num_seen > num:  # only a checkpoint, or blocks of a window, are missing
            return Reuse(cached, "no_checkpoint" if self._has_states else "evicted")
        if not_loaded is not None:
            return Reuse(cached, not_loaded)
        tokens, followers = self._tokens(request, num), self._followers.get(self._parent(request, num), ())
        if (eviction := self._evicted.get(request.kv.keys[num])) is not None:
            tier, at_s = eviction
            return Reuse(cached, "evicted", evicted_from=tier, evicted_s_ago=self.clock() - at_s)
        if tokens in followers:  # the eviction is forgotten, or the cache was reset
            return Reuse(cached, "evicted")
        if num == 0 and not followers and tokens in self._namespaces:
            root, salt, adapter = self._namespaces[tokens]
            if salt != request.message.cache_salt:
                return Reuse(cached, "other_salt")
            if root != request.kv.root:  # otherwise only the block itself is forgotten
                return Reuse(cached, "other_adapter" if adapter != request.message.adapter else "weights_changed")
        differs = [np.frombuffer(tokens, "<i4") != np.frombuffer(each, "<i4") for each in followers]
        num_shared = max((int(each.argmax()) for each in differs), default=0)  # `tokens` differ from each of them
        return Reuse(cached, "new_tokens", differs_at=num * self._size + num_shared)

    def _parent(self, request: Request, block: int) -> bytes:
        return request.kv.keys[block - 1] if block else request.kv.root

    def _tokens(self, request: Request, block: int) -> bytes:
        return request.tokens[block * self._size : (block + 1) * self._size].tobytes()
