"""The tiers below the device: host memory, a disk, peers. Decides which blocks of requests move between them and when.

`Kv` (engine/core/kv.py) holds the pages on the device and calls `Tiers` when it admits, releases or registers blocks.

The index (cache/tiers/index.py) knows the location of every key. If the block chain of a request near the head of the
queue continues in a store, the request leaves the queue while the blocks are read into host memory, for at most the
time to recompute them; other requests do not wait for it. When it is admitted, its host blocks are restored to the
device, a bounded number of bytes per step, and its first row is planned when the last of them has been sent. Every full
device block is offered to the host, and from there to the disk, so eviction and preemption leave a copy.

             ┌──────────── nothing to wait for ────────────┐
             │                                             ▼
    queued ──┴─look up─▶ LOADING ──read, failed or late──▶ LOADED ──admitted──▶ RESTORING ──all copies sent──▶ computing
      ▲                                                      └───────────── nothing to copy ───────────────────▲ │
      └──────────────────────────────── released: preempted, ended or the weights changed ───────────────────────┘

A queued request that has not been looked up and a computing request have no `TierUse`.
"""

import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.base import DISK, PEER, tier_of
from penstock.cache.tiers.index import TierIndex
from penstock.engine.core.cache_history import CacheHistory
from penstock.engine.core.page_keys import PageKeys
from penstock.engine.core.request import Claim, Request, WaitingQueue
from penstock.engine.core.tier_stats import Rates, tier_stats
from penstock.engine.messages import MissReason
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


class Stage(enum.Enum):
    """The stage of a request in the tiers; the figure above has the transitions."""

    LOADING = enum.auto()  # outside of the queue, while blocks of its prefix are read from stores
    LOADED = enum.auto()  # in the queue; the host has what could be read of its prefix
    RESTORING = enum.auto()  # admitted, while host blocks are copied to the device


@dataclass(slots=True, eq=False)
class TierUse:
    """The host blocks and reads that a request holds."""

    stage: Stage
    pins: dict[int, str] = field(default_factory=dict)  # host blocks held until admission → where they came from
    reads: dict[int, int] = field(default_factory=dict)  # LOADING: ticket → index of its block in the chain
    deadline_s: float = 0.0  # of the reads
    is_awaiting: bool = False  # a peer may still announce more blocks of the chain
    num_reported: int = 0  # number of keys that all stores had reported at the last look-up
    copies: deque[tuple[int, int]] = field(default_factory=deque)  # RESTORING: (host block, device block) to send


class NoTiers:
    """Stands for the tiers of an engine that has none."""

    is_stale = False
    is_idle = True
    needs_step = False
    loading: Mapping[Request, object] = {}

    def __init__(self, pool: BlockPool) -> None:
        self.page_of = pool.find

    def pools(self) -> dict[str, BlockPool]:
        return {}

    def wake(self) -> None:
        pass

    def begin(self, _waiting: WaitingQueue, _num_running: int) -> None:
        pass

    def end(self) -> Transfers | None:
        return None

    def finish(self, _step: Step, _result: StepResult) -> None:
        pass

    def prepare(self, _request: Request) -> Claim:
        return Claim.ADMITTED

    def restore(self, _request: Request, _copies: list[list[tuple[int, int]]]) -> dict[str, int]:
        return {}

    def offer(self, _key: bytes) -> None:
        pass

    def release(self, _request: Request) -> None:
        pass

    def why_unread(self, _key: bytes) -> MissReason | None:
        return None

    def forget(self) -> bool:
        return True

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def check(self, _in_flight: Sequence[Transfers | None]) -> None:
        pass


class Tiers:
    """The host blocks of requests, and the traffic between the device, the host and the stores."""

    def __init__(
        self,
        pool: BlockPool,
        keys: PageKeys,
        history: CacheHistory,
        info: ModelInfo,
        chunk: int,
        clock: Callable[[], float],
    ) -> None:
        """`chunk` is the maximum number of positions in a row."""
        self._pool, self._keys, self._history, self._clock = pool, keys, history, clock
        self._size = info.block_size
        self.index = TierIndex(info.num_host_blocks, info.stores)
        self.index.host.on_evict = partial(history.note_eviction, "host")
        self.rates = Rates(info.block_bytes, info.block_size, info.stores)
        self._block_bytes = info.block_bytes
        self._saves_per_step = -(-chunk // info.block_size) * len(info.groups)  # the maximum that a step can fill
        self._restores_per_step = max(1, RESTORE_BYTES // max(info.block_bytes, 1))
        self._max_pins = info.num_host_blocks // 2  # for requests that have not been admitted yet
        self._uses: dict[Request, TierUse] = {}
        self.loading: dict[Request, TierUse] = {}  # those that are LOADING, in the order of their look-up
        self._restoring: dict[Request, TierUse] = {}  # those that are RESTORING, in the order of their admission
        self._waiters: dict[int, list[Request]] = {}  # ticket → the requests that wait for it
        self._num_pins = 0  # of all requests, with the reads that will become pins
        self._saves: list[tuple[int, int]] = []  # of the step being planned
        self._now_s = self._next_probe_s = 0.0  # when the step's planning began, and when the next probe is due
        self._awaits_first_report = bool(info.stores)  # the stores have not reported their keys yet
        self._has_peers = any(tier_of(store) == PEER for store in info.stores)
        self._serves_peers = info.serves_peers
        self.is_stale = False  # nothing may be admitted before the peers have reported their keys
        self._num_reported = 0  # number of keys that all stores have reported
        self._must_forget = False  # the ranks must still be told to serve nothing computed earlier
        self._stores: dict[str, dict[str, float]] = {}
        self._touched: list[bytes] = []  # used keys on the disk, to report with the next transfers
        self.counts: Counter[str] = Counter()

    def pools(self) -> dict[str, BlockPool]:
        """Return the pools whose content is reported, by tier. Blocks of stores pass through the host."""
        return {"host": self.index.host}

    # -- admission -----------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> Claim:
        """Look up the prefix of a queued request, once each time it is queued. Return LOADING if it must leave the queue
        for reads, NO_ROOM if no more host blocks may be pinned, else ADMITTED: `Kv` can admit it now."""
        if request in self._uses:
            return Claim.ADMITTED
        if self._is_pin_limit_reached and self.loading:
            return Claim.NO_ROOM
        return Claim.LOADING if self._start_loading(request) else Claim.ADMITTED

    def _start_loading(self, request: Request) -> bool:
        """Start the reads that the request should wait for before it is admitted; return whether there are any.

        Blocks whose reads fail or are late are computed.
        """
        use = self._uses[request] = TierUse(Stage.LOADED)
        if request.kv.skips_cache:
            return False
        num_blocks, num_usable, host_blocks, missing = self._walk(request, self._max_pins - self._num_pins)
        use.is_awaiting = self._is_awaiting(request, num_blocks) and not self._is_pin_limit_reached
        if not missing and not use.is_awaiting:
            return False
        num_gained = num_blocks - num_usable if missing else 0
        queued = self._queued(missing)
        # If a request names a peer, its prompt has been computed there.
        if request.message.peer is None and not self.rates.is_load_faster(queued, num_gained, len(host_blocks)):
            self._probe([key for _, key in missing])
            return False
        use.deadline_s = self._now_s + self.rates.patience_s(queued, num_gained)
        if request.message.peer is not None:
            use.deadline_s = max(use.deadline_s, request.arrival_s + request.message.peer_wait_s)
        is_awaiting = use.is_awaiting
        self._read(request, use, host_blocks, missing)
        if not use.reads and not is_awaiting:
            self._unpin(use)
            return False
        use.stage, self.loading[request] = Stage.LOADING, use
        return True

    def _is_awaiting(self, request: Request, num_blocks: int) -> bool:
        """Return whether the request's peer may soon have more blocks of the prompt than the first `num_blocks`."""
        if request.message.peer is None or self._now_s >= request.arrival_s + request.message.peer_wait_s:
            return False
        is_open = self._stores.get(request.message.peer, {}).get("is_open", 0.0) > 0
        num_tokens = request.num_prompt - bool(self._keys.num_pages)
        return is_open and num_blocks < min(len(request.kv.keys), num_tokens // self._size)

    def _load_more(self, request: Request, use: TierUse) -> None:
        room = self._max_pins - self._num_pins + len(use.pins) + len(use.reads)
        num_blocks, _, host_blocks, missing = self._walk(request, room)
        use.is_awaiting = self._is_awaiting(request, num_blocks)
        self._read(request, use, host_blocks, missing)

    def _read(self, request: Request, use: TierUse, host_blocks: list[int], missing: list[tuple[int, bytes]]) -> None:
        """Pin the host blocks of the chain, and start reading the missing ones."""
        self._pin(use, host_blocks, "host")  # before any read, because a read evicts the next host block
        use.num_reported = self._num_reported
        for block, key in missing:
            ticket = self.index.start_load(key)
            if ticket is None:  # no free host block: the chain ends here
                use.is_awaiting = False
                break
            if ticket not in use.reads:
                use.reads[ticket] = block
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
    def _is_pin_limit_reached(self) -> bool:
        return self._num_pins >= self._max_pins

    def _resume(self) -> list[Request]:
        """Return the requests whose wait has ended: everything was read, or the deadline has passed."""
        done = []
        for request, use in self.loading.items():
            if use.is_awaiting and (use.num_reported != self._num_reported or not self._is_awaiting(request, 0)):
                self._load_more(request, use)
            if self._is_pin_limit_reached:  # it could pin no more, and no other request can start to load
                use.is_awaiting = False
            if self._now_s >= use.deadline_s or not (use.reads or use.is_awaiting):
                done.append(request)
        for request in done:
            self._stop_loading(request)
        return done

    def _walk(self, request: Request, room: int) -> CachedChain:
        """Return the chain of the request's prefix in the tiers, as far as it needs at most `room` host blocks."""
        find, host, keys_of, room = self._pool.find, self.index.host.find, self._keys, max(room, 0)

        def find_anywhere(key: bytes) -> int:
            return find(key) or host(key) or self.index.ticket_of(key) or self.index.store_of(key) is not None

        most = len(request.kv.keys)
        while True:
            num = keys_of.find(request, find_anywhere, most).num_blocks
            groups = keys_of.needed(request, num)
            # Each group's keys end where the prefix does.
            absent = [
                (num - len(keys) + index, key) for keys in groups for index, key in enumerate(keys) if not find(key)
            ]
            if len(absent) <= room:
                break
            num_first = sum(not find(key) for key in groups[0])
            most = absent[room][0] if num_first > room else num // 2
        host_blocks = [host_block for _, key in absent if (host_block := host(key))]
        missing = [(block, key) for block, key in absent if not host(key)]
        return CachedChain(num, keys_of.find(request, self.page_of, num).num_blocks, host_blocks, missing)

    def _probe(self, keys: list[bytes]) -> None:
        """Read a few blocks that no request waits for, to measure again a store that was slow before."""
        if self._now_s >= self._next_probe_s and not self.index.reads:
            self._next_probe_s = self._now_s + PROBE_EVERY_S
            for key in keys[: min(PROBE_BLOCKS, self._max_pins - self._num_pins)]:
                self.index.start_load(key)

    def _stop_loading(self, request: Request) -> None:
        use = self.loading.pop(request)
        self._num_pins -= len(use.reads)
        use.reads.clear()
        use.stage = Stage.LOADED

    def _pin(self, use: TierUse, host_blocks: Sequence[int], source: str) -> None:
        new = [host_block for host_block in host_blocks if host_block not in use.pins]
        self.index.host.hold(new)
        use.pins.update(dict.fromkeys(new, source))
        self._num_pins += len(new)

    def _unpin(self, use: TierUse) -> None:
        self._num_pins -= len(use.pins)
        self.index.host.release(list(use.pins))
        use.pins.clear()

    def page_of(self, key: bytes) -> int:
        """Return the page with this content: on the device, or negative in host memory; 0 if there is none."""
        return self._pool.find(key) or -self.index.host.find(key)

    def restore(self, request: Request, copies: list[list[tuple[int, int]]]) -> dict[str, int]:
        """Start copying blocks of an admitted request to the device: (host block, device block) pairs by group. Return
        the number of tokens that come from each tier."""
        use = self._uses.pop(request)
        assert use.stage is Stage.LOADED
        tokens = Counter[str]()
        for host_block, _ in copies[0]:  # the other groups' pages are of the same tokens
            tokens[use.pins.get(host_block, "host")] += self._size
        if request.first_scheduled_s is None:
            self.counts.update({f"hits_{store}": count for store, count in tokens.items()})
        use.copies.extend(chain.from_iterable(copies))
        if use.copies:
            self.index.host.hold(host_block for host_block, _ in use.copies)
            use.stage, self._uses[request], self._restoring[request] = Stage.RESTORING, use, use
            request.kv.is_restoring = True
        self._unpin(use)
        return tokens

    def _end_restore(self, request: Request) -> None:
        del self._restoring[request], self._uses[request]
        request.kv.is_restoring = False

    def why_unread(self, key: bytes) -> MissReason | None:
        """Return why a block was not taken from the tier that has it; None if no tier has it."""
        if self.index.ticket_of(key) is not None:
            return "tier_timeout"
        return None if self.index.store_of(key) is None else "tier_slow"

    def offer(self, key: bytes) -> None:
        """Queue the device block with this key for a copy to the host."""
        self.index.offer(key)

    def release(self, request: Request) -> None:
        """End the reads and copies of a request that leaves the device or the queue, before its pages are released."""
        if request in self.loading:
            self._stop_loading(request)
        if request in self._restoring:
            self.index.host.release([host_block for host_block, _ in self._restoring[request].copies])
            self._end_restore(request)
        elif (use := self._uses.pop(request, None)) is not None:
            self._unpin(use)
        self._touch(self._keys.used(request))

    def _touch(self, keys: list[bytes]) -> None:
        """Mark the keys as used in all tiers: a tier's content must not age because a nearer tier always has it."""
        self.index.touch(keys)
        if DISK in self.index.stores:
            self._touched += filter(self.index.stores[DISK].__contains__, reversed(keys))

    # -- steps ---------------------------------------------------------------------------------------------

    def begin(self, waiting: WaitingQueue, num_running: int) -> None:
        """Choose pages of earlier steps to save, before anything of the next step is planned. Requests whose reads have
        ended return to the queue, and the next ones leave it if reading is worthwhile."""
        for request in [request for request, use in self._restoring.items() if not use.copies]:
            self._end_restore(request)
        self._now_s = self._clock()
        keep_free = min(num_running, self._pool.num_usable // 8)
        self._saves = self.index.take_saves(self._pool, self._saves_per_step, keep_free)
        for request in self._resume():
            waiting.add(request)
        if waiting and self.index.stores and not self.is_stale:
            for request in waiting.front(LOOK_AHEAD):
                if self._is_pin_limit_reached and self.loading:
                    break
                if request not in self._uses and self._start_loading(request):
                    waiting.remove(request)

    def end(self) -> Transfers | None:
        """Return what the planned step moves between the tiers."""
        restores: list[tuple[int, int]] = []
        for use in self._restoring.values():
            while use.copies and len(restores) < self._restores_per_step:
                restores.append(use.copies.popleft())
        self.counts["restores"] += len(restores)
        reads, writes = self.index.take_reads(), self.index.take_writes()
        must_forget, self._must_forget = self._must_forget, False
        moves = self._saves or restores or reads or writes or must_forget
        if not moves and len(self._touched) < MANY_TOUCHES:
            return None
        touches, self._touched = self._touched, []
        keys = self.index.saving_keys(self._saves) if self._serves_peers else []
        return Transfers(self._saves, restores, reads, writes, touches, keys, must_forget)

    def finish(self, step: Step, result: StepResult) -> None:
        """Process the end of the step's saves and restores, and of reads and writes of any step."""
        if step.transfers is not None:
            self.index.finish_saves(step.transfers.saves, self._pool)
            self.index.host.release([host_block for host_block, _ in step.transfers.restores])
        if result.transfers is not None:
            self._take_report(result.transfers)
        self.rates.note_step(sum(row.count for row in step.rows), len(step.rows), result.elapsed_s)

    def _take_report(self, result: TransferResult) -> None:
        self._awaits_first_report = self.is_stale = False
        for ticket, ok in result.completions:
            self._complete(ticket, ok)
        self.rates.copies.add(result.num_copied, result.copy_s)
        self._num_reported += sum(map(len, result.found.values()))
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
            use = self.loading.get(request)
            block = None if use is None else use.reads.pop(ticket, None)
            if use is None or block is None:  # it no longer waits
                continue
            self._num_pins -= 1
            if host_block:
                assert read is not None
                self._pin(use, (host_block,), read.store)
            else:
                self._give_up_after(use, block)

    def _give_up_after(self, use: TierUse, block: int) -> None:
        """Stop waiting for later blocks: without this block of the chain they are useless to the request."""
        use.is_awaiting = False
        beyond = [ticket for ticket, other in use.reads.items() if other > block]
        for ticket in beyond:
            del use.reads[ticket]
        self._num_pins -= len(beyond)

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight, waits for a step, or has to be polled."""
        waits = self.loading or self._restoring or self._awaits_first_report or self._must_forget
        return self.index.is_idle and not waits

    @property
    def needs_step(self) -> bool:
        """True if a step is needed even without rows, to poll the stores."""
        return self.is_stale or not self.is_idle

    def wake(self) -> None:
        """Before the next admission, request the keys that peers have reported while the engine was idle."""
        self.is_stale = self._has_peers

    def forget(self) -> bool:
        """Drop all content; return False and drop nothing while blocks are in use."""
        if not self.index.forget():
            return False
        self._must_forget = self._serves_peers
        return True

    def stats(self) -> dict[str, dict[str, float]]:
        """Return gauges and counters by tier."""
        return tier_stats(self.index, self.counts, self.rates, self._stores, self._block_bytes)

    def check(self, in_flight: Sequence[Transfers | None]) -> None:
        """Assert every invariant between two steps; `in_flight` are the transfers of steps without a result."""
        by_stage: dict[Stage, dict[Request, TierUse]] = {stage: {} for stage in Stage}
        for request, use in self._uses.items():
            by_stage[use.stage][request] = use
        assert by_stage[Stage.LOADING] == self.loading and by_stage[Stage.RESTORING] == self._restoring
        for request, use in by_stage[Stage.LOADING].items():
            assert request.slot < 0 and not request.finished and not use.copies
            for ticket in use.reads:
                assert ticket in self.index.reads and request in self._waiters[ticket]
        for request, use in by_stage[Stage.LOADED].items():
            assert request.slot < 0 and not use.reads and not use.copies
        for request, use in by_stage[Stage.RESTORING].items():
            assert request.kv.is_restoring and request.slot >= 0 and not use.pins and not use.reads
        assert self._waiters.keys() <= self.index.reads.keys(), "a request waits for a read that is over"
        pins = [host_block for use in self._uses.values() for host_block in use.pins]
        assert self._num_pins == len(pins) + sum(len(use.reads) for use in self.loading.values())
        pins += [host_block for use in self._restoring.values() for host_block, _ in use.copies]
        pins += [host_block for transfers in in_flight if transfers for host_block, _ in transfers.restores]
        self.index.check(pins)
