"""Memory for a CPU's weights, in huge pages where the kernel has them. A step reads all of it, and with pages of 4 KiB
waits for as many addresses. Weights share regions, so that what rounding up to a huge page wastes is not paid by each; a
region goes with the last weight in it. No torch here: weights are packed while it is imported.
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


def take(num_bytes: int) -> memoryview:
    """Zeroed. Raises OSError if there is no memory."""
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
