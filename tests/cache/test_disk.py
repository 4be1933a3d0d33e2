"""The disk tier as its callers see it.
`penstock cache inspect|verify|clear`."""

import contextlib
import errno
import io
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cache.tiers.disk import operate
from penstock.cache.tiers.disk.catalog import Catalog
from penstock.cache.tiers.disk.directory import ID_BYTES, DirectoryInUse
from penstock.cache.tiers.disk.record import HEADER_BYTES, cell_bytes
from penstock.cache.tiers.disk.tier import DiskLimits, DiskTier
from penstock.cli import main
from tests.support.disk_faults import Fault, FaultyCalls
from tests.support.disk_rig import CHUNK, Rig, capacity_for, key_of, payload_of
from tests.support.refusals import table


def du(path: Path) -> int:
    blocks = 0
    for entry in [path, *path.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # the index that has got its name meanwhile
            blocks += entry.lstat().st_blocks
    return blocks * 512


@pytest.mark.parametrize("chunk", [1, 100, 4096, 8000, 65536])
def test_records_of_every_size_come_back(tmp_path: Path, chunk: int) -> None:
    with Rig(tmp_path, chunk=chunk) as rig:
        assert rig.store(*range(5)) == 5
        assert rig.hits(*range(5)) == 5
        rig.tier.check()
        assert rig.load("never stored") is None


def test_a_buffer_that_is_not_aligned_goes_through_a_copy(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        unaligned = memoryview(bytearray(CHUNK + 1))[1:]
        unaligned[:] = payload_of("a")
        assert rig.tier.put(key_of("a"), unaligned)
        rig.wait()
        unaligned[:] = bytes(CHUNK)
        ticket = rig.tier.start_load(key_of("a"), unaligned)
        [completion] = rig.wait()
        assert completion.ok and completion.ticket == ticket
        assert bytes(unaligned) == payload_of("a")


def test_the_oldest_give_way_and_the_tail_of_a_chain_goes_before_its_head(tmp_path: Path) -> None:
    with Rig(tmp_path, cells=16) as rig:
        rig.store(*range(rig.tier.stats()["slots"]))
        rig.tier.changes()
        rig.tier.touch([key_of(name) for name in (2, 1, 0)])
        rig.store("new")
        assert rig.tier.changes()[1] == [key_of(3)]
        rig.tier.touch(sorted(set(rig.tier.keys()) - {key_of(name) for name in (0, 1, 2)}))
        rig.store("newer")
        assert rig.tier.changes()[1] == [key_of(2)]
        assert rig.hits(0, 1) == 2
        rig.tier.check()


def test_a_record_that_is_being_read_is_not_evicted() -> None:
    catalog = Catalog(num_cells=2, num_backed=0)
    for sequence, name in enumerate(("old", "new")):
        cell = catalog.take(keep_free=False)
        assert cell == sequence
        catalog.publish(cell, key_of(name), sequence)
    catalog.loading[0] += 1
    assert catalog.take(keep_free=False) == 1 and list(catalog.cells) == [key_of("old")]
    assert catalog.take(keep_free=False) is None
    del catalog.loading[0]
    assert catalog.take(keep_free=False) == 0


def test_what_a_full_disk_evicts_is_told(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        cells = rig.tier.stats()["slots"]
        known: set[bytes] = set()
        for name in range(3 * cells):
            rig.store(name)
            found, lost = rig.tier.changes()
            assert known.isdisjoint(found) and known.union(found).issuperset(lost)
            known = known.union(found) - set(lost)
            assert known == set(rig.tier.keys())
        assert len(known) == cells


def test_du_never_exceeds_the_capacity(tmp_path: Path) -> None:
    capacity = capacity_for(64)
    with Rig(tmp_path / "disk", cells=64, limits=DiskLimits(slab_bytes=10 * cell_bytes(CHUNK))) as rig:
        for name in range(200):
            rig.store(name)
            assert du(tmp_path / "disk") - 4096 <= capacity  # the directory above holds other namespaces too
    assert du(tmp_path / "disk") - 4096 <= capacity


def test_a_smaller_capacity_gives_room_back_and_the_largest_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cache.tiers.disk.snapshot.MAX_CELLS", 64)
    limits = DiskLimits(slab_bytes=10 * cell_bytes(CHUNK))
    with Rig(tmp_path, cells=64, limits=limits) as rig:
        rig.store(*range(64))
    with Rig(tmp_path, cells=15, limits=limits) as rig:
        assert du(tmp_path) - 4096 <= capacity_for(15)
        assert len(rig.tier) == rig.hits(*range(64)) >= 15
        rig.tier.check()
    with Rig(tmp_path, cells=64, limits=limits) as rig:
        assert rig.hits(*range(64)) >= 15
        rig.store(*range(64))
        assert rig.hits(*range(64)) >= 62  # two cells are kept ready for the next stores
        rig.tier.check()


def test_another_fingerprint_or_chunk_size_sees_nothing_of_it(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.store("a")
    with Rig(tmp_path, fingerprint=b"other") as rig:
        assert len(rig.tier) == 0 and rig.load("a") is None
    with Rig(tmp_path, chunk=CHUNK + 1) as rig:
        assert len(rig.tier) == 0
    with Rig(tmp_path) as rig:
        assert rig.hits("a") == 1


def test_a_second_opener_is_told_who_is_first(tmp_path: Path) -> None:
    with Rig(tmp_path), pytest.raises(DirectoryInUse, match=f"is in use by process {os.getpid()}"):
        Rig(tmp_path)
    Rig(tmp_path).close()


def test_directories_and_files_are_ours_alone(tmp_path: Path) -> None:
    with Rig(tmp_path / "disk") as rig:
        rig.store("a")
        for path in [tmp_path / "disk", *(tmp_path / "disk").rglob("*")]:
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path


@pytest.mark.parametrize("name", ["slab-000000", "index.tmp", "index", "lock", "probe"])
def test_a_symbolic_link_in_the_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    with Rig(tmp_path) as rig:
        folder = Path(rig.tier.directory)
    (folder / name).unlink(missing_ok=True)
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (folder / name).symlink_to(victim)
    with contextlib.suppress(OSError), Rig(tmp_path) as rig:
        rig.store("a")
        rig.tier.flush()
    assert victim.read_bytes() == b"mine"


def test_closing_ends_every_store_and_load_exactly_once(tmp_path: Path) -> None:
    calls = FaultyCalls()
    rig = Rig(tmp_path, cells=64, calls=calls)
    rig.store(*range(10))
    calls.faults.append(Fault(points=("writev",), delay_s=0.3))  # most are still queued then
    expected = {("store", key_of(name)) for name in range(10, 40) if rig.tier.put(key_of(name), rig.buffer())}
    expected |= {("load", key_of(name)) for name in range(10) if rig.tier.start_load(key_of(name), rig.buffer())}
    rig.close()
    ended = [(completion.kind, completion.key) for completion in rig.tier.poll()]
    assert len(ended) == len(expected) == len(set(ended)) and set(ended) == expected
    assert rig.tier.start_load(key_of(0), rig.buffer()) is None
    assert rig.tier.put(key_of("late"), rig.buffer()) is False and rig.tier.stats()["drops"]["closed"] > 1
    rig.close()


@pytest.mark.parametrize(("capacity", "chunk", "says"), table(__file__, "disk sizes", CHUNK=CHUNK))
def test_sizes_that_cannot_work_are_named(tmp_path: Path, capacity: int, chunk: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DiskTier(tmp_path, capacity_bytes=capacity, chunk_bytes=chunk, fingerprint=b"")


def test_wrong_keys_and_buffers_are_named(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.store("a")
        for call, says in table(__file__, "keys and buffers", key=key_of("a"), CHUNK=CHUNK):
            with pytest.raises(ValueError, match=says):
                call(rig.tier)


def test_the_order_of_use_is_written_at_a_close_alone(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        cells = rig.tier.stats()["slots"]
        rig.store(*range(cells))
        rig.tier.touch([key_of(0), key_of(1)])
        assert rig.hits(2) == 1 and rig.tier.flush()
        assert not list(tmp_path.rglob("index"))
    assert list(tmp_path.rglob("index"))
    with Rig(tmp_path) as rig:
        rig.store("new")
        assert rig.hits(0, 1, 2) == 3
        rig.tier.check()


def filled(path: Path, **more: object) -> Path:
    with Rig(path, **more) as rig:  # type: ignore[arg-type]
        rig.store(*range(8))
        return Path(rig.tier.directory)


Says = Callable[..., str]


@pytest.fixture
def says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Says:
    """Return a function that runs `penstock cache` over one directory, and returns all that it prints."""

    def run(action: str, expected_code: int = 0, path: Path = tmp_path) -> str:
        assert main(["cache", action, str(path)]) == expected_code
        return "".join(capsys.readouterr())

    return run


def test_inspect_tells_what_is_there_and_names_who_uses_it(says: Says, tmp_path: Path) -> None:
    folder = filled(tmp_path, about=("/models/small", 16))
    for shown in (says("inspect"), says("inspect")):  # which itself locks the directory for a moment
        assert "model        /models/small\n" in shown and "tokens       128\n" in shown
    assert re.search(r"on disk      \d+ bytes \(0\.\d\d GiB\)\n", shown) and "bytes each (0.00 GiB together)" in shown
    assert folder.name in shown and "records      8 of" in shown and "in use       no" in shown and "cleanly" in shown
    for lock in (b"1234\n", b" " * ID_BYTES + b'["\xff", 16]'):  # from before stores said whose they are, and damaged
        (folder / "lock").write_bytes(lock)
        assert "model        unknown\n" in says("inspect") and "tokens       unknown\n" in says("inspect")
    with Rig(tmp_path):
        assert f"in use       by process {os.getpid()}" in says("inspect")


def test_verify_finds_the_one_bad_record_and_needs_no_index(says: Says, tmp_path: Path) -> None:
    folder = filled(tmp_path)
    assert "8 good, 0 bad" in says("verify")
    slab = folder / "slab-000000"
    content = bytearray(slab.read_bytes())
    content[3 * cell_bytes(CHUNK) + HEADER_BYTES + 17] ^= 1
    slab.write_bytes(content)
    assert "7 good, 1 bad" in says("verify", 1)
    (folder / "index").unlink()
    assert "0 good, 0 bad, 7 good but missing in the index" in says("verify")


def test_clear_touches_only_its_own_files(says: Says, tmp_path: Path) -> None:
    folder, other = filled(tmp_path), filled(tmp_path, fingerprint=b"other")
    mine = [tmp_path / "notes.txt", folder / "mine.txt", tmp_path / "folder" / "slab-000000"]
    (tmp_path / "folder").mkdir()
    for path in mine:
        path.write_text("keep")
    with Rig(tmp_path) as rig:
        assert "not cleared: " in says("clear", 1) and not other.exists()  # one is in use
        rig.tier.check()
        assert rig.hits(*range(8)) == 8
    says("clear")
    assert list(folder.iterdir()) == [folder / "mine.txt"]
    assert all(path.read_text() == "keep" for path in mine)
    with Rig(tmp_path) as rig:
        assert rig.hits(*range(8)) == 0


def test_a_directory_that_is_not_there_is_named(says: Says, tmp_path: Path) -> None:
    assert "absent: No such file or directory" in says("inspect", 2, tmp_path / "absent")
    assert "no records below" in says("clear")


def test_a_namespace_that_cannot_be_checked_holds_up_no_other(says: Says, tmp_path: Path) -> None:
    folder = filled(tmp_path)
    empty, linked = (folder.with_name(f"{sign * len(folder.name)}") for sign in ("0", "1"))
    empty.mkdir()
    linked.mkdir()
    (linked / "slab-000000").symlink_to(folder / "slab-000000")
    shown = says("verify", 1)
    assert shown.count(": not verified: ") == 2 and f"{folder.name}: 8 good, 0 bad" in shown


def test_a_cell_that_the_disk_cannot_read_is_bad(says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)

    class Failing(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() // cell_bytes(CHUNK) == 3:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(size)

    monkeypatch.setattr(operate, "open", lambda file, _mode: Failing(io.FileIO(file)), raising=False)
    assert "7 good, 1 bad" in says("verify", 1)
