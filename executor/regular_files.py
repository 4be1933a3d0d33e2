"""Opens regular files only: opening or reading a FIFO, a socket or a device can block forever.

All code that reads a file from a path given by a client or an operator uses these functions.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def require_regular(path: Path) -> None:
    """Raise OSError unless `path` is a regular file, without opening it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raise OSError if `path` is anything else.

    The path may have been replaced after the check, so the file is opened without blocking and checked again.
    """
    require_regular(path)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """Return the whole content of a regular file."""
    with open_regular(path) as file:
        return file.read()
