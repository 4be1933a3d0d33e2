"""A small disk tier to be unkind to, with payloads that say whether a byte is wrong."""

import contextlib
import hashlib
import random
import sys
import time
from pathlib import Path
from typing import Any

from penstock.cache.tiers.base import StoreResult
from penstock.cache.tiers.disk.snapshot import cells_within, min_capacity
from penstock.cache.tiers.disk.tier import DiskLimits, DiskTier
from penstock.cache.tiers.health import HealthLimits
from penstock.cache.tiers.memory import huge_buffer

CHUNK = 8000  # neither whole pages nor less than one


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def payload_of(name: object, size: int = CHUNK) -> bytes:
    return hashlib.shake_128(repr(name).encode()).digest(size)


def capacity_for(cells: int, chunk: int = CHUNK) -> int:
    capacity = min_capacity(chunk)
    while cells_within(capacity, chunk) < cells:
        capacity += chunk
    return capacity


# A busy machine is not taken for a disk that hangs, which makes misses of hits.
PATIENT = DiskLimits(health=HealthLimits(stall_s=60.0))


class Rig(contextlib.AbstractContextManager["Rig"]):
    """A tier and what a caller does around it. Every load that ends well is compared."""

    def __init__(self, path: Path, cells: int = 16, chunk: int = CHUNK, fingerprint: bytes = b"model", **more: Any):
        capacity, more = capacity_for(cells, chunk), {"limits": PATIENT, **more}
        self.chunk = chunk
        self.tier = DiskTier(path, capacity_bytes=capacity, chunk_bytes=chunk, fingerprint=fingerprint, **more)

    def buffer(self, content: bytes = b"") -> memoryview:
        buffer = huge_buffer(self.chunk)
        buffer[: len(content)] = content
        return buffer

    def wait(self, count: int = 1) -> list[StoreResult]:
        """Return the next `count` completions."""
        ended: list[StoreResult] = []
        while len(ended) < count:
            ended += self.tier.poll()
            time.sleep(0.0002)
        assert len(ended) == count
        return ended

    def store(self, *names: object) -> int:
        """How many of these were stored; the others were dropped or are there already."""
        stored = 0
        for name in names:
            if self.tier.put(key_of(name), self.buffer(payload_of(name, self.chunk))):
                [completion] = self.wait()
                assert (completion.kind, completion.key) == ("store", key_of(name))
                stored += completion.ok
        return stored

    def load(self, name: object) -> bytes | None:
        """Load the payload and check it; return None for a miss."""
        out = self.buffer()
        ticket = self.tier.start_load(key_of(name), out)
        if ticket is None:
            return None
        [completion] = self.wait()
        assert (completion.kind, completion.ticket, completion.key) == ("load", ticket, key_of(name))
        if not completion.ok:
            return None
        assert bytes(out) == payload_of(name, self.chunk), f"wrong bytes for {name!r}"
        return bytes(out)

    def hits(self, *names: object) -> int:
        return sum(self.load(name) is not None for name in names)

    def finish_scan(self) -> None:
        """Wait until a restart after a crash has looked into every slot."""
        while self.tier.stats()["scan_left"]:
            time.sleep(0.001)
        assert self.tier.poll() == []

    def close(self) -> None:
        self.tier.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def main() -> int:
    """Store and load records below the folder sys.argv[1] until the process is killed; print the name of each stored one."""
    draw = random.Random(sys.argv[2])
    with Rig(Path(sys.argv[1]), chunk=600, cells=48) as rig:
        print("open", flush=True)
        while True:
            name = draw.randrange(200)
            if rig.store(name):
                print(name, flush=True)
            rig.load(draw.randrange(200))
