"""A disk that forgets: what was written and not synced may be lost, torn or reordered when the machine stops."""

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cache.tiers.disk.calls import SystemCalls

SECTOR = 512


class LossyCalls(SystemCalls):
    """Remembers every write since the last sync of its file, and knows what a crash would leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durable: dict[int, bytearray] = {}  # inode → content at its last sync
        self._pending: dict[int, list[tuple[int, bytes]]] = {}

    def writev(self, file: int, parts: Sequence[Any], offset: int) -> int:
        data = b"".join(map(bytes, parts))
        with self._lock:
            inode = os.fstat(file).st_ino
            self._durable.setdefault(inode, bytearray())
            self._pending.setdefault(inode, []).append((offset, data))
            return super().writev(file, parts, offset)

    def sync(self, file: int) -> None:
        with self._lock:
            inode = os.fstat(file).st_ino
            content = self._durable.setdefault(inode, bytearray())
            for offset, data in self._pending.pop(inode, []):
                _put(content, offset, data)

    def crash(self, directory: Path, draw: random.Random) -> dict[str, bytes]:
        """What each file holds afterwards: any selection of the sectors of unsynced writes, in any order."""
        with self._lock:
            return {path.name: self._left_of(path, draw) for path in sorted(directory.iterdir())}

    def _left_of(self, path: Path, draw: random.Random) -> bytes:
        status = path.stat()
        content = bytearray(self._durable.get(status.st_ino, b""))
        writes = list(self._pending.get(status.st_ino, []))
        if draw.random() < 0.5:
            draw.shuffle(writes)
        kept = draw.choice((0.0, 0.5, 0.9, 1.0))
        for offset, data in writes:
            if draw.random() < 0.3:  # torn
                for at in range(0, len(data), SECTOR):
                    if draw.random() < kept:
                        _put(content, offset + at, data[at : at + SECTOR])
            elif draw.random() < kept:
                _put(content, offset, data)
        # The length is metadata, and may or may not have got there.
        length = draw.choice((status.st_size, status.st_size, len(content)))
        return bytes(content[:length].ljust(length, b"\0"))


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data
