"""The engine core's index of the cache tiers: the host block and stores of each key, and the transfers in flight.

It handles keys and block numbers, not requests, bytes or time. One thread calls it, and no method makes a system call.
Host blocks are managed by the same pool class as device blocks: a held block is pinned, a free block with a key is
cached and can be evicted.

The life of a host block:  free → held by a save or read (without a key, so it cannot be matched) → free with its key
                           → held again while a restore or write reads it, or while a request waits for it
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.base import DISK

WRITE_SHARE = 4  # writes to a slow disk may pin at most 1 / WRITE_SHARE of the host blocks


class StoreCopy(NamedTuple):
    """A transfer between a store and a host block."""

    store: str
    key: bytes
    host_block: int


class TierIndex:
    """An index of `num_blocks` host blocks, numbered from 1, and the named stores below them, nearest first."""

    def __init__(self, num_blocks: int, stores: Sequence[str]) -> None:
        self.host = BlockPool(num_blocks + 1)
        self.stores: dict[str, set[bytes]] = {name: set() for name in stores}
        self.reads: dict[int, StoreCopy] = {}  # by ticket
        self.writes: dict[int, StoreCopy] = {}
        self.counts: Counter[str] = Counter()  # events since the start, by name
        self._tickets: dict[bytes, int] = {}  # key → the ticket of the read that loads it
        self._saving: dict[int, bytes] = {}  # host block → its key, until the step that fills it has finished
        self._saving_keys: set[bytes] = set()
        self._new_reads: list[int] = []  # tickets to send with the next step
        self.offers: OrderedDict[bytes, None] = OrderedDict()  # full device blocks missing in the host, oldest first
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()  # keys in the host that are not yet on disk
        self._written_keys: set[bytes] = set()  # keys of `writes`
        self._num_tickets = 0

    # -- lookups -------------------------------------------------------------------------------------------

    def store_of(self, key: bytes) -> str | None:
        for name, keys in self.stores.items():
            if key in keys:
                return name
        return None

    def ticket_of(self, key: bytes) -> int | None:
        return self._tickets.get(key)

    # -- device → host → disk ------------------------------------------------------------------------------

    def offer(self, key: bytes) -> None:
        """Queue a full device block for saving. A later step saves it if it has not been evicted by then."""
        if self.host.find(key):
            self._want_written(key)
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

    def take_writes(self) -> list[tuple[int, bytes, int]]:
        """Return the next disk writes as (ticket, key, host block); each host block is held until its completion."""
        writes = []
        for _ in range(min(len(self._unwritten), max(self.host.num_usable // WRITE_SHARE, 1) - len(self.writes))):
            key, _ = self._unwritten.popitem(last=False)
            host_block = self.host.find(key)
            if host_block == 0:
                self.counts["drops_unwritten"] += 1
                continue
            self.host.hold((host_block,))
            ticket = self._new_ticket()
            self.writes[ticket] = StoreCopy(DISK, key, host_block)
            self._written_keys.add(key)
            writes.append((ticket, key, host_block))
        return writes

    def _want_written(self, key: bytes) -> None:
        if DISK in self.stores and key not in self.stores[DISK] and key not in self._written_keys:
            self._unwritten[key] = None

    # -- disk, peer → host ---------------------------------------------------------------------------------

    def start_load(self, key: bytes) -> int | None:
        """Start reading this key, or find the read in flight; return its ticket, None without a store or free block."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            return ticket
        store = self.store_of(key)
        if store is None or (host_block := self._take_block()) == 0:
            return None
        ticket = self._tickets[key] = self._new_ticket()
        self.reads[ticket] = StoreCopy(store, key, host_block)
        self._new_reads.append(ticket)
        return ticket

    def take_reads(self) -> list[tuple[int, str, bytes, int]]:
        """Return the reads started since the last call as (ticket, store, key, host block), to send with the next step."""
        tickets, self._new_reads = self._new_reads, []
        return [(ticket, *self.reads[ticket]) for ticket in tickets]

    def complete(self, ticket: int, ok: bool) -> int:
        """Finish a read or write; return the host block, matchable from now on, of a successful read, else 0."""
        write = self.writes.pop(ticket, None)
        if write is not None:
            self._written_keys.remove(write.key)
            self.host.release((write.host_block,))
            self.counts["writes" if ok else "drops_disk"] += 1
            if ok:
                self.stores[DISK].add(write.key)
            return 0
        read = self.reads.pop(ticket)
        del self._tickets[read.key]
        self.counts[f"{'reads' if ok else 'failed_reads'}_{read.store}"] += 1
        if not ok:
            if read.store == DISK:  # peers report the loss themselves, and announce the key again
                self.stores[DISK].discard(read.key)
            self.host.release((read.host_block,))
            return 0
        host_block = self._publish(read.host_block, read.key)
        self.host.release((host_block,))
        return host_block

    def note(self, gained: dict[str, list[bytes]], lost: dict[str, list[bytes]]) -> None:
        """Apply the key changes that the stores report. A key in both was gained and then lost."""
        for store, keys in gained.items():
            self.stores[store].update(keys)
        for store, keys in lost.items():
            self.stores[store].difference_update(keys)

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
        self._unwritten.clear()
        for keys in self.stores.values():
            keys.clear()
        return True

    @property
    def is_idle(self) -> bool:
        """Return whether no transfer is in flight or queued."""
        return not (self.offers or self._unwritten or self._saving or self.reads or self.writes)

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
        self._want_written(key)
        return known

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def check(self, pins: Iterable[int] = ()) -> None:
        """Assert every invariant; `pins` lists the host blocks that the caller holds."""
        self.host.check()
        expected = Counter(pins)
        expected.update(self._saving.keys())
        expected.update(copy.host_block for copy in (*self.reads.values(), *self.writes.values()))
        self.host.check_refs(expected)
        assert set(self._saving.values()) == self._saving_keys
        assert {write.key for write in self.writes.values()} == self._written_keys
        assert all(self.reads[ticket].key == key for key, ticket in self._tickets.items())
        for read in self.reads.values():
            assert self.host.refs(read.host_block) == 1, "a host block being read into has another reference"
