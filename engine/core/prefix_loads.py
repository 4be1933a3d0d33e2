"""Looks up the prefixes of queued requests in the tiers, and loads what the stores have of them into host memory.

If the block chain of a request near the head of the queue continues in a store, the request leaves the queue while the
blocks are loaded, for at most the time to recompute them; other requests do not wait for it. The host blocks of its prefix
are pinned until it is admitted. `Tiers` (engine/core/tiers.py) draws the states of a request.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.index import TierIndex
from penstock.engine.core.page_keys import PageKeys
from penstock.engine.core.request import Claim, Request
from penstock.engine.core.tier_stats import Rates

PROBE_BLOCKS = 16  # blocks that are loaded only to measure a store when computing seems faster …
PROBE_EVERY_S = 30.0  # … this often


class CachedChain(NamedTuple):
    """The part of a request's prefix that is cached in a tier below the device."""

    num_blocks: int
    num_usable: int  # blocks of the prefix on the device and in the host
    host_blocks: list[int]  # that hold part of it
    missing: list[tuple[int, bytes]]  # index and key of the blocks to load from a store


@dataclass(slots=True, eq=False)
class LookUp:
    """The host blocks and loads of a queued request whose prefix was looked up."""

    pins: dict[int, str] = field(default_factory=dict)  # host blocks held until admission → where they came from
    loads: dict[int, int] = field(default_factory=dict)  # while it waits: ticket → index of its block in the chain
    deadline_s: float = 0.0  # of the loads
    is_awaiting: bool = False  # a peer may still announce more blocks of the chain
    num_reported: int = 0  # number of keys that all stores had reported at the last look-up


class PrefixLoads:
    """The look-ups of all queued requests. The number of host blocks that they may pin together is limited."""

    def __init__(self, pool: BlockPool, keys: PageKeys, index: TierIndex, rates: Rates) -> None:
        self._pool, self._keys, self._index, self._rates = pool, keys, index, rates
        self._max_pins = index.host.num_usable // 2
        self._look_ups: dict[Request, LookUp] = {}
        self.loading: dict[Request, LookUp] = {}  # those whose requests wait outside of the queue, oldest first
        self._waiters: dict[int, list[Request]] = {}  # ticket → the requests that wait for it
        self._num_pins = 0  # of all requests, with the loads that will become pins
        self.now_s = self._next_probe_s = 0.0  # when the step's planning began, and when the next probe is due
        self.num_reported = 0  # number of keys that all stores have reported
        self.store_stats: dict[str, dict[str, float]] = {}  # the last report of each store

    def prepare(self, request: Request) -> Claim:
        """Look up the prefix of a queued request, once each time it is queued. Return LOADING if it must leave the queue
        for loads, NO_ROOM if no more host blocks may be pinned, else ADMITTED: `Kv` can admit it now."""
        if request in self._look_ups:
            return Claim.ADMITTED
        if self._is_pin_limit_reached and self.loading:
            return Claim.NO_ROOM
        return Claim.LOADING if self._start_loading(request) else Claim.ADMITTED

    def resume(self) -> list[Request]:
        """Return the requests whose wait has ended: everything was loaded, or the deadline has passed."""
        done = []
        for request, look_up in self.loading.items():
            if look_up.is_awaiting and (
                look_up.num_reported != self.num_reported or not self._is_awaiting(request, num_blocks=0)
            ):
                self._load_more(request, look_up)
            if self._is_pin_limit_reached:  # it could pin no more, and no other request can start to load
                look_up.is_awaiting = False
            if self.now_s >= look_up.deadline_s or not (look_up.loads or look_up.is_awaiting):
                done.append(request)
        for request in done:
            self._stop_loading(request)
        return done

    def take(self, request: Request) -> LookUp:
        """Return the look-up of a request that is being admitted. The caller must `unpin` it."""
        assert request not in self.loading
        return self._look_ups.pop(request)

    def release(self, request: Request) -> None:
        """Drop the look-up of a request that leaves the queue without being admitted."""
        if request in self.loading:
            self._stop_loading(request)
        if (look_up := self._look_ups.pop(request, None)) is not None:
            self.unpin(look_up)

    def unpin(self, look_up: LookUp) -> None:
        self._num_pins -= len(look_up.pins)
        self._index.host.release(list(look_up.pins))
        look_up.pins.clear()

    def complete(self, ticket: int, ok: bool) -> None:
        """Process the end of a load or store."""
        load = self._index.loading.get(ticket)
        host_block = self._index.complete(ticket, ok)
        for request in self._waiters.pop(ticket, ()):
            look_up = self.loading.get(request)
            block = None if look_up is None else look_up.loads.pop(ticket, None)
            if look_up is None or block is None:  # it no longer waits
                continue
            self._num_pins -= 1
            if host_block:
                assert load is not None
                self._pin(look_up, (host_block,), load.store)
            else:
                self._give_up_after(look_up, block)

    # -- starting loads --------------------------------------------------------------------------------------

    def _start_loading(self, request: Request) -> bool:
        """Start the loads that the request should wait for before it is admitted; return whether there are any.

        Blocks whose loads fail or are late are computed.
        """
        look_up = self._look_ups[request] = LookUp()
        if request.kv.skips_cache:
            return False
        num_blocks, num_usable, host_blocks, missing = self._walk(request, self._max_pins - self._num_pins)
        is_awaiting = self._is_awaiting(request, num_blocks) and not self._is_pin_limit_reached
        if not missing and not is_awaiting:
            return False
        num_gained = num_blocks - num_usable if missing else 0
        queued = self._queued(missing)
        # If a request names a peer, its prompt has been computed there.
        if request.message.peer is None and not self._rates.is_load_faster(queued, num_gained, len(host_blocks)):
            self._probe([key for _, key in missing])
            return False
        look_up.is_awaiting = is_awaiting
        look_up.deadline_s = self.now_s + self._rates.patience_s(queued, num_gained)
        if request.message.peer is not None:
            look_up.deadline_s = max(look_up.deadline_s, request.arrival_s + request.message.peer_wait_s)
        self._pin_and_load(request, look_up, host_blocks, missing)
        if not look_up.loads and not is_awaiting:
            self.unpin(look_up)
            return False
        self.loading[request] = look_up
        return True

    def _is_awaiting(self, request: Request, num_blocks: int) -> bool:
        """Return whether the request's peer may soon have more blocks of the prompt than the first `num_blocks`."""
        if request.message.peer is None or self.now_s >= request.arrival_s + request.message.peer_wait_s:
            return False
        is_open = self.store_stats.get(request.message.peer, {}).get("is_open", 0.0) > 0
        num_tokens = request.num_prompt - bool(self._keys.num_pages)
        return is_open and num_blocks < min(len(request.kv.keys), num_tokens // self._keys.block_size)

    def _load_more(self, request: Request, look_up: LookUp) -> None:
        room = self._max_pins - self._num_pins + len(look_up.pins) + len(look_up.loads)
        num_blocks, _, host_blocks, missing = self._walk(request, room)
        look_up.is_awaiting = self._is_awaiting(request, num_blocks)
        ended = [host_block for host_block in look_up.pins if host_block not in host_blocks]  # they have left a window
        self.unpin(LookUp({host_block: look_up.pins.pop(host_block) for host_block in ended}))
        self._pin_and_load(request, look_up, host_blocks, missing)

    def _pin_and_load(
        self, request: Request, look_up: LookUp, host_blocks: list[int], missing: list[tuple[int, bytes]]
    ) -> None:
        """Pin the host blocks of the chain, and start loading the missing ones."""
        self._pin(look_up, host_blocks, "host")  # before any load, because a load evicts the next host block
        look_up.num_reported = self.num_reported
        for block, key in missing:
            ticket = self._index.start_load(key)
            if ticket is None:  # no free host block: the chain ends here
                look_up.is_awaiting = False
                break
            if ticket not in look_up.loads:
                look_up.loads[ticket] = block
                self._num_pins += 1
                self._waiters.setdefault(ticket, []).append(request)

    def _walk(self, request: Request, room: int) -> CachedChain:
        """Follow the request's prefix in the tiers, as far as it needs at most `room` host blocks."""
        find, host, keys_of, room = self._pool.find, self._index.host.find, self._keys, max(room, 0)

        def find_anywhere(key: bytes) -> int:
            return find(key) or host(key) or self._index.ticket_of(key) or self._index.store_of(key) is not None

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
        num_usable = keys_of.find(request, lambda key: find(key) or host(key), num).num_blocks
        return CachedChain(num, num_usable, host_blocks, missing)

    def _queued(self, missing: list[tuple[int, bytes]]) -> Counter[str]:
        """Return the number of blocks to load from each store, including those queued for other requests."""
        in_flight = self._index.loading
        tickets = [self._index.ticket_of(key) for _, key in missing]
        mine = [
            self._index.store_of(key) if ticket is None else in_flight[ticket].store
            for (_, key), ticket in zip(missing, tickets, strict=True)
        ]
        needed = {store for store in mine if store is not None}
        queued = Counter(load.store for load in in_flight.values() if load.store in needed)
        queued.update(store for store, ticket in zip(mine, tickets, strict=True) if ticket is None and store)
        return queued

    def _probe(self, keys: list[bytes]) -> None:
        """Load a few blocks that no request waits for, to measure again a store that was slow before."""
        if self.now_s >= self._next_probe_s and not self._index.loading:
            self._next_probe_s = self.now_s + PROBE_EVERY_S
            for key in keys[: min(PROBE_BLOCKS, self._max_pins - self._num_pins)]:
                self._index.start_load(key)

    # -- pins ------------------------------------------------------------------------------------------------

    @property
    def _is_pin_limit_reached(self) -> bool:
        return self._num_pins >= self._max_pins

    def _pin(self, look_up: LookUp, host_blocks: Sequence[int], source: str) -> None:
        new = [host_block for host_block in host_blocks if host_block not in look_up.pins]
        self._index.host.hold(new)
        look_up.pins.update(dict.fromkeys(new, source))
        self._num_pins += len(new)

    def _stop_loading(self, request: Request) -> None:
        look_up = self.loading.pop(request)
        self._num_pins -= len(look_up.loads)
        look_up.loads.clear()

    def _give_up_after(self, look_up: LookUp, block: int) -> None:
        """Stop waiting for later blocks: without this block of the chain they are useless to the request."""
        look_up.is_awaiting = False
        beyond = [ticket for ticket, other in look_up.loads.items() if other > block]
        for ticket in beyond:
            del look_up.loads[ticket]
        self._num_pins -= len(beyond)

    def check(self) -> list[int]:
        """Assert every invariant; return the pinned host blocks."""
        for request, look_up in self._look_ups.items():
            assert request.slot < 0 and not request.finished
            assert not look_up.loads or request in self.loading
        for request, look_up in self.loading.items():
            assert self._look_ups[request] is look_up
            for ticket in look_up.loads:
                assert ticket in self._index.loading and request in self._waiters[ticket]
        assert self._waiters.keys() <= self._index.loading.keys(), "a request waits for a load that is over"
        pins = [host_block for look_up in self._look_ups.values() for host_block in look_up.pins]
        assert self._num_pins == len(pins) + sum(len(look_up.loads) for look_up in self.loading.values())
        return pins
