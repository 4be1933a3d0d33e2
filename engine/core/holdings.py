"""Which blocks a request holds: claimed with its cached prefix, known to the pool by key, given back.

The scheduler decides when; here is how, over the device's pool and, where there are any, the tiers beneath it.
"""

from itertools import chain
from typing import TYPE_CHECKING

from penstock.cache.keys import block_keys
from penstock.cache.pool import BlockPool
from penstock.engine.core.request import Prefix, Request
from penstock.engine.messages import Stats

if TYPE_CHECKING:
    from penstock.engine.core.groups import Groups
    from penstock.engine.core.tiering import Tiering


class Holdings:
    def __init__(
        self,
        pool: BlockPool,
        tiers: "Tiering | None",
        block_size: int,
        enable_prefix_caching: bool,
        stats: Stats,
        groups: "Groups | None" = None,
    ) -> None:
        """`groups`: where a request holds more than one table of blocks of all its tokens."""
        self._pool, self._tiers, self._block_size, self._groups = pool, tiers, block_size, groups
        self._makes_keys = enable_prefix_caching
        self._stats = stats
        self._replaced: list[int] = []  # duplicates that the step being planned may still write to

    def claim(self, request: Request, num_running: int, is_busy: bool) -> bool:
        """Give a waiting request its cached prefix and blocks for all its tokens, or nothing.

        Nothing is admitted in part: a prompt that cannot fit would sit on blocks until it is preempted. A
        block per running request stays free, so that those do not have to preempt the newcomer at once.
        """
        if self._groups is not None:
            return self._claim_groups(self._groups, request, num_running, is_busy)
        pool, num_tokens = self._pool, len(request.tokens)
        places: list[int] = []  # device blocks, and host slots as negatives
        if not request.skips_cache:
            places = pool.lookup(request.keys) if self._tiers is None else self._tiers.places(request, is_busy)
        cached = places if self._tiers is None else [place for place in places if place > 0]
        missing = -(-num_tokens // self._block_size) - len(cached)
        reserve = min(num_running, pool.num_usable // 8)
        if missing + pool.num_idle(cached) + reserve > pool.num_free:
            return False
        self._count(request, len(places))
        pool.hold(cached)
        request.blocks = cached + pool.allocate(missing)
        request.num_registered = len(cached)
        if self._tiers is not None:
            self._restore(self._tiers, request, places, len(cached))
        # The logits of the last token are always needed. Where all its tokens are cached, it is computed
        # again and not stored again: the blocks belong to others too.
        request.write_from = len(places) * self._block_size
        request.num_scheduled = min(request.write_from, num_tokens - 1)
        return True

    def _claim_groups(self, groups: "Groups", request: Request, num_running: int, is_busy: bool) -> bool:
        tiers, place, prefix = self._tiers, self._pool.find, Prefix(0, 0)
        if tiers is not None:
            place = tiers.place
        if not request.skips_cache:
            prefix = groups.find(request, place) if tiers is None else tiers.prefix(groups, request, is_busy)
        reserve = min(num_running * groups.num_attention, self._pool.num_usable // 8)
        copies = groups.claim(request, prefix, reserve, place)
        if copies is None:
            return False
        self._count(request, prefix.num_blocks)
        if tiers is not None:
            tiers.restore(request, list(chain.from_iterable(copies)), len(copies[0]))
        request.write_from = prefix.num_blocks * self._block_size
        request.num_scheduled = min(request.write_from, len(request.tokens) - 1)
        return True

    def _count(self, request: Request, num_cached: int) -> None:
        if not request.skips_cache and request.first_scheduled_s is None:
            self._stats.prefix_queries += len(request.tokens)
            self._stats.prefix_hits += num_cached * self._block_size

    def _restore(self, tiers: "Tiering", request: Request, places: list[int], num_device: int) -> None:
        """Put the claimed blocks in the order of the chain, and have those that lie in the host copied."""
        if num_device < len(places):
            on_device, new = iter(request.blocks[:num_device]), iter(request.blocks[num_device:])
            chain = [next(on_device if place > 0 else new) for place in places]
            request.blocks = [*chain, *new]
            # The pool hears of these blocks when the first row is planned: until then no other request may read them.
            request.num_registered = next(index for index, place in enumerate(places) if place < 0)
        restored = zip(places, request.blocks[: len(places)], strict=True)
        tiers.restore(request, [(-place, block) for place, block in restored if place < 0])

    def release(self, request: Request) -> None:
        """Take all its blocks back. What they hold stays cached until they are needed."""
        if self._tiers is not None:
            self._tiers.leave(request)
        if self._groups is None:
            self._pool.release(request.blocks)
        else:
            self._groups.release(request)
        request.blocks = []
        request.num_scheduled = request.num_registered = request.num_sent_blocks = 0

    def append(self, request: Request, tokens: list[int]) -> None:
        """Tokens of the answer are known."""
        request.tokens.extend(tokens)
        self._stats.generation_tokens += len(tokens)
        if len(request.tokens) % self._block_size < len(tokens):  # one more block is full, or several
            self.extend_keys(request)
            if request.slot >= 0:
                self.register(request)
                if self._groups is not None:
                    self._groups.keep_checkpoints(request)

    def extend_keys(self, request: Request) -> None:
        """Chain keys for the blocks that the known tokens fill. One call for a prompt, one block at a time later."""
        first = len(request.keys) * self._block_size
        full = len(request.tokens) // self._block_size * self._block_size
        if self._makes_keys and full > first:
            parent = request.keys[-1] if request.keys else request.root
            request.keys += block_keys(memoryview(request.tokens)[first:full], self._block_size, root=parent)

    def register(self, request: Request) -> None:
        """Give the pool the keys of blocks whose every position has been handed to the executor.

        Steps run in order, so a request that finds such a block reads it after it was written. Where the pool has
        the same content already, the request moves over to that block and the table entry is sent again.
        """
        full = min(request.num_scheduled // self._block_size, len(request.keys))
        if self._groups is not None:
            self._replaced += self._groups.register(request, full)
            request.num_registered = max(request.num_registered, full)
            return
        for index in range(request.num_registered, full):
            block = self._pool.register(request.blocks[index], request.keys[index])
            if self._tiers is not None:
                self._tiers.index.offer(request.keys[index])
            if block != request.blocks[index]:
                self._replaced.append(request.blocks[index])
                request.blocks[index] = block
                request.num_sent_blocks = min(request.num_sent_blocks, index)
        request.num_registered = max(request.num_registered, full)

    def extend(self, request: Request, end: int) -> None:
        """What the next row needs is free: it goes up to `end`."""
        assert self._groups is not None
        self._replaced += self._groups.extend(request, end)

    def drop_replaced(self) -> None:
        """The step is planned, or over: the blocks that a later step may be given are not written any more."""
        self._pool.release(self._replaced)
        self._replaced.clear()

    def check(self) -> None:
        assert not self._replaced
