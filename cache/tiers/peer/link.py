"""The connection to one peer and its thread: requests blocks, verifies replies and detects a silent peer.

Only this thread touches the sockets. Every load passed to `request` ends in `done` exactly once: read, refused, invalid,
late, or failed because the connection is lost. Nothing writes to its buffer afterwards, since this thread copies the
bytes into it after it has verified them.

    DOWN ──connected──▶ GREETING ──welcome──▶ OPEN ──3 errors in a row, or silence──▶ BYPASSED ──pause──▶ GREETING
      ▲                    └── refused, silence ─────────────────────────────────────────▲
      └── connection lost, in any state; after a reconnection BYPASSED again until the pause has ended
"""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from xxhash import xxh3_64_intdigest as checksum
from zmq.utils.monitor import recv_monitor_message

from penstock.cache.tiers.base import JobTimes, StoreResult
from penstock.cache.tiers.health import STALLED, HealthLimits, TierHealth
from penstock.cache.tiers.peer.announced import AnnouncedKeys
from penstock.cache.tiers.peer.polling import PollThread, Ready
from penstock.cache.tiers.peer.wire import (
    KEY_BYTES,
    LANES,
    RUN_KEYS,
    VERSION,
    Block,
    CurveKeys,
    FromPeer,
    Get,
    KeyUpdate,
    Miss,
    PeerHello,
    PeerRefused,
    Welcome,
    checksum_seed,
    curve_keys,
    make_socket,
    split_keys,
)

log = logging.getLogger("penstock.cache")

MAX_WINDOW = 256  # blocks
REGREET_S = 1.0  # after a late or busy block: pause before requesting the peer's keys again
TICK_MS = 100  # interval of checking deadlines and health while no message arrives
_AUTH_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = _AUTH_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


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
    requested_s: float = 0.0
    sent_s: float = 0.0


class LinkState(Enum):
    DOWN = "no connection"
    GREETING = "connected, but not welcomed yet"
    OPEN = "welcomed: announced blocks can be requested"
    BYPASSED = "connected, but not used for a while"


class PeerLink:
    def __init__(
        self, endpoint: str, chunk_bytes: int, fingerprint: bytes, secret: str, keys: AnnouncedKeys, limits: LinkLimits
    ) -> None:
        self.done: deque[StoreResult] = deque()
        self._keys = keys
        self._chunk_bytes = chunk_bytes
        self._endpoint = endpoint
        self._num_failed = 0  # failed handshakes in a row
        self._hello = PeerHello(VERSION, fingerprint)
        self._seed = checksum_seed(fingerprint)
        self._limits = limits
        self._window = min(max(limits.window_bytes // chunk_bytes, 2), MAX_WINDOW)
        self._requested: deque[Load] = deque()  # from the caller, not yet seen by the thread
        self._waiting: deque[Load] = deque()  # waiting for space in the window
        self._sent: dict[int, Load] = {}
        self._health = TierHealth(limits.health)
        self._state = LinkState.DOWN
        self._greeted_s: float | None = None  # when the unanswered greeting was sent
        self._last_reply_s = 0.0
        self._regreet_s: float | None = None  # when to greet an open peer again, to get all its keys
        self._next_lane = 0
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # failed loads, by reason
        self._loaded = JobTimes()
        self._busy_s = 0.0  # total time with a load in flight
        self._busy_since_s: float | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromPeer).decode
        self._context = zmq.Context(io_threads=LANES)
        lock = curve_keys(secret)
        self._lanes = [self._lane(lock) for _ in range(LANES)]
        self._monitor = self._lanes[0].get_monitor_socket(_EVENTS)  # before connecting, so that no event is missed
        self._connect(endpoint)
        self._lock = threading.Lock()  # held while the thread works, for `check`
        sources = (self._monitor, *self._lanes)
        self._thread = PollThread("penstock-peer-link", sources, lambda: TICK_MS, self._serve)

    def start(self) -> None:
        self._thread.start()

    # -- the caller's thread -------------------------------------------------------------------------------

    def request(self, load: Load) -> None:
        load.requested_s = time.monotonic()
        self._requested.append(load)
        self._thread.wake()

    def close(self) -> None:
        self._thread.stop()
        self._take_requested()
        self._fail_all("closed")
        self._close_sockets()

    @property
    def is_open(self) -> bool:
        return self._state is LinkState.OPEN

    def stats(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "hits": self._loaded.num,
            "loaded_bytes": self._loaded.num * self._chunk_bytes,
            "corrupt_reads": counts["corrupt"],
            "late_reads": counts["after the deadline"],
            "refused": counts["refused"],
            "lost_connections": counts["lost connections"],
            "failed_handshakes": counts["failed handshakes"],
            "is_open": self.is_open,
            "bypasses": self._health.num_bypasses,
            "loading": len(self._sent),
            "queue_bytes": (len(self._requested) + len(self._waiting) + len(self._sent)) * self._chunk_bytes,
            "failures": dict(self._failures),
            "load_times": {"sum_s": self._loaded.sum_s},
            "busy_s": self._busy_s,
        }

    def check(self) -> None:
        """Assert the invariants that hold whenever the thread waits."""
        with self._lock:
            state = self._state
            assert state is not LinkState.OPEN or self._health.is_open
            assert state is not LinkState.BYPASSED or not self._health.is_open
            assert state is LinkState.OPEN or not (self._keys or self._sent or self._waiting or self._regreet_s)
            assert self._greeted_s is None or state in (LinkState.GREETING, LinkState.OPEN)
            assert len(self._sent) <= self._window
            assert all(load.ticket == ticket for ticket, load in self._sent.items())
            for times in (
                [load.requested_s for load in self._sent.values()],
                [load.sent_s for load in self._sent.values()],
            ):
                assert times == sorted(times)
        self._keys.check()

    # -- the thread ----------------------------------------------------------------------------------------

    def _lane(self, lock: CurveKeys | None) -> zmq.Socket[bytes]:
        lane = make_socket(self._context, zmq.DEALER)
        lane.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a peer that is not connected
        lane.setsockopt(zmq.MAXMSGSIZE, max(self._chunk_bytes, RUN_KEYS * KEY_BYTES) + 1024)
        first_s, longest_s = self._limits.reconnect_s
        lane.setsockopt(zmq.RECONNECT_IVL, int(first_s * 1000))
        lane.setsockopt(zmq.RECONNECT_IVL_MAX, int(longest_s * 1000))
        if lock is not None:
            lane.curve_serverkey = lock.server_public
            lane.curve_publickey, lane.curve_secretkey = lock.client_public, lock.client_secret
        return lane

    def _connect(self, endpoint: str) -> None:
        try:
            for lane in self._lanes:
                lane.connect(endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise OSError(error.errno, error.strerror) from None

    def _close_sockets(self) -> None:
        self._lanes[0].disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)

    def _serve(self, ready: Ready) -> None:
        with self._lock:
            self._take_requested()
            for lane in self._lanes:
                if lane in ready:
                    self._receive(lane)
            if self._monitor in ready:
                self._receive_events()
            self._check_deadlines(time.monotonic())
            self._send()
            self._count_busy_time()

    def _take_requested(self) -> None:
        while self._requested:
            self._waiting.append(self._requested.popleft())

    # -- states --------------------------------------------------------------------------------------------

    def _receive_events(self) -> None:
        """Process connection events of the first lane, which stands for all lanes."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._state = LinkState.GREETING if self._health.is_open else LinkState.BYPASSED
                    self._num_failed = 0
                elif event == zmq.EVENT_DISCONNECTED:
                    self._disconnected()
                else:
                    self._handshake_failed()

    def _handshake_failed(self) -> None:
        self._counts["failed handshakes"] += 1
        self._num_failed += 1
        if self._num_failed == 2:  # a single failure is normal while the peer starts or stops
            log.warning("peer %s: handshakes fail; both ends need the same secret", self._endpoint)

    def _disconnected(self) -> None:
        if self._state is LinkState.DOWN:
            self._handshake_failed()
        else:
            self._counts["lost connections"] += 1
        if self._state is LinkState.GREETING and not self._health.is_open:
            self._health.finish_probe(time.monotonic(), ok=False)
        self._disable(LinkState.DOWN, "disconnected")

    def _check_deadlines(self, now_s: float) -> None:
        """Check deadlines and health, and send a greeting if one is due."""
        self._end_late_loads(now_s)
        oldest = self._oldest()
        silent_since_s = self._greeted_s if oldest is None else max(oldest.sent_s, self._last_reply_s)
        if self._health.is_open:
            if self._health.check_stall(now_s, silent_since_s):
                self._disable(LinkState.BYPASSED, STALLED)
        elif silent_since_s is not None and now_s - silent_since_s > self._limits.health.stall_s:
            self._fail_probe(now_s)
        if self._state is LinkState.BYPASSED and self._health.start_probe(now_s):
            self._state = LinkState.GREETING
        is_due = self._regreet_s is not None and now_s >= self._regreet_s
        if is_due or (self._state is LinkState.GREETING and self._greeted_s is None):
            self._greet(now_s)

    def _greet(self, now_s: float) -> None:
        """Send a greeting; if the socket is full, the next pass retries."""
        with contextlib.suppress(zmq.Again):
            self._lanes[0].send(self._encode(self._hello), zmq.NOBLOCK)
            self._greeted_s, self._regreet_s = now_s, None

    def _handle_greeting_reply(self, message: Welcome | PeerRefused) -> None:
        if self._greeted_s is None:
            return  # too late: the greeting has timed out or the connection was lost
        now_s = time.monotonic()
        if isinstance(message, PeerRefused):
            self._counts["refused"] += 1
            if self._health.is_open:
                self._health.bypass(now_s, message.reason)
                self._disable(LinkState.BYPASSED, "refused")
            else:
                self._fail_probe(now_s)
            return
        self._greeted_s = None
        self._state = LinkState.OPEN
        if not self._health.is_open:
            self._health.finish_probe(now_s, ok=True)

    def _fail_probe(self, now_s: float) -> None:
        """Record a failed probe: a greeting after a pause was not answered with a welcome."""
        self._health.finish_probe(now_s, ok=False)
        self._disable(LinkState.BYPASSED, "not connected")

    def _record_failure(self, reason: str) -> None:
        if self._health.record_failure(time.monotonic(), reason):
            self._disable(LinkState.BYPASSED, reason)

    def _disable(self, state: LinkState, reason: str) -> None:
        """Leave the OPEN state: drop the announced keys and fail all loads until the peer welcomes this engine again."""
        self._state = state
        self._greeted_s = self._regreet_s = None
        self._keys.clear()
        self._fail_all(reason)

    def _end_late_loads(self, now_s: float) -> None:
        """Fail loads after their deadline; request the keys again a little later, as the peer may still have these."""
        late_before_s = now_s - self._limits.deadline_s
        while (load := self._oldest()) is not None and load.requested_s <= late_before_s:
            del self._sent[load.ticket]
            self._end(load, "late")
            self._regreet_s = now_s + REGREET_S
        while self._waiting and self._waiting[0].requested_s <= late_before_s:
            self._end(self._waiting.popleft(), "late")

    def _oldest(self) -> Load | None:
        """Return the oldest sent load; `_sent` is in the order of the requests."""
        return next(iter(self._sent.values()), None)

    def _fail_all(self, reason: str) -> None:
        for load in (*self._sent.values(), *self._waiting):
            self._end(load, reason)
        self._sent.clear()
        self._waiting.clear()

    def _end(self, load: Load, reason: str = "") -> None:
        if reason:
            self._failures[reason] += 1
            self._keys.note([load.key], False)  # until the peer announces it again
        self.done.append(StoreResult("load", load.ticket, load.key, not reason))

    # -- sending -------------------------------------------------------------------------------------------

    def _send(self) -> None:
        if self._waiting and not self.is_open:
            self._fail_all("not connected")
        while self._waiting and len(self._sent) < self._window:
            load = self._waiting.popleft()
            load.sent_s = time.monotonic()
            if self._send_get(self._encode(Get(load.ticket, load.key))):
                self._sent[load.ticket] = load
            else:
                self._end(load, "not connected")

    def _send_get(self, message: bytes) -> bool:
        for _ in self._lanes:
            self._next_lane = (self._next_lane + 1) % len(self._lanes)
            with contextlib.suppress(zmq.Again):  # this lane is not connected
                self._lanes[self._next_lane].send(message, zmq.NOBLOCK)
                return True
        return False

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
                except msgspec.DecodeError:
                    self._record_failure("not understood")
                    continue
                if isinstance(message, Block | Miss):
                    self._handle_reply(message, payload)
                elif isinstance(message, KeyUpdate) and self.is_open:
                    self._note_keys(message)
                elif isinstance(message, Welcome | PeerRefused):
                    self._handle_greeting_reply(message)

    def _note_keys(self, keys: KeyUpdate) -> None:
        if len(keys.held) % KEY_BYTES or len(keys.gone) % KEY_BYTES:
            self._record_failure("not understood")
            return
        if keys.is_first:
            self._keys.clear()
        self._keys.note(split_keys(keys.gone), False)
        self._keys.note(split_keys(keys.held), True)

    def _handle_reply(self, message: Block | Miss, payload: list[zmq.Frame]) -> None:
        load = self._sent.pop(message.ticket, None)
        now_s = self._last_reply_s = time.monotonic()
        if load is None:
            self._counts["after the deadline"] += 1
            return
        if isinstance(message, Miss):
            if message.reason == "busy":
                self._regreet_s = now_s + REGREET_S
            self._end(load, "busy" if message.reason == "busy" else "gone")
        elif reason := self._copy_payload(load, message, payload):
            self._counts["corrupt"] += 1
            self._end(load, reason)
            self._record_failure(reason)
        else:
            self._health.record_success()
            self._loaded.add(now_s - load.requested_s)
            self._end(load)

    def _copy_payload(self, load: Load, message: Block, payload: list[zmq.Frame]) -> str:
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
