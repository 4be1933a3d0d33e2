"""The subscriptions to the replicas' cache events, which it passes to the placement of each replica's group.

One task per replica loops over a source of frames: it connects, reads the snapshot with which every connection begins and
then the changes, and reconnects when the connection ends, stalls or has a gap. The source is the stream of a Penstock
engine (`GET /kv_events`) or the ZMQ events of vLLM and SGLang (engine_feed.py). For a replica without events, the
placement estimates the cache from the requests sent to it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

import msgspec
import zmq.asyncio

from penstock.engine.http.kv_stream import ALIVE_S, Frame, FrameReader, StreamError
from penstock.router.fleet.engine_feed import EngineSource
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import Replica
from penstock.router.http.heads import request_head
from penstock.router.http.upstream import ConnectFailed, QueueSink
from penstock.router.placement.engine_blocks import OtherBlockSize

log = logging.getLogger("penstock.router")

PATH = b"/kv_events"
STALL_S = 5 * ALIVE_S  # a source without a frame for so long has stalled
FIRST_PAUSE_S = 0.1  # before reconnecting; doubled up to LONGEST_PAUSE_S, with jitter
LONGEST_PAUSE_S = 5.0


class NoEvents(Exception):
    """The error for a replica that has no event stream or denies access to it."""


class KvFeeds:
    """`can_follow`: asked before each feed of another engine, whether the router can use its events."""

    def __init__(self, fleet: Fleet, can_follow: Callable[[Replica], Awaitable[bool]]) -> None:
        self._fleet = fleet
        self._can_follow = can_follow
        self._context = zmq.asyncio.Context()  # starts no thread before its first socket
        self._by_url: dict[str, asyncio.Task[None]] = {}

    def watch(self, replica: Replica) -> None:
        """Start the feed of the replica; restart it if there is one, because the replica may have restarted."""
        if (old := self._by_url.get(replica.url)) is not None:
            old.cancel()
        self._by_url = {url: task for url, task in self._by_url.items() if not task.done()}
        name = f"the event feed of {replica.url}"
        self._by_url[replica.url] = self._fleet.tasks.keep_running(name, lambda: self._follow(replica))

    def close(self) -> None:
        """Release the sockets, after the tasks have ended."""
        self._context.destroy(0)

    async def _follow(self, replica: Replica) -> None:
        open_stream: Callable[[], AsyncGenerator[Sequence[Frame], None]] = partial(_engine_frames, replica)
        replica.link = None
        if replica.backend.events is not None:
            if not await self._can_follow(replica):
                return
            info = replica.info
            replica.link = EngineSource(self._context, replica.backend, info.fingerprint, info.block_size)
            open_stream = replica.link.frames
        pause_s = FIRST_PAUSE_S
        while self._is_ours(replica):
            num_frames = 0
            try:
                async with contextlib.aclosing(open_stream()) as batches:
                    while self._is_ours(replica):
                        async with asyncio.timeout(STALL_S):
                            frames = await anext(batches)
                        num_frames += len(frames)
                        if not self._take(replica, frames):
                            break
            except (StopAsyncIteration, TimeoutError, ConnectFailed):
                pass  # the probes report this
            except (StreamError, ValueError) as error:
                log.warning("%s: its cache events are not understood: %s", replica.url, error)
                num_frames = 0  # lets the pauses grow
            except NoEvents:
                return
            except OtherBlockSize as error:
                log.info("%s: %s", replica.url, error)
                self._correct_block_size(replica, error.block_size)
                return
            pause_s = FIRST_PAUSE_S if num_frames else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * (0.5 + random.random()))

    def _take(self, replica: Replica, frames: Sequence[Frame]) -> bool:
        """Pass the frames to the placement; return False after a gap, which requires a new snapshot."""
        group = self._fleet.group_with(replica)
        if group is None or replica.url not in group.replicas or not frames:
            return True
        group.placement.apply_events(replica.url, frames)
        return not group.placement.needs_snapshot(replica.url)

    def _correct_block_size(self, replica: Replica, block_size: int) -> None:
        """Correct the replica's block size, which rebuilds its placement entry, and restart its feed."""
        if replica.root is not None and self._is_ours(replica):
            info = msgspec.structs.replace(replica.info, block_size=block_size)
            self._fleet.assign_group(replica, replica.root, replica.models, info)
            asyncio.get_running_loop().call_soon(self.watch, replica)

    def _is_ours(self, replica: Replica) -> bool:
        return self._fleet.replicas.get(replica.url) is replica and replica.state != "removing"


async def _engine_frames(replica: Replica) -> AsyncGenerator[Sequence[Frame], None]:
    """Connect to the event stream of a Penstock engine, which begins with a snapshot, and yield its frames until it
    ends. Raises ConnectFailed, NoEvents and StreamError."""
    pool, sink, reader = replica.pool, QueueSink(), FrameReader()
    upstream = await pool.connect()
    upstream.send(request_head(b"GET", PATH, pool.host_header, replica.key_line), b"", sink)
    try:
        while (data := await sink.pieces.get()) is not None and sink.status == 200:
            yield reader.feed(data)
        if sink.status in (401, 403, 404, 405):
            level = logging.INFO if sink.status in (404, 405) else logging.WARNING
            log.log(level, "%s: no cache events (%d)", replica.url, sink.status)
            raise NoEvents
    finally:
        upstream.drop(sink)
