"""What the tiers beneath the device's blocks agree on. It knows keys and bytes, nothing of requests or tensors.

Two sides work together. The engine core owns the index (cache/tiers/index.py): which key lies in which host block,
in which store, and what is in flight. The ranks own the bytes (executor/tiers/transfers.py): each has its share of
every host block, and its own instance of each store. A block is there only when every rank has its part.

    device blocks ⇄ host blocks ⇄ disk, peer
      (save, restore)      (read, write)

Everything passes through the host: a store reads into a host block and writes from one, and only bytes that it has
checked count as read.
"""

from collections.abc import Container, Iterable
from typing import Any, Literal, NamedTuple, Protocol

DISK, PEER = "disk", "peer"
SERVED = "served"  # among the stores' figures: what was given to peers


def peer_name(address: str) -> str:
    """The store's name: there is one for each peer."""
    return f"{PEER} {address}"


def tier_of(store: str) -> str:
    """The tier that a store belongs to: all peers are one."""
    return store.partition(" ")[0]


class StoreResult(NamedTuple):
    """The end of a load or a store, exactly one for each: from here on the store does not touch its buffer."""

    kind: Literal["load", "store"]
    ticket: int  # of a load
    key: bytes
    ok: bool


class Store(Protocol):
    """One rank's bytes beneath the host tier: a disk, or the tiers of another engine.

    No call blocks: work is queued, and `poll` reports how it ended. A store that cannot serve in time completes with
    `ok` False, whatever the reason (full, broken, stalled, a lease that has run out): it is a miss, never an error.
    A peer takes no `put`.
    """

    @property
    def is_open(self) -> bool:
        """It can serve at present."""
        ...

    def contains(self, key: bytes) -> bool: ...

    def put(self, key: bytes, buffer: Any) -> bool:
        """Take a copy in time. True borrows the buffer until the result; False does not, and there is none."""
        ...

    def start_load(self, key: bytes, out: Any) -> int | None:
        """A ticket, and `out` borrowed until its result; None where the key is not there (any more)."""
        ...

    def poll(self) -> Iterable[StoreResult]: ...

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that can be read since the last call, those of an earlier life included; and keys that cannot."""
        ...

    def touch(self, keys: list[bytes]) -> None:
        """Note that these were used, in this tier or a nearer one; the end of a chain comes before its start."""
        ...

    def stats(self) -> dict[str, Any]:
        """Numbers, and dicts of numbers."""
        ...

    def close(self) -> None:
        """Borrowed buffers are left alone from here on, but for what a hanging device may still write."""
        ...


def chunk_of(name: str, buffer: Any, chunk_bytes: int, *, to_write: bool = False) -> memoryview:
    """A buffer that a store was given, as bytes; ValueError names what is wrong with it."""
    chunk = memoryview(buffer)
    if to_write and chunk.readonly:
        raise ValueError(f"{name}: a buffer that can be written to is expected")
    if chunk.nbytes != chunk_bytes or not chunk.c_contiguous:
        raise ValueError(f"{name}: {chunk.nbytes} bytes given; a chunk has {chunk_bytes}, in one piece")
    return chunk.cast("B")


class KeyChanges:
    """Keys that came and went since the last `take`: what went and came back, or came and went, has not changed."""

    def __init__(self, came: Iterable[bytes] = ()) -> None:
        self._changed = dict.fromkeys(came, True)  # key → whether it is there now

    def note(self, key: bytes, is_there: bool) -> None:
        """This key was not there and is now, or the other way round."""
        if self._changed.get(key, is_there) == is_there:
            self._changed[key] = is_there
        else:
            del self._changed[key]

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(the keys that came, the keys that went)."""
        changed, self._changed = self._changed, {}
        return [key for key, has in changed.items() if has], [key for key, has in changed.items() if not has]

    def check(self, keys: Container[bytes]) -> None:
        assert all((key in keys) == has for key, has in self._changed.items())


class JobTimes:
    """How many loads or stores ended well, and how long they took together."""

    def __init__(self) -> None:
        self.num, self.sum_s = 0, 0.0

    def add(self, seconds: float) -> None:
        self.num += 1
        self.sum_s += seconds
