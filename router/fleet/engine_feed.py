"""The cache events of one engine that publishes them over ZMQ, as vLLM and SGLang do.

Messages are (topic, number, batch). The number has 8 bytes, big-endian, and rises by one. A message that is published while
the subscriber is not connected is lost without notice. So every connection begins with all batches that the engine's replay
endpoint still has, and a gap ends it: the feed (kv_feed.py) then connects again. An engine without a replay endpoint is
known only by what it publishes from the connection on, or from the last gap on.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from penstock.engine.http.kv_stream import ALIVE_S, Alive, Frame
from penstock.router.backend import Backend
from penstock.router.placement.engine_blocks import BadEvents, EngineBlocks

log = logging.getLogger("penstock.router")

REPLAY_S = 3.0  # without a message of a replay: it is given up, before the feed gives up the connection
BACKLOG = 100_000  # batches that wait while a replay is read; those beyond are lost, which is a gap
AT_ONCE = 32  # batches between two other things of the event loop
END = (-1).to_bytes(8, "big", signed=True)


class EngineSource:
    last: int | None  # the number of the last batch

    def __init__(self, context: zmq.asyncio.Context, backend: Backend, fingerprint: bytes, block_size: int) -> None:
        self.counts = {"batches": 0, "replayed": 0, "gaps": 0}  # "batches" has the replayed ones too
        self.is_connected = False
        self._context, self._backend, self._fingerprint = context, backend, fingerprint
        self._block_size = block_size
        self._forget()

    def view(self) -> dict[str, object]:
        return {
            "endpoint": self._backend.events,
            "connected": self.is_connected,
            "seq": self.last,
            "blocks": len(self.blocks.keys),
            **self.counts,
            "unplaced": dict(self.blocks.counts),
        }

    async def frames(self) -> AsyncGenerator[Sequence[Frame], None]:
        """Connect and yield frames, a snapshot first, until the connection ends or has a gap. Raises OtherBlockSize."""
        assert self._backend.events is not None
        events = self._socket(zmq.SUB)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            events.connect(self._backend.events)
            while (await recv_monitor_message(monitor))["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                pass
            # From here on, what is published waits in the socket.
            self._forget()
            async with contextlib.aclosing(self._replay()) as batches:
                async for number, batch in batches:
                    self.counts["replayed"] += 1
                    self._apply(number, batch)
                    yield ()  # a replay may take longer than a silence
            self.is_connected = True
            yield list(self.blocks.snapshot())
            async with contextlib.aclosing(self._published(events, monitor)) as published:
                async for frames in published:
                    yield frames
        finally:
            self.is_connected = False
            events.disable_monitor()
            monitor.close(0)
            events.close(0)

    async def _published(
        self, events: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket
    ) -> AsyncGenerator[Sequence[Frame], None]:
        """Yield what is published, until the connection ends or a batch is missing that a replay may bring.

        The first batches may be repetitions of what was replayed. After that, a number that does not rise means that the
        engine counts from the beginning again, which is a gap too."""
        previous: int | None = None  # the number of the last batch that was published here
        poller = zmq.asyncio.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll(int(1000 * ALIVE_S)))
            if monitor in ready:
                return
            frames: list[Frame] = []
            for _ in range(AT_ONCE if events in ready else 0):
                try:
                    message = await events.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(message) < 2 or len(message[-2]) != 8:
                    log.warning("%s: a message of its events has no number", self._backend.url)
                    continue
                number = int.from_bytes(message[-2], "big")
                starts_again = previous is not None and number <= previous
                has_gap = starts_again or (self.last is not None and number > self.last + 1)
                previous = number
                if has_gap:
                    self.counts["gaps"] += 1
                    if self._backend.replay is not None:
                        return
                if has_gap or self.last is None or number > self.last:
                    frames += self._apply(number, message[-1], has_gap=has_gap)
            yield [*frames, Alive(self.blocks.seq)]

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

    def _apply(self, number: int, batch: bytes, *, has_gap: bool = False) -> list[Frame]:
        """Take in a batch and return what it changes. Where batches before it are missing, or it is not understood, removals
        may be lost, so everything is forgotten: a block that is wrongly believed to be cached would draw requests for as
        long as the replica lives."""
        if has_gap:
            self._forget()
        self.last = number
        self.counts["batches"] += 1
        try:
            changes = self.blocks.take(batch)
            return list(self.blocks.snapshot()) if has_gap else changes
        except BadEvents as error:
            log.warning("%s: its cache events are not understood: %s", self._backend.url, error)
        self._forget()
        self.last = number
        return list(self.blocks.snapshot())

    def _forget(self) -> None:
        self.last = None
        self.blocks = EngineBlocks(self._fingerprint, self._block_size, secrets.token_hex(8))

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
