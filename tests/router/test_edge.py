"""Requests at the router's edge: some are refused, and all others mean the same to every parser behind it."""

import random
import time
from collections.abc import Iterator

import h11
import pytest

from penstock.engine.http.limits import Limits
from tests.support.raw_http import connect, exchange, mangled, post, status
from tests.support.refusals import table
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Seen, Stub, endless, stub

LIMITS = Limits(
    max_header_bytes=4096, max_body_bytes=10_000, header_timeout_s=1.0, body_timeout_s=1.0, max_connections=20
)


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(backend.url, limits=LIMITS) as started:
        yield started


BODY = b'{"prompt":"abc"}'
PIECES = [
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b"0", b";", b":", b",", b"content-length: 5\r\n", b"0\r\n\r\n"),
    *(b"transfer-encoding: chunked\r\n", b"Transfer-Encoding:\tchunked\r\n"),
]
SMUGGLING: dict[str, bytes] = dict(table(__file__, "smuggling", post=post, BODY=BODY))


def test_an_offer_of_another_protocol_is_not_passed_on(router: RunningRouter, backend: Stub) -> None:
    """Java's own client offers h2c with every request."""
    offer = (b"connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA")
    with connect(router.port) as sock:
        sock.sendall(post(BODY, *offer, close=False))
        assert status(sock.recv(65536)) == 200
    seen = backend.seen[-1]
    assert seen.body == BODY and not any(b"upgrade" in name or b"http2" in name for name, _ in seen.headers)


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (5, 2500),
        *(pytest.param(seed, 50_000, marks=(pytest.mark.nightly, pytest.mark.timeout(900))) for seed in (6, 7)),
    ],
)
def test_every_parser_reads_a_mangled_request_alike(
    router: RunningRouter, backend: Stub, seed: int, count: int
) -> None:
    """Whatever bytes come in, each request behind the router is well-formed for two other parsers, with the same method,
    target and body, and there are never more of them than the client's parser may have meant."""
    rng = random.Random(seed)
    chunked = post(b"3\r\n{  \r\n1\r\n}\r\n0\r\n\r\n", b"transfer-encoding: chunked", close=False)
    originals = [*SMUGGLING.values(), *20 * [post(BODY, close=False)], *20 * [chunked]]
    answered = 0
    for _ in range(count):
        request = mangled(rng, rng.choice(originals), PIECES)
        num_seen = len(backend.seen)
        answer = exchange(router.port, request + post(BODY))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        seen = backend.seen[num_seen:]
        assert len(seen) <= request.count(b"HTTP/1") + 1
        for each in seen:
            answered += 1
            assert each.line.startswith(b"POST /") and each.line.endswith(b" HTTP/1.1")
            assert _read_by_h11(each) == each.body
    assert answered > count / 100  # the corpus is not all refused


def _read_by_h11(seen: Seen) -> bytes:
    head = b"\r\n".join([seen.line, *(name + b": " + value for name, value in seen.headers)])
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(head + b"\r\n\r\n" + seen.body + b"GET /next HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    body = b""
    while isinstance(event := parser.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert parser.trailing_data[0].startswith(b"GET /next")
    return body


@pytest.mark.parametrize(
    ("request_", "expected", "words"),
    table(__file__, "fields", BODY=BODY, post=post),
)
def test_a_limit_is_named_with_its_field(router: RunningRouter, request_: bytes, expected: int, words: bytes) -> None:
    answer = exchange(router.port, request_)
    assert (status(answer), words in answer) == (expected, True)


def test_garbage_behind_a_request_is_refused_after_its_answer(router: RunningRouter) -> None:
    answer = exchange(router.port, post(BODY, close=False) + b"\x00garbage\r\n\r\n")
    assert status(answer) == 200 and b"{}HTTP/1.1 400 " in answer


@pytest.mark.parametrize("asks_again", [True, False])
def test_the_connection_of_a_client_that_does_not_read_is_cut(asks_again: bool) -> None:
    with (
        stub(endless) as endless_backend,
        running_router(endless_backend.url, limits=Limits(write_timeout_s=0.3)) as router,
        connect(router.port, receive_buffer=4096) as sock,
    ):
        sock.sendall(post(close=not asks_again))
        until(lambda: any(each.is_paused for each in router.app.edge.connections))
        if asks_again:
            sock.sendall(post(close=False))
        until(lambda: not router.app.edge.connections and not router.app.exchanges)


def test_a_deadline_starts_with_the_request_and_not_with_the_connection(router: RunningRouter) -> None:
    with connect(router.port) as sock:
        for _ in range(3):
            sock.sendall(post(BODY, close=False))
            assert status(sock.recv(4096)) == 200
            time.sleep(0.4)  # together longer than the deadline for headers
