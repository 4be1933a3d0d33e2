"""`penstock cache inspect|verify|clear DIR`: what an operator can do with the directory of a disk tier.

Works on the files alone; whoever has a namespace locked keeps it, and is named. `clear` removes files that have our
names, in directories that have our names, and nothing else.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.cache.tiers.disk.calls import Calls
from penstock.cache.tiers.disk.directory import (
    OUR_DIRECTORIES,
    OUR_FILES,
    SLAB_BYTES,
    SLAB_FILE,
    DirectoryInUse,
    lock,
    open_directory,
)
from penstock.cache.tiers.disk.journal import Geometry, read_index
from penstock.cache.tiers.disk.record import HEADER_BYTES, checksum, read_header, slot_bytes


class CacheError(Exception):
    """One that whoever typed the command can mend."""


class Verdict(NamedTuple):
    good: int
    bad: int  # not what the index says, or not whole
    unlisted: int  # whole, but the index does not know them


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
    act = {"inspect": _inspect, "verify": _verify, "clear": _clear}[args.action]
    codes = [act(path) for path in _namespaces(args.directory)]
    if not codes:
        print(f"no records below {args.directory}")
    return max(codes, default=0)


def verify(path: Path) -> Verdict:
    """Check every slot of a namespace that nobody else uses. Slabs are taken to have their usual size."""
    calls = Calls()
    with _locked(path) as directory:
        known = read_index(calls, directory)
        geometry = known.geometry if known else _guess(path)
        listed = {row["slot"]: (row["key"].tobytes(), row["sequence"]) for row in known.rows} if known else {}
        good = bad = unlisted = 0
        seen = set()
        for slot, header_key, sequence, is_whole in _records(path, geometry):
            expected = listed.get(slot)
            seen.add(slot)
            if expected is None:
                unlisted += is_whole
            elif is_whole and expected == (header_key, sequence):
                good += 1
            else:
                bad += 1
        return Verdict(good, bad + len(listed.keys() - seen), unlisted)


def clear(path: Path) -> int:
    """Remove what is ours in a namespace that nobody else uses; how many bytes that gave back."""
    with _locked(path) as directory:
        names = [name for name in os.listdir(directory) if OUR_FILES.fullmatch(name)]
        size = sum(os.stat(name, dir_fd=directory, follow_symlinks=False).st_blocks * 512 for name in names)
        for name in sorted(names, key=lambda name: name == "lock"):  # the lock last: until then it is held
            os.unlink(name, dir_fd=directory)
    with contextlib.suppress(OSError):  # somebody keeps other files there
        path.rmdir()
    return size


def _inspect(path: Path) -> int:
    directory = open_directory(str(path), create=False)
    try:
        known = read_index(Calls(), directory)
        held = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(path))
    finally:
        os.close(directory)
    print(path.name)
    print(f"  in use       {_holder(path) or 'no'}")
    print(f"  on disk      {held} bytes")
    if known is None:
        print("  index        none that can be trusted; the next start looks into every slot")
        return 0
    print(f"  records      {len(known.rows)} of {known.geometry.num_slots}, {known.geometry.slot_bytes} bytes each")
    print(f"  closed       {'in order' if known.is_clean else 'no, or still open'}")
    return 0


def _verify(path: Path) -> int:
    try:
        good, bad, unlisted = verify(path)
    except DirectoryInUse as error:
        print(f"{path.name}: not checked: {error}")
        return 1
    print(f"{path.name}: {good} good, {bad} bad, {unlisted} good ones that the index does not know")
    return 1 if bad else 0


def _clear(path: Path) -> int:
    try:
        size = clear(path)
    except DirectoryInUse as error:
        print(f"{path.name}: not cleared: {error}")
        return 1
    print(f"{path.name}: {size} bytes given back")
    return 0


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
    try:
        directory = open_directory(str(path), create=False)
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror}") from None
    try:
        held = lock(Calls(), directory, str(path))
        try:
            yield directory
        finally:
            os.close(held)
    finally:
        os.close(directory)


def _holder(path: Path) -> str | None:
    try:
        with _locked(path):
            return None
    except DirectoryInUse as error:
        return re.sub(".* is in use ", "", str(error))


def _guess(path: Path) -> Geometry:
    """The geometry from the first record of all, where no index tells."""
    for slab in sorted(path.glob("slab-*")):
        with open(_no_link(slab), "rb") as file:
            header = read_header(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"))
        if header is not None:
            return Geometry(header.namespace, slot_bytes(header.length), 0)
    raise CacheError(f"{path}: neither an index nor a first record tells how large the slots are")


def _records(path: Path, geometry: Geometry) -> Iterator[tuple[int, bytes, int, bool]]:
    """(slot, key, sequence, whole or not) of every slot with something like a record of this namespace in it."""
    slots_per_slab = max(1, SLAB_BYTES // geometry.slot_bytes)
    for slab in sorted(path.iterdir()):
        if not (match := SLAB_FILE.fullmatch(slab.name)):
            continue
        with open(_no_link(slab), "rb") as file:
            index = 0
            while len(page := file.read(HEADER_BYTES)) == HEADER_BYTES:
                payload = file.read(geometry.slot_bytes - HEADER_BYTES)
                header = read_header(page)
                if header is not None and header.namespace == geometry.namespace:
                    is_whole = checksum(payload[: header.length]) == header.payload_checksum
                    yield int(match[1]) * slots_per_slab + index, header.key, header.sequence, is_whole
                index += 1


def _no_link(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
