"""Checks the Host header of requests to a server that no key protects.

A web page can let its name resolve to 127.0.0.1 after it was loaded (DNS rebinding). For the browser, a server on the
user's machine then has the same origin as the page, which can send any request and read the answers. Such a request has
the page's name as its Host; a program on this machine uses a name or an address of the machine.
"""

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from penstock.engine.http.errors import HttpError, clip

ANY = "*"
MAX_REMEMBERED = 64  # header values, which clients choose
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::\d*)?")  # a name or an address, perhaps with a port
_LOOPBACK = re.compile(r"(?:[\w-]+\.)*localhost|127(?:\.\d{1,3}){3}|\[::1\]", re.ASCII)
_ALLOWED = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]|\*", re.ASCII)


class Hosts:
    """The hosts that requests may name. Without `allowed`, they are checked on a loopback address without a key only."""

    def __init__(self, allowed: Sequence[str], bound_to: str, *, has_keys: bool) -> None:
        """`bound_to`: the name or address that the server listens on."""
        self._accepted: set[bytes] = set()  # header values, so that few requests parse theirs
        self._allowed = {_normal(each) for each in (*allowed, bound_to)}
        self.are_checked = ANY not in allowed and (bool(allowed) or (not has_keys and _is_loopback(bound_to)))

    def refusal(self, host: bytes | None) -> HttpError | None:
        """Return the error for a request with this Host header; HTTP/1.0 without one does not come from a browser."""
        if not self.are_checked or host is None or host in self._accepted:
            return None
        text = host.decode("latin-1")
        parsed = _HOST.fullmatch(text)
        name = "" if parsed is None else _normal(parsed[1])
        if name in self._allowed or _LOOPBACK.fullmatch(name):
            if len(self._accepted) < MAX_REMEMBERED:
                self._accepted.add(host)
            return None
        remedy = f"; if clients use this name, start the server with --allowed-hosts {clip(name)}" if name else ""
        return HttpError(
            403, f"host: {clip(text)!r} is not a name of this machine or an allowed one{remedy}", param="host"
        )


def check_allowed_hosts(allowed: Sequence[str]) -> None:
    """Raise ValueError for a value of --allowed-hosts that no Host header could match."""
    for each in allowed:
        if _ALLOWED.fullmatch(each) is None:
            raise ValueError(
                f"allowed_hosts: {each[:120]!r} is not a host name or an address; write it without a port, like "
                "llm.example or [2001:db8::1], or * for any"
            )


def _is_loopback(host: str) -> bool:
    """Return whether all addresses of a host, which the server could bind, are reachable from this machine only."""
    addresses = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, flags=socket.AI_PASSIVE)}
    return all(ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _normal(name: str) -> str:
    """Return a host as in a URL, in which an IPv6 address has brackets."""
    return f"[{name}]" if ":" in name and name[0] != "[" else name.lower().removesuffix(".")
