"""Both ends of the peer tier in one process, over loopback, and peers that do everything wrong."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import zmq
from xxhash import xxh3_64_intdigest

from penstock.cache.tiers.health import HealthLimits
from penstock.cache.tiers.peer.server import PeerServer
from penstock.cache.tiers.peer.store import LinkLimits, PeerTier
from penstock.cache.tiers.peer.wire import Block, Get, KeyUpdate, PeerHello, ToPeer, Welcome, checksum_seed
from penstock.executor.tiers.served import ServedBlocks
from tests.support.flaky_store import FlakyStore
from tests.support.running_server import until as until  # for the tests of peers

CHUNK = 96 * 1024  # more than zmq copies when it is asked not to
FINGERPRINT = b"f" * 32
SECRET = "a secret that is long enough"
QUICK = LinkLimits(
    deadline_s=60.0, reconnect_s=(0.02, 0.1), health=HealthLimits(stall_s=60.0, first_pause_s=0.05, longest_pause_s=0.2)
)


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def content(number: int) -> bytes:
    return bytes([number % 251]) * CHUNK


class Source(ServedBlocks):
    """The blocks of a rank: these numbers in its host blocks, those in a store that stands for its disk."""

    def __init__(self, memory: Iterable[int] = range(30), disk: Iterable[int] = range(30, 40)) -> None:
        self.disk = FlakyStore(data={key(number): content(number) for number in disk})
        super().__init__(np.zeros((100, CHUNK), np.uint8), self.disk, threading.Lock(), self._poll_disk)
        self.note_disk(self.disk.data, ())
        for number in memory:
            self.add(number)

    def add(self, number: int) -> None:
        with self._lock:
            fill = self.overwrite(number + 1, key(number))  # there is no host block 0
            self._arena[number + 1] = number % 251
            fill()

    def remove(self, number: int) -> None:
        with self._lock:
            self.overwrite(number + 1, b"the key of what is never written")

    def _poll_disk(self) -> None:
        for result in self.disk.poll():
            self.end_load(result.ticket, result.ok)


@contextlib.contextmanager
def serving(source: Source, endpoint: str = "tcp://127.0.0.1:*", **options: Any) -> Iterator[PeerServer]:
    defaults: dict[str, Any] = {"chunk_bytes": CHUNK, "fingerprint": FINGERPRINT, "serve_bytes": 64 * CHUNK}
    with contextlib.closing(PeerServer(endpoint, source, **{**defaults, **options})) as server:
        server.start()
        yield server


def tier(endpoint: str, **options: Any) -> contextlib.closing[PeerTier]:
    return contextlib.closing(opened(endpoint, **options))


def opened(endpoint: str, **options: Any) -> PeerTier:
    defaults: dict[str, Any] = {"chunk_bytes": CHUNK, "fingerprint": FINGERPRINT, "limits": QUICK}
    return PeerTier(endpoint, **{**defaults, **options})


def free_addresses(count: int, ranks: int = 1) -> list[str]:
    """On this machine, each with as many ports in a row: none that the system gives to connections, now or meanwhile."""
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[str] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            first = random.SystemRandom().randrange(10_000, max(below, 30_000) - ranks)
            with contextlib.suppress(OSError):
                for port in range(first, first + ranks):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(f"127.0.0.1:{first}")
    return found


def ended(peer: PeerTier, count: int) -> dict[int, bool]:
    """Ticket → ok of so many loads, each ended once."""
    seen: dict[int, bool] = {}

    def poll() -> bool:
        for completion in peer.poll():
            assert completion.ticket not in seen, "a load ended twice"
            seen[completion.ticket] = completion.ok
        return len(seen) >= count

    until(poll, f"{count} loads end")
    peer.check()
    return seen


class Send(Protocol):
    def __call__(self, message: object, *payload: bytes) -> None: ...


Answer: TypeAlias = Callable[[Get, Send], object]


class LyingPeer(contextlib.AbstractContextManager["LyingPeer"]):
    """Greets as it should and says that it has `keys`; what it answers to a `Get` is up to `answer(get, send)`."""

    def __init__(self, keys: list[bytes], answer: Answer) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.requests: list[Get] = []
        self.num_greetings = 0
        self.greets = True
        self._keys, self.answer = keys, answer
        self._is_over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._socket.close()
        self._context.term()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._is_over:
            if not self._socket.poll(5):
                continue
            client, body = self._socket.recv_multipart()
            message = msgspec.msgpack.decode(body, type=ToPeer)
            if isinstance(message, PeerHello):
                self.num_greetings += 1
                if self.greets:
                    self._send(client, Welcome())
                    self._send(client, KeyUpdate(b"".join(self._keys), b"", True))
            else:
                self.requests.append(message)
                self.answer(message, partial(self._send, client))

    def _send(self, client: bytes, message: object, *payload: bytes) -> None:
        head = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self._socket.send_multipart([client, head, *payload])


def right(get: Get, send: Send) -> None:
    data = content(get.key[3])
    send(Block(get.ticket, get.key, xxh3_64_intdigest(data, checksum_seed(FINGERPRINT))), data)
