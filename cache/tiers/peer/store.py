"""A read-only store over the network: the KV blocks in the tiers of one other engine, and the thread that loads them.

The caller's thread looks up the keys that the peer has announced and never waits. Only the store's own thread touches
the sockets: it requests blocks, verifies replies and detects a silent peer. Every load ends exactly once: complete, refused,
invalid, late, or failed because the connection is lost. Nothing writes to its buffer afterwards, since the thread copies
the bytes into it after it has verified them. Any failure is a miss. Blocks are copied from a peer, never to one.

    start_load ─▶ requests ─▶ thread ─▶ done ─▶ poll: results
                              thread ─▶ keys ─▶ changes: keys that the peer has gained or lost

    closed ──connected, and no pause──▶ greeted ──welcome──▶ open
      ▲                                      │ refused, silence        │ disconnected, 3 errors in a row, silence
      └──────────────────────────────────────┴─────────────────────────┘

After all but a disconnection the circuit breaker (health.py) keeps it closed for a pause; the next greeting is its probe.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from xxhash import xxh3_64_intdigest as checksum

from penstock.cache.tiers.base import StoreResult, chunk_view
from penstock.cache.tiers.health import STALLED, FailureLog, HealthLimits, TierHealth
from penstock.cache.tiers.peer import wire
from penstock.cache.tiers.peer.announced import AnnouncedKeys
from penstock.cache.tiers.peer.lanes import Lanes
from penstock.cache.tiers.peer.polling import PollThread, Ready

log = logging.getLogger("penstock.cache")

MAX_KEYS = 2**20  # per peer, about 100 MB; further announced keys are ignored
MAX_WINDOW = 256  # blocks
REGREET_S = 1.0  # after a late or busy block: pause before requesting the peer's keys again
NEVER = float("inf")
TICK_MS = 100  # interval of checking deadlines and health while no message arrives


class LinkLimits(NamedTuple):
    """Limits that suit a network of machines; tests use tighter ones."""

    window_bytes: int = 32 * 2**20  # requested and not received; further loads wait in this process
    deadline_s: float = 5.0  # counted from `request`
    reconnect_s: tuple[float, float] = (0.1, 5.0)  # first and longest pause between two connection attempts
    health: HealthLimits = HealthLimits()


class Load(msgspec.Struct, gc=False):
    """A request for one block."""

    ticket: int
    key: bytes
    out: memoryview
    requested_s: float
    sent_s: float = 0.0


class PeerTier:
    """The store of one rank of this engine for the same rank of the engine at `endpoint` (`tcp://…`).

    `fingerprint` identifies everything that the bytes depend on: peers with different fingerprints refuse each other.
    One thread at a time may call. Raises OSError if the endpoint is invalid.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        chunk_bytes: int,
        fingerprint: bytes,
        secret: str = "",
        limits: LinkLimits = LinkLimits(),  # noqa: B008  (a constant)
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._endpoint = endpoint
        self._keys = AnnouncedKeys(max_keys)
        self._done: deque[StoreResult] = deque()
        self._next_ticket = 1
        self._is_closed = False
        self._num_failed = 0  # failed handshakes in a row
        self._hello = wire.PeerHello(wire.VERSION, fingerprint)
        self._seed = wire.checksum_seed(fingerprint)
        self._limits = limits
        self._window = min(max(limits.window_bytes // chunk_bytes, 2), MAX_WINDOW)
        self._waiting: deque[Load] = deque()  # for space in the window; the caller appends, the thread removes
        self._sent: dict[int, Load] = {}
        self.is_open = False  # the peer has welcomed this engine: announced blocks can be requested
        self._is_connected = False
        self._health = TierHealth(limits.health, f"peer {endpoint}")
        self._greet_at_s = 0.0  # when to greet the peer next unless it is bypassed: an open one, to get all its keys
        self._greeted_s: float | None = None  # when the unanswered greeting was sent
        self._last_reply_s = 0.0
        self._counts: Counter[str] = Counter()
        self._failure_log = FailureLog("a peer's blocks")
        self._failures: Counter[str] = Counter()  # failed loads, by reason
        self._loads_s = 0.0  # total duration of the successful ones
        self._busy_s = 0.0  # total time with a load in flight
        self._busy_since_s: float | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.FromPeer).decode
        self._lanes = Lanes(endpoint, secret, chunk_bytes, limits.reconnect_s)
        self._lock = threading.Lock()  # held while the thread works, for `check`
        sources = (self._lanes.monitor, *self._lanes.sockets)
        self._thread = PollThread("penstock-peer-link", sources, lambda: TICK_MS, self._serve)
        self._thread.start()

    # -- the caller's thread -------------------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        """Return whether the peer has announced the key, without a system call."""
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys gained since the last call, and the lost keys."""
        return self._keys.take_changes()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Do nothing: the peer evicts by its own rules."""

    def put(self, key: bytes, buffer: Any) -> bool:  # noqa: ARG002  (a peer takes no blocks)
        return False

    def start_load(self, key: bytes, out: Any) -> int | None:
        """Request a block into `out`, borrowed until `poll` returns its result; return its ticket, or None for a miss.

        Unlike a load from disk, a slow load fails at its deadline and releases `out`: the bytes are copied into it only after
        the complete block has been received and verified.
        """
        into = chunk_view("out", out, self._chunk_bytes, to_fill=True)
        if key not in self._keys or self._is_closed:
            self._counts["misses"] += 1
            return None
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        self._waiting.append(Load(ticket, key, into, time.monotonic()))
        self._thread.wake()
        return ticket

    def poll(self) -> list[StoreResult]:
        """Return the results since the last call. Never blocks."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Close the connection. Loads in flight fail; their results can still be polled."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.stop()
        self._fail_all("closed")
        self._lanes.close()

    def stats(self) -> dict[str, Any]:
        """Return counters since the tier was opened and its current state: numbers, and dicts of numbers."""
        counts = self._counts
        return {
            "entries": len(self._keys),
            "misses": counts["misses"],
            "ignored_keys": self._keys.num_ignored,
            "hits": counts["loads"],
            "loaded_bytes": counts["loads"] * self._chunk_bytes,
            "corrupt_reads": counts["corrupt"],
            "late_reads": counts["after the deadline"],
            "refused": counts["refused"],
            "lost_connections": counts["lost connections"],
            "failed_handshakes": counts["failed handshakes"],
            "is_open": self.is_open,
            "bypasses": self._health.num_bypasses,
            "loading": len(self._sent),
            "failures": dict(self._failures),
            "load_times": {"sum_s": self._loads_s},
            "busy_s": self._busy_s,
        }

    def check(self) -> None:
        """Assert the invariants that hold whenever the thread waits."""
        with self._lock:
            assert self._is_connected or (not self.is_open and self._greeted_s is None)
            assert self.is_open or not (self._keys or self._sent)
            assert len(self._sent) <= self._window
            assert all(load.ticket == ticket for ticket, load in self._sent.items())
            for name in ("requested_s", "sent_s"):
                times = [getattr(load, name) for load in self._sent.values()]
                assert times == sorted(times)
        self._keys.check()

    # -- the thread ----------------------------------------------------------------------------------------

    def _serve(self, ready: Ready) -> None:
        with self._lock:
            for lane in self._lanes.sockets:
                if lane in ready:
                    self._receive(lane)
            if self._lanes.monitor in ready:
                for event in self._lanes.events():
                    self._take_event(event)
            self._check_deadlines(time.monotonic())
            self._send()
            self._count_busy_time()

    # -- states --------------------------------------------------------------------------------------------

    def _take_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected, self._num_failed = True, 0
        elif event == zmq.EVENT_DISCONNECTED and self._is_connected:
            self._is_connected = False
            self._counts["lost connections"] += 1
            if self._greeted_s is not None and not self._health.is_open:
                self._health.finish_probe(time.monotonic(), ok=False)
            self._close("disconnected")
        else:
            self._counts["failed handshakes"] += 1
            self._num_failed += 1
            if self._num_failed == 2:  # a single failure is normal while the peer starts or stops
                log.warning("peer %s: handshakes fail; both ends need the same secret", self._endpoint)

    def _check_deadlines(self, now_s: float) -> None:
        """End late loads, close the link to a silent peer, and send a greeting if one is due."""
        self._end_late_loads(now_s)
        oldest = self._oldest()
        silent_since_s = self._greeted_s if oldest is None else max(oldest.sent_s, self._last_reply_s)
        if silent_since_s is not None and now_s - silent_since_s > self._limits.health.stall_s:
            self._bypass(STALLED)
        is_due = self._is_connected and self._greeted_s is None and now_s >= self._greet_at_s
        if not is_due or not (self._health.is_open or self._health.start_probe(now_s)):
            return
        if self._lanes.send_first(self._encode(self._hello)):
            self._greeted_s, self._greet_at_s = now_s, NEVER
        elif not self._health.is_open:  # the socket is full; a healthy peer is greeted in the next pass
            self._health.finish_probe(now_s, ok=False)

    def _handle_greeting_reply(self, message: wire.Welcome | wire.PeerRefused) -> None:
        if self._greeted_s is None:
            return  # too late: the greeting has timed out or the connection was lost
        self._greeted_s = None
        if isinstance(message, wire.PeerRefused):
            self._counts["refused"] += 1
            self._bypass(message.reason)
            return
        self.is_open = True
        if not self._health.is_open:
            self._health.finish_probe(time.monotonic(), ok=True)

    def _record_failure(self, reason: str) -> None:
        if self._health.record_failure(time.monotonic(), reason):
            self._close(reason)

    def _bypass(self, reason: str) -> None:
        """Close the link for a pause: the peer refuses, or is silent."""
        if self._health.is_open:
            self._health.bypass(time.monotonic(), reason)
        else:  # the greeting was a probe
            self._health.finish_probe(time.monotonic(), ok=False)
        self._close(reason)

    def _close(self, reason: str) -> None:
        """Drop the announced keys and fail all loads, until the peer welcomes this engine again."""
        self.is_open, self._greeted_s, self._greet_at_s = False, None, 0.0
        self._keys.clear()
        self._fail_all(reason)

    def _end_late_loads(self, now_s: float) -> None:
        """Fail loads after their deadline; request the keys again a little later, as the peer may still have these."""
        late_before_s = now_s - self._limits.deadline_s
        while (load := self._oldest()) is not None and load.requested_s <= late_before_s:
            del self._sent[load.ticket]
            self._end(load, "late")
            self._greet_at_s = min(self._greet_at_s, now_s + REGREET_S)
        while self._waiting and self._waiting[0].requested_s <= late_before_s:
            self._end(self._waiting.popleft(), "late")

    def _oldest(self) -> Load | None:
        """Return the oldest sent load; `_sent` is in the order of the requests."""
        return next(iter(self._sent.values()), None)

    def _fail_all(self, reason: str) -> None:
        for load in self._sent.values():
            self._end(load, reason)
        self._sent.clear()
        while self._waiting:
            self._end(self._waiting.popleft(), reason)

    def _end(self, load: Load, reason: str = "") -> None:
        if reason:
            self._failures[reason] += 1
            self._keys.note([load.key], False)  # until the peer announces it again
        self._done.append(StoreResult("load", load.ticket, load.key, not reason))

    # -- sending -------------------------------------------------------------------------------------------

    def _send(self) -> None:
        if self._waiting and not self.is_open:
            self._fail_all("not connected")
        while self._waiting and len(self._sent) < self._window:
            load = self._waiting.popleft()
            load.sent_s = time.monotonic()
            if self._lanes.send(self._encode(wire.Get(load.ticket, load.key))):
                self._sent[load.ticket] = load
            else:
                self._end(load, "not connected")

    def _count_busy_time(self) -> None:
        """Add up the time during which a load was in flight."""
        now_s = time.monotonic()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._sent else None

    # -- receiving -----------------------------------------------------------------------------------------

    def _receive(self, lane: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                head, *payload = lane.recv_multipart(zmq.NOBLOCK, copy=False)
                try:
                    message = self._decode(head.buffer)
                except wire.UNDECODABLE:
                    self._record_failure("not understood")
                    continue
                if isinstance(message, wire.Block | wire.Miss):
                    self._handle_reply(message, payload)
                elif isinstance(message, wire.KeyUpdate) and self.is_open:
                    self._note_keys(message)
                elif isinstance(message, wire.Welcome | wire.PeerRefused):
                    self._handle_greeting_reply(message)

    def _note_keys(self, keys: wire.KeyUpdate) -> None:
        if len(keys.held) % wire.KEY_BYTES or len(keys.gone) % wire.KEY_BYTES:
            self._record_failure("not understood")
            return
        if keys.is_first:
            self._keys.clear()
        self._keys.note(wire.split_keys(keys.gone), False)
        self._keys.note(wire.split_keys(keys.held), True)

    def _handle_reply(self, message: wire.Block | wire.Miss, payload: list[zmq.Frame]) -> None:
        load = self._sent.pop(message.ticket, None)
        now_s = self._last_reply_s = time.monotonic()
        if load is None:
            self._counts["after the deadline"] += 1
            return
        if isinstance(message, wire.Miss):
            if message.reason == "busy":
                self._greet_at_s = min(self._greet_at_s, now_s + REGREET_S)
            self._end(load, "busy" if message.reason == "busy" else "gone")
        elif reason := self._copy_payload(load, message, payload):
            self._counts["corrupt"] += 1
            self._failure_log.add(now_s, reason)
            self._end(load, reason)
            self._record_failure(reason)
        else:
            self._health.record_success()
            self._counts["loads"] += 1
            self._loads_s += now_s - load.requested_s
            self._end(load)

    def _copy_payload(self, load: Load, message: wire.Block, payload: list[zmq.Frame]) -> str:
        """Verify a payload and copy it to the load's buffer; return the reason if it is invalid, else ""."""
        if message.key != load.key:
            return "foreign"
        if len(payload) != 1 or len(payload[0].buffer) != self._chunk_bytes:
            return "short"
        data = payload[0].buffer
        if checksum(data, self._seed) != message.checksum:
            return "corrupt"
        np.copyto(np.frombuffer(load.out, np.uint8), np.frombuffer(data, np.uint8))  # releases the GIL
        return ""
