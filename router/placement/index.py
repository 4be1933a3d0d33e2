"""The index of which slot holds which blocks: the Python side of csrc/route_index.c.

The index has 64-bit keys and slot numbers, and no replicas, time or load. Any thread may call any method: the C side
holds a lock, and the calls release the GIL. Memory is bounded at construction.

A key is the low 64 bits of the engine's own. The engine's rules (cache/keys.py) and these must agree on every id, or
nothing ever matches: both call csrc/keys.c.
"""

import secrets
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._csrc import ffi, lib
from penstock.cache.keys import namespace_root

Keys = npt.NDArray[np.uint64]
BYTES, U64S = map(ffi.typeof, ("uint8_t[]", "uint64_t[]"))  # parsed once, not at each call


class KeySpace(NamedTuple):
    """The names that one kind of replica gives its blocks. Replicas of one model and block size share a key space."""

    fingerprint: bytes
    block_size: int

    def root(self, salt: str | None, adapter: str | None) -> bytes:
        return namespace_root(model=self.fingerprint, adapter=adapter, salt=salt)


def prompt_keys(tokens: bytes, space: KeySpace, root: bytes) -> Keys:
    """Hash the full blocks of a prompt (little-endian int32), in one call without the GIL."""
    keys = np.empty(len(tokens) // 4 // space.block_size, dtype=np.uint64)
    lib.penstock_route_keys(root, tokens, len(keys), space.block_size, ffi.from_buffer(U64S, keys))
    return keys


class RouteIndex:
    """Holds facts, which replicas reported, until they are withdrawn or evicted; and the router's predictions, until they
    have aged twice."""

    def __init__(self, capacity: int, num_predictions: int = 2**17, seed: int | None = None) -> None:
        assert 1 <= capacity <= 2**31 and 1 <= num_predictions <= 2**31, (capacity, num_predictions)
        seed = secrets.randbits(64) if seed is None else seed
        opened = lib.penstock_route_open(capacity, num_predictions, seed)
        if opened == ffi.NULL:
            raise MemoryError(f"capacity: no memory for {capacity} facts and {num_predictions} predictions")
        self._index = ffi.gc(opened, lib.penstock_route_close)
        self.num_slots = 0

    def add_slot(self, limit: int, at_ends: bool = False) -> int:
        """Return a slot that holds nothing, for at most `limit` blocks; -1 if every slot is in use, or retired and not swept
        yet. Retired slots are swept a stretch with every call, so a later call may succeed.

        `at_ends`: a key that it holds stands for all of a prompt before it, which it need not hold."""
        slot: int = lib.penstock_route_add_slot(self._index, limit, at_ends)
        self.num_slots = max(self.num_slots, slot + 1)
        return slot

    def retire_slot(self, slot: int) -> None:
        """Forget what the slot holds. O(1): its bits are swept up later."""
        lib.penstock_route_retire_slot(self._index, slot)

    def store(self, slot: int, keys: bytes | Keys) -> int:
        """Store facts; return how many keys the limit of the slot refused."""
        raw = ffi.from_buffer(BYTES, keys)
        return int(lib.penstock_route_store(self._index, slot, raw, len(raw) // 8))

    def remove(self, slot: int, keys: bytes | Keys) -> None:
        raw = ffi.from_buffer(BYTES, keys)
        lib.penstock_route_remove(self._index, slot, raw, len(raw) // 8)

    def predict(self, slot: int, keys: Keys, num_known: int) -> None:
        """Store predictions, of which the first `num_known` may be facts of this slot already."""
        lib.penstock_route_predict(self._index, slot, ffi.from_buffer(U64S, keys), len(keys), num_known)

    def age_predictions(self) -> None:
        lib.penstock_route_age_predictions(self._index)

    def match_into(self, counts: Any, keys: Keys, num_ends: int) -> None:
        """Count per slot how many leading keys of a prompt it holds. `counts`: an array of C, `int32_t[num_slots]`."""
        lib.penstock_route_match(self._index, ffi.from_buffer(U64S, keys), len(keys), num_ends, counts, self.num_slots)

    def num_held(self, slot: int) -> int:
        return int(lib.penstock_route_num_held(self._index, slot))

    def stats(self) -> dict[str, int]:
        out = ffi.new("uint64_t[4]")
        lib.penstock_route_stats(self._index, out)
        return dict(zip(("facts", "predictions", "evictions_total", "reserved_bytes"), out, strict=True))

    def check(self) -> None:
        """Assert every invariant; O(entries)."""
        assert lib.penstock_route_check(self._index) == 1, "the index is broken"
