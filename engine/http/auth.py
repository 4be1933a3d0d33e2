"""Checks API keys: one choke point before routing, closed unless a route is listed as open.

The decision uses the method and the path exactly as the router will match them, never a path put together
from the Host header, and never a prefix: both have been ways round a key in other servers.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engine.http.errors import HttpError

CARRIERS = frozenset({b"authorization", b"x-api-key"})  # the headers that carry a key, each in its own way
OPEN_ROUTES = frozenset({("GET", "/health"), ("HEAD", "/health"), ("GET", "/"), ("HEAD", "/")})


NO_KEY = HttpError(
    401, "the request needs an API key: 'Authorization: Bearer <key>'", headers={"www-authenticate": "Bearer"}
)


class Keys:
    """The accepted API keys. Only their digests are kept; every one is compared, in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("api_keys: a key must be printable ASCII without spaces, and not empty")
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether the request carries a key, as `Authorization: Bearer KEY` or `x-api-key: KEY`, and no wrong one."""
        return self.number(headers) is not None

    def number(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """Return which of the keys the request carries, counted from 1; this number may be logged. None: it carries none,
        or one that is not accepted. Of several accepted keys the first counts."""
        numbers = [self._number_of(given) for given in _digests_of(headers)]
        return None if not numbers or None in numbers else numbers[0]

    def _number_of(self, given: bytes | None) -> int | None:
        if given is None:
            return None
        same = [hmac.compare_digest(given, digest) for digest in self._digests]  # a list: no early exit
        return same.index(True) + 1 if any(same) else None


class Authentication:
    """ASGI middleware: without one of the keys only OPEN_ROUTES answer, and `refusal` all else, whatever the method."""

    def __init__(self, app: ASGIApp, keys: Keys, refusal: ASGIApp) -> None:
        self.app, self.keys, self.refusal = app, keys, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_admitted = not self.keys or self._is_open(scope) or self.keys.admit(scope["headers"])
        await (self.app if is_admitted else self.refusal)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        # A root_path would make the router match another string than scope["path"]; then nothing is open.
        has_prefix = bool(scope.get("root_path"))
        return scope["type"] == "http" and not has_prefix and (scope["method"], scope["path"]) in OPEN_ROUTES


def key_digest(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the digest of the first key that came with a request; None: there is none."""
    return next(iter(_digests_of(headers)), None)


def _digests_of(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes | None]:
    """Return the digest of every key that came with a request; None stands for a value that holds no key."""
    parts = [value.partition(b" ") for value in bearers(headers)]
    return [_digest(key.strip()) if scheme.lower() == b"bearer" else None for scheme, _, key in parts]


def bearers(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return all keys that came, as values of `Authorization`."""
    return [value if name == b"authorization" else b"Bearer " + value for name, value in headers if name in CARRIERS]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
