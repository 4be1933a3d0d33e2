"""The disk tier: what storing costs the caller; lookup; restart.

    python benchmarks/bench_disk.py --dir DIR [--rounds 10]

A store of 2,048 tokens is eight chunks of 8 MiB. Its cost on the calling thread is taken on an empty disk and with
20,000 resident chunks where every further one evicts, in turn; writing and unlinking are left out. A restart opens
100,000 records. DIR is on the disk to measure.
"""

import argparse
import os
import shutil
import statistics
import time
import timeit
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pairs import arguments, record, rounds

from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.directory import SLAB_BYTES, open_directory, slab_name
from penstock.cache.tiers.disk.record import Geometry, cell_bytes, namespace_of
from penstock.cache.tiers.disk.snapshot import ROWS, write_snapshot
from penstock.cache.tiers.disk.tier import DiskTier, cells_within
from penstock.cache.tiers.memory import huge_array

CHUNK = 8 * 2**20
BATCH = 8
RESIDENT = 20_000
MANY = 100_000
BATCHES_A_ROUND = 30
FINGERPRINT = b"benchmark"


class NoWrites(SystemCalls):
    """Records go nowhere; all else is as always."""

    def writev(self, file: int, parts: Sequence[Any], offset: int) -> int:
        return sum(map(len, parts)) if len(parts) > 1 else super().writev(file, parts, offset)

    def allocate(self, file: int, size_bytes: int) -> None:
        os.ftruncate(file, size_bytes)


class Ours:
    """A tier with so many records, real in everything but their bytes."""

    def __init__(self, folder: Path, resident: int, full: bool) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        cells = resident if full else resident + 10**4
        capacity = cells * (cell_bytes(CHUNK) + 4096) + 2**26
        make_records(folder, resident, capacity)
        self.tier = DiskTier(
            folder, capacity_bytes=capacity, chunk_bytes=CHUNK, fingerprint=FINGERPRINT, calls=NoWrites()
        )
        if full:  # the records that fit into what the capacity leaves beside them
            self._fill(self.tier.stats()["slots"] - len(self.tier) + BATCH)
            self.tier._admission.admits = lambda key: True  # type: ignore[method-assign]  # every store evicts
        self._chunks = [memoryview(chunk) for chunk in huge_array(BATCH, CHUNK)]
        self.polls: list[float] = []

    def batches(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            keys = [os.urandom(32) for _ in range(BATCH)]
            put, chunks = self.tier.put, self._chunks
            started_s = time.perf_counter()
            for key, chunk in zip(keys, chunks, strict=True):
                put(key, chunk)
            seconds.append(time.perf_counter() - started_s)
            self.drain(BATCH)
        return seconds

    def drain(self, count: int) -> None:
        while count:
            time.sleep(0.0002)
            started_s = time.perf_counter()
            count -= len(self.tier.poll())
            self.polls.append(time.perf_counter() - started_s)

    def _fill(self, count: int) -> None:
        chunk = huge_array(1, CHUNK)[0]
        self.polls = []
        for _ in range(max(count, 0)):
            self.tier.put(os.urandom(32), memoryview(chunk))
            self.drain(1)


def make_records(folder: Path, count: int, capacity: int) -> None:
    """An index of that many records, and slab files as long as it takes, with no blocks of their own."""
    namespace = namespace_of(FINGERPRINT, CHUNK)
    folder.mkdir(parents=True, exist_ok=True)
    if count == 0:
        return
    directory = open_directory(str(folder / namespace.hex()[:32]), create=True)
    rows = np.zeros(count, ROWS)
    rows["key"] = np.random.default_rng(1).integers(0, 256, (count, 32), np.uint8).view("V32")[:, 0]
    rows["sequence"] = rows["stamp"] = np.arange(1, count + 1)
    rows["cell"] = np.arange(count)
    rows["live"] = 1
    num_cells = cells_within(capacity, CHUNK)
    geometry = Geometry(namespace, cell_bytes(CHUNK), num_cells)
    write_snapshot(SystemCalls(), directory, geometry, rows, count + 1, clean=True)
    per_slab = SLAB_BYTES // cell_bytes(CHUNK)
    for slab in range(-(-count // per_slab)):
        file = os.open(slab_name(slab), os.O_CREAT | os.O_RDWR, 0o600, dir_fd=directory)
        os.ftruncate(file, min(per_slab, num_cells - slab * per_slab) * cell_bytes(CHUNK))
        os.close(file)
    os.close(directory)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e6
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def store_path(args: argparse.Namespace) -> dict[str, Any]:
    sides = {"empty": Ours(args.dir / "empty", 0, full=False), "full": Ours(args.dir / "full", RESIDENT, full=True)}
    for side in sides.values():
        side.batches(3)
        side.polls.clear()
    runs = rounds({name: partial(side.batches, BATCHES_A_ROUND) for name, side in sides.items()}, args.rounds)
    figures: dict[str, Any] = {
        name: quantiles([seconds for batch in values for seconds in batch]) for name, values in runs.items()
    }
    figures["poll"] = quantiles([*sides["empty"].polls, *sides["full"].polls])
    figures["p99 full to empty"] = round(figures["full"]["p99_us"] / figures["empty"]["p99_us"], 2)
    for side in sides.values():
        side.tier.close()
    return figures


def restart_and_lookup(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.dir / "restart"
    shutil.rmtree(folder, ignore_errors=True)
    capacity = MANY * (cell_bytes(CHUNK) + 4096) + 2**26
    make_records(folder, MANY, capacity)
    seconds = []
    for _ in range(args.rounds):
        started_s = time.perf_counter()
        tier = DiskTier(folder, capacity_bytes=capacity, chunk_bytes=CHUNK, fingerprint=FINGERPRINT)
        seconds.append(time.perf_counter() - started_s)
        assert len(tier) == MANY
        keys = tier.keys()[::10]
        names = {"contains": tier.contains, "keys": keys}
        walk = min(timeit.repeat("[contains(key) for key in keys]", number=1, repeat=5, globals=names))
        lookup_s = walk / len(keys)
        tier.close()
    return {
        "entries": MANY,
        "restart_s": {"median": round(statistics.median(seconds), 3), "worst": round(max(seconds), 3)},
        "lookup_ns": round(lookup_s * 1e9),
    }


def main() -> None:
    args = arguments(__doc__, dir=Path("."), rounds=10)
    args.dir = args.dir / "penstock-bench-disk"
    try:
        figures = {"store path": store_path(args), "restart": restart_and_lookup(args)}
    finally:
        shutil.rmtree(args.dir, ignore_errors=True)
    for title, values in figures.items():
        print(title)
        for name, value in values.items():
            print(f"  {name:20} {value}")
    record("disk", figures)


if __name__ == "__main__":
    main()
