"""A replica as the operator writes it, on the command line, in a watched file, with DNS and in `POST /replicas`:

http://HOST:PORT[,events=PORT|ENDPOINT][,replay=PORT|ENDPOINT][,prefill=PORT|HOST:PORT]
"""

import re
from urllib.parse import urlsplit

import msgspec

WORDS = ("events", "replay", "prefill")
FORM = "URL[,events=PORT][,replay=PORT][,prefill=PORT]"
_ENDPOINT = re.compile(r"(tcp://[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}|ipc:///[^,\s]+)")
_PEER = re.compile(r"[A-Za-z0-9._:\[\]-]{1,250}:[0-9]{1,5}")


class RouteError(ValueError):
    """An option of the router cannot be used as given; the message names it."""


class Backend(msgspec.Struct, frozen=True, omit_defaults=True):
    """`events`, `replay`: the ZMQ endpoints where vLLM or SGLang publishes its cache events, and repeats them.
    `prefill`: the replica only computes prompts; decode replicas load its blocks at this address, its --kv-peer-listen,
    written as in their --kv-peer."""

    url: str
    events: str | None = None
    replay: str | None = None
    prefill: str | None = None

    @classmethod
    def of(cls, text: str, field: str = "backend") -> "Backend":
        address, *rest = text.split(",")
        url = canonical_url(address, field)
        options: dict[str, str] = {}
        for each in rest:
            name, _, value = each.partition("=")
            if name not in WORDS or name in options or not value:
                raise RouteError(f"{field}: {each[:80]!r} of {text[:160]!r}; {FORM} is expected, each word once")
            options[name] = _read(name, value, url, field)
        if "replay" in options and "events" not in options:
            raise RouteError(f"{field}: {text[:160]!r} has replay without events; what is replayed are its events")
        return msgspec.convert({"url": url, **options}, cls)


def _read(name: str, value: str, url: str, field: str) -> str:
    """Return the value of a word; a port alone is on the replica's own host."""
    scheme, form, expected = ("", _PEER, "a port or HOST:PORT")
    if name != "prefill":
        scheme, form, expected = ("tcp://", _ENDPOINT, "a port, tcp://HOST:PORT or ipc:///PATH")
    if value.isascii() and value.isdigit():
        value = f"{scheme}{urlsplit(url).netloc.rpartition(':')[0]}:{value}"
    port = value.rpartition(":")[2]
    if not form.fullmatch(value) or (value[:3] != "ipc" and not 1 <= int(port) <= 65535):
        raise RouteError(f"{field}: {name}={value[:80]!r}; {expected} is expected")
    return value


def canonical_url(url: str, field: str = "backend") -> str:
    """Return `http://host:port`, the name of a replica. Raises RouteError for any other form."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise RouteError(f"{field}: {url[:120]!r} is not a URL") from None
    is_plain = parts.path in ("", "/") and "@" not in parts.netloc and not (parts.query or parts.fragment)
    if parts.scheme != "http" or not host or port == 0 or not is_plain:
        raise RouteError(f"{field}: {url[:120]!r} is not of the form http://HOST:PORT")
    if not re.fullmatch(r"[A-Za-z0-9._:-]+", host):
        raise RouteError(f"{field}: {host[:80]!r} is not a host name or an address")
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port if port is not None else 80}"
