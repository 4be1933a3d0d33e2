"""What one rank can give to other engines: the content of its host slots, and of its disk.

The core decides what lies in which slot and says so with every step's transfers; this notes it down, so that a peer
is answered without asking the core. A slot's content counts from the end of the copy or read that filled it to the
moment before the next one begins. Who copies it out meanwhile looks again afterwards whether it still counts.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from penstock.cache.tiers.base import DISK, Store


class Served:
    """A `Source` for cache/tiers/peer/server.py. `lock` is the one under which the rank uses its stores."""

    def __init__(
        self, slots: np.ndarray, stores: Mapping[str, Store], lock: threading.Lock, poll: Callable[[], None]
    ) -> None:
        self._slots = slots  # uint8 [slots, bytes of a block]
        self._disk = stores.get(DISK)
        self._lock = lock
        self._poll = poll  # see what the stores have done, under the lock; of `end_read` it tells us
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._versions = [0] * len(slots)  # of what was written to each
        self._on_disk: set[bytes] = set()
        self._changed: dict[bytes, bool] = {}  # since the last `take_changes`: whether it can be had now
        self._reads: set[int] = set()  # the disk's tickets
        self._ended: list[tuple[int, bool]] = []

    # -- from the rank's threads, under the lock -----------------------------------------------------------

    def overwrite(self, slots: Iterable[int]) -> list[int]:
        """Something else is about to be written to these; what to `fill` them with."""
        versions = []
        for slot in slots:
            self._versions[slot] += 1
            key = self._key_of.pop(slot, None)
            if key is not None and self._slot_of.get(key) == slot:  # else another slot has it, too
                del self._slot_of[key]
                self._note(key)
            versions.append(self._versions[slot])
        return versions

    def fill(self, slot: int, key: bytes, version: int) -> None:
        """The slot has this content from now on, unless it was overwritten again since."""
        if version != self._versions[slot]:
            return
        self._key_of[slot] = key
        self._slot_of[key] = slot
        self._note(key)

    def note_disk(self, came: Iterable[bytes], went: Iterable[bytes]) -> None:
        for keys, change in ((came, self._on_disk.add), (went, self._on_disk.discard)):
            for key in keys:
                change(key)
                self._note(key)

    def forget(self) -> None:
        """Nothing of what was computed so far may be found any more."""
        gone = [*self._slot_of, *self._on_disk]
        self._slot_of.clear()
        self._key_of.clear()
        self._on_disk.clear()
        for key in gone:
            self._note(key)

    def end_read(self, ticket: int, ok: bool) -> None:
        self._reads.remove(ticket)
        self._ended.append((ticket, ok))

    def is_reading(self, ticket: int) -> bool:
        """This read of the disk is for a peer."""
        return ticket in self._reads

    @property
    def has_changed(self) -> bool:
        return bool(self._changed)

    # -- from the server's thread --------------------------------------------------------------------------

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._slot_of.keys() | self._on_disk)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        with self._lock:
            changed, self._changed = self._changed, {}
        return [key for key, has in changed.items() if has], [key for key, has in changed.items() if not has]

    def copy(self, key: bytes, out: memoryview) -> bool:
        slot = self._slot_of.get(key, 0)
        if slot == 0:
            return False
        version = self._versions[slot]
        if self._key_of.get(slot) != key:  # overwritten a moment ago
            return False
        np.copyto(np.frombuffer(out, np.uint8), self._slots[slot])  # without the lock: a step would wait for it
        return self._versions[slot] == version

    def start_read(self, key: bytes, out: memoryview) -> int | None:
        with self._lock:
            if self._disk is None or key not in self._on_disk:
                return None
            ticket = self._disk.start_load(key, out)
            if ticket is not None:
                self._reads.add(ticket)
            return ticket

    def take_reads(self) -> list[tuple[int, bool]]:
        with self._lock:
            self._poll()
            ended, self._ended = self._ended, []
        return ended

    def _note(self, key: bytes) -> None:
        self._changed[key] = key in self._slot_of or key in self._on_disk
