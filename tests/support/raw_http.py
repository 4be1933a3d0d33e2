"""Raw requests to a server or a router, byte by byte."""

import contextlib
import random
import socket
from collections.abc import Iterator, Sequence


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", port))
    return sock


def read_all(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            parts.append(data)
    return b"".join(parts)


@contextlib.contextmanager
def clients(port: int, *requests: bytes) -> Iterator[list[socket.socket]]:
    """Yield connections that have sent one of these requests each."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(port)) for _ in requests]
        for sock, request in zip(socks, requests, strict=True):
            sock.sendall(request)
        yield socks


def exchange(port: int, request: bytes) -> bytes:
    """Send a request and return everything that comes back until the server closes; sending may end early."""
    with connect(port) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(request)
        return read_all(sock)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def post(body: bytes = b'{"prompt":"abc"}', *headers: bytes, close: bool = True) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: localhost", b"content-type: application/json", *headers]
    if close:
        lines.append(b"connection: close")
    if not any(header.lower().startswith((b"content-length", b"transfer-encoding")) for header in headers):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def mangled(rng: random.Random, message: bytes, pieces: Sequence[bytes]) -> bytes:
    """Change a message up to three times: change a byte, delete bytes, or insert a piece, also where a line begins."""
    data = bytearray(message)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 4)]
            case 2:
                data[at:at] = rng.choice(pieces)
            case 3:
                at = data.find(b"\r\n", at) + 2
                data[at:at] = rng.choice(pieces)
    return bytes(data)
