"""When KV blocks move between the tiers: the scheduler's view of host memory, disk and peers.

The index (cache/tiers/index.py) knows what is where; this file decides. A request near the head of the queue
whose chain goes on in a store waits aside while it is read into the host, never longer than computing it again
would take, and no other request waits with it. At its admission the chain's blocks in the host are restored to the
device, a bounded number of bytes a step, and its first row is planned when the last of them has been sent. Every
full block of the device is offered to the host, and from there to the disk, so an eviction or a
preemption leaves a clean copy.

    waiting ──look──▶ loading ──read, failed or late──▶ waiting ──admitted──▶ restoring ──▶ computing
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.base import DISK, PEER, tier_of
from penstock.cache.tiers.index import TierIndex
from penstock.engine.core.kv import Kv
from penstock.engine.core.rates import Rates
from penstock.engine.core.request import Prefix, Request, WaitingQueue
from penstock.engine.core.tier_stats import tier_stats
from penstock.executor.protocol import ModelInfo, TransferResult, Transfers

LOOK_AHEAD = 8  # so many requests at the head of the queue have their blocks read from the stores
RESTORE_BYTES = 64 * 2**20  # a step restores no more than this, or one block
PROBE_BLOCKS = 16  # what is read for the measure alone, when computing seems faster …
PROBE_EVERY_S = 30.0  # … this often
MANY_TOUCHES = 256  # so many are worth transfers of their own


@dataclass(slots=True)
class Loading:
    """A request that waits for reads: which, until when, and whether a peer may yet have more of its chain."""

    deadline_s: float
    wanted: dict[int, int] = field(default_factory=dict)  # ticket → index of its block in the chain
    is_awaiting: bool = False
    num_found: int = 0  # how many keys all stores had found when its chain was walked last


class Tiering:
    def __init__(self, info: ModelInfo, pool: BlockPool, saves_per_step: int, kv: Kv) -> None:
        self.index = TierIndex(info.host_slots, info.stores)
        self.rates = Rates(info.block_bytes, info.block_size, info.stores)
        self._pool = pool
        self._block_size, self._block_bytes = info.block_size, info.block_bytes
        self._saves_per_step = saves_per_step * len(info.groups)
        self._kv = kv
        kv.offer = self.index.offer
        self._restores_per_step = max(1, RESTORE_BYTES // max(info.block_bytes, 1))
        self._max_pins = info.host_slots // 2  # for requests that have not been admitted yet
        self.loading: dict[Request, Loading] = {}  # requests that wait aside for their reads
        self._waiters: dict[int, list[Request]] = {}  # ticket → who waits for it
        self._pins: dict[Request, dict[int, str]] = {}  # slots held for a request → where they came from
        self._num_pins = 0  # of all, and of the reads that will become pins
        self._restoring: dict[Request, deque[tuple[int, int]]] = {}  # (slot, block) still to be sent
        self._restored: list[Request] = []  # whose last restores go with the step being planned
        self._saves: list[tuple[int, int]] = []  # of the step being planned
        self._now_s = self._next_probe_s = 0.0
        self._is_new = bool(info.stores)  # they have not said yet what they have
        self._has_peers = any(tier_of(store) == PEER for store in info.stores)
        self._serves_peers = info.serves_peers
        self.is_stale = False  # a peer may have more than it reported last
        self._num_found = 0
        self._must_forget = False  # the ranks have yet to be asked to give nothing more to peers
        self._stores: dict[str, dict[str, float]] = {}
        self._touched: list[bytes] = []  # keys on the disk that were used, reported to it with the next transfers
        self.counts: Counter[str] = Counter()

    def look(self, request: Request, now_s: float) -> bool:
        """Start what the request should have read before it is admitted. True: it waits aside from now on.

        Each stay in the queue has one look: what failed or came late is computed.
        """
        request.looked = True
        if request.skips_cache:
            return False
        slots, missing, num_blocks = self._chain(request, self._max_pins - self._num_pins)
        is_awaiting = self._is_awaiting(request, num_blocks, now_s) and not self._are_pins_out
        if not missing and not is_awaiting:
            return False
        num_gained = num_blocks - missing[0][0] if missing else 0
        queued = self._queued(missing)
        # A request that names a peer has had its prompt computed there already.
        if request.message.peer is None and not self.rates.is_load_faster(queued, num_gained, len(slots)):
            self._probe([key for _, key in missing], now_s)
            return False
        loading = Loading(now_s + self.rates.patience_s(queued, num_gained))
        if request.message.peer is not None:
            loading.deadline_s = max(loading.deadline_s, request.arrival_s + request.message.peer_wait_s)
        loading.is_awaiting = is_awaiting
        self._read(request, loading, slots, missing)
        if not loading.wanted and not is_awaiting:
            self._unpin(request)
            return False
        self.loading[request] = loading
        return True

    def _is_awaiting(self, request: Request, num_blocks: int, now_s: float) -> bool:
        """The peer that the request names may have more of its prompt soon than these leading blocks."""
        if request.message.peer is None or now_s >= request.arrival_s + request.message.peer_wait_s:
            return False
        is_open = self._stores.get(request.message.peer, {}).get("is_open", 0.0) > 0
        num_tokens = request.num_prompt - self._kv.has_state
        return is_open and num_blocks < min(len(request.keys), num_tokens // self._block_size)

    def _look_again(self, request: Request, loading: Loading, now_s: float) -> None:
        room = self._max_pins - self._num_pins + len(self._pins.get(request, ())) + len(loading.wanted)
        slots, missing, num_blocks = self._chain(request, room)
        loading.is_awaiting = self._is_awaiting(request, num_blocks, now_s)
        self._read(request, loading, slots, missing)

    def _read(self, request: Request, loading: Loading, slots: list[int], missing: list[tuple[int, bytes]]) -> None:
        """Hold what is there of the chain, and start reading what is not."""
        self._pin(request, slots, "host")  # before anything is read: a read takes the slot next to be evicted
        loading.num_found = self._num_found
        for place, key in missing:
            ticket = self.index.start_load(key)
            if ticket is None:  # no free slot: the chain is usable up to here
                loading.is_awaiting = False
                break
            if ticket not in loading.wanted:
                loading.wanted[ticket] = place
                self._num_pins += 1
                self._waiters.setdefault(ticket, []).append(request)

    def _queued(self, missing: list[tuple[int, bytes]]) -> Counter[str]:
        """How much each store that is needed has to read, with what others have asked it for."""
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

    def is_full(self) -> bool:
        """Others wait for their reads, and what they hold is all that may be held: a look would find no room."""
        return self._are_pins_out and bool(self.loading)

    @property
    def _are_pins_out(self) -> bool:
        return self._num_pins >= self._max_pins

    def _resume(self, now_s: float) -> list[Request]:
        """The requests that have waited to the end: all was read, or it takes too long."""
        done = []
        for request, loading in self.loading.items():
            if loading.is_awaiting and (
                loading.num_found != self._num_found or not self._is_awaiting(request, 0, now_s)
            ):
                self._look_again(request, loading, now_s)
            if self._are_pins_out:  # it could not hold more, and others cannot even look
                loading.is_awaiting = False
            if now_s >= loading.deadline_s or not (loading.wanted or loading.is_awaiting):
                done.append(request)
        for request in done:
            self._stop_loading(request)
        return done

    def _chain(self, request: Request, room: int) -> tuple[list[int], list[tuple[int, bytes]], int]:
        """Walk the chain as far as any tier has it and no more than `room` host slots are needed: the slots that
        have their part, (index, key) of what has to be read, and how many blocks that is in all."""
        if not self._kv.is_plain:
            return self._pages(self._kv, request, room)
        keys = request.keys
        slots: list[int] = []
        missing: list[tuple[int, bytes]] = []
        find, host, pending = self._pool.find, self.index.host.find, self.index.ticket_of
        for index, key in enumerate(keys):
            if find(key):
                continue
            if len(slots) + len(missing) >= room:
                return slots, missing, index
            slot = host(key)
            if slot:
                slots.append(slot)
            elif pending(key) is not None or self.index.store_of(key) is not None:
                missing.append((index, key))
            else:
                return slots, missing, index
        return slots, missing, len(keys)

    def _pages(self, kv: Kv, request: Request, room: int) -> tuple[list[int], list[tuple[int, bytes]], int]:
        """As `_chain`, of all that the groups keep of the longest prefix. All of it is needed: what is read has the index of
        the first block that the host does not make usable."""
        find, host = self._pool.find, self.index.host.find

        def find_anywhere(key: bytes) -> int:
            return find(key) or host(key) or self.index.ticket_of(key) or self.index.store_of(key) is not None

        num = most = len(request.keys)
        wanted: list[bytes] = []
        while num:
            num = kv.find(request, find_anywhere, most).num_blocks
            wanted = [key for keys in kv.keys(request, num) for key in keys if not find(key)]
            if len(wanted) <= room:
                break
            most = num // 2
        slots = [slot for key in wanted if (slot := host(key))]
        usable = kv.find(request, self.place, num).num_blocks
        return slots, [(usable, key) for key in wanted if not host(key)], num

    def _probe(self, keys: list[bytes], now_s: float) -> None:
        """Read a little without a request that waits: a store that was slow once must be able to show that it is no more."""
        if now_s >= self._next_probe_s and not self.index.reads:
            self._next_probe_s = now_s + PROBE_EVERY_S
            for key in keys[: min(PROBE_BLOCKS, self._max_pins - self._num_pins)]:
                self.index.start_load(key)

    def _stop_loading(self, request: Request) -> None:
        self._num_pins -= len(self.loading.pop(request).wanted)

    def _pin(self, request: Request, slots: Sequence[int], source: str) -> None:
        held = self._pins.setdefault(request, {})
        new = [slot for slot in slots if slot not in held]
        self.index.pin(new)
        held.update(dict.fromkeys(new, source))
        self._num_pins += len(new)

    def _unpin(self, request: Request) -> None:
        slots = self._pins.pop(request, {})
        self._num_pins -= len(slots)
        self.index.unpin(list(slots))

    def place(self, key: bytes) -> int:
        """A device block, a host block as a negative, or 0."""
        return self._pool.find(key) or -self.index.host.find(key)

    def prefix(self, request: Request, is_busy: bool) -> Prefix:
        """Return the longest prefix that is in the pool, or with what the host has of it where copying that is faster than
        computing it again."""
        kv = self._kv
        far, near = kv.find(request, self.place), kv.find(request, self._pool.find)
        num_gained = far.num_blocks - near.num_blocks
        if num_gained == 0:
            return near
        num_host = sum(self.place(key) < 0 for keys in kv.keys(request, far.num_blocks) for key in keys)
        return far if self.rates.is_restore_faster(num_host, num_gained, is_busy) else near

    def restore(self, request: Request, pairs: list[tuple[int, int]], num_counted: int | None = None) -> None:
        """The request was admitted: it computes as soon as these host slots are in these blocks. The first `num_counted`
        stand for tokens, the others for what other groups keep of the same ones."""
        if request.first_scheduled_s is None:
            sources = self._pins.get(request, {})
            for slot, _ in pairs[:num_counted]:
                self.counts[f"hits_{sources.get(slot, 'host')}"] += self._block_size
        if pairs:
            self.index.pin(slot for slot, _ in pairs)
            self._restoring[request] = deque(pairs)
            request.is_restoring = True
        self._unpin(request)

    def leave(self, request: Request) -> None:
        """The request is aborted, over or preempted, whatever it was doing here."""
        if request in self.loading:
            self._stop_loading(request)
        self._unpin(request)
        pairs = self._restoring.pop(request, None)
        if pairs is not None:
            self.index.unpin([slot for slot, _ in pairs])
        request.is_restoring = request.looked = False
        self._touch(self._kv.used_keys(request))

    def _touch(self, keys: list[bytes]) -> None:
        """What lies beneath must not grow old because a nearer tier always answers."""
        self.index.touch(keys)
        if DISK in self.index.stores:
            self._touched += filter(self.index.stores[DISK].__contains__, reversed(keys))

    def begin_step(self, waiting: WaitingQueue, num_running: int, now_s: float) -> None:
        """Before anything of the next step is planned: what earlier steps filled can be saved now. Requests that have
        waited aside long enough come back; those next in the queue leave it where that is worth it."""
        for request in self._restored:
            request.is_restoring = False
        self._restored.clear()
        self._now_s = now_s
        keep_free = min(num_running, self._pool.num_usable // 8)
        self._saves = self.index.take_saves(self._pool, self._saves_per_step, keep_free)
        for request in self._resume(now_s):
            waiting.add(request)
        if waiting and self.index.stores and not self.is_stale:
            for request in waiting.front(LOOK_AHEAD):
                if not request.looked and not self.is_full() and self.look(request, now_s):
                    waiting.remove(request)

    def end_step(self) -> Transfers | None:
        """What the planned step moves."""
        restores: list[tuple[int, int]] = []
        for request, pairs in self._restoring.items():
            while pairs and len(restores) < self._restores_per_step:
                restores.append(pairs.popleft())
            if not pairs:
                self._restored.append(request)
            if len(restores) == self._restores_per_step:
                break
        for request in self._restored:
            del self._restoring[request]
        self.counts["restores"] += len(restores)
        reads, writes = self.index.take_reads(), self.index.take_writes()
        for store, count in Counter(read[1] for read in reads).items():
            self.rates.reads[store].begin(count, self._now_s)
        must_forget, self._must_forget = self._must_forget, False
        moves = self._saves or restores or reads or writes or must_forget
        if not moves and len(self._touched) < MANY_TOUCHES:
            return None
        touches, self._touched = self._touched, []
        keys = self.index.saving_keys(self._saves) if self._serves_peers else []
        return Transfers(self._saves, restores, reads, writes, touches, keys, must_forget)

    def finish_step(self, transfers: Transfers | None, result: TransferResult | None, now_s: float) -> None:
        """The step's saves and restores are over; reads and writes of any step may be."""
        if transfers is not None:
            self.index.finish_saves(transfers.saves, self._pool)
            self.index.unpin([slot for slot, _ in transfers.restores])
        if result is None:
            return
        self._is_new = self.is_stale = False
        num_read = Counter(store for ticket, ok in result.completions if (store := self._complete(ticket, ok)))
        if result.completions:
            num_left = Counter(read.store for read in self.index.reads.values())
            for store, rate in self.rates.reads.items():
                rate.end(num_read[store], num_left[store], now_s)
        self.rates.copies.add(result.num_copied, result.copy_s)
        self._num_found += sum(map(len, result.found.values()))
        self.index.note(result.found, result.lost)
        for name, numbers in result.stores.items():
            before = self._stores.get(name, {})
            what = "busy_s" if "busy_s" in numbers else "load_times_sum_s"
            loads, seconds = (numbers.get(each, 0) - before.get(each, 0) for each in ("hits", what))
            if name in self.rates.reads:
                self.rates.reads[name].note(loads, seconds / numbers.get("workers", 1))
            self._stores[name] = numbers

    def _complete(self, ticket: int, ok: bool) -> str:
        """The store of a read that brought its block; else nothing."""
        read = self.index.reads.get(ticket)
        slot = self.index.complete(ticket, ok)
        for request in self._waiters.pop(ticket, ()):
            loading = self.loading.get(request)
            place = None if loading is None else loading.wanted.pop(ticket, None)
            if loading is None or place is None:  # it did not wait so long
                continue
            self._num_pins -= 1
            if slot:
                assert read is not None
                self._pin(request, (slot,), read.store)
            else:
                self._give_up_after(loading, place)
        return read.store if read is not None and slot else ""

    def _give_up_after(self, loading: Loading, place: int) -> None:
        """Block `place` of the chain will not come: what lies behind it is of no use to this request."""
        loading.is_awaiting = False
        beyond = [ticket for ticket, other in loading.wanted.items() if other > place]
        for ticket in beyond:
            del loading.wanted[ticket]
        self._num_pins -= len(beyond)

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight or waits for a step to carry it, or to ask."""
        waits = self.loading or self._restoring or self._restored or self._is_new or self._must_forget
        return self.index.is_idle and not waits

    def wake(self) -> None:
        """A request has come to an idle engine: what peers have said meanwhile is asked for first."""
        self.is_stale = self._has_peers

    def forget(self) -> bool:
        if not self.index.forget():
            return False
        self._must_forget = self._serves_peers
        return True

    def stats(self) -> dict[str, dict[str, float]]:
        return tier_stats(self.index, self.counts, self.rates, self._stores, self._block_bytes)

    def check(self, in_flight: Sequence[Transfers | None]) -> None:
        """Assert every invariant; `in_flight` are the transfers of the steps that have no result yet."""
        pins = [slot for slots in self._pins.values() for slot in slots]
        assert self._num_pins == len(pins) + sum(len(loading.wanted) for loading in self.loading.values())
        pins += [slot for pairs in self._restoring.values() for slot, _ in pairs]
        pins += [slot for transfers in in_flight if transfers for slot, _ in transfers.restores]
        self.index.check(pins)
        for request, loading in self.loading.items():
            assert request.slot < 0 and not request.finished
            for ticket in loading.wanted:
                assert ticket in self.index.reads and request in self._waiters[ticket]
        assert self._waiters.keys() <= self.index.reads.keys(), "a request waits for a read that is over"
        for request in self._restoring:
            assert request.is_restoring and request.slot >= 0
