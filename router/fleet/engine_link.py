"""Follows the cache events of one engine that publishes them over ZMQ, as vLLM and SGLang do.

Messages are (topic, number, batch). The number has 8 bytes, big-endian, and rises by one. A message that is published while
the subscriber is not connected is lost without notice. So after every connection and at every gap, everything that is
known is forgotten and the engine's replay endpoint is asked for all batches that it still has. An engine without a replay
endpoint is known only by what it publishes from the connection on.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from penstock.engine.http.kv_stream import ALIVE_S, Alive, Frame
from penstock.router.backend import Backend
from penstock.router.placement.engine_blocks import BadEvents, EngineBlocks

log = logging.getLogger("penstock.router")

REPLAY_S = 5.0  # without a message of a replay: it is given up
BACKLOG = 100_000  # batches that wait here while a replay is read; beyond it they are lost, which is a gap
AT_ONCE = 32  # batches between two other things of the event loop
END = (-1).to_bytes(8, "big", signed=True)
# Batches taken; of those, replayed ones; gaps between published batches; batches that no replay had.
LINK_COUNTS = ("batches", "replayed", "gaps", "lost")


class EngineLink:
    """`take` gets the frames. Ends by OtherBlockSize, or soon after it is not wanted any more."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        backend: Backend,
        fingerprint: bytes,
        block_size: int,
        take: Callable[[Iterable[Frame]], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.counts = dict.fromkeys(LINK_COUNTS, 0)
        self.is_connected = False
        self.last: int | None = None  # the number of the last batch
        self.blocks = EngineBlocks(fingerprint, block_size, secrets.token_hex(8))
        self._context, self._backend, self._take, self._is_wanted = context, backend, take, is_wanted
        self._fingerprint = fingerprint

    def view(self) -> dict[str, object]:
        return {
            "endpoint": self._backend.events,
            "connected": self.is_connected,
            "seq": self.last,
            "blocks": self.blocks.num_blocks,
            **self.counts,
            "unplaced": dict(self.blocks.counts),
        }

    async def run(self) -> None:
        events = self._socket(zmq.SUB)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        poller = zmq.asyncio.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            assert self._backend.events is not None
            events.connect(self._backend.events)
            while self._is_wanted():
                ready = dict(await poller.poll(int(1000 * ALIVE_S)))
                if monitor in ready:
                    await self._connection(await recv_monitor_message(monitor), events)
                if events in ready:
                    await self._read(events)
                if self.is_connected:
                    self._take([Alive(self.blocks.seq)])
        finally:
            events.disable_monitor()
            monitor.close(0)
            events.close(0)

    async def _connection(self, message: Mapping[str, object], events: zmq.asyncio.Socket) -> None:
        if message["event"] == zmq.EVENT_DISCONNECTED:
            self.is_connected = False
            return
        with contextlib.suppress(zmq.Again):  # what still waits may be of a process that has ended
            for _ in range(BACKLOG):
                await events.recv_multipart(zmq.NOBLOCK)
        await self._resync()

    async def _resync(self) -> None:
        """Replace everything that is known by what the engine can still replay. A replay starts with the oldest batch that the
        engine has kept, so blocks from before it stay unknown until they are stored again."""
        self.is_connected = False
        self._forget()
        async with contextlib.aclosing(self._replay()) as batches:
            async for number, batch in batches:
                self.counts["replayed"] += 1
                self._apply(number, batch)
        self._take(self.blocks.snapshot())
        self.is_connected = True

    async def _read(self, events: zmq.asyncio.Socket) -> None:
        for _ in range(AT_ONCE):
            try:
                message = await events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(message) < 2 or len(message[-2]) != 8:
                log.warning("%s: a message of its events has no number", self._backend.url)
                continue
            number = int.from_bytes(message[-2], "big")
            if self.is_connected:
                await self._next(number, message[-1])

    async def _next(self, number: int, batch: bytes) -> None:
        """Take a batch that the engine has just published."""
        if self.last is not None and number > self.last + 1:
            self.counts["gaps"] += 1
            await self._resync()
        if self.last is None or number > self.last:
            self._apply(number, batch)

    def _forget(self) -> None:
        self.last = None
        self.blocks = EngineBlocks(self._fingerprint, self.blocks.block_size, secrets.token_hex(8))

    async def _replay(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield all batches that the engine has kept. vLLM sends the topic with each, SGLang does not."""
        if self._backend.replay is None:
            return
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(self._backend.replay)
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    message = await socket.recv_multipart()
                if len(message) < 2 or message[-2] == END:
                    return
                yield int.from_bytes(message[-2], "big"), message[-1]
        except TimeoutError:
            log.warning("%s: no replay of cache events from %s", self._backend.url, self._backend.replay)
        finally:
            socket.close(0)

    def _apply(self, number: int, batch: bytes) -> None:
        """Take in a batch. If batches before it are missing, removals may be among them, so everything is forgotten first:
        a block that is wrongly believed to be cached would draw requests for as long as the replica lives."""
        is_after_hole = self.last is not None and number > self.last + 1
        if is_after_hole:
            assert self.last is not None
            self.counts["lost"] += number - self.last - 1
            self._forget()
        self.last = number
        self.counts["batches"] += 1
        frames: Iterable[Frame]
        try:
            frames = self.blocks.take(batch)
            is_partly_taken = False
        except BadEvents as error:
            log.warning("%s: its cache events are not understood: %s", self._backend.url, error)
            is_partly_taken = True
        if is_after_hole or is_partly_taken:
            frames = self.blocks.snapshot()
        if self.is_connected:  # else a snapshot of everything follows
            self._take(frames)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),  # besides, not instead
            (zmq.RCVHWM, BACKLOG),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 3000),
        ):
            with contextlib.suppress(zmq.ZMQError):
                socket.setsockopt(option, value)
        return socket
