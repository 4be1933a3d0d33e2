"""Sockets and the life of the HTTP server: bind, accept, close. Signals and draining are the caller's.

uvicorn's own Server is not used: it owns the signals, polls, and closes the listener before it drains, so a
client would see a refused connection where it should see 503.
"""

import asyncio
import socket
import time
from collections import Counter
from email.utils import formatdate
from typing import TYPE_CHECKING

from penstock.engine.http.limits import KEEP_ALIVE_S, Limits, allow_open_files

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from penstock.engine.http.connection import GuardedConnection

BACKLOG = 2048
SETTLE_S = 1.0
SPARE_FILES = 256  # file descriptors for everything that is not a client


def bind_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A TCP socket bound to the address, not listening yet: a client is refused until the server is up.

    Bind before the model loads and a port clash shows at once; port 0 takes a free one. With `reuse_port` several
    processes may bind the same one, and the kernel deals connections out among those that listen.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit these: a client whose machine vanished is noticed after 90 s.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener:
    """Serves `app` on `sock` as long as it is entered; takes over the socket."""

    def __init__(self, app: "ASGIApp", sock: socket.socket, limits: Limits, refused: Counter[int]) -> None:
        # Here: who binds a socket and then starts the core does not wait for them.
        import uvicorn
        from uvicorn.server import ServerState

        from penstock.engine.http.connection import GuardedConnection

        self.sock = sock
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
        self._server: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> "set[GuardedConnection]":
        return self._state.connections  # type: ignore[return-value]  # all of them were made by _connection

    async def __aenter__(self) -> "Listener":
        self._config.load()
        allow_open_files(self._limits.max_connections + SPARE_FILES)
        self._tick()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, sock=self.sock, backlog=BACKLOG)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop accepting; answers that are complete get a moment to leave, everything else is cut off."""
        assert self._server is not None and self._clock is not None
        self._server.close()
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
