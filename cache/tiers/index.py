"""Which block key lies in which host block, in which store, and what is in flight: the core's side of the tiers.

It knows keys and the numbers of blocks, nothing of requests, bytes or time. One thread calls it, and no call makes a
system call. Host blocks are kept by the same pool as the device's: a held one is pinned, a free one with a key is
cached content in the order of eviction.

The life of a host block:  free → held by a save or read (no key yet: it cannot be matched) → free with its key
                           and held again while a restore reads it, a write borrows it, or a request waits for it
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.base import DISK

WRITE_SHARE = 4  # a slow disk may pin one host block in so many


class StoreCopy(NamedTuple):
    """Between a store and a host block."""

    store: str
    key: bytes
    host_block: int


class TierIndex:
    """`num_blocks` host blocks, counted from 1, and the named stores beneath them, nearest first."""

    def __init__(self, num_blocks: int, stores: Sequence[str]) -> None:
        self.host = BlockPool(num_blocks + 1)
        self.stores: dict[str, set[bytes]] = {name: set() for name in stores}
        self.reads: dict[int, StoreCopy] = {}  # by ticket
        self.writes: dict[int, StoreCopy] = {}
        self.counts: Counter[str] = Counter()  # what happened so far, by name
        self._tickets: dict[bytes, int] = {}  # key → the read that brings it
        self._saving: dict[int, bytes] = {}  # host block → its key, until the step that fills it is over
        self._saving_keys: set[bytes] = set()
        self._new_reads: list[int] = []  # tickets, for the next step to carry
        self._offers: OrderedDict[bytes, None] = OrderedDict()  # full device blocks that the host lacks, oldest first
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()  # keys in the host that no disk has yet
        self._written_keys: set[bytes] = set()  # of `writes`
        self._num_tickets = 0

    # -- what is where -------------------------------------------------------------------------------------

    def store_of(self, key: bytes) -> str | None:
        for name, keys in self.stores.items():
            if key in keys:
                return name
        return None

    def ticket_of(self, key: bytes) -> int | None:
        return self._tickets.get(key)

    # -- from the device down ------------------------------------------------------------------------------

    def offer(self, key: bytes) -> None:
        """A device block with this content is full. It is saved with one of the next steps if it is still there."""
        if self.host.find(key):
            self._want_written(key)
        elif key not in self._saving_keys:
            self._offers[key] = None

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    def take_saves(self, device: BlockPool, limit: int, keep_free: int) -> list[tuple[int, int]]:
        """Device blocks to save with the next step, each with its host block. Both are held until `finish_saves`.

        Blocks that no request holds are taken only while `keep_free` others are left to hand out: saving must not
        make a running request wait.
        """
        saves = []
        for _ in range(min(limit, len(self._offers))):
            key, _ = self._offers.popitem(last=False)
            block = device.find(key)
            if block == 0:
                self.counts["drops_evicted"] += 1
            elif self.host.find(key) or key in self._saving_keys:
                continue
            elif device.refs(block) == 0 and device.num_free <= keep_free:
                self._offers[key] = None  # once more, later
            elif (host_block := self._take_block()) == 0:
                self.counts["drops_host_full"] += 1
            else:
                device.hold((block,))
                self._saving[host_block] = key
                self._saving_keys.add(key)
                saves.append((block, host_block))
        return saves

    def saving_keys(self, saves: Sequence[tuple[int, int]]) -> list[bytes]:
        """The content of saves that are in flight."""
        return [self._saving[host_block] for _, host_block in saves]

    def finish_saves(self, saves: Sequence[tuple[int, int]], device: BlockPool) -> None:
        """The step that carried them is over: their content can be matched."""
        held = []
        for _, host_block in saves:
            key = self._saving.pop(host_block)
            self._saving_keys.remove(key)
            held.append(self._publish(host_block, key))
        self.counts["saves"] += len(saves)
        self.host.release(held)
        device.release([block for block, _ in saves])

    def take_writes(self) -> list[tuple[int, bytes, int]]:
        """What the disk should take now, as (ticket, key, host block); each is held until its completion."""
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

    # -- from below up -------------------------------------------------------------------------------------

    def start_load(self, key: bytes) -> int | None:
        """The ticket of a read of this key into the host, begun now or before; None without a store or a free host block."""
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
        """The reads begun since the last call, as (ticket, store, key, host block): the next step carries them."""
        tickets, self._new_reads = self._new_reads, []
        return [(ticket, *self.reads[ticket]) for ticket in tickets]

    def complete(self, ticket: int, ok: bool) -> int:
        """A read or write has ended. For a good read, the host block that can be matched from now on; else 0."""
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
            self.stores[read.store].discard(read.key)
            self.host.release((read.host_block,))
            return 0
        host_block = self._publish(read.host_block, read.key)
        self.host.release((host_block,))
        return host_block

    def note(self, found: dict[str, list[bytes]], lost: dict[str, list[bytes]]) -> None:
        """What the stores say about themselves. A key in both was lost last."""
        for store, keys in found.items():
            self.stores[store].update(keys)
        for store, keys in lost.items():
            self.stores[store].difference_update(keys)

    # -- host blocks ---------------------------------------------------------------------------------------

    def pin(self, host_blocks: Iterable[int]) -> None:
        """Keep these from eviction; once more for every call."""
        self.host.hold(host_blocks)

    def unpin(self, host_blocks: Sequence[int]) -> None:
        self.host.release(host_blocks)

    def touch(self, keys: Iterable[bytes]) -> None:
        """A chain was used: its end goes before its start, and both after what was used earlier."""
        host_blocks = list(filter(None, map(self.host.find, keys)))
        self.host.hold(host_blocks)
        self.host.release(host_blocks)

    def forget(self) -> bool:
        """No key can be matched any more, in stores either (their bytes stay). Refused while anything is held."""
        if not self.host.forget():
            return False
        self._offers.clear()
        self._unwritten.clear()
        for keys in self.stores.values():
            keys.clear()
        return True

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight and nothing waits to be."""
        return not (self._offers or self._unwritten or self._saving or self.reads or self.writes)

    def _take_block(self) -> int:
        """A held host block without a key; 0 when all are pinned."""
        if self.host.num_free == 0:
            return 0
        before = self.host.num_cached
        (host_block,) = self.host.allocate(1)
        self.counts["evictions"] += before - self.host.num_cached
        return host_block

    def _publish(self, host_block: int, key: bytes) -> int:
        """The one that stands for this key from now on, held once: this one, or one that was there before."""
        known = self.host.register(host_block, key)
        if known != host_block:
            self.host.release((host_block,))
        self._want_written(key)
        return known

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def check(self, pins: Iterable[int] = ()) -> None:
        """Assert every invariant; `pins` are all that `pin` took and `unpin` has not given back."""
        self.host.check()
        expected = Counter(pins)
        expected.update(self._saving.keys())
        expected.update(copy.host_block for copy in (*self.reads.values(), *self.writes.values()))
        for host_block in range(1, self.host.num_blocks):
            assert self.host.refs(host_block) == expected[host_block], f"host block {host_block}: references differ"
        assert set(self._saving.values()) == self._saving_keys
        assert {write.key for write in self.writes.values()} == self._written_keys
        assert all(self.reads[ticket].key == key for key, ticket in self._tickets.items())
        for read in self.reads.values():
            assert self.host.refs(read.host_block) == 1, "what is being read into belongs to the read alone"
