"""The command `penstock cache inspect|verify|clear DIR` for the directory of a disk tier.

It works on the files alone. `verify` and `clear` skip a namespace that a process has locked, and print its process id.
`clear` removes only files with the tier's file names in directories with its directory names.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest as checksum

from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.directory import (
    ID_BYTES,
    LOCK_FILE,
    OUR_DIRECTORIES,
    OUR_FILES,
    SLAB_BYTES,
    SLAB_FILE,
    DirectoryInUse,
    lock,
    open_directory,
)
from penstock.cache.tiers.disk.record import HEADER_BYTES, cell_bytes, read_header
from penstock.cache.tiers.disk.snapshot import read_snapshot


class CacheError(Exception):
    """An error that the operator can fix."""


USER_ERRORS = (CacheError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary, act, done in (
        ("inspect", "Show the contents of a directory used as --kv-disk-path.", _inspect, "inspected"),
        ("verify", "Read and verify every record. Exits with code 1 if a record is bad.", _verify, "verified"),
        ("clear", "Remove all records. Other files are kept.", _clear, "cleared"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("directory", type=Path, metavar="DIR")
        action.set_defaults(act=act, done=done)


def run(args: argparse.Namespace) -> int:
    """Run the action on every namespace; return exit code 0, or 1 if a record is bad or a namespace failed."""
    codes = []
    for path in _namespaces(args.directory):
        try:
            codes.append(args.act(path))
        except (DirectoryInUse, CacheError, OSError) as error:
            print(f"{path.name}: not {args.done}: {error}")
            codes.append(1)
    if not codes:
        print(f"no records below {args.directory}")
    return max(codes, default=0)


def _inspect(path: Path) -> int:
    directory = open_directory(str(path), create=False)
    try:
        index = read_snapshot(SystemCalls(), directory)
        held = _disk_usage(directory, os.listdir(directory))
    finally:
        os.close(directory)
    model, record_tokens = _about(path)
    print(path.name)
    print(f"  model        {model}")
    print(f"  in use       {_holder(path) or 'no'}")
    print(f"  on disk      {held} bytes ({held / 2**30:.2f} GiB)")
    if index is None:
        print("  index        missing or invalid; the next start scans every cell")
        return 0
    size = f"{index.header.cell_bytes} bytes each"
    if index.header.clean:
        held = len(index.rows) * index.header.cell_bytes
        print(f"  records      {len(index.rows)} of {index.header.num_cells}, {size} ({held / 2**30:.2f} GiB together)")
        print(f"  tokens       {len(index.rows) * record_tokens if record_tokens else 'unknown'}")
        print("  closed       cleanly")
    else:
        print(f"  cells        {index.header.num_cells}, {size}")
        print("  closed       no, or still open; after a crash the next start scans every cell")
    return 0


def _verify(path: Path) -> int:
    """Verify every cell of a namespace that no process uses, assuming slabs of the default size."""
    with _locked(path) as directory:
        index = read_snapshot(SystemCalls(), directory)
        namespace, size = (index.header.namespace, index.header.cell_bytes) if index else _read_first_header(path)
        listed = {row["cell"]: (row["key"].tobytes(), row["sequence"]) for row in index.rows} if index else {}
        good = unlisted = 0
        bad = set(listed)  # cells whose record differs from the index or is corrupt
        for cell, record, is_whole in _records(path, namespace, size):
            if cell not in listed:
                unlisted += is_whole
            elif is_whole and listed[cell] == record:
                good += 1
                bad.remove(cell)
    print(f"{path.name}: {good} good, {len(bad)} bad, {unlisted} good but missing in the index")
    return 1 if bad else 0


def _clear(path: Path) -> int:
    """Remove the tier's files of a namespace that no process uses."""
    with _locked(path) as directory:
        names = [name for name in os.listdir(directory) if OUR_FILES.fullmatch(name)]
        size = _disk_usage(directory, names)
        for name in sorted(names, key=lambda name: name == LOCK_FILE):  # the lock file last: it guards the others
            os.unlink(name, dir_fd=directory)
    with contextlib.suppress(OSError):  # other files keep the directory
        path.rmdir()
    print(f"{path.name}: {size} bytes ({size / 2**30:.2f} GiB) freed")
    return 0


def _about(path: Path) -> tuple[str, int]:
    """Return the model and the tokens of a record, as the last process that used the namespace wrote them."""
    try:
        with open(_no_link(path / LOCK_FILE), "rb") as file:
            return msgspec.json.decode(file.read()[ID_BYTES:], type=tuple[str, int])
    except (OSError, ValueError, RecursionError):
        return "unknown", 0


def _disk_usage(directory: int, names: list[str]) -> int:
    """Return the bytes that the files occupy on disk."""
    blocks = 0
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # the index may be renamed meanwhile
            blocks += os.stat(name, dir_fd=directory, follow_symlinks=False).st_blocks
    return blocks * 512


def _namespaces(directory: Path) -> list[Path]:
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        raise CacheError(f"{directory}: {error.strerror}") from None
    ours = [entry for entry in entries if OUR_DIRECTORIES.fullmatch(entry.name)]
    return sorted(Path(entry.path) for entry in ours if entry.is_dir(follow_symlinks=False))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open and lock the namespace's directory; yield its descriptor."""
    with contextlib.ExitStack() as undo:
        try:
            directory = open_directory(str(path), create=False)
        except OSError as error:
            raise CacheError(f"{path}: {error.strerror}") from None
        undo.callback(os.close, directory)
        undo.callback(os.close, lock(SystemCalls(), directory, str(path)))
        yield directory


def _holder(path: Path) -> str | None:
    try:
        with _locked(path):
            return None
    except DirectoryInUse as error:
        return re.sub(".* is in use ", "", str(error))


def _read_first_header(path: Path) -> tuple[bytes, int]:
    """Read the namespace and the cell size from the first record of a slab, for a directory without an index."""
    for slab in sorted(path.glob("slab-*")):
        with open(_no_link(slab), "rb") as file:
            header = read_header(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"))
        if header is not None:
            return header.namespace, cell_bytes(header.length)
    raise CacheError(f"{path}: the cell size is unknown: neither the index nor a first record is readable")


def _records(path: Path, namespace: bytes, size: int) -> Iterator[tuple[int, tuple[bytes, int], bool]]:
    """Yield (cell, (key, sequence), is whole) for every cell with a valid record header of this namespace."""
    for slab in sorted(path.iterdir()):
        if not (match := SLAB_FILE.fullmatch(slab.name)):
            continue
        cell = int(match[1]) * max(1, SLAB_BYTES // size)
        with open(_no_link(slab), "rb") as file:
            for number in range(os.stat(file.fileno()).st_size // size):
                try:
                    file.seek(number * size)
                    page, payload = file.read(HEADER_BYTES), file.read(size - HEADER_BYTES)
                except OSError:  # unreadable: counts as bad if the index lists it
                    continue
                header = read_header(page)
                if header is not None and header.namespace == namespace:
                    is_whole = checksum(payload[: header.length]) == header.payload_checksum
                    yield cell + number, (header.key, header.sequence), is_whole


def _no_link(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
