"""The thread that serves one rank's blocks to other engines. It knows keys, buffers and clients, nothing of tiers.

A block that is asked for is copied out, or read from the disk, into a buffer of our own, and sent from there: that
is all the time it is held in its place, however slow the reader is, and no step of the engine waits for it. These
buffers are the budget: when all are in flight, the next to ask is refused at once.
"""

import contextlib
from collections import Counter
from typing import Any, Protocol

import msgspec
import zmq
from xxhash import xxh3_64_intdigest as checksum
from zmq.auth.thread import ThreadAuthenticator

from penstock.cache.tiers.memory import huge_array
from penstock.cache.tiers.peer.polling import PollThread, Ready
from penstock.cache.tiers.peer.wire import (
    LANES,
    RUN_KEYS,
    VERSION,
    Block,
    CurveGuard,
    FromPeer,
    Get,
    KeyUpdate,
    Miss,
    PeerHello,
    PeerRefused,
    ToPeer,
    Welcome,
    lock_of,
    make_socket,
    seed_of,
)

MAX_CLIENTS = 64  # engines that hear what there is
MAX_ASK_BYTES = 4096
MAX_BUFFERS = 1024
QUEUED_MESSAGES = 4096  # to one client that does not take them
IDLE_MS, READING_MS = 1000, 1
ASKS_AT_ONCE = 64


class BlockSource(Protocol):
    """What there is to give. Called by the server's thread; no call blocks for longer than a copy takes."""

    def keys(self) -> list[bytes]: ...

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that came since the last call, and keys that went."""
        ...

    def copy(self, key: bytes, out: memoryview) -> bool:
        """Its bytes from memory, whole and in one go; False where they are not there, or were overwritten meanwhile."""
        ...

    def start_read(self, key: bytes, out: memoryview) -> int | None:
        """From where it takes longer: a ticket for `take_reads`, `out` borrowed until then. None: not there either."""
        ...

    def take_reads(self) -> list[tuple[int, bool]]: ...


class PeerServer:
    """Listens at `endpoint` (`tcp://…`) from `start` to `close`. Raises OSError if the port cannot be had."""

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
        """`serve_bytes`: of blocks in flight at a time, to all clients together."""
        self._source = source
        self._chunk_bytes = chunk_bytes
        self._fingerprint = fingerprint
        self._seed = seed_of(fingerprint)
        rows = huge_array(min(max(serve_bytes // chunk_bytes, 2), MAX_BUFFERS), chunk_bytes)
        self._buffers = [memoryview(row) for row in rows]
        self._free = list(range(len(self._buffers)))
        self._sending: list[tuple[zmq.MessageTracker, int]] = []  # and the buffer it is sent from
        # The source's ticket → client, what it asked for, and a buffer.
        self._reading: dict[int, tuple[bytes, Get, int]] = {}
        self._clients: dict[bytes, bool] = {}  # which hear of keys → it needs all of them
        self._num_blocks = self._num_refused = 0
        self._misses: Counter[str] = Counter()  # by reason
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToPeer).decode
        self._context = zmq.Context(io_threads=LANES)
        self._guard: ThreadAuthenticator | None = None
        self._socket = self._listen(endpoint, secret)
        self._is_over = False
        self._thread = PollThread(
            "penstock-peer-server", (self._socket,), lambda: READING_MS if self._reading else IDLE_MS, self._serve
        )

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that the system chose if none was given."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        self._thread.start()

    def call(self) -> None:
        """From any thread: the source has changed."""
        self._thread.call()

    def close(self) -> None:
        """Nothing of the source is used afterwards, but for buffers that a disk may still write to."""
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
        listening = make_socket(self._context, zmq.ROUTER)
        listening.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error says that a client has gone
        listening.setsockopt(zmq.MAXMSGSIZE, MAX_ASK_BYTES)
        listening.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        lock = lock_of(secret)
        if lock is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback("*", credentials_provider=CurveGuard(lock.client_public))
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
        if self._reading:
            self._finish_reads()

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(ASKS_AT_ONCE):
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    message = self._decode(parts[0]) if len(parts) == 1 else None
                except msgspec.DecodeError:
                    message = None
                if isinstance(message, PeerHello):
                    self._greet(client, message)
                elif isinstance(message, Get):
                    self._give(client, message)

    def _greet(self, client: bytes, hello: PeerHello) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            for each in list(self._clients):  # those that have left show when they are sent something
                self._send(each, KeyUpdate(b"", b""))
        reason = ""
        if hello.version != VERSION:
            reason = f"version {hello.version} of the messages; this engine speaks {VERSION}"
        elif hello.fingerprint != self._fingerprint:
            reason = "another model, layout, block size, number of ranks or rank"
        elif len(self._clients) >= MAX_CLIENTS and client not in self._clients:
            reason = f"{MAX_CLIENTS} engines are connected already"
        if reason:
            self._num_refused += 1
            self._send(client, PeerRefused(reason))
        elif self._send(client, Welcome()):
            self._clients[client] = True
            self._announce()

    # -- what there is -------------------------------------------------------------------------------------

    def _announce(self) -> None:
        came, went = self._source.take_changes()
        update = [KeyUpdate(run, b"") for run in _runs(came)] + [KeyUpdate(b"", run) for run in _runs(went)]
        for client, is_behind in list(self._clients.items()):
            sent = [self._send(client, message) for message in (self._all_keys() if is_behind else update)]
            if client in self._clients:  # one that takes them too slowly gets everything once more, later
                self._clients[client] = not all(sent)

    def _all_keys(self) -> list[KeyUpdate]:
        return [KeyUpdate(run, b"", number == 0) for number, run in enumerate(_runs(self._source.keys()) or [b""])]

    def _send(self, client: bytes, message: FromPeer, payload: memoryview | None = None) -> zmq.MessageTracker | bool:
        """A payload's tracker; True without one. False where the client is gone or takes nothing."""
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

    def _give(self, client: bytes, get: Get) -> None:
        buffer = self._take_buffer()
        if buffer is None:
            self._miss(client, get, "busy")
        elif self._source.copy(get.key, self._buffers[buffer]):
            self._send_block(client, get, buffer)
        elif (ticket := self._source.start_read(get.key, self._buffers[buffer])) is not None:
            self._reading[ticket] = client, get, buffer
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

    def _send_block(self, client: bytes, get: Get, buffer: int) -> None:
        payload = self._buffers[buffer]
        tracker = self._send(client, Block(get.ticket, get.key, checksum(payload, self._seed)), payload)
        if isinstance(tracker, zmq.MessageTracker):
            self._sending.append((tracker, buffer))
            self._num_blocks += 1
        else:
            self._free.append(buffer)
            self._misses["not taken"] += 1

    def _miss(self, client: bytes, get: Get, reason: str) -> None:
        self._misses[reason] += 1
        self._send(client, Miss(get.ticket, reason))

    def _finish_reads(self) -> None:
        for ticket, ok in self._source.take_reads():
            client, get, buffer = self._reading.pop(ticket)
            if ok:
                self._send_block(client, get, buffer)
            else:
                self._free.append(buffer)
                self._miss(client, get, "gone")


def _runs(keys: list[bytes]) -> list[bytes]:
    return [b"".join(keys[start : start + RUN_KEYS]) for start in range(0, len(keys), RUN_KEYS)]
