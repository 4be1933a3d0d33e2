"""The pages of the pool that each request holds: a block table for each attention group, and a recurrent state. Most models have
one group alone.

The scheduler decides when pages are claimed and given back; here is how, over the device's pool and, where there are any,
the tiers beneath it. A request is admitted with its cached prefix and the blocks that it needs for good, or not at all: a
prompt that cannot fit would sit on blocks until it is preempted.

Blocks that have left a window are given back when the next row is planned. A state is written in its place, until it is to
be kept: then its pages are a *checkpoint*, known to the pool by key, and the next row writes to others. So a hit on a
checkpoint copies nothing, and neither does making one. docs/caches.md.

A prefix counts as cached up to a position at which every group has what it needs: full groups all blocks, windows those
that the next token still sees, and the state a checkpoint at exactly that position.
"""

from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from penstock.cache.keys import block_keys, page_key
from penstock.cache.pool import BlockPool
from penstock.engine.core.request import Prefix, Request
from penstock.engine.messages import Stats
from penstock.executor.protocol import ModelInfo

if TYPE_CHECKING:
    from penstock.engine.core.tiering import Tiering

NEVER = 1 << 62  # a position


class Kv:
    """Claims, extends and gives back the pages of requests, and tells the pool what they hold."""

    def __init__(self, pool: BlockPool, info: ModelInfo, chunk: int, makes_keys: bool, stats: Stats) -> None:
        """`chunk` is the most positions that a row has. Without `makes_keys` nothing is ever found in the cache."""
        self._pool, self._size, self._chunk, self._groups = pool, info.block_size, chunk, info.groups
        self._makes_keys, self._stats = makes_keys, stats
        self.tiers: Tiering | None = None
        self._replaced: list[int] = []  # pages that the step being planned may still write to or read
        self.listeners: list[Callable[[bytes], None]] = []  # hear the keys of blocks that may be hit from now on
        self.offer: Callable[[bytes], None] = lambda _key: None  # to the tiers, where there are any
        self._full = [index for index, group in enumerate(info.groups) if group.kind == "full"]
        self._windows = [(index, group.window) for index, group in enumerate(info.groups) if group.kind == "window"]
        self.num_attention = len(self._full) + len(self._windows)
        self._state, self.num_pages = self.num_attention, info.groups[-1].pages
        self.has_state = self.num_pages > 0
        # There is one block table of all tokens and nothing else. The hot path asks for it: a call less for each row.
        self.is_plain = len(info.groups) == 1 and not self._windows
        # Checkpoints this many blocks apart cost about as much as the blocks between them.
        self._interval = -(-self.num_pages // self.num_attention)

    # -- what is cached ------------------------------------------------------------------------------------

    def find(self, request: Request, find: Callable[[bytes], int], most: int = NEVER) -> Prefix:
        """`find` says for a key whether, or where, it is. No more than `most` blocks."""
        num = min(len(request.keys), most)
        if self.num_pages:  # a state is that behind all tokens: the last one's logits need the state before it
            num = min(num, (len(request.tokens) - 1) // self._size)
        for group in self._full:
            keys = self._keys(request, group, 0, num)
            num = next((block for block, key in enumerate(keys) if not find(key)), num)
        seen = num
        while num:
            if self.num_pages and not self._has_state(request, num, find):
                num -= 1
            elif (lacking := self._lacking(request, num, find)) >= 0:
                num = lacking
            else:
                break
        return Prefix(num, seen)

    def _has_state(self, request: Request, num: int, find: Callable[[bytes], int]) -> bool:
        # Most are not there, which the first page's key shows.
        return bool(find(self._key(request, num - 1, self._state))) and all(map(find, self.state_keys(request, num)))

    def _lacking(self, request: Request, num: int, find: Callable[[bytes], int]) -> int:
        """The last of the first `num` blocks that a window needs and does not have; -1: there is none."""
        for group, window in self._windows:
            for block in range(num - 1, self._first_seen(request, num, window) - 1, -1):
                if not find(self._key(request, block, group)):
                    return block
        return -1

    def _first_seen(self, request: Request, num: int, window: int) -> int:
        """The first block that a window needs of a cached prefix of `num`. The last token is computed in any case."""
        return max(0, min(num * self._size, len(request.tokens) - 1) + 1 - window) // self._size

    def _key(self, request: Request, block: int, group: int) -> bytes:
        if group == 0:
            return request.keys[block]
        place = block, group
        if place not in request.page_keys:
            request.page_keys[place] = page_key(request.keys[block], group)
        return request.page_keys[place]

    def _keys(self, request: Request, group: int, first: int, end: int) -> list[bytes]:
        if group == 0:
            return request.keys[first:end]
        return [self._key(request, block, group) for block in range(first, end)]

    def state_keys(self, request: Request, num: int) -> list[bytes]:
        """Of the checkpoint behind the first `num` blocks."""
        return [page_key(request.keys[num - 1], self._state, page) for page in range(self.num_pages)]

    def keys_at(self, key: bytes) -> Iterator[bytes]:
        """Of what groups after the first keep at the block of this key."""
        yield from (page_key(key, group) for group in range(1, self.num_attention))
        yield from (page_key(key, self._state, page) for page in range(self.num_pages))

    def _tell(self, key: bytes) -> None:
        for listener in self.listeners:
            listener(key)

    def keys(self, request: Request, num: int) -> list[list[bytes]]:
        """Of each attention group what a cached prefix of `num` blocks needs, up to its end; then of the state."""
        tables = []
        for group, info in enumerate(self._groups[: self.num_attention]):
            first = self._first_seen(request, num, info.window) if info.window else 0
            tables.append(self._keys(request, group, first, num))
        return [*tables, self.state_keys(request, num) if num and self.num_pages else []]

    # -- what a request holds ------------------------------------------------------------------------------

    def claim(self, request: Request, num_running: int, is_busy: bool) -> bool:
        """Give a waiting request its cached prefix and blocks for all its tokens, or nothing.

        A block of each table per running request stays free, so that those do not have to preempt the newcomer at once.
        """
        tiers, place, prefix = self.tiers, self._pool.find, Prefix(0, 0)
        if tiers is not None:
            place = tiers.place
        if not request.skips_cache:
            prefix = self.find(request, place) if tiers is None else tiers.prefix(request, is_busy)
        reserve = min(num_running * self.num_attention, self._pool.num_usable // 8)
        copies = self._claim(request, prefix, reserve, place)
        if copies is None:
            return False
        if not request.skips_cache and request.first_scheduled_s is None:
            self._stats.prefix_queries += len(request.tokens)
            self._stats.prefix_hits += prefix.num_blocks * self._size
        if tiers is not None:
            tiers.restore(request, list(chain.from_iterable(copies)), len(copies[0]))
        # The logits of the last token are always needed. Where all its tokens are cached, it is computed again and not
        # stored again: the blocks belong to others too.
        request.write_from = prefix.num_blocks * self._size
        request.num_scheduled = min(request.write_from, len(request.tokens) - 1)
        return True

    def _claim(
        self, request: Request, prefix: Prefix, reserve: int, place: Callable[[bytes], int]
    ) -> list[list[tuple[int, int]]] | None:
        """Take what is cached of the prefix and the blocks that the request needs for good, or nothing: then return None.

        `place` says where a page is: on the device, or in the host as a negative. Returns the (host block, block) pairs to
        be copied, by group. Blocks of windows, and a state to write to, come with the first row: they must be free now,
        but nothing is taken.
        """
        pool, num, num_tokens = self._pool, prefix.num_blocks, len(request.tokens)
        found = [[place(key) for key in keys] for keys in self.keys(request, num)]
        cached = [page for pages in found for page in pages if page > 0]
        num_new = sum(map(len, found)) - len(cached)
        needed = sum(group.most_pages(num_tokens, self._chunk, self._size) for group in self._groups) - self.num_pages
        if max(num_new, needed - len(cached)) + pool.num_idle(cached) + reserve > pool.num_free:
            return None
        pool.hold(cached)
        new = iter(pool.allocate(num_new))
        copies: list[list[tuple[int, int]]] = []
        first = num  # block that is not on the device
        for pages in found:
            copies.append([])
            for index, page in enumerate(pages):
                if page < 0:
                    pages[index] = next(new)
                    copies[-1].append((-page, pages[index]))
                    first = min(first, num - len(pages) + index) if len(copies) <= self.num_attention else first
        *tables, state = found
        request.num_left = [num - len(table) for table in tables]
        tables = [[0] * (num - len(table)) + table for table in tables]
        for group in self._full:
            tables[group] += pool.allocate(-(-num_tokens // self._size) - num)
        request.blocks, *request.others = tables
        request.num_sent_blocks, *request.num_sent_others = request.num_left
        # The pool hears of what is copied when the first row is planned: until then no other request may read it.
        request.num_registered = first
        request.state, request.is_state_shared = state, True
        if copies[-1]:
            pool.hold(state)
            request.checkpoints[num] = state
        request.branch = prefix.num_seen if prefix.num_seen > num else 0
        return copies

    def begin_row(self, request: Request, count: int) -> int:
        """Give back what no later row needs. So many positions of the next `count` are computed in one row: it ends where a
        checkpoint is due."""
        start = request.num_scheduled
        for group, window in self._windows:
            table, left = request.tables[group], request.num_left[group]
            first = max(0, start + 1 - window) // self._size
            if first > left:
                self._pool.release([block for block in table[left:first] if block])
                table[left:first] = [0] * len(table[left:first])
                request.num_left[group] = first
        return min(count, self._next_checkpoint(request) - start) if self.num_pages else count

    def _next_checkpoint(self, request: Request) -> int:
        """The first position behind those that were scheduled: one every few blocks, at the last full block of the prompt,
        and where the ways of requests with the same beginning part."""
        if request.skips_cache:
            return NEVER
        start, every = request.num_scheduled, self._interval * self._size
        due = (request.branch * self._size, (request.num_prompt - 1) // self._size * self._size)
        return min([position for position in due if position > start] + [(start // every + 1) * every])

    def num_missing(self, request: Request, end: int) -> int:
        """How many pages the next row takes if it goes up to `end`."""
        blocks = -(-end // self._size)
        missing = max(0, blocks - len(request.blocks))
        for table in request.others:
            missing += max(0, blocks - len(table))
        return missing + (self.num_pages if request.is_state_shared else 0)

    def extend(self, request: Request, end: int) -> None:
        """Take what the next row needs, up to `end`."""
        pool, blocks = self._pool, -(-end // self._size)
        if blocks > len(request.blocks):
            request.blocks += pool.allocate(blocks - len(request.blocks))
        for table in request.others:
            if blocks > len(table):
                table += pool.allocate(blocks - len(table))
        if not self.num_pages:
            return
        due, read = self._next_checkpoint(request), request.state
        if request.is_state_shared:
            self._replaced += read  # only this row still reads it
            request.state = pool.allocate(self.num_pages)
        wanted = read or request.state, request.state
        reads, writes = (
            tuple(new) if new != sent else () for new, sent in zip(wanted, request.sent_state, strict=True)
        )
        request.new_state, request.sent_state = (reads, writes), wanted
        request.is_state_shared = False
        if end == due:
            self._keep_state(request, end)

    def drop_replaced(self) -> None:
        """The step is planned, or over: the blocks that a later step may be given are not written any more."""
        self._pool.release(self._replaced)
        self._replaced.clear()

    # -- drafts --------------------------------------------------------------------------------------------
    # A state cannot take a wrong token back. So the rows of drafts write another one, and the one before them stays until
    # their result is there. If some were wrong, it is gone back to: the next row computes the right ones once more, all but
    # their keys and values.

    def draft_room(self, request: Request) -> int:
        """How many drafts may follow the row of one position that was just planned: as far as the next checkpoint, and none
        where the row reads or writes one."""
        if request.is_state_shared or request.sent_state[0] != request.state:
            return 0
        return self._next_checkpoint(request) - request.num_scheduled

    def begin_drafts(self, request: Request) -> tuple[int, ...]:
        """The pages that the row and its drafts write."""
        request.draft_state = self._pool.allocate(self.num_pages)
        request.sent_state = request.state, request.draft_state
        return tuple(request.draft_state)

    def end_drafts(self, request: Request, num_right: int, num_sent: int) -> None:
        """The right ones count as scheduled."""
        behind, request.draft_state = request.draft_state, []
        if num_right < num_sent:
            self._pool.release(behind)
            request.write_from = request.num_scheduled
            request.num_scheduled -= 1 + num_right
            request.num_known = request.num_scheduled + 1  # what follows is sent with the row
            return
        self._pool.release(request.state)
        request.state, end = behind, request.num_scheduled
        request.num_scheduled -= num_right
        if end == self._next_checkpoint(request):
            self._keep_state(request, end)
        request.num_scheduled = end

    def _keep_state(self, request: Request, end: int) -> None:
        """It is a checkpoint from now on, known to the pool when its key is."""
        self._pool.hold(request.state)
        request.checkpoints[end // self._size], request.is_state_shared = request.state, True

    # -- keys ----------------------------------------------------------------------------------------------

    def append(self, request: Request, tokens: list[int]) -> None:
        """Tokens of the answer are known."""
        request.tokens.extend(tokens)
        self._stats.generation_tokens += len(tokens)
        if len(request.tokens) % self._size < len(tokens):  # one more block is full, or several
            self.extend_keys(request)
            if request.slot >= 0:
                self.register(request)
                if self.num_pages:
                    self.keep_checkpoints(request)

    def extend_keys(self, request: Request) -> None:
        """Chain keys for the blocks that the known tokens fill. One call for a prompt, one block at a time later."""
        first = len(request.keys) * self._size
        full = len(request.tokens) // self._size * self._size
        if self._makes_keys and full > first:
            parent = request.keys[-1] if request.keys else request.root
            request.keys += block_keys(memoryview(request.tokens)[first:full], self._size, root=parent)

    def register(self, request: Request) -> None:
        """Give the pool the keys of blocks whose every position has been handed to the executor.

        Steps run in order, so a request that finds such a block reads it after it was written. Where the pool has the same
        content already, the request moves over to that block and the table entry is sent again.
        """
        end = min(request.num_scheduled // self._size, len(request.keys))
        for block in range(request.num_registered, end):
            if not self.num_pages:
                self._tell(request.keys[block])
            for group, table in enumerate(request.tables):
                page = table[block]
                if not page:  # it has left the window before its key was known
                    continue
                key = self._key(request, block, group)
                known = self._pool.register(page, key)
                self.offer(key)
                if known != page:
                    self._replaced.append(page)
                    table[block] = known
                    if group:
                        request.num_sent_others[group - 1] = min(request.num_sent_others[group - 1], block)
                    else:
                        request.num_sent_blocks = min(request.num_sent_blocks, block)
        request.num_registered = max(request.num_registered, end)

    def keep_checkpoints(self, request: Request) -> None:
        """Give the pool the keys of checkpoints, as far as they are known. Not before the step that writes them is planned as
        a whole: no row of it may read what another one writes."""
        for num in [num for num in request.checkpoints if num <= len(request.keys)]:
            pages = request.checkpoints.pop(num)
            keys = self.state_keys(request, num)
            self._tell(request.keys[num - 1])
            known = [self._pool.register(*pair) for pair in zip(pages, keys, strict=True)]
            for key in keys:
                self.offer(key)
            self._pool.release([page for page, same in zip(pages, known, strict=True) if page != same])
            self._pool.release(known)
            request.kept.append(num)

    def release(self, request: Request) -> None:
        """Take everything back. What it holds stays cached until the pages are needed; what was computed last goes first
        then, in all groups alike."""
        if self.tiers is not None:
            self.tiers.leave(request)
        for num in reversed(request.kept):  # used as lately as the blocks
            pages = [page for key in self.state_keys(request, num) if (page := self._pool.find(key))]
            self._pool.hold(pages)
            self._pool.release(pages)
        self._pool.release([page for pages in zip_longest(*request.tables, fillvalue=0) for page in pages if page])
        self._pool.release([*request.state, *request.draft_state, *chain.from_iterable(request.checkpoints.values())])
        request.blocks, request.others, request.num_left, request.num_sent_others = [], [], [], []
        request.num_scheduled = request.num_registered = request.num_sent_blocks = 0
        request.state, request.draft_state = [], []
        request.sent_state, request.new_state = ([], []), ((), ())
        request.checkpoints.clear()
        request.kept.clear()
        request.page_keys.clear()

    def used_keys(self, request: Request) -> list[bytes]:
        """Of what a request holds, starts of chains first."""
        kept, keys = set(request.kept), []
        for block in range(request.num_registered):
            keys += [self._key(request, block, group) for group, left in enumerate(request.num_left) if block >= left]
            keys += self.state_keys(request, block + 1) if block + 1 in kept else []
        return keys

    def held(self, request: Request) -> Iterator[int]:
        """Every page as often as it is held."""
        return filter(None, chain(*request.tables, request.state, request.draft_state, *request.checkpoints.values()))

    def check(self, request: Request) -> None:
        """Assert between two steps that a running request has what its next row reads."""
        assert not self._replaced
        for group, window in self._windows:
            seen = request.tables[group][max(0, request.num_scheduled + 1 - window) // self._size :]
            assert all(seen), "a block that is still seen was given back"
        assert len(request.state) in (0, self.num_pages)
        assert request.state or request.is_state_shared or not self.num_pages
        assert not request.draft_state or request.num_pending == 1, "drafts without a row in flight"
