"""`--kv-events-config`: publishes KV cache events over ZMQ in vLLM's format, for routers that read it.

It gets the core's cache updates from our own stream (kv_events.py). vLLM's events contain more than that stream sends: the
tokens of each block and its parent block. The core reports them when it computes the keys of a request's blocks, and they
are remembered here for as long as the block may be cached in any tier.
"""

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import zmq

from penstock.engine.config import ConfigError
from penstock.engine.http.kv_stream import keys_in
from penstock.engine.messages import CacheUpdate, KeyedBlock
from penstock.engine.server.server_config import KvEventsConfig
from penstock.executor.protocol import ModelInfo

log = logging.getLogger("penstock.server")

MEDIA = {"device": "GPU", "host": "CPU"}
END = (-1).to_bytes(8, "big", signed=True)
SPARE = 2**14  # blocks remembered in addition to the cached ones, for requests in flight


class KvPublisher:
    """Publishes the events; one per server, from before its first request until it stops."""

    def __init__(self, info: ModelInfo, config: KvEventsConfig) -> None:
        self._config, self._info = config, info
        self.blocks: dict[bytes, KeyedBlock] = {}
        self._num_new = 2 * info.num_blocks  # new blocks between two sweeps
        self.most = self._num_new + SPARE
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._context = zmq.Context()

    def start(self) -> None:
        """Bind the sockets; raise ConfigError if an endpoint cannot be bound."""
        if self._info.hits_at_ends:
            raise ConfigError(
                "kv_events_config: given; prefixes of this model are cached only up to checkpoints, which vLLM's events "
                "cannot express; use GET /kv_events"
            )
        self._socket = self._bind(zmq.PUB, "endpoint", self._config.endpoint, self._config.hwm)
        if self._config.replay_endpoint is not None:
            # No high-water mark: the buffer already limits the number of replayed messages.
            self._replay = self._bind(zmq.ROUTER, "replay_endpoint", self._config.replay_endpoint, 0)
            asyncio.get_running_loop().add_reader(self._replay.fileno(), self._repeat)
        log.warning("cache events with the tokens of prompts are published at %s, to anyone", self._config.endpoint)

    def close(self) -> None:
        if self._config.replay_endpoint is not None:
            asyncio.get_running_loop().remove_reader(self._replay.fileno())
        self._context.destroy(linger=0)

    def publish(self, update: CacheUpdate, cached: Mapping[str, set[bytes]]) -> None:
        """Publish an update of the core. `cached`: the keys in each tier after the update."""
        self.remember(update.blocks, cached)
        medium = MEDIA[update.tier]
        events: list[dict[str, Any]] = []
        if update.removed:
            hashes = [_number(key) for key in keys_in(update.removed)]
            events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": 0})
        events += [self._stored(run, medium) for run in self._runs(keys_in(update.stored))]
        if events:
            payload = msgspec.msgpack.encode([time.time(), events, 0])
            number, self._number = self._number, self._number + 1
            self._buffer.append((number, payload))
            self._socket.send_multipart([self._config.topic.encode(), number.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    def remember(self, blocks: list[KeyedBlock], cached: Mapping[str, set[bytes]]) -> None:
        """Add blocks. Now and then drop all except the cached and the newest ones; this visits every block."""
        for block in blocks:
            self.blocks.pop(block.key, None)  # so that the block moves to the end, among the newest
            self.blocks[block.key] = block
        if len(self.blocks) > self.most:
            in_use = set().union(*cached.values())
            newest = dict(list(self.blocks.items())[-SPARE:])
            self.blocks = {key: block for key, block in self.blocks.items() if key in in_use} | newest
            self.most = len(self.blocks) + self._num_new

    def _runs(self, keys: list[bytes]) -> Iterator[list[KeyedBlock]]:
        """Yield runs of consecutive blocks. Blocks that are not remembered any more are left out."""
        run: list[KeyedBlock] = []
        for block in filter(None, map(self.blocks.get, keys)):
            if run and block.parent != run[-1].key:
                yield run
                run = []
            run.append(block)
        if run:
            yield run

    def _stored(self, run: list[KeyedBlock], medium: str) -> dict[str, Any]:
        first = run[0]
        extra = [[word for word in (block.adapter, block.salt) if word is not None] or None for block in run]
        return {
            "type": "BlockStored",
            "block_hashes": [_number(block.key) for block in run],
            "parent_block_hash": _number(first.parent) if first.parent else None,
            "token_ids": array("i", b"".join(block.tokens for block in run)).tolist(),
            "block_size": self._info.block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": first.adapter,
            "extra_keys": extra if any(extra) else None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

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
