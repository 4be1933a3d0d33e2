"""The server that sends one rank's KV blocks to other engines, with its thread.

A requested block is copied, or loaded from the disk, into a send buffer of the server. The block itself is held only for
the copy, however slow the client is, and no step of the engine waits for it. The number of send buffers is the limit:
when all are in flight, further requests are refused at once.
"""

import contextlib
from collections import Counter
from typing import Any, Protocol

import msgspec
import zmq
from xxhash import xxh3_64_intdigest as checksum
from zmq.auth.thread import ThreadAuthenticator

from penstock.cache.tiers.memory import huge_array
from penstock.cache.tiers.peer import wire
from penstock.cache.tiers.peer.polling import PollThread, Ready

MAX_CLIENTS = 64  # engines subscribed to the keys
MAX_REQUEST_BYTES = 4096
MAX_BUFFERS = 1024
QUEUED_MESSAGES = 4096  # for one client that does not receive
IDLE_MS, LOADING_MS = 1000, 1
MAX_REQUESTS_PER_PASS = 64


class BlockSource(Protocol):
    """The blocks that the server can send. The server's thread calls it; no call blocks for longer than a copy."""

    def keys(self) -> list[bytes]: ...

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys added and the keys removed since the last call."""

    def copy(self, key: bytes, out: memoryview) -> bool:
        """Copy the block from memory; return False if it is not there or was overwritten during the copy."""

    def start_load(self, key: bytes, out: memoryview) -> int | None:
        """Start loading the block from disk into `out`, borrowed until `take_loads` returns the ticket; None for a miss."""

    def take_loads(self) -> list[tuple[int, bool]]: ...


class PeerServer:
    """A server at `endpoint` (`tcp://…`) from `start` to `close`. Raises OSError if it cannot bind the port."""

    def __init__(
        self,
        endpoint: str,
        source: BlockSource,
        *,
        chunk_bytes: int,
        fingerprint: bytes,
        secret: str = "",
        serve_bytes: int,
    ) -> None:
        """Bind the socket and allocate the buffers; `serve_bytes` limits the blocks in flight to all clients together."""
        self._source = source
        self._chunk_bytes = chunk_bytes
        self._fingerprint = fingerprint
        self._seed = wire.checksum_seed(fingerprint)
        rows = huge_array(min(max(serve_bytes // chunk_bytes, 2), MAX_BUFFERS), chunk_bytes)
        self._buffers = [memoryview(row) for row in rows]
        self._free = list(range(len(self._buffers)))
        self._sending: list[tuple[zmq.MessageTracker, int]] = []  # with the buffer being sent
        # The source's ticket → client, its request, buffer.
        self._loading: dict[int, tuple[bytes, wire.Get, int]] = {}
        self._clients: dict[bytes, bool] = {}  # subscribed clients → needs a full snapshot of the keys
        self._num_blocks = self._num_refused = 0
        self._misses: Counter[str] = Counter()  # by reason
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.ToPeer).decode
        self._context = zmq.Context(io_threads=wire.LANES)
        self._guard: ThreadAuthenticator | None = None
        self._socket = self._listen(endpoint, secret)
        self._is_over = False
        self._thread = PollThread(
            "penstock-peer-server", (self._socket,), lambda: LOADING_MS if self._loading else IDLE_MS, self._serve
        )

    @property
    def endpoint(self) -> str:
        """Return the bound endpoint, with the port that the system chose for port 0."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        self._thread.start()

    def call(self) -> None:
        """Wake the thread because the source has changed; callable from any thread."""
        self._thread.wake()

    def close(self) -> None:
        """Stop serving. The source is not used afterwards, but a load in flight may still write to a buffer."""
        if self._is_over:
            return
        self._is_over = True
        self._thread.stop()
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)

    def stats(self) -> dict[str, Any]:
        return {
            "blocks": self._num_blocks,
            "bytes": self._num_blocks * self._chunk_bytes,
            "refused_peers": self._num_refused,
            "clients": len(self._clients),
            "misses": dict(self._misses),
        }

    # -- the thread ----------------------------------------------------------------------------------------

    def _listen(self, endpoint: str, secret: str) -> zmq.Socket[bytes]:
        listening = wire.make_socket(self._context, zmq.ROUTER)
        listening.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that has disconnected is an error
        listening.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        listening.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        lock = wire.curve_keys(secret)
        if lock is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback("*", credentials_provider=wire.CurveGuard(lock.client_public))
            listening.curve_server = True
            listening.curve_publickey, listening.curve_secretkey = lock.server_public, lock.server_secret
        try:
            listening.bind(endpoint)
        except zmq.ZMQError as error:
            if self._guard is not None:
                self._guard.stop()
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from None
        return listening

    def _serve(self, ready: Ready) -> None:
        self._announce()
        if self._socket in ready:
            self._receive()
        if self._loading:
            self._finish_loads()

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_REQUESTS_PER_PASS):
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    message = self._decode(parts[0]) if len(parts) == 1 else None
                except wire.UNDECODABLE:
                    message = None
                if isinstance(message, wire.PeerHello):
                    self._greet(client, message)
                elif isinstance(message, wire.Get):
                    self._serve_block(client, message)

    def _greet(self, client: bytes, hello: wire.PeerHello) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            for each in list(self._clients):  # sending reveals disconnected clients
                self._send(each, wire.KeyUpdate(b"", b""))
        reason = ""
        if hello.version != wire.VERSION:
            reason = f"protocol version {hello.version}; this engine uses {wire.VERSION}"
        elif hello.fingerprint != self._fingerprint:
            reason = "different model, layout, block size, number of ranks or rank"
        elif len(self._clients) >= MAX_CLIENTS and client not in self._clients:
            reason = f"{MAX_CLIENTS} engines are connected already"
        if reason:
            self._num_refused += 1
            self._send(client, wire.PeerRefused(reason))
        elif self._send(client, wire.Welcome()):
            self._clients[client] = True
            self._announce()

    # -- keys ----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        came, went = self._source.take_changes()
        update = [wire.KeyUpdate(run, b"") for run in _runs(came)] + [wire.KeyUpdate(b"", run) for run in _runs(went)]
        for client, is_behind in list(self._clients.items()):
            sent = [self._send(client, message) for message in (self._all_keys() if is_behind else update)]
            if client in self._clients:  # a client whose queue was full gets a new snapshot later
                self._clients[client] = not all(sent)

    def _all_keys(self) -> list[wire.KeyUpdate]:
        return [wire.KeyUpdate(run, b"", number == 0) for number, run in enumerate(_runs(self._source.keys()) or [b""])]

    def _send(
        self, client: bytes, message: wire.FromPeer, payload: memoryview | None = None
    ) -> zmq.MessageTracker | bool:
        """Send a message; return the payload's tracker, or True without payload; False if the client cannot receive."""
        frames: list[bytes | memoryview] = [client, self._encode(message)]
        if payload is not None:
            frames.append(payload)
        try:
            tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None, track=payload is not None)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._clients.pop(client, None)
            return False
        return tracker or True

    # -- blocks --------------------------------------------------------------------------------------------

    def _serve_block(self, client: bytes, get: wire.Get) -> None:
        buffer = self._take_buffer()
        if buffer is None:
            self._miss(client, get, "busy")
        elif self._source.copy(get.key, self._buffers[buffer]):
            self._send_block(client, get, buffer)
        elif (ticket := self._source.start_load(get.key, self._buffers[buffer])) is not None:
            self._loading[ticket] = client, get, buffer
        else:
            self._free.append(buffer)
            self._miss(client, get, "gone")

    def _take_buffer(self) -> int | None:
        if not self._free:
            sending, self._sending = self._sending, []
            for tracker, buffer in sending:
                if tracker.done:
                    self._free.append(buffer)
                else:
                    self._sending.append((tracker, buffer))
        return self._free.pop() if self._free else None

    def _send_block(self, client: bytes, get: wire.Get, buffer: int) -> None:
        payload = self._buffers[buffer]
        tracker = self._send(client, wire.Block(get.ticket, get.key, checksum(payload, self._seed)), payload)
        if isinstance(tracker, zmq.MessageTracker):
            self._sending.append((tracker, buffer))
            self._num_blocks += 1
        else:
            self._free.append(buffer)
            self._misses["not taken"] += 1

    def _miss(self, client: bytes, get: wire.Get, reason: str) -> None:
        self._misses[reason] += 1
        self._send(client, wire.Miss(get.ticket, reason))

    def _finish_loads(self) -> None:
        for ticket, ok in self._source.take_loads():
            client, get, buffer = self._loading.pop(ticket)
            if ok:
                self._send_block(client, get, buffer)
            else:
                self._free.append(buffer)
                self._miss(client, get, "gone")


def _runs(keys: list[bytes]) -> list[bytes]:
    return [b"".join(keys[start : start + wire.RUN_KEYS]) for start in range(0, len(keys), wire.RUN_KEYS)]
