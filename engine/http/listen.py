"""Sockets and the life of the HTTP server: bind, accept, close. Signals and draining are the caller's.

uvicorn's own Server is not used: it owns the signals, polls, and closes the listener before it drains, so a
client would see a refused connection where it should see 503.
"""

import asyncio
import errno
import socket
import time
from collections import Counter
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from penstock.engine.http.limits import KEEP_ALIVE_S, Limits, allow_open_files

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from penstock.engine.http.connection import GuardedConnection

Address = tuple[socket.AddressFamily, tuple[Any, ...]]

BACKLOG = 2048
SETTLE_S = 1.0
FREE_PORT_ATTEMPTS = 20
NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
SPARE_FILES = 256  # file descriptors for everything that is not a client


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a TCP socket for every address that `host` resolves to, all bound to one port and not listening yet.

    Binding before the model loads shows a taken port at once. Port 0 takes one that is free at every address. IPv6
    addresses are left out where this machine has no IPv6: `localhost` may name ::1 there.
    """
    addresses = _resolve(host, port)
    num_attempts = FREE_PORT_ATTEMPTS if port == 0 else 1
    for attempt in range(num_attempts):
        try:
            return _bind_all(addresses, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or attempt == num_attempts - 1:
                raise
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
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
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


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener:
    """Serves `app` on all `sockets`, which it takes over, as long as it is entered."""

    def __init__(self, app: "ASGIApp", sockets: list[socket.socket], limits: Limits, refused: Counter[int]) -> None:
        # Here: who binds a socket and then starts the core does not wait for them.
        import uvicorn
        from uvicorn.server import ServerState

        from penstock.engine.http.connection import GuardedConnection

        self.sockets = sockets
        self._limits, self._refused = limits, refused
        self._config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # its warnings are one line per malformed request, which anyone can send
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
        )
        self._state, self._kind = ServerState(), GuardedConnection
        self._servers: list[asyncio.Server] = []
        self._clock: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> "set[GuardedConnection]":
        return self._state.connections  # type: ignore[return-value]  # all of them were made by _connection

    async def __aenter__(self) -> "Listener":
        self._config.load()
        allow_open_files(self._limits.max_connections + SPARE_FILES)
        self._tick()
        loop = asyncio.get_running_loop()
        for sock in self.sockets:
            self._servers.append(await loop.create_server(self._connection, sock=sock, backlog=BACKLOG))
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop accepting; answers that are complete get a moment to leave, everything else is cut off."""
        assert self._clock is not None
        for server in self._servers:
            server.close()
        self._clock.cancel()
        for connection in list(self.connections):
            connection.shutdown()
        await self._settle()
        for connection in list(self.connections):
            connection.transport.abort()  # the application sees a client that disconnects, and cleans up
        await self._settle()

    async def _settle(self) -> None:
        """Wait until no connection and no request is left, but not for long."""
        deadline_s = time.monotonic() + SETTLE_S
        while (self.connections or self._state.tasks) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    def _connection(self) -> "GuardedConnection":
        return self._kind(self._limits, self._refused, config=self._config, server_state=self._state, app_state={})

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tick)
