"""The pages of the KV pool that requests hold: a block table for each attention group, and a recurrent state.

The scheduler decides when pages are claimed and released; `Kv` does this with the device's pool. Host memory and the
stores below it are the subject of `Tiers` (engine/core/tiers.py). A request is admitted with its cached prefix and all
blocks that it needs permanently, or not at all: a prompt that does not fit would hold blocks until it is preempted.

Blocks that have left a window are released when the next row is planned. A state is updated in place until it has to be
kept: then its pages become a *checkpoint*, which the pool knows by key, and the next row writes to other pages. So
neither creating nor hitting a checkpoint copies anything. See docs/caches.md.

A prefix is cached up to a position for which each group has its pages: full groups all blocks, windows the blocks that
the next token attends to, and the state a checkpoint at exactly this position.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, zip_longest

import msgspec

from penstock.cache.pool import BlockPool
from penstock.engine.core.cache_history import CacheHistory
from penstock.engine.core.page_keys import NEVER, PageKeys, Prefix
from penstock.engine.core.request import Claim, Request
from penstock.engine.core.tiers import NoTiers, Tiers
from penstock.engine.messages import Stats
from penstock.executor.protocol import ModelInfo, Row, Transfers


class Kv:
    """Claims, extends and releases the pages of requests, and registers their content in the pool."""

    def __init__(
        self, pool: BlockPool, info: ModelInfo, chunk: int, makes_keys: bool, stats: Stats, clock: Callable[[], float]
    ) -> None:
        """Begin with an empty pool, and with tiers if the executor has host blocks. `chunk` is the maximum number of
        positions in a row. Without `makes_keys`, nothing is found in the cache."""
        self._pool, self._stats, self._size, self._chunk = pool, stats, info.block_size, chunk
        self._history = CacheHistory(info, clock)
        pool.on_evict = partial(self._history.note_eviction, "device")
        self.keys = PageKeys(info.groups, info.block_size, makes_keys)
        self._groups, self._windows, self.num_pages = info.groups, self.keys.windows, self.keys.num_pages
        has_tiers = info.num_host_blocks > 0
        self.tiers = Tiers(pool, self.keys, self._history, info, chunk) if has_tiers else NoTiers(pool)
        self.pools = {"device": pool, **self.tiers.pools}  # those whose content is reported, by tier
        self._page_of = self.tiers.page_of
        # Checkpoints so far apart cost about as much memory as the blocks between them. On a GPU each one costs a step, too.
        least = chunk // info.block_size if info.device == "cuda" else 0
        self._interval = max(-(-self.num_pages // self.keys.num_attention), least)  # in blocks
        self._replaced: list[int] = []  # pages that the step being planned may still write to or read
        self.listeners: list[Callable[[bytes], None]] = []  # called with each key that can be hit from now on
        self._only_grows = not self._windows and not self.num_pages  # rows release nothing

    def end_step(self, requests: Iterable[Request]) -> Transfers | None:
        """Finish a step whose rows of these requests are planned; return what it moves between the tiers."""
        if self.num_pages:
            for request in requests:
                self.keep_checkpoints(request)
        # Not earlier: a request admitted in this step must not get a block that a row of it writes.
        self.drop_replaced()
        return self.tiers.end()

    def forget(self) -> bool:
        """Drop all cached content in all tiers; return False and drop nothing while pages are in use."""
        return self.tiers.forget() and self._pool.forget()

    # -- what a request holds ------------------------------------------------------------------------------

    def claim(self, request: Request, num_running: int) -> Claim:
        """Allocate the cached prefix and all permanently needed blocks of a waiting request, or nothing.

        Window blocks and a state to write to are allocated with the first row: they must be free now, but are not
        claimed. For each running request one block per table stays free, so that running requests do not preempt the
        new one at once.
        """
        claim = self.tiers.prepare(request)
        if claim is not Claim.ADMITTED:
            return claim
        kv, pool, num_tokens = request.kv, self._pool, len(request.tokens)
        prefix = Prefix(0, 0, 0) if kv.skips_cache else self.keys.find(request, self._page_of)
        num = prefix.num_blocks
        found = [[self._page_of(key) for key in keys] for keys in self.keys.needed(request, num)]
        cached = [page for pages in found for page in pages if page > 0]
        num_new = sum(map(len, found)) - len(cached)
        needed = sum(group.most_pages(num_tokens, self._chunk, self._size) for group in self._groups) - self.num_pages
        reserve = min(num_running * self.keys.num_attention, pool.num_usable // 8)
        if max(num_new, needed - len(cached)) + pool.num_idle(cached) + reserve > pool.num_free:
            return Claim.NO_ROOM
        pool.hold(cached)
        kv.num_registered = num - max((len(table) - _num_leading(table) for table in found[:-1]), default=0)
        copies = [self._take_for_copies(pages) for pages in found]
        *tables, state = found
        kv.num_outside = [num - len(table) for table in tables]
        kv.num_sent = [*kv.num_outside]
        kv.tables = [[0] * (num - len(table)) + table for table in tables]
        for group in self.keys.full:
            kv.tables[group] += pool.allocate(-(-num_tokens // self._size) - num)
        kv.has_news = True
        if self._only_grows:
            kv.covered_end = len(kv.blocks) * self._size
        kv.state, kv.is_state_shared = state, True
        if copies[-1]:
            pool.hold(state)
            kv.checkpoints[num] = state
        elif state:
            kv.kept.append(num)
        kv.branch = prefix.num_seen if prefix.num_seen > num else 0
        from_tiers = self.tiers.restore(request, copies)
        # The logits of the last token are always needed. If all tokens are cached, it is computed again and not stored
        # again: other requests hold the block too.
        kv.write_from = num * self._size
        request.num_scheduled = min(kv.write_from, num_tokens - 1)
        if request.first_scheduled_s is None:
            self._note_reuse(request, prefix, from_tiers)
        return Claim.ADMITTED

    def _note_reuse(self, request: Request, prefix: Prefix, from_tiers: dict[str, int]) -> None:
        kv, found = request.kv, prefix.num_blocks * self._size
        if not kv.skips_cache:
            self._stats.prefix_queries += len(request.tokens)
            self._stats.prefix_hits += found
        cached = {"device": found - sum(from_tiers.values()), **from_tiers}
        cached[max(cached, key=cached.__getitem__)] -= found - request.num_scheduled  # the last token is computed again
        not_loaded = self.tiers.why_not_loaded(kv.keys[prefix.num_blocks]) if prefix.num_blocks < prefix.most else None
        kv.reuse = self._history.explain(request, prefix, cached, not_loaded)

    def _take_for_copies(self, pages: list[int]) -> list[tuple[int, int]]:
        """Replace host pages, which are negative, by new device pages; return the (host page, page) pairs."""
        copies = []
        for index, page in enumerate(pages):
            if page < 0:
                (pages[index],) = self._pool.allocate(1)
                copies.append((-page, pages[index]))
        return copies

    def begin_row(self, request: Request, count: int) -> int:
        """Release blocks that no later row needs. Return how many of the next `count` positions fit into one row, which
        ends where a checkpoint is due."""
        kv, start = request.kv, request.num_scheduled
        for group, window in self._windows:
            table, left = kv.tables[group], kv.num_outside[group]
            first = max(0, start + 1 - window) // self._size
            if first > left:
                self._pool.release([block for block in table[left:first] if block])
                table[left:first] = [0] * len(table[left:first])
                kv.num_outside[group] = first
        return min(count, self._next_checkpoint(request) - start) if self.num_pages else count

    def _next_checkpoint(self, request: Request) -> int:
        """Return the next position at which a checkpoint is due: every few blocks, at the last full block of the
        prompt, and where other requests with the same prefix diverge."""
        if request.kv.skips_cache:
            return NEVER
        start, every = request.num_scheduled, self._interval * self._size
        due = (request.kv.branch * self._size, (request.num_prompt - 1) // self._size * self._size)
        return min([position for position in due if position > start] + [(start // every + 1) * every])

    def num_missing(self, request: Request, end: int) -> int:
        """Return how many pages the next row needs if it ends at `end`."""
        kv, blocks = request.kv, -(-end // self._size)
        missing = sum([max(0, blocks - len(table)) for table in kv.tables])
        return missing + (self.num_pages if kv.is_state_shared else 0)

    def extend(self, request: Request, end: int) -> None:
        """Allocate what the next row needs, up to position `end`."""
        kv, blocks = request.kv, -(-end // self._size)
        for table in kv.tables:
            if blocks > len(table):
                table += self._pool.allocate(blocks - len(table))
                kv.has_news = True
        if self._only_grows:
            kv.covered_end = len(kv.blocks) * self._size
        if self.num_pages:
            self._extend_state(request, end)

    def _extend_state(self, request: Request, end: int) -> None:
        kv = request.kv
        due, read = self._next_checkpoint(request), kv.state
        if kv.is_state_shared:
            self._replaced += read  # only this row still reads it
            kv.state = self._pool.allocate(self.num_pages)
        wanted = read or kv.state, kv.state
        reads, writes = (tuple(new) if new != sent else () for new, sent in zip(wanted, kv.sent_state, strict=True))
        kv.new_state, kv.sent_state = (reads, writes), wanted
        kv.has_news = kv.has_news or bool(reads or writes)
        kv.is_state_shared = False
        if end == due:
            self._keep_state(request, end)

    def drop_replaced(self) -> None:
        """Free the replaced pages, once the step is planned or has ended and none of its rows uses them."""
        if self._replaced:
            self._pool.release(self._replaced)
            self._replaced.clear()

    def release(self, request: Request) -> None:
        """Release all pages. Their content stays cached until the pages are reused; the last computed pages are evicted
        first, in all groups alike."""
        self.tiers.release(request)
        kv = request.kv
        find, keys = self._pool.find, self.keys.state_keys
        states = {num: [page for key in keys(request, num) if (page := find(key))] for num in kv.kept}
        self._pool.hold(chain.from_iterable(states.values()))  # checkpoints count as used as recently as the blocks
        self._pool.release([*kv.state, *kv.draft_state, *chain.from_iterable(kv.checkpoints.values())])
        blocks = enumerate(zip_longest(*kv.tables, fillvalue=0), 1)
        self._pool.release([page for num, pages in blocks for page in (*pages, *states.get(num, ())) if page])
        request.kv = kv.without_pages()
        request.num_scheduled = 0

    # -- drafts --------------------------------------------------------------------------------------------
    # A recurrent state cannot be rolled back. So the rows of drafts write to another state, and the previous state is
    # kept until their result is known. If a draft was rejected, the request returns to the previous state, and the next
    # row computes the accepted drafts again, except their keys and values.

    def draft_room(self, request: Request, spare: int) -> int:
        """Return how many drafts may follow the single-position row that was just planned, with `spare` free pages: up
        to the next checkpoint, and none if the row reads or writes a checkpoint."""
        kv = request.kv
        if not self.num_pages:
            return NEVER
        if self.num_pages > spare or kv.is_state_shared or kv.sent_state[0] != kv.state:
            return 0
        return self._next_checkpoint(request) - request.num_scheduled

    def extend_for_drafts(self, request: Request, row: Row, drafts: tuple[int, ...]) -> Row:
        """Allocate pages for the drafts that follow a single-position row; return the row with the drafts."""
        kv = request.kv
        missing = max(0, -(-(row.start + 1 + len(drafts)) // self._size) - len(kv.blocks))
        if missing:
            first = (row.first_block, row.blocks) if row.blocks else (len(kv.blocks), ())
            sent = [first, *(row.groups or [(len(table), ()) for table in kv.tables[1:]])]
            for group, (table, (begin, blocks)) in enumerate(zip(kv.tables, sent, strict=True)):
                assert group == 0 or len(table) + missing == len(kv.blocks), "a row of one position has equal tables"
                new = self._pool.allocate(missing)
                if kv.num_sent[group] == len(table):  # otherwise an entry has changed, and the next row sends it again
                    kv.num_sent[group] += missing
                table += new
                sent[group] = begin, (*blocks, *new)
            (first_block, blocks), *groups = sent
            row = msgspec.structs.replace(row, first_block=first_block, blocks=blocks, groups=tuple(groups))
            if self._only_grows:
                kv.covered_end = len(kv.blocks) * self._size
        if self.num_pages:
            kv.draft_state = self._pool.allocate(self.num_pages)
            kv.sent_state = kv.state, kv.draft_state
            row = msgspec.structs.replace(row, states_out=tuple(kv.draft_state))
        return msgspec.structs.replace(row, first_token=row.start + 1, tokens=drafts)

    def end_drafts(self, request: Request, num_right: int, num_sent: int) -> None:
        """Count the accepted drafts as scheduled, or return to the state before them."""
        kv = request.kv
        if not kv.draft_state:
            return
        behind, kv.draft_state = kv.draft_state, []
        if num_right < num_sent:
            self._pool.release(behind)
            kv.write_from = request.num_scheduled
            request.num_scheduled -= 1 + num_right
            request.num_known = request.num_scheduled + 1  # what follows is sent with the row
            return
        self._pool.release(kv.state)
        kv.state, end = behind, request.num_scheduled
        request.num_scheduled -= num_right
        if end == self._next_checkpoint(request):
            self._keep_state(request, end)
        request.num_scheduled = end

    def _keep_state(self, request: Request, end: int) -> None:
        """Make the state a checkpoint; it is registered in the pool once its key is known."""
        kv = request.kv
        self._pool.hold(kv.state)
        kv.checkpoints[end // self._size], kv.is_state_shared = kv.state, True

    # -- keys ----------------------------------------------------------------------------------------------

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Append known tokens of the answer."""
        request.tokens.extend(tokens)
        self._stats.generation_tokens += len(tokens)
        if len(request.tokens) % self._size < len(tokens):  # one more block is full, or several
            self.keys.extend(request)
            if request.slot >= 0:
                self.register(request)
                if self.num_pages:
                    self.keep_checkpoints(request)

    def register(self, request: Request) -> None:
        """Register the blocks of which every position has been passed to the executor.

        Steps run in order, so a request that finds such a block reads it after it was written. If the pool already has
        the same content, the request uses that block, and its table entry is sent again.
        """
        kv = request.kv
        end = min(request.num_scheduled // self._size, len(kv.keys))
        for block in range(kv.num_registered, end):
            if not self.num_pages:
                self._tell(kv.keys[block])
            self._history.note_block(request, block)
            for group, table in enumerate(kv.tables):
                page = table[block]
                if not page:  # it left the window before its key was known
                    continue
                key = self.keys.key(request, block, group)
                known = self._pool.register(page, key)
                self.tiers.offer(key)
                if known != page:
                    self._replaced.append(page)
                    table[block] = known
                    kv.num_sent[group] = min(kv.num_sent[group], block)  # the next row sends the table again from here
                    kv.has_news = True
        kv.num_registered = max(kv.num_registered, end)

    def keep_checkpoints(self, request: Request) -> None:
        """Register checkpoints whose keys are known, after the whole step that writes them has been planned: no row of
        a step may read what another row of it writes."""
        kv = request.kv
        for num in [num for num in kv.checkpoints if num <= len(kv.keys)]:
            pages = kv.checkpoints.pop(num)
            keys = self.keys.state_keys(request, num)
            self._tell(kv.keys[num - 1])
            known = [self._pool.register(*pair) for pair in zip(pages, keys, strict=True)]
            for key in keys:
                self.tiers.offer(key)
            self._pool.release([page for page, same in zip(pages, known, strict=True) if page != same])
            self._pool.release(known)
            kv.kept.append(num)

    def _tell(self, key: bytes) -> None:
        for listener in self.listeners:
            listener(key)

    # -- invariants ----------------------------------------------------------------------------------------

    def check(self, running: Iterable[Request], in_flight: Sequence[Transfers | None]) -> None:
        """Assert, between two steps, that running requests have what their next rows read, and that every page is held
        only by its owners."""
        assert not self._replaced
        refs: dict[int, int] = {}
        for request in running:
            request.check(self._size)
            kv = request.kv
            for group, window in self._windows:
                seen = kv.tables[group][max(0, request.num_scheduled + 1 - window) // self._size :]
                assert all(seen), "a block that is still seen was given back"
            assert len(kv.state) in (0, self.num_pages)
            assert kv.state or kv.is_state_shared or not self.num_pages
            assert not kv.draft_state or request.num_pending == 1, "drafts without a row in flight"
            for page in kv.held():
                refs[page] = refs.get(page, 0) + 1
        for transfers in filter(None, in_flight):
            for page, _ in transfers.saves:
                refs[page] = refs.get(page, 0) + 1
        self._pool.check_refs(refs)
        self.tiers.check(in_flight)


def _num_leading(pages: list[int]) -> int:
    """Return how many leading pages are on the device."""
    return next((index for index, page in enumerate(pages) if page < 0), len(pages))
