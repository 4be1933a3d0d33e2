"""A stand-in for the endpoint picker of an inference gateway. It chooses a server by the published protocols alone.

The names are those of the Gateway API Inference Extension (proposal 003, model server protocol), of llm-d's plugins
(token-producer, precise-prefix-cache-producer, the three scorers) and of vLLM's cache events. Like the real one it has keys
of its own for blocks of token ids. A server that lacks a name is refused, and the error has the name.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families

GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
SCORERS = ("prefix-cache-scorer", "kv-cache-utilization-scorer", "queue-scorer")
REPLAY_MS = 60_000


class Unfit(Exception):
    """A server that the picker cannot use; the message has the missing name."""


class Server:
    """One server as the picker sees it: where it is, its gauges, and the blocks in its cache."""

    def __init__(self, address: str, events: str, replay: str) -> None:
        """`address`: host and port. `events` and `replay`: the endpoints of its cache events."""
        self.address, self._context = address, zmq.Context()
        self.socket, self.replay = (self._context.socket(kind) for kind in (zmq.SUB, zmq.DEALER))
        self.socket.connect(events)
        self.replay.connect(replay)
        self.number = 0  # of the batch that is expected next
        self.gauges: dict[str, float] = {}
        self.keys: dict[Any, bytes] = {}  # the engine's name of a cached block → our key

    def close(self) -> None:
        self._context.destroy(linger=0)


class Picker:
    """Picks one of its servers for a request, as the profile of an EndpointPickerConfig says."""

    def __init__(
        self, config: dict[str, Any], servers: Sequence[Server], seen: Callable[[bytes], bytes] = lambda data: data
    ) -> None:
        """`seen`: changes what the servers send, and the paths that they are asked for."""
        plugins = {each["type"]: each.get("parameters", {}) for each in config["plugins"]}
        (profile,) = config["schedulingProfiles"]
        self._weights = {each["pluginRef"]: each["weight"] for each in profile["plugins"]}
        assert self._weights.keys() == {*SCORERS}
        prefix = plugins["precise-prefix-cache-producer"]
        self._block_size = prefix["tokenProcessorConfig"]["blockSizeTokens"]
        self._topic_filter = prefix["kvEventsConfig"]["topicFilter"]
        self._model = plugins["token-producer"]["modelName"]
        self._servers, self._seen = servers, seen
        for server in servers:
            server.socket.subscribe(self._topic_filter)

    def pick(self, path: str, body: dict[str, Any]) -> str:
        """Return the address of the server with the highest score."""
        tokens = self._tokens(path, body)
        for server in self._servers:
            self._read_gauges(server)
            self._read_events(server)
        queues = [server.gauges[GAUGES[0]] for server in self._servers]
        scores = {}
        for server in self._servers:
            depth = (max(queues) - server.gauges[GAUGES[0]]) / (max(queues) - min(queues) or 1)
            parts = self._prefix_score(server, tokens), 1 - server.gauges[GAUGES[2]], depth
            scores[server.address] = sum(self._weights[name] * part for name, part in zip(SCORERS, parts, strict=True))
        return max(scores, key=scores.__getitem__)

    def _prefix_score(self, server: Server, tokens: list[int]) -> float:
        """Return the share of the prompt's whole blocks that the server has from the beginning on."""
        keys, cached = self._keys(b"", tokens), {*server.keys.values()}
        found = next((place for place, key in enumerate(keys) if key not in cached), len(keys))
        return found / max(len(keys), 1)

    def _keys(self, parent: bytes, tokens: list[int]) -> list[bytes]:
        keys = []
        for start in range(0, len(tokens) // self._block_size * self._block_size, self._block_size):
            block = json.dumps(tokens[start : start + self._block_size]).encode()
            parent = hashlib.blake2b(parent + block).digest()
            keys.append(parent)
        return keys

    def _fetch(self, server: Server, path: str, body: dict[str, Any] | None = None) -> bytes:
        url = f"http://{server.address}{self._seen(path.encode()).decode()}"
        answer = httpx.get(url) if body is None else httpx.post(url, json=body)
        if answer.status_code != 200:
            raise Unfit(f"{server.address}: {path}: status {answer.status_code}")
        return self._seen(answer.content)

    def _tokens(self, path: str, body: dict[str, Any]) -> list[int]:
        """Have the prompt tokenized by the first server, as the plugin token-producer does."""
        server = self._servers[0]
        found = json.loads(self._fetch(server, f"{path}/render", body | {"model": self._model}))
        first = found if isinstance(found, dict) else found[0]
        if "token_ids" not in first:
            raise Unfit(f"{server.address}: {path}/render: its answer has no token_ids")
        return list(first["token_ids"])

    def _read_gauges(self, server: Server) -> None:
        text = self._fetch(server, "/metrics").decode()
        families = {each.name: each for each in text_string_to_metric_families(text)}
        for name in GAUGES:
            if name not in families or families[name].type != "gauge":
                raise Unfit(f"{server.address}: /metrics has no gauge {name}")
            server.gauges[name] = families[name].samples[0].value

    def _read_events(self, server: Server) -> None:
        """Read the published batches, then request those that were published before the subscription."""
        while server.socket.poll(0):
            self._take_batch(server, server.socket.recv_multipart())
        server.replay.send_multipart([b"", server.number.to_bytes(8, "big")])
        while server.replay.poll(REPLAY_MS):
            _, *batch = server.replay.recv_multipart()
            if not batch[-1]:
                return
            self._take_batch(server, batch)
        raise Unfit(f"{server.address}: no replay of its events")

    def _take_batch(self, server: Server, batch: list[bytes]) -> None:
        topic, number, payload = map(self._seen, batch)
        expected = f"{self._topic_filter}{server.address}@{self._model}"
        if topic.decode() != expected:
            raise Unfit(f"{server.address}: events have the topic {topic.decode()}, not {expected}")
        if int.from_bytes(number, "big") != server.number:
            return  # it is known already, or the replay has what is missing before it
        server.number += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            self._take_event(server, event)

    def _take_event(self, server: Server, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "BlockRemoved":
            for name in event["block_hashes"]:
                server.keys.pop(name, None)
        elif kind == "BlockStored":
            if missing := [name for name in STORED if name not in event]:
                raise Unfit(f"{server.address}: BlockStored has no {missing[0]}")
            if event["block_size"] != self._block_size:
                raise Unfit(f"{server.address}: block_size is {event['block_size']}, not {self._block_size}")
            parent = event["parent_block_hash"]
            if parent is None or parent in server.keys:
                keys = self._keys(b"" if parent is None else server.keys[parent], event["token_ids"])
                server.keys |= zip(event["block_hashes"], keys, strict=True)
        else:
            raise Unfit(f"{server.address}: {kind} is neither BlockStored nor BlockRemoved")
