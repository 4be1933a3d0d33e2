"""Checks API keys at one place before routing. A route requires a key unless it is listed as open.

The decision uses the method and the path exactly as the router matches them, never a path derived from the Host header
and never a prefix: both have been ways around a key in other servers.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import Scope

from penstock.engine.http.errors import HttpError

# The identity of a router's client, for its replica; a router strips it from requests.
OWNER_HEADER = b"x-penstock-owner"
CARRIERS = frozenset({b"authorization", b"x-api-key"})  # the headers that carry a key, each in its own way
OPEN_ROUTES = frozenset((method, path) for method in ("GET", "HEAD") for path in ("/", "/health", "/ready"))


NO_KEY = HttpError(
    401, "the request needs an API key: 'Authorization: Bearer <key>'", headers={"www-authenticate": "Bearer"}
)


class Keys:
    """The accepted API keys. Only their digests are kept; every one is compared, in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("api_keys: a key must be printable ASCII without spaces, and not empty")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def number(self, bearers: Iterable[bytes]) -> int | None:
        """Return the number, from 1, of the key of a request with these `bearers`; it may be logged. None: the request has
        no key, or one that is not accepted. If it has several accepted keys, the first counts."""
        numbers = [self._number_of(bearer) for bearer in bearers]
        return None if not numbers or None in numbers else numbers[0]

    def identity(self, number: int) -> bytes:
        """Return the identity of an accepted key for replicas: the same at every router, and of no use as a key."""
        return hashlib.sha256(b"identity of a key\0" + self._digests[number - 1]).hexdigest().encode()

    def _number_of(self, bearer: bytes) -> int | None:
        scheme, _, key = bearer.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        given = hashlib.sha256(key.strip()).digest()
        same = [hmac.compare_digest(given, digest) for digest in self._digests]  # a list: no early exit
        return same.index(True) + 1 if any(same) else None


def is_open(scope: Scope) -> bool:
    """Return whether the route of a request needs no key."""
    # A root_path would make the router match another string than scope["path"]; then nothing is open.
    return not scope.get("root_path") and (scope["method"], scope["path"]) in OPEN_ROUTES


def bearers(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return all keys in the request (`Authorization: Bearer KEY` or `x-api-key: KEY`) as `Authorization` values."""
    return [value if name == b"authorization" else b"Bearer " + value for name, value in headers if name in CARRIERS]
