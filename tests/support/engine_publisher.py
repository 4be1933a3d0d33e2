"""What vLLM and SGLang publish of their caches, without either: messages of the same layout from sockets of the same kind,
and a replica of raw sockets that says of itself what such an engine says."""

import contextlib
import hashlib
import queue
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from tests.support.router_stub import Seen, Stub, stub, whole

FIELDS = {  # of an event as an array, in their order
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
END = (-1).to_bytes(8, "big", signed=True)


def names_of(tokens: Sequence[int], size: int, parent: bytes | None = None, seed: bytes = b"seed") -> list[bytes]:
    """The engine's own names of whole blocks."""
    names, last = [], parent or b""
    for start in range(0, len(tokens) // size * size, size):
        last = hashlib.md5(seed + last + repr(tokens[start : start + size]).encode(), usedforsecurity=False).digest()
        names.append(last)
    return names


def stored(tokens: Sequence[int], size: int = 16, start: int = 0, **more: Any) -> dict[str, Any]:
    """The blocks of a prompt from the `start`-th on."""
    names = names_of(tokens, size)
    return {
        "type": "BlockStored",
        "block_hashes": names[start:],
        "parent_block_hash": names[start - 1] if start else None,
        "token_ids": list(tokens[start * size : len(names) * size]),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(names: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def as_array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event[name] for name in FIELDS[event["type"]])]


def batch(*events: Any, time_s: float = 0.0) -> bytes:
    return msgspec.msgpack.encode([time_s, list(events), 0])


class Publisher:
    """A PUB socket and the ROUTER socket that repeats. A thread owns both."""

    def __init__(self, ports: tuple[int, int] = (0, 0), *, buffer: int = 10_000, says_topic: bool = True) -> None:
        self.ports = ports
        self.num_replays = 0
        self._says_topic = says_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._number = 0
        self._wanted: queue.Queue[tuple[bytes, bool]] = queue.Queue()
        self._stop, self._is_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._is_up.wait(60)

    def publish(self, *events: Any, is_lost: bool = False) -> None:
        """`is_lost`: the message reaches no subscriber, as when the network is away."""
        self._wanted.put((batch(*events, time_s=id(self) + self._number), is_lost))
        self._wanted.join()

    def count_from_zero(self) -> None:
        """Number the next batch 0, with nothing left to replay, while the sockets stay as they are."""
        self._wanted.join()
        self._buffer.clear()
        self._number = 0

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        context = zmq.Context()
        events, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        try:
            events.bind(f"tcp://127.0.0.1:{self.ports[0] or '*'}")
            replay.bind(f"tcp://127.0.0.1:{self.ports[1] or '*'}")
            ends = [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (events, replay)]
            self.ports = (int(ends[0].rpartition(":")[2]), int(ends[1].rpartition(":")[2]))
            self._is_up.set()
            while not self._stop.is_set():
                if replay.poll(2):
                    self._repeat(replay)
                with contextlib.suppress(queue.Empty):
                    while True:
                        payload, is_lost = self._wanted.get_nowait()
                        self._buffer.append((self._number, payload))
                        if not is_lost:
                            events.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
                        self._number += 1
                        self._wanted.task_done()
        finally:
            context.destroy(0)

    def _repeat(self, replay: "zmq.Socket[bytes]") -> None:
        who, _, first = replay.recv_multipart()
        self.num_replays += 1
        topic = [b""] if self._says_topic else []
        for number, payload in self._buffer:
            if number >= int.from_bytes(first, "big"):
                replay.send_multipart([who, b"", *topic, number.to_bytes(8, "big"), payload])
        replay.send_multipart([who, b"", *topic, END, b""])


class StandIn:
    """An engine of another kind: a stub that answers as one, and its publisher."""

    def __init__(self, http: Stub, **settings: Any) -> None:
        self.http = http
        self.metrics = (
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
            'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.0\n'
        )
        self.settings = settings
        self.publisher = Publisher(**settings)
        http.questions[b"/metrics"] = lambda seen, sock: whole(self.metrics.encode())
        http.questions[b"/health"] = lambda seen, sock: whole()

    def restart(self) -> None:
        """Its cache is empty, its numbers begin again."""
        ports = self.publisher.ports
        self.publisher.close()
        self.publisher = Publisher(ports, **self.settings)

    @property
    def backend(self) -> str:
        events, replay = self.publisher.ports
        return f"{self.http.url},events={events},replay={replay}"


@contextlib.contextmanager
def stand_in(answer: Any = lambda seen, sock: whole(), **settings: Any) -> Iterator[StandIn]:
    with stub(answer) as http:
        engine = StandIn(http, **settings)
        try:
            yield engine
        finally:
            engine.publisher.close()


def answer_with(cached: int) -> Any:
    """To every request, an answer that says in its usage how much was cached."""

    def answer(_seen: Seen, _sock: socket.socket) -> bytes:
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
        return whole(msgspec.json.encode({"id": "x", "choices": [], "usage": usage}))

    return answer
