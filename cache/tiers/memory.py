"""Aligned private memory for direct I/O by disks and devices, on huge pages where the system has them.

Huge pages raised the bandwidth of O_DIRECT by 20-40 %: a 4 MiB request then has a few segments instead of more than the
device accepts in one command. Python's anonymous `mmap` is shared memory by default, which gets huge pages only if the
administrator allows it; hence MAP_PRIVATE.
"""

import contextlib
import mmap
from typing import Any

import numpy as np

from penstock._csrc import ffi

HUGE_PAGE = 2 * 2**20


def huge_buffer(size_bytes: int) -> memoryview:
    """Allocate zeroed bytes aligned to 2 MiB; the kernel assigns memory when a page is first touched."""
    if size_bytes < 1:
        raise ValueError(f"size_bytes: {size_bytes} given; at least 1 is needed")
    pages = mmap.mmap(-1, size_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -address_of(pages) % HUGE_PAGE
    return memoryview(pages)[start : start + size_bytes]


def huge_array(rows: int, row_bytes: int) -> np.ndarray:
    """Allocate a `huge_buffer` as a uint8 array [rows, row_bytes]."""
    return np.frombuffer(huge_buffer(rows * row_bytes), np.uint8).reshape(rows, row_bytes)


def address_of(buffer: Any) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))
