"""What the edge refuses, and that what passes means the same to every parser behind it."""

import random
import socket
import time
from collections.abc import Iterator

import h11
import pytest

from penstock.engine.http.limits import Limits
from tests.support.raw_http import connect, exchange, post, read_all, status
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Seen, Stub, whole

LIMITS = Limits(
    max_header_bytes=4096, max_body_bytes=10_000, header_timeout_s=0.4, body_timeout_s=0.4, max_connections=20
)


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(backend.url, limits=LIMITS) as started:
        yield started


BODY = b'{"prompt":"abc"}'
SMUGGLING = {
    "length and coding": post(BODY, b"content-length: 16", b"transfer-encoding: chunked"),
    "coding and length": post(BODY, b"transfer-encoding: chunked", b"content-length: 16"),
    "two equal lengths": post(BODY, b"content-length: 16", b"content-length: 16"),
    "two lengths": post(BODY, b"content-length: 16", b"content-length: 1"),
    "a list of lengths": post(BODY, b"content-length: 16, 16"),
    "a signed length": post(BODY, b"content-length: +16"),
    "a negative length": post(BODY, b"content-length: -16"),
    "a hexadecimal length": post(BODY, b"content-length: 0x10"),
    "a length beyond 64 bits": post(BODY, b"content-length: 99999999999999999999999"),
    "space before the colon": post(BODY, b"content-length : 16"),
    "a folded header": post(BODY, b"content-length: 16\r\n x: y"),
    "a bare line feed": post(BODY, b"content-length: 16\nx: y"),
    "a bare carriage return": post(BODY, b"content-length: 16\rx: y"),
    "a null in a name": post(BODY, b"content-length: 16\r\nx\x00: y"),
    "a null in a value": post(BODY, b"content-length: 16\r\nx: \x00"),
    "a header without a name": post(BODY, b"content-length: 16\r\n: y"),
    "an unknown coding": post(BODY, b"transfer-encoding: xchunked"),
    "a coding before chunked": post(b"0\r\n\r\n", b"transfer-encoding: gzip, chunked"),
    "chunked twice": post(b"0\r\n\r\n", b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
    "a chunk size with a prefix": post(b"0x3\r\nabc\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    "a chunk size with a space": post(b"3 \r\nabc\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    "a chunk size with a sign": post(b"+3\r\nabc\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    "a chunk size beyond 64 bits": post(b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    "a chunk longer than its size": post(b"3\r\nabcd\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    "chunks with line feeds": post(b"3\nabc\n0\n\n", b"transfer-encoding: chunked"),
    "two hosts": post(BODY, b"host: y", b"content-length: 16"),
    "no host": post(BODY).replace(b"host: x\r\n", b""),
    "a version from the future": post(BODY).replace(b"HTTP/1.1", b"HTTP/2.0"),
    "an absolute target": post(BODY).replace(b"/v1/completions", b"http://other/v1/completions"),
    "a tunnel": b"CONNECT other:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100,
}


@pytest.mark.parametrize("what", SMUGGLING)
def test_a_request_that_two_parsers_could_read_differently_is_refused(
    router: RunningRouter, backend: Stub, what: str
) -> None:
    num_seen = len(backend.seen)
    answer = exchange(router.port, SMUGGLING[what])
    assert 400 <= status(answer) <= 505
    assert b'"error":{"message":' in answer
    assert len(backend.seen) == num_seen


def test_an_offer_of_another_protocol_is_ignored_and_goes_no_further(router: RunningRouter, backend: Stub) -> None:
    """Java's own client offers h2c with every request. Cut into two pieces it is refused, and never becomes a second one."""
    offer = (b"Upgrade: h2c", b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA", b"content-length: 16")
    asked = post(BODY, *offer).replace(b"connection: close", b"connection: close, Upgrade, HTTP2-Settings")
    num_seen = len(backend.seen)
    assert status(exchange(router.port, asked)) == 200
    (seen,) = backend.seen[num_seen:]
    assert seen.body == BODY and not any(b"upgrade" in name or b"http2" in name for name, _ in seen.headers)
    inner = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    asked = post(inner, *offer[:2], b"content-length: %d" % len(inner))
    asked = asked.replace(b"connection: close", b"connection: close, Upgrade, HTTP2-Settings")
    cut = asked.index(b"Upgrade: h2c") + 4
    with connect(router.port) as sock:
        sock.sendall(asked[:cut])
        time.sleep(0.1)
        sock.sendall(asked[cut:])
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 ") == 1 and status(answer) == 400


@pytest.mark.parametrize(
    ("seed", "count"),
    [(5, 6000), *(pytest.param(seed, 50_000, marks=(pytest.mark.slow, pytest.mark.timeout(900))) for seed in (6, 7))],
)
def test_what_a_mangled_request_becomes_is_read_alike_by_every_parser(
    router: RunningRouter, backend: Stub, seed: int, count: int
) -> None:
    """Whatever bytes come in: each request that arrives behind the router is well-formed for two other parsers, with
    the same method, target and body, and never are there more of them than the client's parser may have meant."""
    rng = random.Random(seed)
    chunked = post(b"3\r\n{  \r\n1\r\n}\r\n0\r\n\r\n", b"transfer-encoding: chunked", close=False)
    originals = [*SMUGGLING.values(), *20 * [post(BODY, close=False)], *20 * [chunked]]
    answered = 0
    for _ in range(count):
        mangled = _mangle(rng, rng.choice(originals))
        num_seen = len(backend.seen)
        answer = exchange(router.port, mangled + post(BODY))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        seen = backend.seen[num_seen:]
        assert len(seen) <= mangled.count(b"HTTP/1") + 1
        for each in seen:
            answered += 1
            assert each.line.startswith(b"POST /") and each.line.endswith(b" HTTP/1.1")
            assert _read_by_h11(each) == each.body
    assert answered > 50  # the corpus is not all refused


def _mangle(rng: random.Random, request: bytes) -> bytes:
    data = bytearray(request)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.randrange(1, 4)]
        elif kind == 2:
            data[place:place] = rng.choice([b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b"0", b";", b":", b","])
        else:
            data[place:place] = rng.choice(
                [
                    b"content-length: 5\r\n",
                    b"transfer-encoding: chunked\r\n",
                    b"Transfer-Encoding:\tchunked\r\n",
                    b"0\r\n\r\n",
                ]
            )
    return bytes(data)


def _read_by_h11(seen: Seen) -> bytes:
    head = b"\r\n".join([seen.line, *(name + b": " + value for name, value in seen.headers)])
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(head + b"\r\n\r\n" + seen.body + b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    body = b""
    while isinstance(event := parser.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert parser.trailing_data[0].startswith(b"GET /next")
    return body


@pytest.mark.parametrize(
    ("request_", "expected", "words"),
    [
        (post(BODY, b"expect: something"), 417, b"expect"),
        (post(BODY).replace(b"application/json", b"text/plain"), 415, b"content-type"),
        (post(b""), 400, b"valid JSON"),
        (post(b'{"prompt":'), 400, b"valid JSON"),
        (post(b'{"model":5}'), 400, b"model"),
        (post(b'{"model":"other"}'), 404, b"other"),
    ],
)
def test_a_limit_is_named_with_its_field(router: RunningRouter, request_: bytes, expected: int, words: bytes) -> None:
    answer = exchange(router.port, request_)
    assert (status(answer), words in answer) == (expected, True)


def test_garbage_behind_a_request_comes_after_its_answer(router: RunningRouter, backend: Stub) -> None:
    answer = exchange(router.port, post(BODY, close=False) + b"\x00garbage\r\n\r\n")
    assert status(answer) == 200
    assert b"{}HTTP/1.1 400 " in answer


def test_an_unread_answer_does_not_stay_for_ever(backend: Stub) -> None:
    def endless(seen: Seen, sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            sock.sendall(b"2710\r\n" + b"x" * 10000 + b"\r\n")

    backend.answer = endless
    limits = Limits(write_timeout_s=0.3)
    try:
        with running_router(backend.url, limits=limits) as router, connect(router.port, receive_buffer=4096) as sock:
            sock.sendall(post())
            until(lambda: bool(router.app.exchanges))
            until(lambda: not router.app.exchanges)
            until(lambda: not router.app.edge.connections)
    finally:
        backend.answer = lambda seen, sock: whole()


def test_a_thousand_tiny_pipelined_requests_need_no_deep_stack(router: RunningRouter) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert exchange(router.port, 1000 * request + last).count(b"HTTP/1.1 200 OK") == 1001


def test_the_clock_of_a_deadline_starts_with_the_request_and_not_the_connection(router: RunningRouter) -> None:
    with connect(router.port) as sock:
        for _ in range(3):
            sock.sendall(post(BODY, close=False))
            assert status(sock.recv(4096)) == 200
            time.sleep(0.2)  # together longer than the deadline for headers
