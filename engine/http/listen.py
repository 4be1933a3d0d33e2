"""The lifetime of the HTTP server: accepts connections and closes them. Signals and draining are the caller's task.

uvicorn's own Server is not used: it handles signals itself, polls, and closes the listener before it drains, so clients
would get a refused connection instead of a 503.
"""

import asyncio
import socket
import time
from collections import Counter
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from penstock.engine.http.connection import GuardedConnection
from penstock.engine.http.limits import KEEP_ALIVE_S, Limits, allow_open_files
from penstock.engine.http.sockets import BACKLOG, listen

SETTLE_S = 1.0
SPARE_FILES = 256  # file descriptors for everything that is not a client


class Listener:
    """A context in which `app` is served on all `sockets`, which it owns from then on."""

    def __init__(self, app: ASGIApp, sockets: list[socket.socket], limits: Limits, refused: Counter[int]) -> None:
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
            log_level="error",  # its warnings are one line per malformed request, which any client can send
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
        )
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._clock: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> set[GuardedConnection]:
        return self._state.connections  # type: ignore[return-value]  # all of them were made by _connection

    async def __aenter__(self) -> "Listener":
        self._config.load()
        allow_open_files(self._limits.max_connections + SPARE_FILES)
        self._tick()
        loop = asyncio.get_running_loop()
        for sock in self.sockets:
            listen(sock)
            self._servers.append(await loop.create_server(self._connection, sock=sock, backlog=BACKLOG))
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop accepting. Complete answers get a moment to be written; all other connections are aborted."""
        assert self._clock is not None
        for server in self._servers:
            server.close()
        self._clock.cancel()
        for connection in list(self.connections):
            connection.shutdown()
        await self._settle()
        for connection in list(self.connections):
            connection.transport.abort()  # for the application, the client disconnects
        await self._settle()

    async def _settle(self) -> None:
        """Wait briefly until no connection and no request is left."""
        deadline_s = time.monotonic() + SETTLE_S
        while (self.connections or self._state.tasks) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    def _connection(self) -> GuardedConnection:
        return GuardedConnection(
            self._limits, self._refused, config=self._config, server_state=self._state, app_state={}
        )

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tick)
