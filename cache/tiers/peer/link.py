"""The thread that talks to one peer: asks for blocks, checks what comes, and notices when nothing does.

Only this thread touches the sockets. Every load that is handed to `ask` ends in `done`, once: read, refused, wrong,
late, or because the peer is gone. At its end nobody writes to its buffer any more, since the bytes are copied into
it here, after they have been checked.

    down ──connected──▶ greeting ──welcome──▶ open ──3 errors in a row, or silence──▶ bypassed ──pause──▶ greeting
      ▲                    └── refused ─────────────────────────────────────────────────▲
      └── connection lost, from anywhere
"""

import contextlib
import os
import threading
import time
from collections import Counter, deque
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from xxhash import xxh3_64_intdigest as checksum
from zmq.utils.monitor import recv_monitor_message

from penstock.cache.tiers.health import HealthLimits, TierHealth
from penstock.cache.tiers.measures import TimeCounts
from penstock.cache.tiers.peer.announced import Announced
from penstock.cache.tiers.peer.wire import (
    KEY_BYTES,
    LANES,
    RUN_KEYS,
    VERSION,
    Block,
    FromPeer,
    Get,
    Hello,
    Keys,
    Lock,
    Miss,
    Refused,
    Welcome,
    lock_of,
    make_socket,
    seed_of,
    split,
)

MAX_WINDOW = 256  # blocks
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
    """One block's way here. Who asks does not touch it until it is in `done`."""

    ticket: int
    key: bytes
    out: Any
    asked_s: float = 0.0
    sent_s: float = 0.0
    ok: bool = False


class Link:
    def __init__(
        self, endpoint: str, chunk_bytes: int, fingerprint: bytes, secret: str, keys: Announced, limits: LinkLimits
    ) -> None:
        self.done: deque[Load] = deque()
        self._keys = keys
        self._chunk_bytes = chunk_bytes
        self._hello = Hello(VERSION, fingerprint)
        self._seed = seed_of(fingerprint)
        self._limits = limits
        self._window = min(max(limits.window_bytes // chunk_bytes, 2), MAX_WINDOW)
        self._asked: deque[Load] = deque()  # by the caller, not seen here yet
        self._waiting: deque[Load] = deque()  # for room in the window
        self._sent: dict[int, Load] = {}
        self._health = TierHealth(limits.health)
        self._is_connected = self._is_welcome = self._is_probing = False
        self._greeted_s: float | None = None  # a greeting waits for its answer
        self._heard_s = 0.0  # the last answer
        self._ask_again_s: float | None = None  # when to ask what there is, because some was not given in time
        self._next_lane = 0
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # loads, by reason
        self._load_times = TimeCounts()
        self._busy_s = 0.0  # while anything was asked for
        self._busy_since_s: float | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromPeer).decode
        self._context = zmq.Context(io_threads=LANES)
        lock = lock_of(secret)
        self._lanes = [self._lane(lock) for _ in range(LANES)]
        self._monitor = self._lanes[0].get_monitor_socket(_HEARD)  # before there is anything to be missed
        self._connect(endpoint)
        self._is_called = False
        self._is_over = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="penstock-peer-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- from the caller's thread --------------------------------------------------------------------------

    def ask(self, load: Load) -> None:
        load.asked_s = time.monotonic()
        self._asked.append(load)
        self._call()

    def close(self) -> None:
        self._is_over = True
        os.eventfd_write(self._event, 1)
        self._thread.join()
        self._leave()
        os.close(self._event)

    @property
    def is_open(self) -> bool:
        return self._is_welcome

    def stats(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "hits": counts["hits"],
            "loaded_bytes": counts["hits"] * self._chunk_bytes,
            "corrupt_reads": counts["corrupt"],
            "late_reads": counts["after the deadline"],
            "refused": counts["refused"],
            "lost_connections": counts["lost connections"],
            "failed_handshakes": counts["failed handshakes"],
            "is_open": self._is_welcome,
            "bypasses": self._health.num_bypasses,
            "loading": len(self._sent),
            "queue_bytes": (len(self._asked) + len(self._waiting) + len(self._sent)) * self._chunk_bytes,
            "failures": dict(self._failures),
            "load_times": self._load_times.as_dict(),
            "busy_s": self._busy_s,
        }

    def _call(self) -> None:
        """One system call for however many loads are asked for before the thread looks."""
        if not self._is_called:
            self._is_called = True
            os.eventfd_write(self._event, 1)

    # -- the thread ----------------------------------------------------------------------------------------

    def _lane(self, lock: Lock | None) -> zmq.Socket:
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

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._event, self._monitor, *self._lanes):
            poller.register(source, zmq.POLLIN)
        while not self._is_over:
            ready = dict(poller.poll(TICK_MS))
            if self._event in ready:
                os.eventfd_read(self._event)
                self._is_called = False  # in this order: what is asked after the look below calls again
            while self._asked:
                self._waiting.append(self._asked.popleft())
            for lane in self._lanes:
                if lane in ready:
                    self._receive(lane)
            if self._monitor in ready:
                self._hear_events()
            self._look_after(time.monotonic())
            self._send()
            self._measure()
        self._fail_all("closed")
        while self._asked:
            self._end(self._asked.popleft(), "closed")

    def _hear_events(self) -> None:
        """Of the first lane: the others live and die with it."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._is_connected = True
                    if self._health.is_open:
                        self._greet(time.monotonic())
                elif event == zmq.EVENT_DISCONNECTED:
                    self._disconnected()
                else:
                    self._counts["failed handshakes"] += 1

    def _disconnected(self) -> None:
        self._counts["lost connections" if self._is_connected else "failed handshakes"] += 1
        self._is_connected = False
        if self._is_probing:
            self._probed(time.monotonic(), ok=False)
        self._withdraw("disconnected")

    def _greet(self, now_s: float) -> None:
        with contextlib.suppress(zmq.Again):  # the connection was lost this moment: the monitor will say so
            self._lanes[0].send(self._encode(self._hello), zmq.NOBLOCK)
            self._greeted_s = now_s

    def _look_after(self, now_s: float) -> None:
        late = [load for load in self._sent.values() if now_s - load.asked_s >= self._limits.deadline_s]
        for load in late:
            del self._sent[load.ticket]
            self._end(load, "late")
        while self._waiting and now_s - self._waiting[0].asked_s >= self._limits.deadline_s:
            self._end(self._waiting.popleft(), "late")
        if late:
            self._ask_again_s = now_s + 1.0
        oldest_s = min((load.sent_s for load in self._sent.values()), default=None)
        silent_since_s = self._greeted_s if oldest_s is None else max(oldest_s, self._heard_s)
        was_open = self._health.is_open
        if self._is_probing:
            if silent_since_s is not None and now_s - silent_since_s > self._limits.health.stall_s:
                self._probed(now_s, ok=False)
        elif was_open:
            self._health.watch(now_s, silent_since_s)
            if not self._health.is_open:
                self._withdraw(self._health.reason)
        if self._is_connected and self._health.is_open and not self._is_welcome and self._greeted_s is None:
            self._greet(now_s)  # the connection was made a moment before the socket would take a message
        if self._is_connected and self._health.wants_probe(now_s):
            self._is_probing = True
            self._greet(now_s)
            if self._greeted_s is None:
                self._probed(now_s, ok=False)
        if self._is_welcome and self._ask_again_s is not None and now_s >= self._ask_again_s:
            self._ask_again_s = None
            self._greet(now_s)

    def _probed(self, now_s: float, ok: bool) -> None:
        self._is_probing = False
        self._greeted_s = None
        self._health.probed(now_s, ok)

    def _withdraw(self, reason: str) -> None:
        """Nothing can be read until the peer has greeted us again."""
        self._is_welcome = False
        self._greeted_s = None
        self._ask_again_s = None
        self._keys.clear()
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for load in (*self._sent.values(), *self._waiting):
            self._end(load, reason)
        self._sent.clear()
        self._waiting.clear()

    def _end(self, load: Load, reason: str = "") -> None:
        load.ok = not reason
        if reason:
            self._failures[reason] += 1
            self._keys.go([load.key])  # until the peer says again that it has it
        load.out = None
        self.done.append(load)

    # -- asking --------------------------------------------------------------------------------------------

    def _send(self) -> None:
        if self._waiting and not self._is_welcome:
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
        """For how long anything was under way."""
        now_s = time.monotonic()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._sent else None

    # -- hearing -------------------------------------------------------------------------------------------

    def _receive(self, lane: zmq.Socket) -> None:
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
                elif isinstance(message, Keys) and self._is_welcome:
                    self._note_keys(message)
                elif isinstance(message, Welcome | Refused):
                    self._greeted(message)

    def _greeted(self, message: Welcome | Refused) -> None:
        if self._greeted_s is None:
            return  # too late: the connection has been given up meanwhile
        now_s = time.monotonic()
        self._greeted_s = None
        if isinstance(message, Refused):
            self._counts["refused"] += 1
            if self._is_probing:
                self._probed(now_s, ok=False)
            elif self._health.is_open:
                self._health.bypass(now_s, message.reason)
                self._withdraw("refused")
            return
        self._is_welcome = True
        if self._is_probing:
            self._probed(now_s, ok=True)

    def _note_keys(self, keys: Keys) -> None:
        if len(keys.held) % KEY_BYTES or len(keys.gone) % KEY_BYTES:
            self._blame("not understood")
            return
        if keys.is_first:
            self._keys.clear()
        self._keys.go(split(keys.gone))
        self._keys.come(split(keys.held))

    def _answer(self, message: Block | Miss, payload: list[zmq.Frame]) -> None:
        load = self._sent.pop(message.ticket, None)
        now_s = self._heard_s = time.monotonic()
        if load is None:
            self._counts["after the deadline"] += 1
            return
        if isinstance(message, Miss):
            if message.reason == "busy":
                self._ask_again_s = now_s + 1.0
            self._end(load, "busy" if message.reason == "busy" else "gone")
            return
        reason = self._take(load, message, payload)
        if reason:
            self._counts["corrupt"] += 1
            self._end(load, reason)
            self._blame(reason)
            return
        self._health.worked()
        self._counts["hits"] += 1
        self._load_times.add(now_s - load.asked_s)
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

    def _blame(self, reason: str) -> None:
        was_open = self._health.is_open
        self._health.failed(time.monotonic(), reason)
        if was_open and not self._health.is_open:
            self._withdraw(self._health.reason)
