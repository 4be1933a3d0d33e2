"""A store in memory that keeps the contract of `cache/tiers/base.py` and nothing more: it is late, it forgets, it
fails, it refuses, and it takes the borrowed buffers at their word."""

import random
from dataclasses import dataclass, field
from typing import Any

from penstock.cache.tiers.base import StoreResult

LOAD_S = 0.001  # what a load takes, as far as the store reports it


@dataclass
class FlakyStore:
    """Every probability is of one operation; `delay` is the most polls it takes. The defaults never fail."""

    seed: int = 0
    delay: int = 0
    refuses: float = 0.0  # a put, at once
    fails_put: float = 0.0
    fails_load: float = 0.0
    misses: float = 0.0  # start_load says None although the key was there
    capacity: int = 10**9
    data: dict[bytes, bytes] = field(default_factory=dict)
    is_stalled: bool = False  # nothing completes
    closed: bool = False
    is_open: bool = True
    scan_left: int = 0  # as reported

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._in_flight: list[list[Any]] = []  # [polls left, kind, ticket, key, buffer, ok]
        self._num_tickets = self._num_loads = 0
        self._visible: dict[bytes, None] = dict.fromkeys(self.data)
        self._lost: dict[bytes, None] = {}

    def contains(self, key: bytes) -> bool:
        return key in self.data

    def put(self, key: bytes, buffer: memoryview) -> bool:
        assert not self.closed and not any(entry[1] == "store" and entry[3] == key for entry in self._in_flight), (
            "a put of a key that is in flight"
        )
        if key in self.data or self._rng.random() < self.refuses:
            return False
        ok = self._rng.random() >= self.fails_put
        self._in_flight.append([self._rng.randint(0, self.delay), "store", 0, key, buffer, ok])
        return True

    def start_load(self, key: bytes, out: memoryview) -> int | None:
        assert not self.closed
        if key not in self.data or self._rng.random() < self.misses:
            return None
        self._num_tickets += 1
        ok = self._rng.random() >= self.fails_load
        out[:] = bytes([0xAA]) * len(out)  # borrowed: no byte of it may matter to others now
        self._in_flight.append([self._rng.randint(0, self.delay), "load", self._num_tickets, key, out, ok])
        return self._num_tickets

    def poll(self) -> list[StoreResult]:
        if self.is_stalled:
            return []
        done, rest = [], []
        for entry in self._in_flight:
            if entry[0] > 0:
                entry[0] -= 1
                rest.append(entry)
                continue
            _, kind, ticket, key, buffer, ok = entry
            # The buffer is read and written only now: reusing it early is found out.
            if kind == "store" and ok:
                self.insert(key, bytes(buffer))
            elif kind == "load":
                ok = ok and key in self.data
                buffer[:] = self.data[key] if ok else bytes([0x55]) * len(buffer)
                self._num_loads += ok
            done.append(StoreResult(kind, ticket, key, ok))
        self._in_flight = rest
        return done

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        changes = list(self._visible), list(self._lost)
        self._visible.clear()
        self._lost.clear()
        return changes

    def touch(self, keys: list[bytes]) -> None:
        for key in keys:
            if key in self.data:
                self.data[key] = self.data.pop(key)

    def stats(self) -> dict[str, Any]:
        loads = {"hits": self._num_loads, "load_times": {"sum_s": LOAD_S * self._num_loads}}
        return {"entries": len(self.data), "scan_left": self.scan_left, **loads}

    def close(self) -> None:
        self.closed = True

    def insert(self, key: bytes, value: bytes) -> None:
        self.data[key] = value
        self._visible[key] = None
        self._lost.pop(key, None)
        while len(self.data) > self.capacity:
            oldest = next(iter(self.data))
            del self.data[oldest]
            self._lost[oldest] = None
            self._visible.pop(oldest, None)
