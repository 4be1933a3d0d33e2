"""`penstock cache inspect|verify|clear`."""

import errno
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cache.tiers.disk import operate
from penstock.cache.tiers.disk.record import HEADER_BYTES, cell_bytes
from penstock.cli import main
from tests.support.disk_rig import CHUNK, Rig


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
    (folder / "lock").write_bytes(b"1234\n")  # as stores were written before they said whose they are
    assert "model        unknown\n" in says("inspect") and "tokens       unknown\n" in says("inspect")
    with Rig(tmp_path):
        assert f"in use       by process {os.getpid()}" in says("inspect")


def test_verify_finds_the_one_bad_record(says: Says, tmp_path: Path) -> None:
    folder = filled(tmp_path)
    assert "8 good, 0 bad" in says("verify")
    with (folder / "slab-000000").open("r+b") as file:
        file.seek(3 * cell_bytes(CHUNK) + HEADER_BYTES + 17)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert "7 good, 1 bad" in says("verify", 1)


def test_verify_needs_no_index(says: Says, tmp_path: Path) -> None:
    (filled(tmp_path) / "index").unlink()
    assert "0 good, 0 bad, 8 good but missing in the index" in says("verify")


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
