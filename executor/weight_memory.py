"""Allocates memory for weights on a CPU, in huge pages if the kernel supports them. A step reads all weights, and with
pages of 4 KiB it would wait for many TLB misses. Weights share regions, so that each need not be rounded up to a huge
page; a region is freed with its last weight.
"""

import threading
import weakref
from typing import Any

from penstock.cache.tiers.memory import address_of, huge_buffer

REGION = 32 << 20
ALIGNMENT = 64

_lock = threading.Lock()
_last: "weakref.ref[Any] | None" = None  # the mapping of the last region
_next = 0  # its first free byte


def allocate(num_bytes: int) -> memoryview:
    """Allocate `num_bytes` of zeroed memory; raise OSError if there is none left."""
    global _last, _next
    if num_bytes > REGION // 2:
        return huge_buffer(num_bytes)
    with _lock:
        mapping = None if _last is None else _last()
        if mapping is None or _next + num_bytes > len(mapping):
            region = huge_buffer(REGION)
            mapping = region.obj
            _last, _next = weakref.ref(mapping), address_of(region) - address_of(mapping)
        piece = memoryview(mapping)[_next : _next + num_bytes]
        _next += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece
