"""What one rank can give to other engines: the content of its host blocks, and of its disk.

The core decides what lies in which host block and names it in every step's transfers; this notes it down, so that a
peer is answered without asking the core. A content counts from the end of the copy or load that filled its host block
to the moment before the next one begins. Who copies it out meanwhile looks again afterwards whether it still counts.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from penstock.cache.tiers.base import DISK, Store


class Filling(NamedTuple):
    """What a host block will hold, if nothing else is written to it before."""

    host: int
    key: bytes
    version: int


class Served:
    """A `Source` for cache/tiers/peer/server.py. `lock` is the one under which the rank uses its stores."""

    def __init__(
        self, arena: np.ndarray, stores: Mapping[str, Store], lock: threading.Lock, poll: Callable[[], None]
    ) -> None:
        """arena: uint8 [host blocks, bytes of a block]. `poll`: see what the stores have done, under the lock; it calls
        `end_read`."""
        self._arena = arena
        self._disk = stores.get(DISK)
        self._lock = lock
        self._poll = poll
        self._host_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._versions = [0] * len(arena)  # of what was written to each
        self._on_disk: set[bytes] = set()
        self._changed: dict[bytes, bool] = {}  # since the last `take_changes`: whether it can be had now
        self._reads: set[int] = set()  # the disk's tickets
        self._ended: list[tuple[int, bool]] = []

    # -- from the rank's threads, under the lock -----------------------------------------------------------

    def overwrite(self, host: int, key: bytes) -> Filling:
        """Something else is about to be written there; `fill` when it is done."""
        self._versions[host] += 1
        before = self._key_of.pop(host, None)
        if before is not None and self._host_of.get(before) == host:  # else another host block has it, too
            del self._host_of[before]
            self._note(before)
        return Filling(host, key, self._versions[host])

    def fill(self, filling: Filling) -> None:
        """It counts from now on, unless its host block was overwritten again since."""
        host, key, version = filling
        if version == self._versions[host]:
            self._key_of[host] = key
            self._host_of[key] = host
            self._note(key)

    def note_disk(self, came: Iterable[bytes], went: Iterable[bytes]) -> None:
        for keys, change in ((came, self._on_disk.add), (went, self._on_disk.discard)):
            for key in keys:
                change(key)
                self._note(key)

    def forget(self) -> None:
        """Nothing of what was computed so far may be found any more."""
        gone = [*self._host_of, *self._on_disk]
        self._host_of.clear()
        self._key_of.clear()
        self._on_disk.clear()
        for key in gone:
            self._note(key)

    def end_read(self, ticket: int, ok: bool) -> bool:
        """Whether this read of the disk was for a peer."""
        if ticket not in self._reads:
            return False
        self._reads.remove(ticket)
        self._ended.append((ticket, ok))
        return True

    @property
    def has_changed(self) -> bool:
        return bool(self._changed)

    # -- from the server's thread --------------------------------------------------------------------------

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._host_of.keys() | self._on_disk)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        with self._lock:
            changed, self._changed = self._changed, {}
        return [key for key, has in changed.items() if has], [key for key, has in changed.items() if not has]

    def copy(self, key: bytes, out: memoryview) -> bool:
        host = self._host_of.get(key, 0)
        if host == 0:
            return False
        version = self._versions[host]
        if self._key_of.get(host) != key:  # overwritten a moment ago
            return False
        np.copyto(np.frombuffer(out, np.uint8), self._arena[host])  # without the lock: a step would wait for it
        return self._versions[host] == version

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
        self._changed[key] = key in self._host_of or key in self._on_disk
