"""Bytes that change behind the disk tier's back, and ends that come in the middle of everything."""

import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.record import HEADER_BYTES, cell_bytes
from penstock.cache.tiers.disk.tier import DiskLimits
from penstock.cache.tiers.health import HealthLimits
from tests.support.disk_faults import Fault, FaultyCalls
from tests.support.disk_rig import Rig, key_of
from tests.support.fork_server import fork_server
from tests.support.refusals import hardest

SECTOR = 512
SMALL = 600  # bytes of a payload, so that many fit into a second
CELL = cell_bytes(SMALL)
NEVER_BYPASSED = DiskLimits(health=HealthLimits(max_errors=10**9, stall_s=60.0))


class LossyCalls(SystemCalls):
    """A disk that forgets: it knows what a crash would leave of what was written since the last sync of a file."""

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
        """Return the content of each file afterwards: any selection of the sectors of unsynced writes, in any order."""
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


def slab_of(rig: Rig) -> Path:
    """Return the first slab file, in whose cells the names 0 … n-1 lie in this order."""
    return Path(rig.tier.directory) / "slab-000000"


def flip_a_bit(slab: mmap.mmap, draw: random.Random, cells: int) -> None:
    at = draw.randrange(cells) * CELL + draw.randrange(HEADER_BYTES + SMALL)
    slab[at] ^= 1 << draw.randrange(8)


def zero_some(slab: mmap.mmap, draw: random.Random, cells: int) -> None:
    at = draw.randrange(cells) * CELL + draw.choice((0, HEADER_BYTES))
    slab[at : at + SECTOR] = bytes(SECTOR)


def swap(slab: mmap.mmap, draw: random.Random, cells: int) -> None:
    """Swap two records, or their headers or their payloads alone."""
    start, size = draw.choice(((0, CELL), (0, HEADER_BYTES), (HEADER_BYTES, SMALL)))
    one, other = (slice(cell * CELL + start, cell * CELL + start + size) for cell in draw.sample(range(cells), 2))
    slab[one], slab[other] = slab[other], slab[one]


MUTATIONS: list[Callable[[mmap.mmap, random.Random, int], None]] = [flip_a_bit, zero_some, swap, swap, swap]


@pytest.mark.parametrize("changes", [150, pytest.param(100_000, marks=pytest.mark.soak)])
def test_changed_bytes_are_a_miss_and_logged(tmp_path: Path, changes: int, caplog: pytest.LogCaptureFixture) -> None:
    """After each change all records are read; `Rig` compares every byte. Lost records are stored again."""
    draw = random.Random(1)
    with Rig(tmp_path, chunk=SMALL, cells=8, limits=NEVER_BYPASSED) as rig:
        cells = rig.tier.stats()["slots"]
        names = range(cells)
        rig.store(*names)
        num_missed = 0
        for _ in range(changes):
            with slab_of(rig).open("r+b") as file, mmap.mmap(file.fileno(), 0) as slab:
                draw.choice(MUTATIONS)(slab, draw, cells)
            missed = cells - rig.hits(*names)
            assert 1 <= missed <= 2
            num_missed += missed
            assert rig.store(*names) == missed
        stats = rig.tier.stats()
        assert stats["corrupt_reads"] + stats["stale_reads"] == num_missed
        rig.tier.check()
    assert f"{tmp_path}" in caplog.messages[0] and "failed to load a block: " in caplog.messages[0]


@pytest.mark.parametrize("size", [0, 1, CELL - 1, CELL + HEADER_BYTES, 3 * CELL + 100])
def test_a_truncated_slab_loses_what_was_cut_off_and_nothing_else(tmp_path: Path, size: int) -> None:
    with Rig(tmp_path, chunk=SMALL) as rig:
        rig.store(*range(8))
        os.truncate(slab_of(rig), size)
        whole = size // CELL + (size % CELL >= HEADER_BYTES + SMALL)
        assert rig.hits(*range(8)) == whole
        assert rig.store(*range(8)) == 8 - whole
    with Rig(tmp_path, chunk=SMALL) as rig:
        assert rig.hits(*range(8)) == 8


def test_files_that_change_their_names_or_go_away_are_misses(tmp_path: Path) -> None:
    limits = DiskLimits(slab_bytes=4 * CELL)
    with Rig(tmp_path, chunk=SMALL, cells=12, limits=limits) as rig:
        rig.store(*range(12))
        folder = Path(rig.tier.directory)
    (folder / "slab-000000").rename(folder / "other")
    (folder / "slab-000001").rename(folder / "slab-000000")
    (folder / "other").rename(folder / "slab-000001")
    (folder / "slab-000002").unlink()
    with Rig(tmp_path, chunk=SMALL, cells=12, limits=limits) as rig:
        assert rig.hits(*range(12)) == 0
        assert rig.store(*range(12)) == 12 == rig.hits(*range(12))
        rig.tier.check()


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "open"])
def test_a_broken_index_costs_time_and_no_record(tmp_path: Path, damage: str) -> None:
    draw = random.Random(damage)
    with Rig(tmp_path) as rig:
        rig.store(*range(5))
    with Rig(tmp_path) as rig:
        folder = Path(rig.tier.directory)
        opened = (folder / "index").read_bytes()
        rig.store(*range(5, 10))
    index = folder / "index"
    data = bytearray(index.read_bytes())
    at = draw.randrange(len(data))
    if damage == "gone":
        index.unlink()
    elif damage == "cut":
        index.write_bytes(data[:at])
    elif damage == "flipped":
        data[at] ^= 1
        index.write_bytes(data)
    else:  # as a crash leaves it
        index.write_bytes(opened)
    with Rig(tmp_path) as rig:
        assert rig.load("from the first second") is None  # served at once, whatever the scan does
        rig.finish_scan()
        assert rig.hits(*range(10)) == 10
        rig.tier.check()


@pytest.mark.parametrize("kills", [*hardest([6, 20], 6), pytest.param(1000, marks=pytest.mark.soak)])
def test_a_kill_in_the_middle_of_writing_loses_only_what_was_in_flight(tmp_path: Path, kills: int) -> None:
    draw = random.Random(1)
    for number in range(kills):
        reads, writes = os.pipe()
        with os.fdopen(reads) as output:
            victim = fork_server("tests.support.disk_rig").start(str(tmp_path), str(number), fds={1: writes})
            os.close(writes)
            lines = []
            if draw.random() < 0.9:  # the others may end while they open
                lines = [output.readline() for _ in range(draw.randrange(1, 40))]
            time.sleep(draw.random() * 0.06)
            victim.kill()
            victim.wait(60)
            lines += output
        stored = [int(line) for line in lines if line.endswith("\n") and line != "open\n"]
        with Rig(tmp_path, chunk=SMALL, cells=48) as rig:
            rig.finish_scan()
            assert {key_of(name) for name in stored[-8:]} <= set(rig.tier.keys())
            num_records, num_hits = len(rig.tier), rig.hits(*range(200))
            rig.tier.check()
            stats = rig.tier.stats()
            num_bad = stats["stale_reads"] + stats["corrupt_reads"]
            # All are served but those that the kill caught half-written, and one that gave way to the next store.
            assert num_bad <= 2 and num_records - num_bad - num_hits <= 1


@pytest.mark.parametrize("schedules", [20, pytest.param(10_000, marks=pytest.mark.soak)])
def test_lost_torn_and_reordered_writes_are_misses(tmp_path: Path, schedules: int) -> None:
    draw = random.Random(1)
    served = 0  # each of them is compared
    for number in range(schedules):
        calls = LossyCalls()
        before, after = tmp_path / f"{number}a", tmp_path / f"{number}b"
        with Rig(before, chunk=SMALL, cells=12, calls=calls) as rig:
            for _ in range(draw.randrange(1, 25)):
                rig.store(draw.randrange(30))
            if draw.random() < 0.5:
                rig.tier.flush()
            left = calls.crash(Path(rig.tier.directory), draw)
            folder = after / Path(rig.tier.directory).name
        folder.mkdir(parents=True)
        for name, content in left.items():
            (folder / name).write_bytes(content)
        with Rig(after, chunk=SMALL, cells=12) as rig:
            rig.finish_scan()
            served += rig.hits(*range(30))
            rig.store(*range(30))
            rig.hits(*range(30))
            rig.tier.check()
        shutil.rmtree(before)
        shutil.rmtree(after)
    assert served > schedules


def test_what_a_scan_has_found_is_kept_by_a_close_that_follows_at_once(tmp_path: Path) -> None:
    with Rig(tmp_path, cells=16) as rig:
        assert rig.store(*range(8)) == 8
    (index,) = tmp_path.rglob("index")
    index.unlink()
    with Rig(tmp_path, cells=16) as rig:
        rig.finish_scan()
    with Rig(tmp_path, cells=16) as rig:
        assert rig.tier.stats()["scan_left"] == 0 and rig.hits(*range(8)) == 8


def test_a_scan_that_a_close_cuts_short_leaves_the_index_unwritten(tmp_path: Path) -> None:
    """The next start looks again, so no record is lost."""
    with Rig(tmp_path, cells=200) as rig:
        rig.store(*range(200))
        kept = set(rig.tier.keys())
    (index,) = tmp_path.rglob("index")
    index.unlink()
    with Rig(tmp_path, cells=200, calls=FaultyCalls(Fault(points=("readv",), delay_s=0.005))):
        pass
    assert not index.exists()
    with Rig(tmp_path, cells=200) as rig:
        rig.finish_scan()
        assert set(rig.tier.keys()) == kept
