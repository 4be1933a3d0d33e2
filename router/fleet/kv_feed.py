"""Follows every replica's cache events and hands them to its group's placement.

One task per replica runs the same loop over a source of frames: connect, take the snapshot with which every connection
begins, take what changes, and connect again when the connection ends, stalls or has a gap. The source is the stream of our
own engine (`GET /kv_events`), or what vLLM and SGLang publish over ZMQ (engine_feed.py). A replica that publishes nothing is
left alone: the placement then goes by what was sent to it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Sequence

import msgspec
import zmq.asyncio

from penstock.engine.http.kv_stream import ALIVE_S, Frame, FrameReader, Snapshot, StreamError
from penstock.router.background import Tasks, keep_running
from penstock.router.fleet.engine_feed import EngineSource
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import Replica
from penstock.router.http.heads import question_head
from penstock.router.http.upstream import ConnectFailed, QueueSink
from penstock.router.placement.engine_blocks import OtherBlockSize

log = logging.getLogger("penstock.router")

PATH = "/kv_events"
SILENT_S = 5 * ALIVE_S  # a source that yields nothing for so long has stalled
FIRST_PAUSE_S = 0.1  # before connecting again; doubled up to the next, with jitter
LONGEST_PAUSE_S = 5.0


class NoEvents(Exception):
    """The replica has no such stream, or does not let us read it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"no cache events ({status})")
        self.status = status


class KvFeeds:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._context = zmq.asyncio.Context()  # starts no thread before its first socket
        self._tasks = Tasks()
        self._by_url: dict[str, asyncio.Task[None]] = {}

    def watch(self, replica: Replica) -> None:
        """Follow the replica from now on; one that has come back is followed anew."""
        if (old := self._by_url.get(replica.url)) is not None:
            old.cancel()
        self._by_url = {url: task for url, task in self._by_url.items() if not task.done()}
        following = keep_running(f"the event feed of {replica.url}", lambda: self._follow(replica))
        self._by_url[replica.url] = self._tasks.spawn(following)

    async def close(self) -> None:
        await self._tasks.close()
        self._context.destroy(0)

    async def _follow(self, replica: Replica) -> None:
        source: HttpSource | EngineSource = HttpSource(replica)
        if replica.backend.events is not None:
            info = replica.info
            source = replica.link = EngineSource(self._context, replica.backend, info.fingerprint, info.block_size)
        pause_s = FIRST_PAUSE_S
        while self._is_ours(replica):
            num_frames = 0
            try:
                async with contextlib.aclosing(source.frames()) as batches:
                    while self._is_ours(replica):
                        async with asyncio.timeout(SILENT_S):
                            frames = await anext(batches)
                        num_frames += len(frames)
                        if not self._take(replica, frames):
                            break
            except (StopAsyncIteration, TimeoutError, ConnectFailed):
                pass  # the probes say so too, and louder
            except (StreamError, ValueError) as error:
                log.warning("%s: its cache events are not understood: %s", replica.url, error)
                num_frames = 0  # nothing to build on: the pauses grow
            except NoEvents as error:
                log.log(logging.INFO if error.status in (404, 405) else logging.WARNING, "%s: %s", replica.url, error)
                return
            except OtherBlockSize as error:
                log.info("%s: %s", replica.url, error)
                self._introduce_again(replica, error.block_size)
                return
            pause_s = FIRST_PAUSE_S if num_frames else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * (0.5 + random.random()))

    def _take(self, replica: Replica, frames: Sequence[Frame]) -> bool:
        """Hand the frames on; False after a gap, where only another snapshot helps."""
        group = self._fleet.home(replica)
        if group is None or replica.url not in group.replicas or not frames:
            return True
        group.placement.apply_events(replica.url, frames)
        is_within_snapshot = isinstance(frames[-1], Snapshot) and not frames[-1].is_last
        return is_within_snapshot or not group.placement.needs_snapshot(replica.url)

    def _introduce_again(self, replica: Replica, block_size: int) -> None:
        """With blocks of another size it is a replica of another kind, which is followed anew."""
        if replica.root is not None and self._is_ours(replica):
            info = msgspec.structs.replace(replica.info, block_size=block_size)
            self._fleet.introduce(replica, replica.root, replica.models, info)
            asyncio.get_running_loop().call_soon(self.watch, replica)

    def _is_ours(self, replica: Replica) -> bool:
        return self._fleet.replicas.get(replica.url) is replica and replica.state != "removing"


class HttpSource:
    """Our own engine's stream, which begins with a snapshot."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def frames(self) -> AsyncGenerator[Sequence[Frame], None]:
        """Connect and yield frames until the stream ends. Raises ConnectFailed, NoEvents and StreamError."""
        pool, sink, reader = self._replica.pool, QueueSink(), FrameReader()
        upstream = await pool.connect()
        upstream.send(question_head(PATH, pool.host_header, self._replica.key_line), b"", sink)
        try:
            while (data := await sink.pieces.get()) is not None and sink.status == 200:
                yield reader.feed(data)
            if sink.status in (401, 403, 404, 405):
                raise NoEvents(sink.status)
        finally:
            upstream.drop(sink)
