"""`penstock cache inspect|verify|clear DIR`: what an operator can do with the directory of a disk tier.

Works on the files alone; a process that has a namespace locked keeps it, and is named. `clear` removes files that have
our names, in directories that have our names, and nothing else.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest as checksum

from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.directory import (
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
    """One that the operator can mend."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("inspect", "Show what lies in a directory that was given as --kv-disk-path."),
        ("verify", "Read every record and check it. Exit code 1 if some are bad."),
        ("clear", "Remove all records. Other files are left alone."),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("directory", type=Path, metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if all is well, 1 if something is bad or in use."""
    actions = {"inspect": (_inspect, "inspected"), "verify": (_verify, "checked"), "clear": (_clear, "cleared")}
    act, done = actions[args.action]
    codes = []
    for path in _namespaces(args.directory):
        try:
            codes.append(act(path))
        except (DirectoryInUse, CacheError, OSError) as error:
            print(f"{path.name}: not {done}: {error}")
            codes.append(1)
    if not codes:
        print(f"no records below {args.directory}")
    return max(codes, default=0)


def _inspect(path: Path) -> int:
    directory = open_directory(str(path), create=False)
    try:
        known = read_snapshot(SystemCalls(), directory)
        held = _held(directory, os.listdir(directory))
    finally:
        os.close(directory)
    print(path.name)
    print(f"  in use       {_holder(path) or 'no'}")
    print(f"  on disk      {held} bytes")
    if known is None:
        print("  index        none that can be trusted; the next start looks into every cell")
        return 0
    print(f"  records      {len(known.rows)} of {known.header.num_cells}, {known.header.cell_bytes} bytes each")
    print(f"  closed       {'in order' if known.header.clean else 'no, or still open'}")
    return 0


def _verify(path: Path) -> int:
    """Check every cell of a namespace that no process uses. Slabs are taken to have their usual size."""
    with _locked(path) as directory:
        known = read_snapshot(SystemCalls(), directory)
        namespace, size = (known.header.namespace, known.header.cell_bytes) if known else _guess(path)
        listed = {row["cell"]: (row["key"].tobytes(), row["sequence"]) for row in known.rows} if known else {}
        good = unlisted = 0
        bad = set(listed)  # not what the index says, or not whole
        for cell, record, is_whole in _records(path, namespace, size):
            if cell not in listed:
                unlisted += is_whole
            elif is_whole and listed[cell] == record:
                good += 1
                bad.remove(cell)
    print(f"{path.name}: {good} good, {len(bad)} bad, {unlisted} good ones that the index does not know")
    return 1 if bad else 0


def _clear(path: Path) -> int:
    """Remove what is ours in a namespace that no process uses."""
    with _locked(path) as directory:
        names = [name for name in os.listdir(directory) if OUR_FILES.fullmatch(name)]
        size = _held(directory, names)
        for name in sorted(names, key=lambda name: name == LOCK_FILE):  # it comes last: until then it is held
            os.unlink(name, dir_fd=directory)
    with contextlib.suppress(OSError):  # other files are kept there
        path.rmdir()
    print(f"{path.name}: {size} bytes given back")
    return 0


def _held(directory: int, names: list[str]) -> int:
    """Bytes on disk."""
    blocks = 0
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # a snapshot that has got its name meanwhile
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
    """The namespace's directory, ours alone meanwhile."""
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


def _guess(path: Path) -> tuple[bytes, int]:
    """Namespace and size of a cell from the first record of all, where there is no index."""
    for slab in sorted(path.glob("slab-*")):
        with open(_no_link(slab), "rb") as file:
            header = read_header(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"))
        if header is not None:
            return header.namespace, cell_bytes(header.length)
    raise CacheError(f"{path}: neither an index nor a first record says how large the cells are")


def _records(path: Path, namespace: bytes, size: int) -> Iterator[tuple[int, tuple[bytes, int], bool]]:
    """(cell, key and sequence, whole or not) of every cell with something like a record of this namespace in it."""
    for slab in sorted(path.iterdir()):
        if not (match := SLAB_FILE.fullmatch(slab.name)):
            continue
        cell = int(match[1]) * max(1, SLAB_BYTES // size)
        with open(_no_link(slab), "rb") as file:
            for number in range(os.stat(file.fileno()).st_size // size):
                try:
                    file.seek(number * size)
                    page, payload = file.read(HEADER_BYTES), file.read(size - HEADER_BYTES)
                except OSError:  # the disk cannot read it: bad, where the index names it
                    continue
                header = read_header(page)
                if header is not None and header.namespace == namespace:
                    is_whole = checksum(payload[: header.length]) == header.payload_checksum
                    yield cell + number, (header.key, header.sequence), is_whole


def _no_link(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
