"""A backend of raw sockets that answers, breaks off, stalls or sends rubbish, as a test needs."""

import contextlib
import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

MODELS = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: a\n\n\r\n"


def whole(body: bytes = b"{}", status: bytes = b"200 OK", *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 " + status + b"\r\n" + lines + b"content-length: %d\r\n\r\n" % len(body) + body


class Seen:
    """A request as the backend read it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.split(b"\r\n")
        self.line = lines[0]
        self.headers = [
            (name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines[1:])
        ]
        self.body = body

    def header(self, name: bytes) -> list[bytes]:
        return [value for each, value in self.headers if each == name]


Answer = Callable[[Seen, socket.socket], bytes | None]  # to a POST; None: it hangs up


def ok(seen: Seen, sock: socket.socket) -> bytes:
    return whole()


def sick(seen: Seen, sock: socket.socket) -> bytes:
    return whole(b"{}", b"500 Internal Server Error")


def hang_up(seen: Seen, sock: socket.socket) -> None:
    """Read the request, and break the connection."""


def in_turn(*answers: Answer) -> Answer:
    """Return an answer that gives these one after the other, and the last one for ever, also as the answer of several stubs."""
    turns = itertools.chain(answers, itertools.repeat(answers[-1]))
    return lambda seen, sock: next(turns)(seen, sock)


def first_fails(*answers: Answer) -> Answer:
    """Return an answer for several stubs: the one that is asked first always gives the first of these, the one that is
    asked next the second, and the rest the last."""
    hosts: list[list[bytes]] = []

    def answer(seen: Seen, sock: socket.socket) -> bytes | None:
        if (host := seen.header(b"host")) not in hosts:
            hosts.append(host)
        return answers[min(hosts.index(host), len(answers) - 1)](seen, sock)

    return answer


def endless(seen: Seen, sock: socket.socket) -> None:
    """Stream as fast as the router reads, without an end."""
    sock.sendall(STREAM)
    while True:
        sock.sendall(b"2710\r\n" + b"x" * 10000 + b"\r\n")


class Hold:
    """Sends `first` at once and `answer` when `go` is set, unless the router leaves before."""

    def __init__(self, answer: bytes | None = whole(), first: bytes = b"") -> None:
        self.answer, self.first = answer, first
        self.seen: list[Seen] = []
        self.is_asked, self.is_left, self.go = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, seen: Seen, sock: socket.socket) -> bytes | None:
        self.seen.append(seen)
        sock.sendall(self.first)
        self.is_asked.set()
        sock.settimeout(0.01)
        while not self.go.is_set():
            with contextlib.suppress(TimeoutError):
                with contextlib.suppress(ConnectionError):
                    assert not sock.recv(1)
                self.is_left.set()
                return None
        sock.settimeout(None)
        return self.answer


class Stub(socketserver.ThreadingTCPServer):
    """`answer` is called with each POST and its socket; it returns bytes to send, or None after which it hangs up."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.seen: list[Seen] = []
        self.num_opened = self.num_closed = 0  # connections, and those that the other end closed
        self.answers_all = False  # whether `answer` has GETs too
        self.is_ready = True
        self.is_dying = False  # takes connections and answers nothing: the kernel has yet to close what listens
        self.models = MODELS
        self.questions: dict[bytes, Answer] = {}  # by path, what is done in place of answering 404 to a GET
        super().__init__(("127.0.0.1", 0), _Connection)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.BaseRequestHandler):
    server: Stub

    def handle(self) -> None:
        self.server.num_opened += 1
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b""
        with contextlib.suppress(OSError):
            while True:
                while b"\r\n\r\n" not in data:
                    more = self.request.recv(65536)
                    if not more:
                        self.server.num_closed += 1
                        return
                    data += more
                head, _, data = data.partition(b"\r\n\r\n")
                seen = Seen(head, b"")
                length = int((seen.header(b"content-length") or [b"0"])[0])
                while len(data) < length:
                    data += self.request.recv(1 << 20)
                seen.body, data = data[:length], data[length:]
                reply = self._reply(seen)
                if reply is None:
                    return
                self.request.sendall(reply)

    def _reply(self, seen: Seen) -> bytes | None:
        if self.server.is_dying:
            return None
        path = seen.line.split(b" ")[1]
        if self.server.answers_all:
            self.server.seen.append(seen)
            return self.server.answer(seen, self.request)
        if path == b"/ready":
            return whole() if self.server.is_ready else whole(b"{}", b"503 Service Unavailable")
        if path == b"/v1/models":
            return whole(self.server.models)
        if seen.line.startswith(b"GET"):
            question = self.server.questions.get(path)
            return whole(b"{}", b"404 Not Found") if question is None else question(seen, self.request)
        self.server.seen.append(seen)
        return self.server.answer(seen, self.request)


@contextlib.contextmanager
def stub(answer: Answer = ok) -> Iterator[Stub]:
    with Stub(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
