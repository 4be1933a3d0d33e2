"""The thread that talks to one peer: asks for blocks, checks what comes, and notices when nothing does.

Only this thread touches the sockets. Every load that is handed to `ask` ends in `done`, once: read, refused, wrong,
late, or because the peer is gone. At its end nothing writes to its buffer any more, since the bytes are copied into
it here, after they have been checked.

    DOWN ──connected──▶ GREETING ──welcome──▶ OPEN ──3 errors in a row, or silence──▶ BYPASSED ──pause──▶ GREETING
      ▲                    └── refused, silence ─────────────────────────────────────────▲
      └── connection lost, from anywhere: once it is back, BYPASSED again if the pause is not over
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
from penstock.cache.tiers.peer.announced import Announced
from penstock.cache.tiers.peer.polling import PollThread, Ready
from penstock.cache.tiers.peer.wire import (
    KEY_BYTES,
    LANES,
    RUN_KEYS,
    VERSION,
    Block,
    FromPeer,
    Get,
    KeyUpdate,
    Lock,
    Miss,
    PeerHello,
    PeerRefused,
    Welcome,
    lock_of,
    make_socket,
    seed_of,
    split,
)

log = logging.getLogger("penstock.cache")

MAX_WINDOW = 256  # blocks
ASK_AGAIN_S = 1.0  # after a block was not given in time
TICK_MS = 100  # so often deadlines and health are looked at, where nothing else happens
_AUTH_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_HEARD = _AUTH_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class LinkLimits(NamedTuple):
    """Bounds that suit a network of machines; tests have tighter ones."""

    window_bytes: int = 32 * 2**20  # asked for and not there yet; what is more waits here
    deadline_s: float = 5.0  # from `ask` on
    reconnect_s: tuple[float, float] = (0.1, 5.0)  # the first pause between two tries, and the longest
    health: HealthLimits = HealthLimits()


class Load(msgspec.Struct, gc=False):
    """One block's way here."""

    ticket: int
    key: bytes
    out: memoryview
    asked_s: float = 0.0
    sent_s: float = 0.0


class LinkState(Enum):
    DOWN = "no connection"
    GREETING = "connected, and not welcome yet"
    OPEN = "welcome: what the peer announces can be asked for"
    BYPASSED = "connected, and left alone for a while"


class PeerLink:
    def __init__(
        self, endpoint: str, chunk_bytes: int, fingerprint: bytes, secret: str, keys: Announced, limits: LinkLimits
    ) -> None:
        self.done: deque[StoreResult] = deque()
        self._keys = keys
        self._chunk_bytes = chunk_bytes
        self._endpoint = endpoint
        self._num_failed = 0  # handshakes in a row
        self._hello = PeerHello(VERSION, fingerprint)
        self._seed = seed_of(fingerprint)
        self._limits = limits
        self._window = min(max(limits.window_bytes // chunk_bytes, 2), MAX_WINDOW)
        self._asked: deque[Load] = deque()  # by the caller, not seen here yet
        self._waiting: deque[Load] = deque()  # for room in the window
        self._sent: dict[int, Load] = {}
        self._health = TierHealth(limits.health)
        self._state = LinkState.DOWN
        self._greeted_s: float | None = None  # when the greeting was sent that waits for its answer
        self._heard_s = 0.0  # the last answer
        self._ask_again_s: float | None = None  # when to greet an open peer again: it says what it has
        self._next_lane = 0
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # loads, by reason
        self._loaded = JobTimes()
        self._busy_s = 0.0  # while anything was asked for
        self._busy_since_s: float | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromPeer).decode
        self._context = zmq.Context(io_threads=LANES)
        lock = lock_of(secret)
        self._lanes = [self._lane(lock) for _ in range(LANES)]
        self._monitor = self._lanes[0].get_monitor_socket(_HEARD)  # before there is anything to be missed
        self._connect(endpoint)
        self._lock = threading.Lock()  # held while the thread acts, for `check`
        sources = (self._monitor, *self._lanes)
        self._thread = PollThread("penstock-peer-link", sources, lambda: TICK_MS, self._serve)

    def start(self) -> None:
        self._thread.start()

    # -- from the caller's thread --------------------------------------------------------------------------

    def ask(self, load: Load) -> None:
        load.asked_s = time.monotonic()
        self._asked.append(load)
        self._thread.call()

    def close(self) -> None:
        self._thread.stop()
        self._take_asked()
        self._fail_all("closed")
        self._leave()

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
            "queue_bytes": (len(self._asked) + len(self._waiting) + len(self._sent)) * self._chunk_bytes,
            "failures": dict(self._failures),
            "load_times": {"sum_s": self._loaded.sum_s},
            "busy_s": self._busy_s,
        }

    def check(self) -> None:
        """What holds whenever the thread waits."""
        with self._lock:
            state = self._state
            assert state is not LinkState.OPEN or self._health.is_open
            assert state is not LinkState.BYPASSED or not self._health.is_open
            assert state is LinkState.OPEN or not (self._keys or self._sent or self._waiting or self._ask_again_s)
            assert self._greeted_s is None or state in (LinkState.GREETING, LinkState.OPEN)
            assert len(self._sent) <= self._window
            assert all(load.ticket == ticket for ticket, load in self._sent.items())
            for times in (
                [load.asked_s for load in self._sent.values()],
                [load.sent_s for load in self._sent.values()],
            ):
                assert times == sorted(times)
        self._keys.check()

    # -- the thread ----------------------------------------------------------------------------------------

    def _lane(self, lock: Lock | None) -> zmq.Socket[bytes]:
        lane = make_socket(self._context, zmq.DEALER)
        lane.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
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
            self._leave()
            raise OSError(error.errno, error.strerror) from None

    def _leave(self) -> None:
        self._lanes[0].disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)

    def _serve(self, ready: Ready) -> None:
        with self._lock:
            self._take_asked()
            for lane in self._lanes:
                if lane in ready:
                    self._receive(lane)
            if self._monitor in ready:
                self._hear_events()
            self._look_after(time.monotonic())
            self._send()
            self._measure()

    def _take_asked(self) -> None:
        while self._asked:
            self._waiting.append(self._asked.popleft())

    # -- states --------------------------------------------------------------------------------------------

    def _hear_events(self) -> None:
        """Of the first lane: the others live and die with it."""
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
        if self._num_failed == 2:  # one may come while the peer starts, or ends
            log.warning("peer %s: its handshakes fail; both ends need the same secret", self._endpoint)

    def _disconnected(self) -> None:
        if self._state is LinkState.DOWN:
            self._handshake_failed()
        else:
            self._counts["lost connections"] += 1
        if self._state is LinkState.GREETING and not self._health.is_open:
            self._health.probed(time.monotonic(), ok=False)
        self._leave_for(LinkState.DOWN, "disconnected")

    def _look_after(self, now_s: float) -> None:
        """Whatever only the time says."""
        self._end_late_loads(now_s)
        oldest = self._oldest()
        silent_since_s = self._greeted_s if oldest is None else max(oldest.sent_s, self._heard_s)
        if self._health.is_open:
            if self._health.watch(now_s, silent_since_s):
                self._leave_for(LinkState.BYPASSED, STALLED)
        elif silent_since_s is not None and now_s - silent_since_s > self._limits.health.stall_s:
            self._refuse(now_s)
        if self._state is LinkState.BYPASSED and self._health.wants_probe(now_s):
            self._state = LinkState.GREETING
        is_due = self._ask_again_s is not None and now_s >= self._ask_again_s
        if is_due or (self._state is LinkState.GREETING and self._greeted_s is None):
            self._greet(now_s)

    def _greet(self, now_s: float) -> None:
        """Once more in the next pass if the socket takes no message this moment."""
        with contextlib.suppress(zmq.Again):
            self._lanes[0].send(self._encode(self._hello), zmq.NOBLOCK)
            self._greeted_s, self._ask_again_s = now_s, None

    def _greeted(self, message: Welcome | PeerRefused) -> None:
        if self._greeted_s is None:
            return  # too late: the connection has been given up meanwhile
        now_s = time.monotonic()
        if isinstance(message, PeerRefused):
            self._counts["refused"] += 1
            if self._health.is_open:
                self._health.bypass(now_s, message.reason)
                self._leave_for(LinkState.BYPASSED, "refused")
            else:
                self._refuse(now_s)
            return
        self._greeted_s = None
        self._state = LinkState.OPEN
        if not self._health.is_open:
            self._health.probed(now_s, ok=True)

    def _refuse(self, now_s: float) -> None:
        """A greeting after a pause has not been answered with a welcome."""
        self._health.probed(now_s, ok=False)
        self._leave_for(LinkState.BYPASSED, "not connected")

    def _blame(self, reason: str) -> None:
        if self._health.failed(time.monotonic(), reason):
            self._leave_for(LinkState.BYPASSED, reason)

    def _leave_for(self, state: LinkState, reason: str) -> None:
        """Nothing can be read until the peer has greeted us again."""
        self._state = state
        self._greeted_s = self._ask_again_s = None
        self._keys.clear()
        self._fail_all(reason)

    def _end_late_loads(self, now_s: float) -> None:
        """Their peer is asked a little later what it has: perhaps it still has these."""
        asked_until_s = now_s - self._limits.deadline_s
        while (load := self._oldest()) is not None and load.asked_s <= asked_until_s:
            del self._sent[load.ticket]
            self._end(load, "late")
            self._ask_again_s = now_s + ASK_AGAIN_S
        while self._waiting and self._waiting[0].asked_s <= asked_until_s:
            self._end(self._waiting.popleft(), "late")

    def _oldest(self) -> Load | None:
        """Of those that were sent, which are in the order in which they were asked for."""
        return next(iter(self._sent.values()), None)

    def _fail_all(self, reason: str) -> None:
        for load in (*self._sent.values(), *self._waiting):
            self._end(load, reason)
        self._sent.clear()
        self._waiting.clear()

    def _end(self, load: Load, reason: str = "") -> None:
        if reason:
            self._failures[reason] += 1
            self._keys.note([load.key], False)  # until the peer says again that it has it
        self.done.append(StoreResult("load", load.ticket, load.key, not reason))

    # -- asking --------------------------------------------------------------------------------------------

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
            with contextlib.suppress(zmq.Again):  # this lane is not up (yet)
                self._lanes[self._next_lane].send(message, zmq.NOBLOCK)
                return True
        return False

    def _measure(self) -> None:
        """For how long anything was in flight."""
        now_s = time.monotonic()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._sent else None

    # -- hearing -------------------------------------------------------------------------------------------

    def _receive(self, lane: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                head, *payload = lane.recv_multipart(zmq.NOBLOCK, copy=False)
                try:
                    message = self._decode(head.buffer)
                except msgspec.DecodeError:
                    self._blame("not understood")
                    continue
                if isinstance(message, Block | Miss):
                    self._answer(message, payload)
                elif isinstance(message, KeyUpdate) and self.is_open:
                    self._note_keys(message)
                elif isinstance(message, Welcome | PeerRefused):
                    self._greeted(message)

    def _note_keys(self, keys: KeyUpdate) -> None:
        if len(keys.held) % KEY_BYTES or len(keys.gone) % KEY_BYTES:
            self._blame("not understood")
            return
        if keys.is_first:
            self._keys.clear()
        self._keys.note(split(keys.gone), False)
        self._keys.note(split(keys.held), True)

    def _answer(self, message: Block | Miss, payload: list[zmq.Frame]) -> None:
        load = self._sent.pop(message.ticket, None)
        now_s = self._heard_s = time.monotonic()
        if load is None:
            self._counts["after the deadline"] += 1
            return
        if isinstance(message, Miss):
            if message.reason == "busy":
                self._ask_again_s = now_s + ASK_AGAIN_S
            self._end(load, "busy" if message.reason == "busy" else "gone")
        elif reason := self._take(load, message, payload):
            self._counts["corrupt"] += 1
            self._end(load, reason)
            self._blame(reason)
        else:
            self._health.worked()
            self._loaded.add(now_s - load.asked_s)
            self._end(load)

    def _take(self, load: Load, message: Block, payload: list[zmq.Frame]) -> str:
        """Copy a payload that is what was asked for; else what is wrong with it."""
        if message.key != load.key:
            return "foreign"
        if len(payload) != 1 or len(payload[0].buffer) != self._chunk_bytes:
            return "short"
        data = payload[0].buffer
        if checksum(data, self._seed) != message.checksum:
            return "corrupt"
        np.copyto(np.frombuffer(load.out, np.uint8), np.frombuffer(data, np.uint8))  # others run meanwhile
        return ""
