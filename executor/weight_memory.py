"""Memory for a CPU's weights, in huge pages where the kernel has them. A step reads all of it, and with pages of 4 KiB
waits for as many addresses. Weights share regions, so that what rounding up to a huge page wastes is not paid by each.
No torch here: weights are packed while it is imported.
"""

import threading

from penstock.cache.tiers.memory import huge_buffer

REGION = 32 << 20  # lives as long as one weight in it does
ALIGNMENT = 64

_lock = threading.Lock()
_region, _used = memoryview(b""), 0


def take(num_bytes: int) -> memoryview:
    """Zeroed. Raises OSError if there is no memory."""
    global _region, _used
    if num_bytes > REGION // 2:
        return huge_buffer(num_bytes)
    with _lock:
        if _used + num_bytes > len(_region):
            _region, _used = huge_buffer(REGION), 0
        first, end = _used, _used + num_bytes
        _used = -(-end // ALIGNMENT) * ALIGNMENT
        return _region[first:end]
