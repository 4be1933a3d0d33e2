"""Stores finished responses in memory, which `previous_response_id` can continue.

They are limited in number and bytes; the least recently used is evicted first. A response is visible only to the owner
that created it: an API key or, behind a router, one of the router's keys.
"""

from collections import OrderedDict
from typing import NamedTuple

MAX_RESPONSES = 10_000
MAX_BYTES = 64 << 20  # JSON size of all responses together


# The number of the API key (None if the server has no keys), and the digest of a router's client (empty if none is named).
Owner = tuple[int | None, bytes]


class StoredResponse(NamedTuple):
    owner: Owner
    reply: bytes  # the response as JSON
    items: bytes  # its input and output items, as JSON
    previous_id: str | None

    @property
    def size_bytes(self) -> int:
        return len(self.reply) + len(self.items)


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used first
        self._size_bytes = 0

    def put(self, response_id: str, stored: StoredResponse) -> bool:
        """Store a response, evicting others; return False if it is larger than the whole store."""
        if stored.size_bytes > self._max_bytes:
            return False
        self._stored[response_id] = stored
        self._size_bytes += stored.size_bytes
        while len(self._stored) > self._max_responses or self._size_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))
        return True

    def get(self, owner: Owner, response_id: str) -> StoredResponse | None:
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, owner: Owner, response_id: str) -> bool:
        if self.get(owner, response_id) is None:
            return False
        self._drop(response_id)
        return True

    def check(self) -> None:
        assert self._size_bytes == sum(stored.size_bytes for stored in self._stored.values()) <= self._max_bytes
        assert len(self._stored) <= self._max_responses

    def _drop(self, response_id: str) -> None:
        self._size_bytes -= self._stored.pop(response_id).size_bytes
