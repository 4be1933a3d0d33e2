"""The system calls of the disk tier, one method each, so that tests can inject errors.

Files are opened relative to a directory descriptor and never through a symbolic link.
"""

import errno
import os
from collections.abc import Sequence
from typing import Any

_ALWAYS = os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700


class SystemCalls:
    """The real system calls. Methods raise OSError; `readv` and `writev` may transfer fewer bytes than requested."""

    def open(self, directory: int, name: str, flags: int) -> int:
        return os.open(name, flags | _ALWAYS, FILE_MODE, dir_fd=directory)

    def writev(self, file: int, parts: Sequence[Any], offset: int) -> int:
        return os.pwritev(file, parts, offset)

    def readv(self, file: int, parts: Sequence[Any], offset: int) -> int:
        return os.preadv(file, parts, offset)

    def allocate(self, file: int, size_bytes: int) -> None:
        """Extend the file to this size and allocate its blocks, or raise and restore its size."""
        before = os.fstat(file).st_size
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError:
            os.ftruncate(file, before)  # frees blocks that were allocated before the error
            raise

    def truncate(self, file: int, size_bytes: int) -> None:
        os.ftruncate(file, size_bytes)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def rename(self, directory: int, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def unlink(self, directory: int, name: str) -> None:
        os.unlink(name, dir_fd=directory)


def write_all(calls: SystemCalls, file: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = calls.writev(file, [view], offset)
        if written == 0:
            raise OSError(errno.EIO, "a write wrote no bytes")
        view, offset = view[written:], offset + written


def read_all(calls: SystemCalls, file: int) -> bytes:
    data = bytearray(os.fstat(file).st_size)
    view, offset = memoryview(data), 0
    while view and (count := calls.readv(file, [view], offset)):
        view, offset = view[count:], offset + count
    return bytes(data[:offset])
