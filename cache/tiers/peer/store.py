"""The tiers of another engine as one more store: its blocks by key, over the network, one peer to an instance.

The caller's thread owns the index, which is what the peer has announced, and never waits; a thread of its own
(link.py) talks. Any failure is a miss. It takes no stores: blocks are copied from a peer, never to one.

    start_load ─▶ asks ─▶ link ─▶ done ─▶ poll: results
                          link ─▶ keys ─▶ changes: what the peer has, and has no more
"""

from collections.abc import Iterable
from typing import Any

from penstock.cache.tiers.base import StoreResult, chunk_of
from penstock.cache.tiers.peer.announced import Announced
from penstock.cache.tiers.peer.link import LinkLimits, Load, PeerLink

MAX_KEYS = 2**20  # of one peer, 100 MB: what it announces beyond that is not heard


class PeerTier:
    """One rank of the engine at `endpoint` (`tcp://…`), seen by the same rank of this one.

    `fingerprint` names all that gives the bytes their meaning: a peer with another one is refused, and refuses. One
    thread at a time may call. Raises OSError where no connection can even be tried.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        chunk_bytes: int,
        fingerprint: bytes,
        secret: str = "",
        limits: LinkLimits = LinkLimits(),  # noqa: B008  (a constant)
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._keys = Announced(max_keys)
        self._num_misses = 0
        self._next_ticket = 1
        self._is_closed = False
        self._link = PeerLink(endpoint, chunk_bytes, fingerprint, secret, self._keys, limits)
        self._link.start()

    @property
    def is_open(self) -> bool:
        """The peer is there and has said what it has."""
        return self._link.is_open

    def contains(self, key: bytes) -> bool:
        """Whether the peer has said so. No system call."""
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that can be read and could not at the last call, and the other way round."""
        return self._keys.take_changes()

    def touch(self, keys: Iterable[bytes]) -> None:
        """What the peer keeps is its own business."""

    def put(self, key: bytes, buffer: Any) -> bool:  # noqa: ARG002  (a peer takes no blocks)
        return False

    def start_load(self, key: bytes, out: Any) -> int | None:
        """A ticket, and `out` borrowed until `poll` yields its result; None if there is nothing to ask for.

        Unlike a disk's, a read that takes too long gives `out` back at its deadline: the bytes are copied into it
        only when all of them have come and are right.
        """
        into = chunk_of("out", out, self._chunk_bytes, to_write=True)
        if key not in self._keys or self._is_closed:
            self._num_misses += 1
            return None
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._link.ask(Load(ticket, key, into))
        return ticket

    def poll(self) -> list[StoreResult]:
        """What has ended since the last call. Never blocks."""
        done = self._link.done
        return [done.popleft() for _ in range(len(done))]

    def close(self) -> None:
        """End the connection. What was in flight can still be polled, as failed."""
        if not self._is_closed:
            self._is_closed = True
            self._link.close()

    def __enter__(self) -> "PeerTier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Counters since the tier was opened, and how things stand. Numbers, and dicts of numbers."""
        return {
            "entries": len(self._keys),
            "misses": self._num_misses,
            "unheard_keys": self._keys.num_unheard,
            **self._link.stats(),
        }

    def check(self) -> None:
        """What holds between any two calls."""
        self._link.check()
