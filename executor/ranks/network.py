"""The connection of an executor to ranks on other machines: ZMQ over TCP, with every byte encrypted by CURVE.

Keys are created for one run and sent to each rank at its start over the cluster's own channel; a connection without the
run's client key is refused before anything of it is read. Messages are msgspec and plain buffers, never pickle. A rank
whose connection to its executor is lost exits.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from penstock.cache.tiers.peer.wire import CurveGuard
from penstock.executor.child_main import leave
from penstock.executor.ranks.wire import FromWorker

Socket = zmq.Socket[bytes]

HIGH_WATER = 0  # no limit, so nothing is dropped: the executor limits the steps in flight itself
SILENCE_MS = 10_000  # without a heartbeat for this long, the connection counts as lost
BEAT_MS = 1_000
REACH_S = 30.0  # a rank that the executor cannot reach for this long gives up
CLOSE_CHECK_MS = 200


class Ticket(msgspec.Struct, frozen=True):
    """The data that a rank needs to reach the hub. It is secret: its holder can pose as a rank."""

    rank: int
    steps: str
    reports: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


class Hub:
    """The executor's end: sends all ranks the same messages and receives their reports."""

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        self._server_key, server_secret = zmq.curve_keypair()
        self._client_key, self._client_secret = zmq.curve_keypair()
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", credentials_provider=CurveGuard(self._client_key))
        self._sockets: list[Socket] = []
        self._steps = self._bind(zmq.ROUTER, host, server_secret)
        self._steps.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._reports = self._bind(zmq.PULL, host, server_secret)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)

    def _bind(self, kind: int, host: str, secret: bytes) -> Socket:
        bound = _socket(self._context, kind)
        self._sockets.append(bound)
        bound.curve_server = True
        bound.curve_publickey, bound.curve_secretkey = self._server_key, secret
        bound.bind(f"tcp://{host}:*")
        return bound

    def ticket(self, rank: int) -> Ticket:
        steps, reports = (bound.getsockopt_string(zmq.LAST_ENDPOINT) for bound in (self._steps, self._reports))
        return Ticket(rank, steps, reports, self._server_key, self._client_key, self._client_secret)

    def send(self, rank: int, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message. It is copied before this returns, so the caller may reuse every buffer."""
        try:
            self._steps.send_multipart([b"%d" % rank, *parts], copy=True)
        except zmq.ZMQError as error:
            raise ConnectionError(f"rank {rank} cannot be reached: {error}") from error

    def fileno(self) -> int:
        return int(self._reports.getsockopt(zmq.FD))

    def receive(self, timeout_s: float) -> Iterator[tuple[int, FromWorker]]:
        """Yield all arrived reports, waiting for the first. Exhaust it: the descriptor only signals changes."""
        self._reports.poll(int(timeout_s * 1000))
        while True:
            try:
                rank, body = self._reports.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield int(rank), self._decoder.decode(body)

    def close(self) -> None:
        self._guard.stop()
        for bound in self._sockets:
            bound.close(linger=500)
        self._context.term()


class Spoke:
    """A rank's end: calls `on_message` in a thread of its own, and exits when it loses its executor.

    Steps and reports have separate connections. The constructor returns once the rank can be reached.
    """

    def __init__(self, ticket: Ticket, on_message: Callable[[list[memoryview]], None]) -> None:
        self._context = zmq.Context()
        self._name = b"%d" % ticket.rank
        self._reports = self._make(zmq.PUSH, ticket)
        self._reports.connect(ticket.reports)
        self._encoder = msgspec.msgpack.Encoder()
        self._is_reached, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(ticket, on_message), daemon=True)
        self._thread.start()
        if not self._is_reached.wait(REACH_S):
            raise ConnectionError(f"rank {ticket.rank} has not reached its executor at {ticket.steps} in {REACH_S:g} s")

    def _make(self, kind: int, ticket: Ticket) -> Socket:
        link = _socket(self._context, kind)
        link.curve_serverkey = ticket.server_key
        link.curve_publickey, link.curve_secretkey = ticket.public_key, ticket.secret_key
        link.setsockopt(zmq.IDENTITY, self._name)
        return link

    def _listen(self, ticket: Ticket, on_message: Callable[[list[memoryview]], None]) -> None:
        """Receive messages. A socket belongs to one thread, so this one also opens and closes its socket."""
        steps = self._make(zmq.DEALER, ticket)
        monitor = steps.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        steps.connect(ticket.steps)
        poller = zmq.Poller()
        poller.register(steps, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while not self._is_over.is_set():
            ready = dict(poller.poll(CLOSE_CHECK_MS))
            if monitor in ready:
                if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    leave()
                self._is_reached.set()
            if steps in ready:
                on_message([frame.buffer for frame in steps.recv_multipart(copy=False)])
        steps.disable_monitor()
        monitor.close()
        steps.close(linger=0)

    def report(self, message: msgspec.Struct) -> None:
        """Send a report; called by one thread at a time."""
        self._reports.send_multipart([self._name, self._encoder.encode(message)])

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._reports.close(linger=500)
        self._context.term()


def _socket(context: zmq.Context[Socket], kind: int) -> Socket:
    made: Socket = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, HIGH_WATER)
    made.setsockopt(zmq.RCVHWM, HIGH_WATER)
    made.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    return made
