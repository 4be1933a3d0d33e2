"""Binds the sockets of a server before the model is loaded."""

import errno
import socket
from typing import Any

Address = tuple[socket.AddressFamily, tuple[Any, ...]]

BACKLOG = 2048
FREE_PORT_ATTEMPTS = 20
NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


class PortError(OSError):
    """A server cannot listen where it was told to; the message names address and reason."""


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a TCP socket for every address that `host` resolves to, all bound to one port and not listening yet.

    Binding before the model loads shows a taken port at once. Port 0 takes one that is free at every address. IPv6
    addresses are left out where this machine has no IPv6: `localhost` may name ::1 there. Raises PortError.
    """
    addresses = _resolve(host, port)
    num_attempts = FREE_PORT_ATTEMPTS if port == 0 else 1
    for attempt in range(num_attempts):
        try:
            return _bind_all(addresses, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or attempt == num_attempts - 1:
                raise PortError(f"port: {error.strerror}") from None
    raise AssertionError("the last attempt returns or raises")


def _bind_all(addresses: list[Address], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for address in addresses:
        try:
            sockets.append(_bind(address, sockets[0].getsockname()[1] if sockets else port))
        except OSError as error:
            if address[0] == socket.AF_INET6 and error.errno in NO_IPV6:
                missing = error
                continue
            for sock in sockets:
                sock.close()
            raise
    if not sockets:
        assert missing is not None, "a name resolves to one address at least"
        raise missing
    return sockets


def _resolve(host: str, port: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortError(f"host: cannot listen on {host}:{port}: {error.strerror}") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bind(address: Address, port: int) -> socket.socket:
    family, (host, _, *rest) = address
    sock: socket.socket | None = None
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these: a client whose machine vanished is noticed after 90 s.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.bind((host, port, *rest))
    except OSError as error:
        if sock is not None:
            sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def listen(sock: socket.socket) -> None:
    """Make a bound socket listen. Raise PortError if another server that was bound to the same port listens by now: the
    kernel lets both bind, and uvloop's `create_server` would close this socket without an error."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise PortError(f"port: cannot listen on {url_of(sock).removeprefix('http://')}: {error.strerror}") from None


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
