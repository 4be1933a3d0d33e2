"""A replica as the operator writes it, on the command line, in a watched file, with DNS and in `POST /replicas`:

http://HOST:PORT[,events=PORT|ENDPOINT][,replay=PORT|ENDPOINT][,key=VARIABLE]
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

WORDS = ("events", "replay", "key")
REMOVED = {
    "canary": "send a share of the requests elsewhere in the gateway in front",
    "shadow": "mirror requests in the gateway in front",
    "priority": "let the client or the gateway in front set the request's priority",
}
FORM = "URL[,events=PORT][,replay=PORT][,key=VARIABLE]"
SECRET = re.compile(r"[\x21-\x7e]+")  # a key that is sent
_ENDPOINT = re.compile(r"(tcp://[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}|ipc:///[^,\s]+)")


class RouteError(ValueError):
    """An option of the router cannot be used as given; the message names it."""


class Backend(msgspec.Struct, frozen=True, omit_defaults=True):
    """`events`, `replay`: the ZMQ endpoints where vLLM or SGLang publishes its cache events, and repeats them.
    `key`: the environment variable with the API key of the replica."""

    url: str
    events: str | None = None
    replay: str | None = None
    key: str | None = None

    @classmethod
    def of(cls, text: str, field: str = "backend") -> "Backend":
        address, *rest = text.split(",")
        url = canonical_url(address, field)
        given: dict[str, str] = {}
        for each in rest:
            name, _, value = each.partition("=")
            if name in REMOVED:
                raise RouteError(f"{field}: {each[:80]!r} is no longer there; {REMOVED[name]}")
            if name not in WORDS or name in given or not value:
                raise RouteError(f"{field}: {each[:80]!r} of {text[:160]!r}; {FORM} is expected, each word once")
            given[name] = _read(name, value, url, field)
        if "replay" in given and "events" not in given:
            raise RouteError(f"{field}: {text[:160]!r} has replay without events; what is replayed are its events")
        return msgspec.convert({"url": url, **given}, cls)

    @property
    def text(self) -> str:
        words = [f"{name}={value}" for name in WORDS if (value := getattr(self, name)) is not None]
        return ",".join([self.url, *words])

    def lines(self, environment: Mapping[str, str]) -> bytes:
        """Return the header with the replica's own key, written; empty if it has none. Raises RouteError."""
        if self.key is None:
            return b""
        secret = environment.get(self.key, "")
        if not re.fullmatch(SECRET, secret):
            state = "is not a key" if secret else "is not set"
            raise RouteError(f"backend: {self.url} has key={self.key}, and the environment variable {self.key} {state}")
        return f"authorization: Bearer {secret}\r\n".encode()


def _read(name: str, value: str, url: str, field: str) -> str:
    if name in ("events", "replay"):
        if value.isascii() and value.isdigit():
            value = f"tcp://{urlsplit(url).netloc.rpartition(':')[0]}:{value}"
        port = value.rpartition(":")[2]
        if not _ENDPOINT.fullmatch(value) or (value[:3] == "tcp" and not 1 <= int(port) <= 65535):
            raise RouteError(f"{field}: {name}={value[:80]!r}; a port, tcp://HOST:PORT or ipc:///PATH is expected")
        return value
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise RouteError(f"{field}: key={value[:40]!r} is not the name of an environment variable")
    return value


def canonical_url(url: str, field: str = "backend") -> str:
    """Return `http://host:port`, the name of a replica. Raises RouteError for any other form."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise RouteError(f"{field}: {url[:120]!r} is not a URL") from None
    if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query or parts.username:
        raise RouteError(f"{field}: {url[:120]!r} is not of the form http://HOST:PORT")
    if not re.fullmatch(r"[A-Za-z0-9._:-]+", host):
        raise RouteError(f"{field}: {host[:80]!r} is not a host name or an address")
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port if port is not None else 80}"
