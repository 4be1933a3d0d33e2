"""The pages of requests with host memory, a disk or peers below the device: decides what moves between them and when.

The index (cache/tiers/index.py) knows the location of every key. If the block chain of a request near the head of the
queue continues in a store, the request leaves the queue while the blocks are read into host memory, for at most the
time to recompute them; other requests do not wait for it. When it is admitted, its host blocks are restored to the
device, a bounded number of bytes per step, and its first row is planned when the last of them has been sent. Every full
device block is offered to the host, and from there to the disk, so eviction and preemption leave a copy.

    waiting ──look up──▶ loading ──read, failed or late──▶ waiting ──admitted──▶ restoring ──▶ computing
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.base import DISK, PEER, tier_of
from penstock.cache.tiers.index import TierIndex
from penstock.engine.core.kv import Kv
from penstock.engine.core.request import Claim, Loading, Request, WaitingQueue
from penstock.engine.core.tier_stats import Rates, tier_stats
from penstock.engine.messages import MissReason, Stats
from penstock.executor.protocol import ModelInfo, Step, StepResult, TransferResult, Transfers

LOOK_AHEAD = 8  # requests at the head of the queue whose blocks are read from stores
RESTORE_BYTES = 64 * 2**20  # maximum per step, but at least one block
PROBE_BLOCKS = 16  # blocks that are read only to measure a store when computing seems faster …
PROBE_EVERY_S = 30.0  # … this often
MANY_TOUCHES = 256  # with this many, transfers are sent for them alone


class CachedChain(NamedTuple):
    """The part of a request's prefix that is cached in a tier below the device."""

    num_blocks: int
    num_usable: int  # blocks of the prefix on the device and in the host
    host_blocks: list[int]  # that hold part of it
    missing: list[tuple[int, bytes]]  # index and key of the blocks to read from a store


class TieredKv(Kv):
    def __init__(
        self, pool: BlockPool, info: ModelInfo, chunk: int, makes_keys: bool, stats: Stats, clock: Callable[[], float]
    ) -> None:
        super().__init__(pool, info, chunk, makes_keys, stats, clock)
        self.index = TierIndex(info.num_host_blocks, info.stores)
        self.index.host.on_evict = partial(self._history.note_eviction, "host")
        self.rates = Rates(info.block_bytes, info.block_size, info.stores)
        self._block_bytes = info.block_bytes
        self._saves_per_step = -(-chunk // info.block_size) * len(info.groups)  # the maximum that a step can fill
        self._restores_per_step = max(1, RESTORE_BYTES // max(info.block_bytes, 1))
        self._max_pins = info.num_host_blocks // 2  # for requests that have not been admitted yet
        self.loading: dict[Request, Loading] = {}  # requests that wait outside of the queue for their reads
        self._waiters: dict[int, list[Request]] = {}  # ticket → the requests that wait for it
        self._pins: dict[Request, dict[int, str]] = {}  # host blocks held for a request → where they came from
        self._num_pins = 0  # of all requests, with the reads that will become pins
        # Pairs (host block, device block) that a step will send; empty after the last
        self._restoring: dict[Request, deque[tuple[int, int]]] = {}
        self._saves: list[tuple[int, int]] = []  # of the step being planned
        self._now_s = self._next_probe_s = 0.0  # when the step's planning began, and when the next probe is due
        self._is_new = bool(info.stores)  # the stores have not reported their keys yet
        self._has_peers = any(tier_of(store) == PEER for store in info.stores)
        self._serves_peers = info.serves_peers
        self.is_stale = False  # a peer may have more than it has reported
        self._num_found = 0
        self._must_forget = False  # the ranks must still be told to serve nothing computed earlier
        self._stores: dict[str, dict[str, float]] = {}
        self._touched: list[bytes] = []  # used keys on the disk, to report with the next transfers
        self.counts: Counter[str] = Counter()

    def pools(self) -> dict[str, BlockPool]:
        return {"device": self._pool, "host": self.index.host}  # blocks of stores pass through the host

    def claim(self, request: Request, num_running: int) -> Claim:
        if not request.kv.was_looked_up:
            if self._are_pins_out and self.loading:  # other requests wait for reads, and no more may be pinned
                return Claim.NO_ROOM
            if self._start_loading(request):
                return Claim.LOADING
        return super().claim(request, num_running)

    def _start_loading(self, request: Request) -> bool:
        """Start the reads that the request should wait for before it is admitted; return whether there are any.

        This is done once each time the request is queued: blocks whose reads fail or are late are computed.
        """
        request.kv.was_looked_up = True
        if request.kv.skips_cache:
            return False
        num_blocks, num_usable, host_blocks, missing = self._walk(request, self._max_pins - self._num_pins)
        is_awaiting = self._is_awaiting(request, num_blocks) and not self._are_pins_out
        if not missing and not is_awaiting:
            return False
        num_gained = num_blocks - num_usable if missing else 0
        queued = self._queued(missing)
        # If a request names a peer, its prompt has been computed there.
        if request.message.peer is None and not self.rates.is_load_faster(queued, num_gained, len(host_blocks)):
            self._probe([key for _, key in missing])
            return False
        loading = Loading(self._now_s + self.rates.patience_s(queued, num_gained))
        if request.message.peer is not None:
            loading.deadline_s = max(loading.deadline_s, request.arrival_s + request.message.peer_wait_s)
        loading.is_awaiting = is_awaiting
        self._read(request, loading, host_blocks, missing)
        if not loading.wanted and not is_awaiting:
            self._unpin(request)
            return False
        self.loading[request] = loading
        return True

    def _is_awaiting(self, request: Request, num_blocks: int) -> bool:
        """Return whether the request's peer may soon have more blocks of the prompt than the first `num_blocks`."""
        if request.message.peer is None or self._now_s >= request.arrival_s + request.message.peer_wait_s:
            return False
        is_open = self._stores.get(request.message.peer, {}).get("is_open", 0.0) > 0
        num_tokens = request.num_prompt - bool(self.num_pages)
        return is_open and num_blocks < min(len(request.kv.keys), num_tokens // self._size)

    def _load_more(self, request: Request, loading: Loading) -> None:
        room = self._max_pins - self._num_pins + len(self._pins.get(request, ())) + len(loading.wanted)
        num_blocks, _, host_blocks, missing = self._walk(request, room)
        loading.is_awaiting = self._is_awaiting(request, num_blocks)
        self._read(request, loading, host_blocks, missing)

    def _read(
        self, request: Request, loading: Loading, host_blocks: list[int], missing: list[tuple[int, bytes]]
    ) -> None:
        """Pin the host blocks of the chain, and start reading the missing ones."""
        self._pin(request, host_blocks, "host")  # before any read, because a read evicts the next host block
        loading.num_found = self._num_found
        for place, key in missing:
            ticket = self.index.start_load(key)
            if ticket is None:  # no free host block: the chain ends here
                loading.is_awaiting = False
                break
            if ticket not in loading.wanted:
                loading.wanted[ticket] = place
                self._num_pins += 1
                self._waiters.setdefault(ticket, []).append(request)

    def _queued(self, missing: list[tuple[int, bytes]]) -> Counter[str]:
        """Return the number of blocks to read from each store, including those queued for other requests."""
        in_flight = self.index.reads
        tickets = [self.index.ticket_of(key) for _, key in missing]
        mine = [
            self.index.store_of(key) if ticket is None else in_flight[ticket].store
            for (_, key), ticket in zip(missing, tickets, strict=True)
        ]
        needed = {store for store in mine if store is not None}
        queued = Counter(read.store for read in in_flight.values() if read.store in needed)
        queued.update(store for store, ticket in zip(mine, tickets, strict=True) if ticket is None and store)
        return queued

    @property
    def _are_pins_out(self) -> bool:
        return self._num_pins >= self._max_pins

    def _resume(self) -> list[Request]:
        """Return the requests whose wait has ended: everything was read, or the deadline has passed."""
        done = []
        for request, loading in self.loading.items():
            if loading.is_awaiting and (loading.num_found != self._num_found or not self._is_awaiting(request, 0)):
                self._load_more(request, loading)
            if self._are_pins_out:  # it could pin no more, and no other request can start to load
                loading.is_awaiting = False
            if self._now_s >= loading.deadline_s or not (loading.wanted or loading.is_awaiting):
                done.append(request)
        for request in done:
            self._stop_loading(request)
        return done

    def _walk(self, request: Request, room: int) -> CachedChain:
        """Return the chain of the request's prefix in the tiers, as far as it needs at most `room` host blocks."""
        find, host, keys_of, room = self._pool.find, self.index.host.find, self.keys, max(room, 0)

        def find_anywhere(key: bytes) -> int:
            return find(key) or host(key) or self.index.ticket_of(key) or self.index.store_of(key) is not None

        most = len(request.kv.keys)
        while True:
            num = keys_of.find(request, find_anywhere, most).num_blocks
            groups = keys_of.needed(request, num)
            # Each group's keys end where the prefix does.
            wanted = [
                (num - len(keys) + index, key) for keys in groups for index, key in enumerate(keys) if not find(key)
            ]
            if len(wanted) <= room:
                break
            num_first = sum(not find(key) for key in groups[0])
            most = wanted[room][0] if num_first > room else num // 2
        host_blocks = [host_block for _, key in wanted if (host_block := host(key))]
        missing = [(block, key) for block, key in wanted if not host(key)]
        return CachedChain(num, keys_of.find(request, self.page_of, num).num_blocks, host_blocks, missing)

    def _probe(self, keys: list[bytes]) -> None:
        """Read a few blocks that no request waits for, to measure again a store that was slow before."""
        if self._now_s >= self._next_probe_s and not self.index.reads:
            self._next_probe_s = self._now_s + PROBE_EVERY_S
            for key in keys[: min(PROBE_BLOCKS, self._max_pins - self._num_pins)]:
                self.index.start_load(key)

    def _stop_loading(self, request: Request) -> None:
        self._num_pins -= len(self.loading.pop(request).wanted)

    def _pin(self, request: Request, host_blocks: Sequence[int], source: str) -> None:
        held = self._pins.setdefault(request, {})
        new = [host_block for host_block in host_blocks if host_block not in held]
        self.index.host.hold(new)
        held.update(dict.fromkeys(new, source))
        self._num_pins += len(new)

    def _unpin(self, request: Request) -> None:
        host_blocks = self._pins.pop(request, {})
        self._num_pins -= len(host_blocks)
        self.index.host.release(list(host_blocks))

    def page_of(self, key: bytes) -> int:
        return self._pool.find(key) or -self.index.host.find(key)

    def _restore(self, request: Request, copies: list[list[tuple[int, int]]]) -> dict[str, int]:
        sources, tokens = self._pins.get(request, {}), Counter[str]()
        for host_block, _ in copies[0]:  # the other groups' pages are of the same tokens
            tokens[sources.get(host_block, "host")] += self._size
        if request.first_scheduled_s is None:
            self.counts.update({f"hits_{store}": count for store, count in tokens.items()})
        pairs = deque(chain.from_iterable(copies))
        if pairs:
            self.index.host.hold(host_block for host_block, _ in pairs)
            self._restoring[request] = pairs
            request.kv.is_restoring = True
        self._unpin(request)
        return tokens

    def _why_unread(self, key: bytes) -> MissReason | None:
        if self.index.ticket_of(key) is not None:
            return "tier_timeout"
        return None if self.index.store_of(key) is None else "tier_slow"

    def _offer(self, key: bytes) -> None:
        self.index.offer(key)

    def release(self, request: Request) -> None:
        """Release the pages, and end the request's reads and restores."""
        if request in self.loading:
            self._stop_loading(request)
        self._unpin(request)
        pairs = self._restoring.pop(request, None)
        if pairs is not None:
            self.index.host.release([host_block for host_block, _ in pairs])
        request.kv.is_restoring = request.kv.was_looked_up = False
        self._touch(self.keys.used(request))
        super().release(request)

    def _touch(self, keys: list[bytes]) -> None:
        """Mark the keys as used in all tiers: a tier's content must not age because a nearer tier always has it."""
        self.index.touch(keys)
        if DISK in self.index.stores:
            self._touched += filter(self.index.stores[DISK].__contains__, reversed(keys))

    def begin_step(self, waiting: WaitingQueue, num_running: int) -> None:
        """Choose pages of earlier steps to save. Requests whose reads have ended return to the queue, and the next ones
        leave it if reading is worthwhile."""
        for request in [request for request, pairs in self._restoring.items() if not pairs]:
            del self._restoring[request]
            request.kv.is_restoring = False
        self._now_s = self._clock()
        keep_free = min(num_running, self._pool.num_usable // 8)
        self._saves = self.index.take_saves(self._pool, self._saves_per_step, keep_free)
        for request in self._resume():
            waiting.add(request)
        if waiting and self.index.stores and not self.is_stale:
            for request in waiting.front(LOOK_AHEAD):
                if self._are_pins_out and self.loading:
                    break
                if not request.kv.was_looked_up and self._start_loading(request):
                    waiting.remove(request)

    def end_step(self, requests: Iterable[Request]) -> Transfers | None:
        super().end_step(requests)
        restores: list[tuple[int, int]] = []
        for pairs in self._restoring.values():
            while pairs and len(restores) < self._restores_per_step:
                restores.append(pairs.popleft())
        self.counts["restores"] += len(restores)
        reads, writes = self.index.take_reads(), self.index.take_writes()
        must_forget, self._must_forget = self._must_forget, False
        moves = self._saves or restores or reads or writes or must_forget
        if not moves and len(self._touched) < MANY_TOUCHES:
            return None
        touches, self._touched = self._touched, []
        keys = self.index.saving_keys(self._saves) if self._serves_peers else []
        return Transfers(self._saves, restores, reads, writes, touches, keys, must_forget)

    def finish_step(self, step: Step, result: StepResult) -> None:
        """Process the end of the step's saves and restores, and of reads and writes of any step."""
        if step.transfers is not None:
            self.index.finish_saves(step.transfers.saves, self._pool)
            self.index.host.release([host_block for host_block, _ in step.transfers.restores])
        if result.transfers is not None:
            self._take_report(result.transfers)
        self.rates.note_step(sum(row.count for row in step.rows), len(step.rows), result.elapsed_s)

    def _take_report(self, result: TransferResult) -> None:
        self._is_new = self.is_stale = False
        for ticket, ok in result.completions:
            self._complete(ticket, ok)
        self.rates.copies.add(result.num_copied, result.copy_s)
        self._num_found += sum(map(len, result.found.values()))
        self.index.note(result.found, result.lost)
        for store, keys in result.lost.items():
            for key in keys:
                self._history.note_eviction(store, key)
        for name, numbers in result.stores.items():
            before = self._stores.get(name, {})
            what = "busy_s" if "busy_s" in numbers else "load_times_sum_s"
            loads, seconds = (numbers.get(each, 0) - before.get(each, 0) for each in ("hits", what))
            if name in self.rates.reads:
                self.rates.reads[name].add(loads, seconds / numbers.get("workers", 1))
            self._stores[name] = numbers

    def _complete(self, ticket: int, ok: bool) -> None:
        """Process the end of a read or write."""
        read = self.index.reads.get(ticket)
        host_block = self.index.complete(ticket, ok)
        for request in self._waiters.pop(ticket, ()):
            loading = self.loading.get(request)
            place = None if loading is None else loading.wanted.pop(ticket, None)
            if loading is None or place is None:  # it no longer waits
                continue
            self._num_pins -= 1
            if host_block:
                assert read is not None
                self._pin(request, (host_block,), read.store)
            else:
                self._give_up_after(loading, place)

    def _give_up_after(self, loading: Loading, place: int) -> None:
        """Stop waiting for later blocks: without block `place` of the chain they are useless to this request."""
        loading.is_awaiting = False
        beyond = [ticket for ticket, other in loading.wanted.items() if other > place]
        for ticket in beyond:
            del loading.wanted[ticket]
        self._num_pins -= len(beyond)

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight, waits for a step, or has to be polled."""
        waits = self.loading or self._restoring or self._is_new or self._must_forget
        return self.index.is_idle and not waits

    @property
    def needs_step(self) -> bool:
        return self.is_stale or not self.is_idle

    def wake(self) -> None:
        """Before the next admission, request the keys that peers have reported while the engine was idle."""
        self.is_stale = self._has_peers

    def forget(self) -> bool:
        if not self.index.forget():
            return False
        self._must_forget = self._serves_peers
        return super().forget()

    def tier_stats(self) -> dict[str, dict[str, float]]:
        return tier_stats(self.index, self.counts, self.rates, self._stores, self._block_bytes)

    def check(self, running: Iterable[Request], in_flight: Sequence[Transfers | None]) -> None:
        """Assert every invariant; `in_flight` are the transfers of steps without a result."""
        super().check(running, in_flight)
        pins = [host_block for host_blocks in self._pins.values() for host_block in host_blocks]
        assert self._num_pins == len(pins) + sum(len(loading.wanted) for loading in self.loading.values())
        pins += [host_block for pairs in self._restoring.values() for host_block, _ in pairs]
        pins += [host_block for transfers in in_flight if transfers for host_block, _ in transfers.restores]
        self.index.check(pins)
        for request, loading in self.loading.items():
            assert request.slot < 0 and not request.finished
            for ticket in loading.wanted:
                assert ticket in self.index.reads and request in self._waiters[ticket]
        assert self._waiters.keys() <= self.index.reads.keys(), "a request waits for a read that is over"
        for request in self._restoring:
            assert request.kv.is_restoring and request.slot >= 0
