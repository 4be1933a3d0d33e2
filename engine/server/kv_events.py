"""`GET /kv_events`: streams the keys of all cached KV blocks, and every change, to any number of listeners.

The core sends updates from when the first listener connects until the last one disconnects, or all the time if they are
also published over ZMQ (kv_publisher.py). Meanwhile the keys are
mirrored here, so that a snapshot costs the core nothing. Each listener has a bounded backlog; if it falls behind, the
backlog is replaced with a new snapshot. engine/http/kv_stream.py defines the frames.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from penstock.engine.http.kv_stream import ALIVE_S, Alive, Changes, Hello, keys_in, pack, snapshot
from penstock.engine.messages import CacheUpdate
from penstock.engine.server.endpoint import unless_gone
from penstock.engine.server.service import Service

MAX_BACKLOG_BYTES = 2**22  # the size of a snapshot of half a million blocks, which is cheaper from there on
Publish = Callable[[CacheUpdate, Mapping[str, set[bytes]]], None]  # an update, and the keys in each tier after it
_HEADERS = [(b"content-type", b"application/octet-stream"), (b"cache-control", b"no-store")]


class KvEvents:
    """The ASGI application of the route; one per server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        service.engine.on_cache_update = self._take
        self._engine_id = secrets.token_hex(8)
        self._seq = 0
        self._mirror: dict[str, set[bytes]] | None = None  # tier → keys; None until the core's snapshot
        self._listeners: set[_Listener] = set()
        self._publish: Publish | None = None

    def publish_to(self, publish: Publish | None) -> None:
        """Call `publish` with every update, from now on (None: no more). The updates contain the blocks' tokens."""
        self._publish = publish
        if publish is not None:
            self._service.engine.watch_cache(True, with_blocks=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if scope["method"] != "HEAD":
            try:
                await unless_gone(receive, self._send_frames(send))
            except ClientDisconnect:
                scope["penstock.call"].is_gone = True
                return
        await send({"type": "http.response.body", "body": b""})

    async def _send_frames(self, send: Send) -> None:
        async with aclosing(self.frames()) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of one listener, until the server drains or the model's weights change."""
        listener = _Listener()
        self._listeners.add(listener)
        if len(self._listeners) == 1 and self._publish is None:
            self._service.engine.watch_cache(True)
        try:
            info = self._service.info
            numbers = info.block_size, info.num_blocks - 1, info.hits_at_ends
            yield pack(Hello(self._engine_id, "sha256", info.fingerprint, *numbers))
            # Other weights have other keys, so the stream ends and the listener has to reconnect.
            while self._service.info is info and not self._service.is_draining and self._service.engine.health().alive:
                if listener.is_behind and self._mirror is not None:
                    listener.is_behind = False
                    # Changes during the snapshot go to the backlog.
                    for frame in snapshot(self._seq, {tier: b"".join(keys) for tier, keys in self._mirror.items()}):
                        yield pack(frame)
                if listener.backlog:
                    frames, listener.backlog = bytes(listener.backlog), bytearray()
                    yield frames
                if not await listener.wait(ALIVE_S):
                    yield pack(Alive(self._seq))
        finally:
            self._listeners.remove(listener)
            if not self._listeners and self._publish is None:
                self._mirror = None
                self._service.engine.watch_cache(False)

    def _take(self, update: CacheUpdate) -> None:
        if update.is_snapshot:
            if self._mirror is None:
                self._mirror = {}
            self._mirror[update.tier] = set(keys_in(update.stored))
            for listener in self._listeners:
                listener.fall_behind()
        elif self._mirror is not None:  # otherwise the update was sent before the last listener disconnected
            keys = self._mirror.setdefault(update.tier, set())
            keys.difference_update(keys_in(update.removed))
            keys.update(keys_in(update.stored))
            if self._publish is not None:
                self._publish(update, self._mirror)
            if not (update.stored or update.removed):
                return  # contents of blocks that are cached already, for the publisher alone
            self._seq += 1
            if self._listeners:
                frame = pack(Changes(self._seq, update.tier, update.stored, update.removed))
                for listener in self._listeners:
                    listener.put(frame)  # an update too long for a frame is also too long for a backlog


class _Listener:
    def __init__(self) -> None:
        self.backlog = bytearray()  # frames
        self.is_behind = True  # it needs a snapshot
        self._arrived = asyncio.Event()

    def put(self, frame: bytes) -> None:
        if self.is_behind:
            return
        self.backlog += frame
        if len(self.backlog) > MAX_BACKLOG_BYTES:
            self.fall_behind()
        self._arrived.set()

    def fall_behind(self) -> None:
        self.backlog.clear()
        self.is_behind = True
        self._arrived.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a frame or a state change; return False if the timeout passes first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        self._arrived.clear()
        return True
