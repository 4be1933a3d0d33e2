"""The engine core's index of the cache tiers: the host block and stores of each key, and the transfers in flight.

It handles keys and block numbers, not requests, bytes or time. One thread calls it, and no method makes a system call.
Host blocks are managed by the same pool class as device blocks: a held block is pinned, a free block with a key is
cached and can be evicted.

The life of a host block:  free → held by a save or load (without a key, so it cannot be matched) → free with its key
                           → held again while a restore or store copies it, or while a request waits for it
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.names import DISK

STORE_SHARE = 4  # stores on a slow disk may pin at most 1 / STORE_SHARE of the host blocks


class StoreCopy(NamedTuple):
    """A load or store in flight."""

    store: str
    key: bytes
    host_block: int


class TierIndex:
    """An index of `num_blocks` host blocks, numbered from 1, and the named stores below them, nearest first."""

    def __init__(self, num_blocks: int, stores: Sequence[str]) -> None:
        self.host = BlockPool(num_blocks + 1)
        self.stored_keys: dict[str, set[bytes]] = {name: set() for name in stores}
        self.loading: dict[int, StoreCopy] = {}  # in flight, by ticket
        self.storing: dict[int, StoreCopy] = {}
        self.counts: Counter[str] = Counter()  # events since the start, by name
        self._tickets: dict[bytes, int] = {}  # key → the ticket of its load
        self._saving: dict[int, bytes] = {}  # host block → its key, until the step that fills it has finished
        self._saving_keys: set[bytes] = set()
        self._new_loads: list[int] = []  # tickets to send with the next step
        self.offers: OrderedDict[bytes, None] = OrderedDict()  # full device blocks missing in the host, oldest first
        self._unstored: OrderedDict[bytes, None] = OrderedDict()  # keys in the host that are not yet on disk
        self._storing_keys: set[bytes] = set()  # keys of `storing`
        self._num_tickets = 0

    # -- lookups -------------------------------------------------------------------------------------------

    def store_of(self, key: bytes) -> str | None:
        return next((name for name, keys in self.stored_keys.items() if key in keys), None)

    def ticket_of(self, key: bytes) -> int | None:
        return self._tickets.get(key)

    # -- device → host → disk ------------------------------------------------------------------------------

    def offer(self, key: bytes) -> None:
        """Queue a full device block for saving. A later step saves it if it has not been evicted by then."""
        if self.host.find(key):
            self._want_stored(key)
        elif key not in self._saving_keys:
            self.offers[key] = None

    def take_saves(self, device: BlockPool, limit: int, keep_free: int) -> list[tuple[int, int]]:
        """Return the (device block, host block) pairs to save with the next step, both held until `finish_saves`.

        A free device block is saved only while more than `keep_free` blocks are free: saving must not make a running
        request wait.
        """
        saves = []
        for _ in range(min(limit, len(self.offers))):
            key, _ = self.offers.popitem(last=False)
            block = device.find(key)
            if block == 0:
                self.counts["drops_evicted"] += 1
            elif self.host.find(key) or key in self._saving_keys:
                continue
            elif device.refs(block) == 0 and device.num_free <= keep_free:
                self.offers[key] = None  # retry later
            elif (host_block := self._take_block()) == 0:
                self.counts["drops_host_full"] += 1
            else:
                device.hold((block,))
                self._saving[host_block] = key
                self._saving_keys.add(key)
                saves.append((block, host_block))
        return saves

    def saving_keys(self, saves: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the keys of saves in flight."""
        return [self._saving[host_block] for _, host_block in saves]

    def num_saved_only(self, device: BlockPool) -> int:
        """Count the device blocks that only saves in flight hold."""
        return sum(device.refs(device.find(key)) == 1 for key in self._saving_keys)

    def finish_saves(self, saves: Sequence[tuple[int, int]], device: BlockPool) -> None:
        """Release the blocks of saves whose step has finished, and make their host blocks matchable."""
        held = []
        for _, host_block in saves:
            key = self._saving.pop(host_block)
            self._saving_keys.remove(key)
            held.append(self._publish(host_block, key))
        self.counts["saves"] += len(saves)
        self.host.release(held)
        device.release([block for block, _ in saves])

    def take_stores(self) -> list[tuple[int, bytes, int]]:
        """Return the next stores on disk as (ticket, key, host block); each host block is held until its completion."""
        started = []
        for _ in range(min(len(self._unstored), max(self.host.num_usable // STORE_SHARE, 1) - len(self.storing))):
            key, _ = self._unstored.popitem(last=False)
            host_block = self.host.find(key)
            if host_block == 0:
                self.counts["drops_unstored"] += 1
                continue
            self.host.hold((host_block,))
            ticket = self._new_ticket()
            self.storing[ticket] = StoreCopy(DISK, key, host_block)
            self._storing_keys.add(key)
            started.append((ticket, key, host_block))
        return started

    def _want_stored(self, key: bytes) -> None:
        if DISK in self.stored_keys and key not in self.stored_keys[DISK] and key not in self._storing_keys:
            self._unstored[key] = None

    # -- disk, peer → host ---------------------------------------------------------------------------------

    def start_load(self, key: bytes) -> int | None:
        """Start loading this key, or find the load in flight; return its ticket, None without a store or free block."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            return ticket
        store = self.store_of(key)
        if store is None or (host_block := self._take_block()) == 0:
            return None
        ticket = self._tickets[key] = self._new_ticket()
        self.loading[ticket] = StoreCopy(store, key, host_block)
        self._new_loads.append(ticket)
        return ticket

    def take_loads(self) -> list[tuple[int, str, bytes, int]]:
        """Return the loads started since the last call as (ticket, store, key, host block), to send with the next step."""
        tickets, self._new_loads = self._new_loads, []
        return [(ticket, *self.loading[ticket]) for ticket in tickets]

    def complete(self, ticket: int, ok: bool) -> int:
        """Finish a load or store; return the host block, matchable from now on, of a successful load, else 0."""
        store = self.storing.pop(ticket, None)
        if store is not None:
            self._storing_keys.remove(store.key)
            self.host.release((store.host_block,))
            self.counts["stores" if ok else "drops_disk"] += 1
            if ok:
                self.stored_keys[DISK].add(store.key)
            return 0
        load = self.loading.pop(ticket)
        del self._tickets[load.key]
        self.counts[f"{'loads' if ok else 'failed_loads'}_{load.store}"] += 1
        if not ok:
            if load.store == DISK:  # peers report the loss themselves, and announce the key again
                self.stored_keys[DISK].discard(load.key)
            self.host.release((load.host_block,))
            return 0
        host_block = self._publish(load.host_block, load.key)
        self.host.release((host_block,))
        return host_block

    def note(self, gained: dict[str, list[bytes]], lost: dict[str, list[bytes]]) -> None:
        """Apply the key changes that the stores report. A key in both was gained and then lost."""
        for store, keys in gained.items():
            self.stored_keys[store].update(keys)
        for store, keys in lost.items():
            self.stored_keys[store].difference_update(keys)

    # -- host blocks ---------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark a chain as most recently used; its end is evicted before its start."""
        host_blocks = list(filter(None, map(self.host.find, keys)))
        self.host.hold(host_blocks)
        self.host.release(host_blocks)

    def forget(self) -> bool:
        """Forget all keys, also those in stores, whose bytes stay; return False and keep all while a block is held."""
        if not self.host.forget():
            return False
        self.offers.clear()
        self._unstored.clear()
        for keys in self.stored_keys.values():
            keys.clear()
        return True

    @property
    def is_idle(self) -> bool:
        """Return whether no transfer is in flight or queued."""
        return not (self.offers or self._unstored or self._saving or self.loading or self.storing)

    def _take_block(self) -> int:
        """Allocate a host block; return 0 if all are pinned."""
        if self.host.num_free == 0:
            return 0
        before = self.host.num_cached
        (host_block,) = self.host.allocate(1)
        self.counts["evictions"] += before - self.host.num_cached
        return host_block

    def _publish(self, host_block: int, key: bytes) -> int:
        """Make the key matchable; return its block, held once: this one, or the one that had the key already."""
        known = self.host.register(host_block, key)
        if known != host_block:
            self.host.release((host_block,))
        self._want_stored(key)
        return known

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def check(self, pins: Iterable[int] = ()) -> None:
        """Assert every invariant; `pins` lists the host blocks that the caller holds."""
        self.host.check()
        expected = Counter(pins)
        expected.update(self._saving.keys())
        expected.update(copy.host_block for copy in (*self.loading.values(), *self.storing.values()))
        self.host.check_refs(expected)
        assert set(self._saving.values()) == self._saving_keys
        assert {store.key for store in self.storing.values()} == self._storing_keys
        assert all(self.loading[ticket].key == key for key, ticket in self._tickets.items())
        for load in self.loading.values():
            assert self.host.refs(load.host_block) == 1, "a host block being loaded has another reference"
