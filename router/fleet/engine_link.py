"""Follows the cache events of one engine that publishes them over ZMQ, as vLLM and SGLang do.

Messages are (topic, number, batch), the number 8 bytes big-endian and rising by one. What is published while none is
connected is lost to the subscriber, which does not hear of it; so after every connection, and at every gap, the engine's replay
endpoint is asked for what follows the last batch. Whether that is still the same process is seen by the last batch
itself, which comes once more: it bears the time of its making. An engine without a replay endpoint is believed only in
what it says from the connection on.
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
LINK_COUNTS = ("batches", "replayed", "lost", "restarts")


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
        self._last_batch = b""

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
                    await self._connection(await recv_monitor_message(monitor))
                if events in ready:
                    await self._read(events)
                if self.is_connected:
                    self._take([Alive(self.blocks.seq)])
        finally:
            events.disable_monitor()
            monitor.close(0)
            events.close(0)

    async def _connection(self, message: Mapping[str, object]) -> None:
        if message["event"] == zmq.EVENT_DISCONNECTED:
            self.is_connected = False
            return
        await self._catch_up()
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
        """A batch as it is published."""
        if self.last is not None and number > self.last + 1:
            await self._fill(self.last + 1)
        if self.last is None or number > self.last:
            self._apply(number, batch)

    async def _fill(self, first: int) -> None:
        async with contextlib.aclosing(self._replay(first)) as batches:
            async for number, batch in batches:
                if self.last is None or number > self.last:
                    self.counts["replayed"] += 1
                    self._apply(number, batch)

    async def _catch_up(self) -> None:
        """Behind a connection: what was missed, of the same process; or all that a new one has said."""
        if self.last is not None:
            if await self._is_same():
                await self._fill(self.last + 1)
                return
            self.counts["restarts"] += 1
        self._forget()
        await self._fill(0)

    async def _is_same(self) -> bool:
        assert self.last is not None
        async with contextlib.aclosing(self._replay(self.last)) as batches:
            async for number, batch in batches:
                return number == self.last and batch == self._last_batch
        return False

    def _forget(self) -> None:
        self.last, self._last_batch = None, b""
        self.blocks = EngineBlocks(self._fingerprint, self.blocks.block_size, secrets.token_hex(8))

    async def _replay(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """What the engine still has of its batches from this number on. vLLM says the topic again, SGLang does not."""
        if self._backend.replay is None:
            return
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(self._backend.replay)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
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
        """A hole before it could not be filled: removals may be among what is lost."""
        if self.last is not None and number > self.last + 1:
            self.counts["lost"] += number - self.last - 1
            self.blocks.missed()
        self.last, self._last_batch = number, batch
        self.counts["batches"] += 1
        frames: Iterable[Frame]
        try:
            frames = self.blocks.take(batch)
        except BadEvents as error:
            log.warning("%s: its cache events are not understood: %s", self._backend.url, error)
            frames = self.blocks.snapshot()  # a part of the batch may have been taken
        if self.is_connected:  # else all of it follows at once
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
