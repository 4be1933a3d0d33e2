"""Who may ask: one choke point before routing, closed unless a route is listed as open.

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
        """Whether the request carries one of the keys, once: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
        return self.number(headers) is not None

    def number(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """Which of the keys it carries, from 1 in their order: what may be logged of a key."""
        given = key_digest(headers)
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
    """Of the key that came with a request; None: there is none, or more than one was given."""
    values = bearers(headers)
    scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return _digest(key.strip()) if scheme.lower() == b"bearer" else None


def bearers(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """All keys that came, as values of `Authorization`."""
    return [value if name == b"authorization" else b"Bearer " + value for name, value in headers if name in CARRIERS]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
