"""`--kv-events-config`: publishes KV cache events over ZMQ in vLLM's format, for routers that read it.

It listens to our own stream (kv_events.py) and adds the additional data of vLLM's events: the tokens of each block and
its parent block. The core does not send these, but every token of a prompt or an answer passes through this process. So
the block keys are computed here again, and remembered for as long as the block may be cached.
"""

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import zmq

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.config import ConfigError
from penstock.engine.http.kv_stream import KEY_BYTES, Changes, Frame, Snapshot, keys_in
from penstock.engine.messages import Outputs, Submit
from penstock.engine.server.kv_events import KvEvents
from penstock.engine.server.server_config import KvEventsConfig
from penstock.engine.server.service import Service

log = logging.getLogger("penstock.server")

MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
END = (-1).to_bytes(8, "big", signed=True)
SPARE = 2**14  # blocks remembered in addition to the cached ones, for requests in flight


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class KnownBlock(NamedTuple):
    """The content of a block. `parent`: key of the previous block, b"" for the first, which alone has a salt."""

    parent: bytes
    tokens: bytes
    adapter: str | None
    salt: str | None


class OpenRequest:
    def __init__(self, message: Submit, root: bytes) -> None:
        self.message = message
        self.tokens = array("i", message.tokens)
        self.last_key = root  # key of the last full block; before the first, the root key of the namespace
        self.num_keyed = 0  # tokens in full blocks


class Known:
    """Remembers the tokens of all blocks of prompts and answers."""

    def __init__(self, fingerprint: bytes, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.blocks: dict[bytes, KnownBlock] = {}
        self._fingerprint, self._num_new = fingerprint, 2 * num_blocks  # new blocks between two sweeps
        self._most = self._num_new + SPARE
        self._open: dict[str, OpenRequest] = {}

    def change_model(self, fingerprint: bytes) -> None:
        """Recompute the keys of open requests with the fingerprint of the new weights."""
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            for before in [*self._open.values()]:
                self.submitted(before.message)
                request = self._open[before.message.request_id]
                request.tokens = before.tokens
                self._extend(request)

    def submitted(self, message: Submit) -> None:
        root = namespace_root(model=self._fingerprint, adapter=message.adapter, salt=message.cache_salt)
        request = self._open[message.request_id] = OpenRequest(message, root)
        self._extend(request)

    def stepped(self, outputs: Outputs) -> None:
        for output in outputs.outputs:
            request = self._open.get(output.request_id)
            if request is not None:
                request.tokens.extend(output.tokens)
                self._extend(request)
                if output.finish_reason is not None:
                    del self._open[output.request_id]

    def forget(self, tiers: Iterable[set[bytes]]) -> None:
        """Drop all blocks except cached and recent ones. A sweep visits every block, so it runs only now and then."""
        if len(self.blocks) > self._most:
            cached = set().union(*tiers)
            newest = dict(list(self.blocks.items())[-SPARE:])
            self.blocks = {key: block for key, block in self.blocks.items() if key in cached} | newest
            self._most = len(self.blocks) + self._num_new

    def _extend(self, request: OpenRequest) -> None:
        """Compute the keys of the blocks that have become full."""
        first, size = request.num_keyed, self.block_size
        full = len(request.tokens) // size * size
        if full == first:
            return
        message, parent = request.message, request.last_key[:KEY_BYTES] if first else b""
        keys = block_keys(memoryview(request.tokens)[first:full], size, root=request.last_key)
        for at, key in zip(range(first, full, size), keys, strict=True):
            tokens = request.tokens[at : at + size].tobytes()
            short = key[:KEY_BYTES]
            self.blocks.pop(short, None)  # so that the block moves to the end, among the newest
            self.blocks[short] = KnownBlock(parent, tokens, message.adapter, None if at else message.cache_salt)
            parent = short
        request.last_key, request.num_keyed = keys[-1], full


class KvPublisher:
    """Publishes the events; one per server, from before its first request until it stops."""

    def __init__(self, service: Service, events: KvEvents, config: KvEventsConfig) -> None:
        self._service, self._events, self._config = service, events, config
        info = service.info
        self._known = Known(info.fingerprint, info.block_size, info.num_blocks)
        self._cached: dict[str, set[bytes]] = {}  # tier → keys published as stored and not yet as removed
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._context = zmq.Context()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bind the sockets and start publishing; raise ConfigError if an endpoint cannot be bound."""
        if self._service.info.hits_at_ends:
            raise ConfigError(
                "kv_events_config: this model's recurrent states are cached at some ends of prompts alone, which vLLM's "
                "events cannot say; GET /kv_events can"
            )
        self._socket = self._bind(zmq.PUB, "endpoint", self._config.endpoint, self._config.hwm)
        if self._config.replay_endpoint is not None:
            # No high-water mark: the buffer already limits the number of replayed messages.
            self._replay = self._bind(zmq.ROUTER, "replay_endpoint", self._config.replay_endpoint, 0)
            asyncio.get_running_loop().add_reader(self._replay.fileno(), self._repeat)
        engine = self._service.engine
        before = engine.on_step

        def on_step(outputs: Outputs) -> None:
            self._known.stepped(outputs)
            if before is not None:
                before(outputs)

        engine.on_submit, engine.on_step = self._known.submitted, on_step
        self._task = asyncio.get_running_loop().create_task(self._follow())
        log.warning("cache events with the tokens of prompts are published at %s, to anyone", self._config.endpoint)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            if self._config.replay_endpoint is not None:
                asyncio.get_running_loop().remove_reader(self._replay.fileno())
        self._context.destroy(linger=0)

    async def _follow(self) -> None:
        """Publish the stream of changes until the server drains or the engine is dead; restart it with new weights."""
        info = None
        while info is not self._service.info:
            info = self._service.info
            self._known.change_model(info.fingerprint)
            async for frame in self._events.frames():
                self._take(frame)

    def _take(self, frame: Frame) -> None:
        events: list[Event] = []
        if isinstance(frame, Snapshot):
            if frame.is_first and self._cached:
                self._cached = {}
                events.append(AllBlocksCleared())
            events += self._stored(frame.tier, self._in_order(keys_in(frame.keys)))
        elif isinstance(frame, Changes):
            events += self._removed(frame.tier, keys_in(frame.removed))
            events += self._stored(frame.tier, keys_in(frame.stored))
        if events:
            self._publish(events)

    def _in_order(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the keys of a snapshot, which is unordered, so that each key follows its parent."""
        left = dict.fromkeys(keys)
        while left:
            key = next(iter(left))
            chain = []
            while key in left:
                del left[key]
                chain.append(key)
                block = self._known.blocks.get(key)
                key = b"" if block is None else block.parent
            yield from reversed(chain)

    def _stored(self, tier: str, keys: Iterable[bytes]) -> Iterator[Event]:
        """Yield one event per run of consecutive blocks."""
        cached = self._cached.setdefault(tier, set())
        run: list[bytes] = []
        for key in keys:
            block = self._known.blocks.get(key)
            if block is None:
                continue  # from a request before the publisher started, so its tokens are unknown
            if run and block.parent != run[-1]:
                yield self._stored_run(tier, run)
                run = []
            run.append(key)
            cached.add(key)
        if run:
            yield self._stored_run(tier, run)
        self._known.forget(self._cached.values())

    def _stored_run(self, tier: str, run: list[bytes]) -> Event:
        blocks = [self._known.blocks[key] for key in run]
        first = blocks[0]
        extra = [[word for word in (block.adapter, block.salt) if word is not None] or None for block in blocks]
        return BlockStored(
            block_hashes=[_number(key) for key in run],
            parent_block_hash=_number(first.parent) if first.parent else None,
            token_ids=array("i", b"".join(block.tokens for block in blocks)).tolist(),
            block_size=self._known.block_size,
            lora_id=None,
            medium=MEDIA.get(tier, "STORAGE"),
            lora_name=first.adapter,
            extra_keys=extra if any(extra) else None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def _removed(self, tier: str, keys: Iterable[bytes]) -> Iterator[Event]:
        cached = self._cached.setdefault(tier, set())
        gone = [key for key in keys if key in cached]
        cached.difference_update(gone)
        if gone:
            yield BlockRemoved([_number(key) for key in gone], MEDIA.get(tier, "STORAGE"), group_idx=0)

    def _publish(self, events: list[Event]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        number, self._number = self._number, self._number + 1
        self._buffer.append((number, payload))
        self._socket.send_multipart([self._config.topic.encode(), number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def _repeat(self) -> None:
        """Answer all pending replay requests, since the descriptor is edge-triggered."""
        topic = self._config.topic.encode()
        while self._replay.poll(0):
            who, *rest = self._replay.recv_multipart(zmq.NOBLOCK)
            if len(rest) != 2 or len(rest[1]) != 8:
                continue
            first = int.from_bytes(rest[1], "big")
            for number, payload in self._buffer:
                if number >= first:
                    self._replay.send_multipart([who, b"", topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            self._replay.send_multipart([who, b"", b"", END, b""], zmq.NOBLOCK)

    def _bind(self, kind: int, name: str, endpoint: str, high_water: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(high_water)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events_config: {name} {endpoint!r}: {error.strerror}") from None
        return socket


def _number(key: bytes) -> int:
    return int.from_bytes(key, "little")
