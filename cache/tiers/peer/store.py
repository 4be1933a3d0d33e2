"""A read-only store over the network: the KV blocks in the tiers of one other engine.

The caller's thread reads the keys that the peer has announced and never waits; a thread of the link (link.py)
communicates. Any failure is a miss. Blocks are copied from a peer, never to one.

    start_load ─▶ requests ─▶ link ─▶ done ─▶ poll: results
                              link ─▶ keys ─▶ changes: keys that the peer has gained or lost
"""

from collections.abc import Iterable
from typing import Any

from penstock.cache.tiers.base import StoreResult, chunk_view
from penstock.cache.tiers.peer.announced import AnnouncedKeys
from penstock.cache.tiers.peer.link import LinkLimits, Load, PeerLink

MAX_KEYS = 2**20  # per peer, about 100 MB; further announced keys are ignored


class PeerTier:
    """The store of one rank of this engine for the same rank of the engine at `endpoint` (`tcp://…`).

    `fingerprint` identifies everything that the bytes depend on: peers with different fingerprints refuse each other.
    One thread at a time may call. Raises OSError if the endpoint is invalid.
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
        self._keys = AnnouncedKeys(max_keys)
        self._num_misses = 0
        self._next_ticket = 1
        self._is_closed = False
        self._link = PeerLink(endpoint, chunk_bytes, fingerprint, secret, self._keys, limits)
        self._link.start()

    @property
    def is_open(self) -> bool:
        """Return whether the peer has welcomed this engine and announces its keys."""
        return self._link.is_open

    def contains(self, key: bytes) -> bool:
        """Return whether the peer has announced the key, without a system call."""
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys that became readable since the last call, and those that became unreadable."""
        return self._keys.take_changes()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Do nothing: the peer evicts by its own rules."""

    def put(self, key: bytes, buffer: Any) -> bool:  # noqa: ARG002  (a peer takes no blocks)
        return False

    def start_load(self, key: bytes, out: Any) -> int | None:
        """Request a block into `out`, borrowed until `poll` returns its result; return its ticket, or None for a miss.

        Unlike a disk read, a slow read fails at its deadline and releases `out`: the bytes are copied into it only after
        the complete block has been received and verified.
        """
        into = chunk_view("out", out, self._chunk_bytes, to_write=True)
        if key not in self._keys or self._is_closed:
            self._num_misses += 1
            return None
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._link.request(Load(ticket, key, into))
        return ticket

    def poll(self) -> list[StoreResult]:
        """Return the results since the last call. Never blocks."""
        done = self._link.done
        return [done.popleft() for _ in range(len(done))]

    def close(self) -> None:
        """Close the connection. Loads in flight fail; their results can still be polled."""
        if not self._is_closed:
            self._is_closed = True
            self._link.close()

    def __enter__(self) -> "PeerTier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Return counters since the tier was opened and its current state: numbers, and dicts of numbers."""
        return {
            "entries": len(self._keys),
            "misses": self._num_misses,
            "ignored_keys": self._keys.num_ignored,
            **self._link.stats(),
        }

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        self._link.check()
