"""The tiers below the device: host memory, a disk, peers. Decides which blocks of requests move between them and when.

`Kv` (engine/core/kv.py) holds the pages on the device and calls `Tiers` when it admits, releases or registers blocks.

The index (cache/tiers/index.py) knows the location of every key. PrefixLoads (prefix_loads.py) loads what a store has of
a queued request's prefix into host memory. When the request is admitted, its host blocks are restored to the device, a
bounded number of bytes per step, and its first row is planned when the last of them has been sent. Every full device
block is offered to the host, and from there to the disk, so eviction and preemption leave a copy.

             ┌──────────── nothing to wait for ────────────┐
             │                                             ▼
    queued ──┴─look up─▶ loading ──done, failed or late──▶ looked up ──admitted──▶ restoring ──all sent──▶ computing
      ▲                                                      └───────────── nothing to copy ───────────────▲ │
      └──────────────────────────────── released: preempted, ended or the weights changed ───────────────────┘
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.index import TierIndex
from penstock.cache.tiers.names import DISK, PEER, tier_of
from penstock.engine.core.cache_history import CacheHistory
from penstock.engine.core.fair_queue import WaitingQueue
from penstock.engine.core.page_keys import PageKeys
from penstock.engine.core.prefix_loads import PrefixLoads
from penstock.engine.core.request import Claim, Request
from penstock.engine.core.tier_stats import Rates, tier_stats
from penstock.engine.messages import MissReason
from penstock.executor.protocol import ModelInfo, Step, StepResult, TransferResult, Transfers

LOOK_AHEAD = 8  # requests at the head of the queue whose blocks are loaded from stores
RESTORE_BYTES = 64 * 2**20  # maximum per step, but at least one block
MANY_TOUCHES = 256  # with this many, transfers are sent for them alone


class NoTiers:
    """Stands for the tiers of an engine that has none: they hold nothing, and nothing moves."""

    is_stale = False
    is_idle = True
    loading: Mapping[Request, object] = {}
    pools: Mapping[str, BlockPool] = {}

    def __init__(self, pool: BlockPool) -> None:
        self.page_of = pool.find

    def prepare(self, _request: Request) -> Claim:
        return Claim.ADMITTED

    def forget(self) -> bool:
        return True

    def wake(self) -> None:
        pass

    def begin(self, _waiting: WaitingQueue, _num_running: int) -> None:
        pass

    def num_saved_only(self) -> int:
        return 0

    def end(self) -> Transfers | None:
        return None

    def finish(self, _step: Step, _result: StepResult) -> None:
        pass

    def restore(self, _request: Request, _copies: list[list[tuple[int, int]]]) -> dict[str, int]:
        return {}

    def offer(self, _key: bytes) -> None:
        pass

    def release(self, _request: Request) -> None:
        pass

    def why_not_loaded(self, _key: bytes) -> MissReason | None:
        return None

    def stats(self) -> Any:
        return {}

    def check(self, _in_flight: Sequence[Transfers | None]) -> None:
        pass


class Tiers:
    """The host blocks of requests, and the traffic between the device, the host and the stores."""

    def __init__(self, pool: BlockPool, keys: PageKeys, history: CacheHistory, info: ModelInfo, chunk: int) -> None:
        """`chunk` is the maximum number of positions in a row."""
        self._pool, self._keys, self._history = pool, keys, history
        self._size = info.block_size
        self.index = TierIndex(info.num_host_blocks, info.stores)
        self.index.host.on_evict = partial(history.note_eviction, "host")
        self.rates = Rates(info.block_bytes, info.block_size, info.stores)
        self._saves_per_step = -(-chunk // info.block_size) * len(info.groups)  # the maximum that a step can fill
        self._restores_per_step = max(1, RESTORE_BYTES // max(info.block_bytes, 1))
        self._loads = PrefixLoads(pool, keys, self.index, self.rates)
        # (host block, device block) pairs that a step will send, by admitted requests in their order; empty after the last
        self._restoring: dict[Request, deque[tuple[int, int]]] = {}
        self._saves: list[tuple[int, int]] = []  # of the step being planned
        self._awaits_first_report = bool(info.stores)  # the stores have not reported their keys yet
        self._has_peers = any(tier_of(store) == PEER for store in info.stores)
        self._serves_peers = info.serves_peers
        self.is_stale = False  # nothing may be admitted before peers and disk have reported their keys
        self._must_forget = False  # the ranks must still be told to serve nothing computed earlier
        self._touched: list[bytes] = []  # used keys on the disk, to report with the next transfers
        self.counts: Counter[str] = Counter()
        self.pools = {"host": self.index.host}  # whose content is reported: blocks of stores pass through the host
        self.offer = self.index.offer  # queues the device block with a key for a copy to the host
        self.num_saved_only = partial(self.index.num_saved_only, pool)  # device blocks that are free when saves end
        self.prepare, self.loading = self._loads.prepare, self._loads.loading

    # -- admission -----------------------------------------------------------------------------------------

    def page_of(self, key: bytes) -> int:
        """Return the page with this content: on the device, or negative in host memory; 0 if there is none."""
        return self._pool.find(key) or -self.index.host.find(key)

    def restore(self, request: Request, copies: list[list[tuple[int, int]]]) -> dict[str, int]:
        """Start copying blocks of an admitted request to the device: (host block, device block) pairs by group. Return
        the number of tokens that come from each tier."""
        look_up, tokens = self._loads.take(request), Counter[str]()
        outside = request.kv.num_outside[0]  # blocks before the window, which count like the first one within it
        for host_block, page in copies[0]:  # the other groups' pages are of the same tokens
            is_first = page == request.kv.tables[0][outside]
            tokens[look_up.pins.get(host_block, "host")] += self._size * (1 + outside * is_first)
        if request.first_scheduled_s is None:
            self.counts.update({f"hits_{store}": count for store, count in tokens.items()})
        pairs = deque(chain.from_iterable(copies))
        if pairs:
            self.index.host.hold(host_block for host_block, _ in pairs)
            self._restoring[request] = pairs
            request.kv.is_restoring = True
        self._loads.unpin(look_up)
        return tokens

    def why_not_loaded(self, key: bytes) -> MissReason | None:
        """Return why a block was not taken from the tier that has it; None if no tier has it."""
        if self.index.ticket_of(key) is not None:
            return "tier_timeout"
        return None if self.index.store_of(key) is None else "tier_slow"

    def release(self, request: Request) -> None:
        """End the loads and copies of a request that leaves the device or the queue, before its pages are released."""
        self._loads.release(request)
        self.index.host.release([host_block for host_block, _ in self._restoring.pop(request, ())])
        # Its blocks count as used in all tiers: a tier's content must not age because a nearer tier always has it.
        keys = self._keys.used(request)
        self.index.touch(keys)
        if DISK in self.index.stored_keys:
            self._touched += filter(self.index.stored_keys[DISK].__contains__, reversed(keys))

    # -- steps ---------------------------------------------------------------------------------------------

    def begin(self, waiting: WaitingQueue, num_running: int) -> None:
        """Choose pages of earlier steps to save, before anything of the next step is planned. Requests whose loads have
        ended return to the queue, and the next ones leave it if loading is worthwhile."""
        for request in [request for request, pairs in self._restoring.items() if not pairs]:
            del self._restoring[request]
            request.kv.is_restoring = False
        self._loads.now_s = self._history.clock()
        keep_free = min(num_running, self._pool.num_usable // 8)
        self._saves = self.index.take_saves(self._pool, self._saves_per_step, keep_free)
        for request in self._loads.resume():
            waiting.add(request)
        if waiting and self.index.stored_keys and not self.is_stale:
            for request in waiting.front(LOOK_AHEAD):
                claim = self._loads.prepare(request)
                if claim is Claim.NO_ROOM:
                    break
                if claim is Claim.LOADING:
                    waiting.remove(request)

    def end(self) -> Transfers | None:
        """Return what the planned step moves between the tiers."""
        restores: list[tuple[int, int]] = []
        for pairs in self._restoring.values():
            while pairs and len(restores) < self._restores_per_step:
                restores.append(pairs.popleft())
        self.counts["restores"] += len(restores)
        loads, stores = self.index.take_loads(), self.index.take_stores()
        must_forget, self._must_forget = self._must_forget, False
        moves = self._saves or restores or loads or stores or must_forget
        if not moves and len(self._touched) < MANY_TOUCHES:
            return None
        touches, self._touched = self._touched, []
        keys = self.index.saving_keys(self._saves) if self._serves_peers else []
        return Transfers(self._saves, restores, loads, stores, touches, keys, must_forget)

    def finish(self, step: Step, result: StepResult) -> None:
        """Process the end of the step's saves and restores, and of loads and stores of any step."""
        if step.transfers is not None:
            self.index.finish_saves(step.transfers.saves, self._pool)
            self.index.host.release([host_block for host_block, _ in step.transfers.restores])
        if result.transfers is not None:
            self._take_report(result.transfers)
        self.rates.note_step(sum(row.count for row in step.rows), len(step.rows), result.elapsed_s)

    def _take_report(self, result: TransferResult) -> None:
        self._awaits_first_report = self.is_stale = False
        for ticket, ok in result.completions:
            self._loads.complete(ticket, ok)
        self.rates.copies.add(result.num_copied, result.copy_s)
        self._loads.num_reported += sum(map(len, result.gained.values()))
        self.index.note(result.gained, result.lost)
        for store, keys in result.lost.items():
            for key in keys:
                self._history.note_eviction(store, key)
        for name, numbers in result.store_stats.items():
            before = self._loads.store_stats.get(name, {})
            duration = "busy_s" if "busy_s" in numbers else "load_times_sum_s"
            num_loads, seconds = (numbers.get(each, 0) - before.get(each, 0) for each in ("hits", duration))
            if name in self.rates.loads:
                self.rates.loads[name].add(num_loads, seconds / numbers.get("workers", 1))
            self._loads.store_stats[name] = numbers

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight, waits for a step, or has to be polled."""
        waits = self.loading or self._restoring or self._awaits_first_report or self._must_forget
        return self.index.is_idle and not waits

    def wake(self) -> None:
        """Before the next admission, request the keys that came while the engine was idle, from peers or the disk's scan."""
        is_scanning = self._loads.store_stats.get(DISK, {}).get("scan_left", 0) > 0
        self.is_stale = self._has_peers or is_scanning

    def forget(self) -> bool:
        """Drop all content; return False and drop nothing while blocks are in use."""
        if not self.index.forget():
            return False
        self._must_forget = self._serves_peers
        return True

    def stats(self) -> dict[str, dict[str, float]]:
        """Return gauges and counters by tier."""
        return tier_stats(self.index, self.counts, self.rates, self._loads.store_stats)

    def check(self, in_flight: Sequence[Transfers | None]) -> None:
        """Assert every invariant between two steps; `in_flight` are the transfers of steps without a result."""
        pins = self._loads.check()
        for request, pairs in self._restoring.items():
            assert request.kv.is_restoring and request.slot >= 0
            pins += [host_block for host_block, _ in pairs]
        pins += [host_block for transfers in in_flight if transfers for host_block, _ in transfers.restores]
        self.index.check(pins)
