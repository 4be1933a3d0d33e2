"""The cache events of vLLM and SGLang, without either: messages of the same layout from sockets of the same kind, and a
replica of raw sockets that describes itself as such an engine does."""

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from tests.support.refusals import cases
from tests.support.router_stub import Stub, stub, whole

FIELDS: dict[str, tuple[str, ...]] = dict(cases(__file__, "fields of events"))  # as an array, in their order
END = (-1).to_bytes(8, "big", signed=True)


def names_of(tokens: Sequence[int], size: int) -> list[bytes]:
    """Return the engine's own names of whole blocks."""
    names, last = [], b""
    for start in range(0, len(tokens) // size * size, size):
        last = hashlib.md5(last + repr(tokens[start : start + size]).encode(), usedforsecurity=False).digest()
        names.append(last)
    return names


def stored(tokens: Sequence[int], size: int = 16, start: int = 0, **more: Any) -> dict[str, Any]:
    """Return the event for the blocks of a prompt from the `start`-th on."""
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
    """A PUB socket, and a ROUTER socket from which a thread repeats the latest batches."""

    def __init__(
        self, ports: Sequence[int] = (0, 0), *, host: str = "127.0.0.1", buffer: int = 10_000, says_topic: bool = True
    ) -> None:
        self.host = host
        self._topic = [b""] if says_topic else []
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._number = 0
        self._context = zmq.Context()
        self._events, self._replay = sockets = [self._context.socket(kind) for kind in (zmq.PUB, zmq.ROUTER)]
        for each, port in zip(sockets, ports, strict=True):
            each.setsockopt(zmq.IPV6, 1)
            each.bind(f"tcp://{host}:{port or '*'}")
        self.ports = [int(each.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]) for each in sockets]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat)
        self._thread.start()

    def publish(self, *events: Any, is_lost: bool = False) -> None:
        """Publish a batch. `is_lost`: it reaches no subscriber, as when the network is away."""
        payload = batch(*events, time_s=id(self) + self._number)
        self._buffer.append((self._number, payload))
        if not is_lost:
            self._events.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def count_from_zero(self) -> None:
        """Begin the numbers of batches again, with nothing left to replay, while the sockets stay as they are."""
        self._buffer.clear()
        self._number = 0

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._context.destroy(0)

    def _repeat(self) -> None:
        while not self._stop.is_set():
            if not self._replay.poll(20):
                continue
            client, _, first = self._replay.recv_multipart()
            for number, payload in list(self._buffer):
                if number >= int.from_bytes(first, "big"):
                    self._replay.send_multipart([client, b"", *self._topic, number.to_bytes(8, "big"), payload])
            self._replay.send_multipart([client, b"", *self._topic, END, b""])


class StandIn:
    """An engine of another kind: a stub that answers as one, and its publisher."""

    def __init__(self, http: Stub, **settings: Any) -> None:
        self.http = http
        self.metrics = "".join(cases(__file__, "metrics of an engine"))
        self.settings = settings
        self.publisher = Publisher(**settings)
        http.questions[b"/metrics"] = lambda seen, sock: whole(self.metrics.encode())
        http.questions[b"/health"] = lambda seen, sock: whole()

    def restart(self) -> None:
        """Restart the engine: its cache is empty, and its numbers begin again."""
        ports = self.publisher.ports
        self.publisher.close()
        self.publisher = Publisher(ports, **self.settings)

    @property
    def backend(self) -> str:
        events, replay = (f"tcp://{self.publisher.host}:{port}" for port in self.publisher.ports)
        return f"{self.http.url},events={events},replay={replay}"


@contextlib.contextmanager
def stand_in(**settings: Any) -> Iterator[StandIn]:
    with stub() as http:
        engine = StandIn(http, **settings)
        try:
            yield engine
        finally:
            engine.publisher.close()
