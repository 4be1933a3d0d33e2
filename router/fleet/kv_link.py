"""Follows every replica's stream of cache events and hands the frames to its group's placement.

One task per replica: connect, read, and when the stream breaks, stalls or has a gap, connect again; a stream begins
with all that is cached. A replica without such a stream is left alone: the placement then goes by what it was sent.
Engines of another kind publish theirs elsewhere (router/fleet/engine_link.py).
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterable
from functools import partial

import msgspec
import zmq.asyncio

from penstock.engine.http.kv_stream import ALIVE_S, Frame, FrameReader, Snapshot, StreamError
from penstock.router.background import keep_running
from penstock.router.fleet.engine_link import EngineLink
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import Replica
from penstock.router.http.heads import AnswerHead, question_head
from penstock.router.http.upstream import ConnectFailed, Dechunker, Upstream
from penstock.router.placement.engine_blocks import OtherBlockSize

log = logging.getLogger("penstock.router")

PATH = "/kv_events"
SILENT_S = 5 * ALIVE_S  # a stream that says nothing for so long is given up
FIRST_PAUSE_S = 0.1  # before connecting again; doubled up to the next, with jitter
LONGEST_PAUSE_S = 5.0


class KvLinks:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._context = zmq.asyncio.Context()  # starts no thread before its first socket
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, replica: Replica) -> None:
        """From now on; a replica that has come back is asked anew."""
        old = self._tasks.pop(replica.url, None)
        if old is not None:
            old.cancel()
        watch = self._watch_stream if replica.backend.events is None else self._watch_engine
        watching = keep_running(f"the event stream of {replica.url}", lambda: watch(replica))
        task = self._tasks[replica.url] = asyncio.get_running_loop().create_task(watching)
        task.add_done_callback(partial(self._watched, replica.url))

    def _watched(self, url: str, task: asyncio.Task[None]) -> None:
        """The replica has left."""
        if self._tasks.get(url) is task:
            del self._tasks[url]

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._context.destroy(0)

    async def _watch_engine(self, replica: Replica) -> None:
        """Until its blocks turn out to have another size: then it is a replica of another kind, and listened to anew."""

        def take(frames: Iterable[Frame]) -> None:
            group = self._fleet.home(replica)
            if group is not None and replica.url in group.replicas:
                group.placement.apply_events(replica.url, frames)

        info = replica.info
        replica.link = EngineLink(
            self._context, replica.backend, info.fingerprint, info.block_size, take, lambda: self._is_ours(replica)
        )
        try:
            await replica.link.run()
        except OtherBlockSize as error:
            log.info("%s: %s", replica.url, error)
            info = msgspec.structs.replace(info, block_size=error.block_size)
            if replica.root is not None and self._is_ours(replica):
                self._fleet.introduce(replica, replica.root, replica.models, info)
                asyncio.get_running_loop().call_soon(self.watch, replica)

    async def _watch_stream(self, replica: Replica) -> None:
        pause_s = FIRST_PAUSE_S
        while self._is_ours(replica):
            stream = Stream(self._fleet, replica)
            try:
                upstream = await replica.pool.connect()
                upstream.send(question_head(PATH, replica.pool.host_header, replica.key_line), b"", stream)
                await self._follow(stream, upstream)
            except ConnectFailed:
                pass  # the probes say so too, and louder
            if stream.status in (401, 403, 404, 405):
                level = logging.INFO if stream.status in (404, 405) else logging.WARNING
                log.log(level, "%s: no cache events (%d)", replica.url, stream.status)
                return
            pause_s = FIRST_PAUSE_S if stream.num_frames else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * (0.5 + random.random()))

    async def _follow(self, stream: "Stream", upstream: Upstream) -> None:
        """Until the stream is over, or says nothing for too long."""
        try:
            heard = -1
            while not stream.over.is_set() and stream.num_pieces != heard:
                heard = stream.num_pieces
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SILENT_S):
                        await stream.over.wait()
        finally:
            upstream.drop(stream)

    def _is_ours(self, replica: Replica) -> bool:
        return self._fleet.replicas.get(replica.url) is replica and replica.state != "removing"


class Stream:
    """The leg of one event stream."""

    def __init__(self, fleet: Fleet, replica: Replica) -> None:
        self.status = 0
        self.num_pieces = self.num_frames = 0
        self.over = asyncio.Event()
        self._fleet = fleet
        self._replica = replica
        self._frames = FrameReader()
        self._body: Dechunker | None = None

    def head(self, head: AnswerHead) -> None:
        self.status = head.status
        if head.is_chunked:
            self._body = Dechunker()
        if head.status != 200:
            self.over.set()

    def data(self, data: bytes) -> None:
        self.num_pieces += 1
        group = self._fleet.home(self._replica)
        if self.over.is_set() or group is None or self._replica.url not in group.replicas:
            return
        try:
            frames = self._frames.feed(self._body.feed(data) if self._body is not None else data)
            self.num_frames += len(frames)
            group.placement.apply_events(self._replica.url, frames)
        except (StreamError, ValueError) as error:
            log.warning("%s: its cache events are not understood: %s", self._replica.url, error)
            self.num_frames = 0  # nothing to build on: the pauses grow
            self.over.set()
            return
        is_whole = any(not isinstance(frame, Snapshot) or frame.is_last for frame in frames)
        if is_whole and group.placement.needs_snapshot(self._replica.url):
            self.over.set()

    def ended(self) -> None:
        self.over.set()

    def lost(self, reason: str) -> None:  # noqa: ARG002  (a Leg)
        self.over.set()
