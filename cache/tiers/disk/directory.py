"""The directory of one namespace: its permissions, its lock and its slab files.

PATH/<namespace, 32 hex digits>/    mode 0700; all files in it have mode 0600
    lock              locked with flock by the process that uses the directory; contains its process id, in 20 columns,
                      and in JSON the model and the tokens of a record, or nothing
    probe             a page for testing the disk
    index             see snapshot.py
    slab-000000 …     cells of records, preallocated; 1 GiB each, except the last
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading

import msgspec

from penstock.cache.tiers.disk.calls import DIRECTORY_MODE, SystemCalls
from penstock.cache.tiers.disk.record import PAGE, Geometry
from penstock.cache.tiers.memory import huge_buffer

SLAB_BYTES = 2**30
LOCK_FILE, PROBE_FILE = "lock", "probe"
OUR_FILES = re.compile(r"lock|probe|index|index\.tmp|slab-\d{6,}")
OUR_DIRECTORIES = re.compile(r"[0-9a-f]{32}")
SLAB_FILE = re.compile(r"slab-(\d{6,})")
ID_BYTES = 21  # of the process id and the newline


class DirectoryInUse(OSError):
    """The error for a directory that another process has locked."""


def open_directory(path: str, create: bool) -> int:
    """Open a directory that belongs to this user and set its mode to 0700 if others had access; return its descriptor."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(directory)
    if status.st_uid != os.geteuid():
        os.close(directory)
        raise PermissionError(errno.EPERM, f"belongs to user {status.st_uid}, not to {os.geteuid()}", path)
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.fchmod(directory, DIRECTORY_MODE)
    return directory


def lock(calls: SystemCalls, directory: int, path: str, about: tuple[str, int] | None = None) -> int:
    """Lock the directory; return the descriptor that holds the lock until it is closed or the process ends. Without
    `about` the file keeps what it says about the records."""
    file = calls.open(directory, LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(file, b"%-20d\n" % os.getpid(), 0)
        if about is not None:
            os.ftruncate(file, ID_BYTES)
            os.pwrite(file, msgspec.json.encode(about), ID_BYTES)
    except BlockingIOError:
        holder = os.pread(file, 20, 0).decode("ascii", "replace").strip() or "(id not written yet)"
        os.close(file)
        raise DirectoryInUse(f"{path} is in use by process {holder}") from None
    except BaseException:
        os.close(file)
        raise
    return file


def open_probe(calls: SystemCalls, directory: int) -> tuple[int, bool]:
    """Create the probe file; return its descriptor, and whether O_DIRECT works here."""
    for flag in (os.O_DIRECT, 0):
        with contextlib.ExitStack() as undo:
            try:
                file = calls.open(directory, PROBE_FILE, os.O_RDWR | os.O_CREAT | flag)
                undo.callback(os.close, file)
                if is_usable(calls, file, huge_buffer(PAGE)):
                    undo.pop_all()
                    return file, bool(flag)
            except OSError as error:
                if not flag or error.errno != errno.EINVAL:
                    raise
    raise OSError(errno.EIO, "a page that was written cannot be read back")


def is_usable(calls: SystemCalls, file: int, page: memoryview) -> bool:
    """Write a page to the probe file and read it back."""
    return calls.writev(file, [page], 0) == PAGE and calls.readv(file, [page], 0) == PAGE


class Slabs:
    """The slab files, opened and allocated at first use. Worker threads call it."""

    def __init__(
        self, calls: SystemCalls, directory: int, geometry: Geometry, *, slab_bytes: int, is_direct: bool
    ) -> None:
        self.cell_bytes, self.num_cells = geometry.cell_bytes, geometry.num_cells
        self.cells_per_slab = max(1, slab_bytes // self.cell_bytes)
        self.is_direct = is_direct
        self._calls = calls
        self._directory = directory
        self._flags = os.O_RDWR | (os.O_DIRECT if is_direct else 0)
        self._files: dict[int, int] = {}
        self._backed: set[int] = set()  # fully allocated slabs
        self._lock = threading.Lock()  # held while a slab is opened or grown, never during record I/O

    def trim(self) -> int:
        """Delete what exceeds the capacity, which may have been larger before; return the number of allocated cells."""
        num_backed = 0
        names = os.listdir(self._directory)
        for slab, name in sorted((int(found[1]), name) for name in names if (found := SLAB_FILE.fullmatch(name))):
            size = self._size(slab)
            if size == 0:
                self._calls.unlink(self._directory, name)
                continue
            file = self._calls.open(self._directory, name, os.O_RDWR)
            try:
                have = os.fstat(file).st_size
                if have > size:
                    self._calls.truncate(file, size)
            finally:
                os.close(file)
            if have >= size:
                self._backed.add(slab)
            if slab * self.cells_per_slab == num_backed:  # no gap before this slab
                num_backed += min(have, size) // self.cell_bytes
        return num_backed

    def locate(self, cell: int, *, grow: bool) -> tuple[int, int]:
        """Return the file and offset of a cell. Without `grow`, raise FileNotFoundError if its slab does not exist."""
        slab, index = divmod(cell, self.cells_per_slab)
        file = self._files.get(slab)
        if file is None or (grow and slab not in self._backed):
            with self._lock:
                file = self._open(slab, grow)
        return file, index * self.cell_bytes

    def is_backed(self, cell: int) -> bool:
        return cell // self.cells_per_slab in self._backed

    def close(self) -> None:
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def _open(self, slab: int, grow: bool) -> int:
        file = self._files.get(slab)
        if file is None:
            flags = self._flags | (os.O_CREAT if grow else 0)
            file = self._files[slab] = self._calls.open(self._directory, f"slab-{slab:06d}", flags)
        if grow and slab not in self._backed:
            size = self._size(slab)
            if os.fstat(file).st_size < size:
                self._calls.allocate(file, size)
            self._backed.add(slab)
        return file

    def _size(self, slab: int) -> int:
        cells = self.num_cells - slab * self.cells_per_slab
        return max(0, min(cells, self.cells_per_slab)) * self.cell_bytes
