"""The interface of the KV cache tiers below device memory. It handles keys and bytes, not requests or tensors.

The engine core owns the index (cache/tiers/index.py): the host block and the stores of each key, and the transfers in
flight. The ranks own the bytes (executor/tiers/transfers.py): each rank has its shard of every host block and its own
instance of each store. A block is available only if every rank has its shard.

    device blocks ⇄ host blocks ⇄ disk, peer
      (save, restore)      (store, load)

All data passes through host blocks: a load fills one, a store copies one, and a load succeeds only if the bytes have
been verified. A *store* is also the object that holds the blocks of one tier.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol


class StoreResult(NamedTuple):
    """The result of a load or store, reported exactly once; the store does not touch the buffer afterwards."""

    kind: Literal["load", "store"]
    ticket: int  # of a load
    key: bytes
    ok: bool


class Store(Protocol):
    """One rank's storage below the host tier: a disk, or the tiers of another engine.

    No call blocks: work is queued, and `poll` reports the results. A store that cannot serve in time completes with `ok`
    False, whatever the reason (full, broken, stalled, expired): a failure is a miss, never an error. A peer is read-only
    and refuses every `put`.
    """

    @property
    def is_open(self) -> bool:
        """Return whether the store can serve at present."""

    def contains(self, key: bytes) -> bool: ...

    def put(self, key: bytes, buffer: Any) -> bool:
        """Queue a store. True borrows the buffer until the result is polled; after False no result comes."""

    def start_load(self, key: bytes, out: Any) -> int | None:
        """Queue a load into `out`, borrowed until its result, and return its ticket; None if the key is not stored."""

    def poll(self) -> Iterable[StoreResult]: ...

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys gained since the last call, including those of earlier runs, and the lost keys."""

    def touch(self, keys: list[bytes]) -> None:
        """Mark keys as used, in this tier or a nearer one; pass the end of a chain before its start."""

    def stats(self) -> dict[str, Any]:
        """Return statistics: numbers, and dicts of numbers."""

    def close(self) -> None:
        """Close the store. It no longer touches borrowed buffers, except that a hung device may still write to one."""


def chunk_view(name: str, buffer: Any, chunk_bytes: int, *, to_fill: bool = False) -> memoryview:
    """Return a caller's buffer as a memoryview of bytes; raise ValueError if it cannot hold a chunk."""
    chunk = memoryview(buffer)
    if to_fill and chunk.readonly:
        raise ValueError(f"{name}: a writable buffer is expected")
    if chunk.nbytes != chunk_bytes or not chunk.c_contiguous:
        raise ValueError(f"{name}: {chunk.nbytes} bytes given; a chunk has {chunk_bytes} contiguous bytes")
    return chunk.cast("B")
