"""Which record lies in which slot, which slots can be given out next, and what has changed. No files, no threads.

    new ─take─▶ BUSY ─publish─▶ READY ─evict─▶ (taken again)
     ▲           │                │
    free ◀───────┴─── release ◀───┴─ forget

Every operation takes a fixed number of steps at any fill. Slots for the next stores are made ready in advance, by
whoever polls, so that taking one costs the same on an empty and on a full disk.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable

import numpy as np

from penstock.cache.tiers.disk.journal import ROW
from penstock.cache.tiers.disk.recency import Recency
from penstock.cache.tiers.disk.record import KEY_BYTES

_FREE, _BUSY, _READY = 0, 1, 2
_MAX_PASSED = 64  # records in use that eviction looks past
_MAX_RESERVE = 64


class Catalog:
    """`num_slots` slots, of which `num_backed` may hold records of an earlier life. `rows` takes what the index needs."""

    def __init__(self, num_slots: int, num_backed: int, rows: deque[bytes]) -> None:
        self.slots: dict[bytes, int] = {}  # READY ones
        self.sequences = array("Q", bytes(8 * num_slots))
        self.loading: dict[int, int] = {}  # slot → loads under way
        self.pins: dict[bytes, int] = {}
        self.reserve: list[int] = []  # slots made ready for the next stores
        self.is_full = False  # nothing is left but to evict
        self.num_evictions = 0
        self.retention_s = 0.0  # moving average of how long records stay unused before they are evicted
        self._rows = rows
        self._state = bytearray(num_slots)
        self._keys: list[bytes | None] = [None] * num_slots
        self._used_s = array("d", bytes(8 * num_slots))
        self._recency = Recency(num_slots)
        self._free: dict[int, None] = dict.fromkeys(range(num_backed - 1, -1, -1))  # popitem gives the first
        self._unbacked: list[int] = []  # free, but there was no room for their slab
        self._frontier = num_backed  # this and all behind it are new
        self._grow_at_s = 0.0  # 0: at once
        self._num_reserved = min(_MAX_RESERVE, num_slots // 32)
        self._found: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}
        self._is_hidden = False

    def restore(self, rows: np.ndarray) -> np.ndarray:
        """Take over rows of live slots in the order of their stamps; those of them that count."""
        rows = rows[rows["slot"] < self._frontier]
        slots: list[int] = rows["slot"].tolist()
        packed = rows["key"].tobytes()
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        self.slots.update(zip(keys, slots, strict=True))
        if len(self.slots) < len(slots):  # a key was written again elsewhere: its last row counts
            kept = [self.slots[key] == slot for key, slot in zip(keys, slots, strict=True)]
            rows, keys = rows[kept], [key for key, keep in zip(keys, kept, strict=True) if keep]
            slots = rows["slot"].tolist()
        for slot, key in zip(slots, keys, strict=True):
            self._keys[slot] = key
        state = np.frombuffer(self._state, np.uint8)
        state[slots] = _READY
        np.frombuffer(self.sequences, np.uint64)[slots] = rows["sequence"]
        np.frombuffer(self._used_s)[slots] = time.monotonic()
        self._recency.restore(rows["slot"].astype(np.int64), int(rows["stamp"].max(initial=0)))
        self._found = dict.fromkeys(keys)
        self._free = dict.fromkeys(np.flatnonzero(state[: self._frontier] == _FREE)[::-1].tolist())
        return rows

    def to_scan(self) -> list[int]:
        """Slots that may hold something else than is known of them: first those of which nothing is known."""
        return sorted(self._free) + sorted(self.slots.values())

    # -- giving slots out ----------------------------------------------------------------------------------

    def prepare(self, keep_free: bool) -> None:
        """Fill the reserve, by evicting if need be. `keep_free`: rather new slots, the scan may find something."""
        while len(self.reserve) < self._num_reserved and (slot := self._next_slot(keep_free)) is not None:
            self.reserve.insert(0, slot)

    def take(self, keep_free: bool) -> int | None:
        """A slot for a store; None if all hold records in use."""
        slot = self.reserve.pop() if self.reserve else self._next_slot(keep_free)
        if slot is not None:
            self._state[slot] = _BUSY
        return slot

    def _next_slot(self, keep_free: bool) -> int | None:
        self.is_full = False
        if self._free and not keep_free:
            return self._free.popitem()[0]
        if self._grow_at_s and time.monotonic() >= self._grow_at_s:
            self._grow_at_s = 0.0
        if not self._grow_at_s:
            if self._unbacked:
                return self._unbacked.pop()
            if self._frontier < len(self._state):
                self._frontier += 1
                return self._frontier - 1
        if self._free:
            return self._free.popitem()[0]
        self.is_full = True
        return self._evict()

    def _evict(self) -> int | None:
        for passed, slot in enumerate(self._recency.oldest()):
            if slot not in self.loading and self._keys[slot] not in self.pins:
                self.num_evictions += 1
                age_s = time.monotonic() - self._used_s[slot]
                self.retention_s += 0.01 * (age_s - self.retention_s)
                # No row says so: the one of the next record will, and until then the old row leads to a miss.
                self._drop(slot)
                return slot
            if passed == _MAX_PASSED:
                break
        return None

    # -- what becomes of a slot ----------------------------------------------------------------------------

    def publish(self, slot: int, key: bytes, sequence: int) -> None:
        """The slot holds this record: it can be found."""
        self.slots[key] = slot
        self._keys[slot] = key
        self.sequences[slot] = sequence
        self._state[slot] = _READY
        self.use(slot)
        self._appear(key)

    def release(self, slot: int, key: bytes) -> None:
        """A store into it has failed."""
        self._state[slot] = _FREE
        self._rows.append(ROW.pack(key, 0, 0, slot, 0))
        self._free[slot] = None

    def stop_growing(self, until_s: float, is_backed: Callable[[int], bool]) -> None:
        """There is no room for another slab: set the slots aside that would need one."""
        self._grow_at_s = until_s
        for slots in (self.reserve, list(self._free)):
            self._unbacked += [slot for slot in slots if not is_backed(slot)]
        self.reserve = [slot for slot in self.reserve if is_backed(slot)]
        for slot in self._unbacked:
            self._free.pop(slot, None)

    def forget(self, slot: int, key: bytes, sequence: int) -> None:
        """This record is bad; unless the slot holds another by now, it is free."""
        if self._keys[slot] == key and self.sequences[slot] == sequence:
            self._drop(slot)
            self._free[slot] = None
            self._rows.append(ROW.pack(key, 0, 0, slot, 0))

    def adopt(self, slot: int, key: bytes, sequence: int) -> bool:
        """Take in what a scan found, unless slot or key have another use by now, or something newer."""
        if self._state[slot] == _READY and self.sequences[slot] < sequence:
            stale = self._keys[slot]
            assert stale is not None
            self.forget(slot, stale, self.sequences[slot])  # its row was older than its record
        if slot not in self._free or key in self.slots:
            return False
        del self._free[slot]
        self.publish(slot, key, sequence)
        return True

    def use(self, slot: int) -> None:
        stamp = self._recency.use(slot)
        self._used_s[slot] = time.monotonic()
        self._rows.append(ROW.pack(self._keys[slot], self.sequences[slot], stamp, slot, 1))

    def _drop(self, slot: int) -> None:
        key = self._keys[slot]
        assert key is not None
        del self.slots[key]
        self._keys[slot] = None
        self.pins.pop(key, None)
        self._state[slot] = _FREE
        self._recency.drop(slot)
        self._vanish(key)

    # -- telling what has changed --------------------------------------------------------------------------

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that are there and were not at the last call, and the other way round."""
        found, self._found = list(self._found), {}
        lost, self._lost = list(self._lost), {}
        return found, lost

    def hide(self) -> None:
        """Nobody can read: as far as others are told, all is lost."""
        for key in self.slots:
            self._vanish(key)
        self._is_hidden = True

    def show(self) -> None:
        self._is_hidden = False
        for key in self.slots:
            self._appear(key)

    def _appear(self, key: bytes) -> None:
        if self._is_hidden:
            return
        if key in self._lost:
            del self._lost[key]
        else:
            self._found[key] = None

    def _vanish(self, key: bytes) -> None:
        if self._is_hidden:
            return
        if key in self._found:
            del self._found[key]
        else:
            self._lost[key] = None

    def check(self, num_busy: int) -> None:
        self._recency.check()
        ready = [slot for slot, state in enumerate(self._state) if state == _READY]
        assert sorted(self._recency.oldest()) == ready == sorted(self.slots.values())
        assert all(self._keys[slot] == key for key, slot in self.slots.items())
        free = [*self.reserve, *self._free, *self._unbacked, *range(self._frontier, len(self._state))]
        assert len(free) == len(set(free)) and all(self._state[slot] == _FREE for slot in free)
        assert len(free) + len(ready) + num_busy == len(self._state)
        assert self.pins.keys() <= self.slots.keys()
        assert not self._found.keys() & self._lost.keys()
        assert self._is_hidden or self._found.keys() <= self.slots.keys()
        assert self._is_hidden or self._lost.keys().isdisjoint(self.slots)
