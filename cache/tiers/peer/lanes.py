"""The sockets that connect an engine to one peer: several, because one does not fill a fast network.

The peer's store (store.py) reads them, all from its own thread.
"""

import contextlib
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.cache.tiers.peer.wire import KEY_BYTES, LANES, RUN_KEYS, CurveKeys, curve_keys, make_socket

_AUTH_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = _AUTH_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Lanes:
    def __init__(self, endpoint: str, secret: str, chunk_bytes: int, reconnect_s: tuple[float, float]) -> None:
        """Begin to connect; raise OSError if the endpoint is not one."""
        self._context = zmq.Context(io_threads=LANES)
        lock = curve_keys(secret)
        self.sockets = [self._open(lock, chunk_bytes, reconnect_s) for _ in range(LANES)]
        self.monitor = self.sockets[0].get_monitor_socket(_EVENTS)  # before connecting, so that no event is missed
        self._next = 0
        try:
            for socket in self.sockets:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from None

    def _open(self, lock: CurveKeys | None, chunk_bytes: int, reconnect_s: tuple[float, float]) -> zmq.Socket[bytes]:
        socket = make_socket(self._context, zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a peer that is not connected
        socket.setsockopt(zmq.MAXMSGSIZE, max(chunk_bytes, RUN_KEYS * KEY_BYTES) + 1024)
        first_s, longest_s = reconnect_s
        socket.setsockopt(zmq.RECONNECT_IVL, int(first_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(longest_s * 1000))
        if lock is not None:
            socket.curve_serverkey = lock.server_public
            socket.curve_publickey, socket.curve_secretkey = lock.client_public, lock.client_secret
        return socket

    def events(self) -> Iterator[int]:
        """Yield the connection events of the first socket since the last call; they stand for all sockets."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]

    def send_first(self, message: bytes) -> bool:
        """Send over the first socket; return False if it is full."""
        with contextlib.suppress(zmq.Again):
            self.sockets[0].send(message, zmq.NOBLOCK)
            return True
        return False

    def send(self, message: bytes) -> bool:
        """Send over the next socket that is connected; return False if none is."""
        for _ in self.sockets:
            self._next = (self._next + 1) % len(self.sockets)
            with contextlib.suppress(zmq.Again):  # this one is not connected
                self.sockets[self._next].send(message, zmq.NOBLOCK)
                return True
        return False

    def close(self) -> None:
        self.sockets[0].disable_monitor()
        self.monitor.close()
        self._context.destroy(linger=0)
