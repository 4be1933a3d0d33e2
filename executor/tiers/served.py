"""The blocks that one rank offers to other engines: those in its host blocks and in its disk tier.

The core decides the content of host blocks and lists it in every step's transfers; this class records it, so that peers
are answered without asking the core. An entry is valid from the end of the copy or load that filled its host block
until the next one begins. A reader therefore checks after copying whether the entry is still valid.
"""

import threading
from collections.abc import Callable, Iterable

import numpy as np

from penstock.cache.tiers.base import Store

Fill = Callable[[], None]  # makes the new content of a host block available, once it is there


class ServedBlocks:
    """The `Source` of cache/tiers/peer/server.py. `lock` also protects the rank's use of its stores."""

    def __init__(self, arena: np.ndarray, disk: Store | None, lock: threading.Lock, poll: Callable[[], None]) -> None:
        """arena: uint8 [host blocks, bytes per block]. `poll` processes completions of the stores, under the lock; it
        calls `end_load`."""
        self._arena = arena
        self._disk = disk
        self._lock = lock
        self._poll = poll
        self._host_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._versions = [0] * len(arena)  # number of writes to each host block
        self._on_disk: set[bytes] = set()
        self._changed: dict[bytes, bool] = {}  # since the last `take_changes`: key → is available now
        self._loads: set[int] = set()  # tickets of the disk tier
        self._ended: list[tuple[int, bool]] = []

    # -- from the rank's threads, under the lock -----------------------------------------------------------

    def overwrite(self, host: int, key: bytes) -> Fill:
        """Invalidate a host block that is about to be overwritten. Call the returned function after the write: it makes
        the new content available, unless the block has been overwritten again."""
        before = self._key_of.pop(host, None)  # before the version changes: `copy` reads them in the other order
        self._versions[host] = version = self._versions[host] + 1
        if before is not None and self._host_of.get(before) == host:  # otherwise another host block has it too
            del self._host_of[before]
            self._note(before)

        def fill() -> None:
            if version == self._versions[host]:
                self._key_of[host] = key
                self._host_of[key] = host
                self._note(key)

        return fill

    def note_disk(self, came: Iterable[bytes], went: Iterable[bytes]) -> None:
        for keys, change in ((came, self._on_disk.add), (went, self._on_disk.discard)):
            for key in keys:
                change(key)
                self._note(key)

    def forget(self) -> None:
        """Withdraw everything that was computed so far."""
        gone = [*self._host_of, *self._on_disk]
        self._host_of.clear()
        self._key_of.clear()
        self._on_disk.clear()
        for key in gone:
            self._note(key)

    def end_load(self, ticket: int, ok: bool) -> bool:
        """Record the end of a load from disk; return whether it was for a peer."""
        if ticket not in self._loads:
            return False
        self._loads.remove(ticket)
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
        np.copyto(np.frombuffer(out, np.uint8), self._arena[host])  # without the lock, which a step would wait for
        return self._versions[host] == version

    def start_load(self, key: bytes, out: memoryview) -> int | None:
        with self._lock:
            if self._disk is None or key not in self._on_disk:
                return None
            ticket = self._disk.start_load(key, out)
            if ticket is not None:
                self._loads.add(ticket)
            return ticket

    def take_loads(self) -> list[tuple[int, bool]]:
        with self._lock:
            self._poll()
            ended, self._ended = self._ended, []
        return ended

    def _note(self, key: bytes) -> None:
        self._changed[key] = key in self._host_of or key in self._on_disk
