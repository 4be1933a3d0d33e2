"""What the tiers beneath the device's blocks agree on. It knows keys and bytes, nothing of requests or tensors.

Two sides work together. The engine core owns the index (cache/tiers/index.py): which key lies in which host slot,
in which store, and what is on its way. The ranks own the bytes (executor/tiers/transfers.py): each has the host slots of
its share of every block, and its own instance of each store. A block is there only when every rank has its part.

    device blocks ⇄ host slots ⇄ disk, peer
      (save, restore)      (read, write)

Everything passes through the host: a store reads into a host slot and writes from one, and only bytes that it has
checked count as read.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

DISK, PEER = "disk", "peer"
SERVED = "served"  # among the stores' figures: what was given to peers


def peer_name(address: str) -> str:
    """The store's name: there is one for each peer."""
    return f"{PEER} {address}"


def tier_of(store: str) -> str:
    """The tier that a store belongs to: all peers are one."""
    return store.partition(" ")[0]


class Counts(NamedTuple):
    """Leading blocks of a chain by the nearest tier that has them, in one walk without a system call."""

    device: int
    host: int
    loading: int  # on their way to the host
    stores: dict[str, int]


class Completion(Protocol):
    """The end of a load or of a store, exactly one for each."""

    @property
    def kind(self) -> Literal["load", "store"]: ...
    @property
    def ticket(self) -> int: ...  # of a load
    @property
    def key(self) -> bytes: ...
    @property
    def ok(self) -> bool: ...


class Store(Protocol):
    """One rank's bytes beneath the host tier: a disk, or the tiers of another engine.

    No call blocks: work is queued, and `poll` tells how it ended. A store that cannot serve in time completes with
    `ok` False, whatever the reason (full, broken, stalled, a lease that has run out): it is a miss, never an error.
    A peer takes no `put`.
    """

    @property
    def is_open(self) -> bool:
        """It can serve at present."""
        ...

    def contains(self, key: bytes) -> bool: ...

    def put(self, key: bytes, buffer: Any) -> bool:
        """Take a copy in time. True borrows the buffer until the completion; False does not, and there is none."""
        ...

    def start_load(self, key: bytes, out: Any) -> int | None:
        """A ticket, and `out` borrowed until its completion; None where the key is not there (any more)."""
        ...

    def poll(self) -> Iterable[Completion]: ...

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that can be read since the last call, those of an earlier life included; and keys that cannot."""
        ...

    def touch(self, keys: list[bytes]) -> None:
        """These were used, in this tier or a nearer one; the start of a chain comes first."""
        ...

    def stats(self) -> dict[str, Any]:
        """Numbers, and dicts of numbers."""
        ...

    def close(self) -> None:
        """Borrowed buffers are left alone from here on, but for what a hanging device may still write."""
        ...
