"""Streams that go past the router's parser: what arrives is what was sent, and the router knows of it what it knew before."""

import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httptools
import pytest

from penstock._csrc import ffi, lib
from tests.support.raw_http import connect, exchange, post, read_all
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Seen, Stub, whole

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(body: bytes, size: bytes = b"%x") -> bytes:
    return size % len(body) + b"\r\n" + body + b"\r\n"


EVENT = chunk(b'data: {"text":"abc"}\n\n')


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(backend.url) as started:
        yield started
        assert not started.app.relay.lanes


@pytest.fixture
def answers(backend: Stub) -> Iterator[Callable[[Callable[[Seen, socket.socket], bytes | None]], None]]:
    yield lambda answer: setattr(backend, "answer", answer)
    backend.answer = lambda seen, sock: whole()


def begin(router: RunningRouter, sock: socket.socket) -> None:
    """A stream, until it goes past the router."""
    sock.sendall(HEAD)
    while not router.app.relay.lanes:
        sock.sendall(EVENT)
        time.sleep(0.002)


def events_of(router: RunningRouter) -> int:
    """As the router has counted them by now."""

    def look() -> int:
        (one,) = router.app.exchanges
        one._gather()
        return one._num_data

    return int(router.call(look))


def test_what_goes_past_arrives_as_it_was_sent(router: RunningRouter, answers: Callable[..., None]) -> None:
    rng, sent = random.Random(7), list[bytes]()

    def stream(seen: Seen, sock: socket.socket) -> bytes:
        begin(router, sock)
        body = b""
        for _ in range(rng.randrange(1, 60)):
            data = b"data: " + rng.randbytes(rng.choice((0, 3, 300, 5000))) + b"\n\n"
            body += chunk(data, rng.choice((b"%x", b"%X", b"%06x", b"%x;note=1", b"%07x")))
        sent.append(body)
        while body:  # in pieces that know nothing of chunks, or several at once
            cut = rng.choice((1, 7, 100, 3000, 20000))
            sock.sendall(body[:cut])
            body = body[cut:]
            time.sleep(0.001)
        return END

    answers(stream)
    for _ in range(20):
        answer = exchange(router.port, post())
        assert answer.replace(EVENT, b"").endswith(b"\r\n\r\n" + sent[-1] + END)


def test_what_went_past_is_counted(router: RunningRouter, answers: Callable[..., None]) -> None:
    seen_counts = []

    def stream(seen: Seen, sock: socket.socket) -> bytes:
        begin(router, sock)
        until(lambda: not is_arriving(router))
        before = events_of(router)
        sock.sendall(EVENT * 50)
        until(lambda: events_of(router) == before + 50)
        seen_counts.append(before)
        return END

    answers(stream)
    answer = exchange(router.port, post())
    assert answer.count(EVENT) == seen_counts[0] + 50


def is_arriving(router: RunningRouter) -> bool:
    """Events that were sent while the stream was handed over may still be on their way."""
    before = events_of(router)
    time.sleep(0.02)
    return events_of(router) != before


def test_cached_tokens_at_the_end_are_still_found(router: RunningRouter, answers: Callable[..., None]) -> None:
    def stream(seen: Seen, sock: socket.socket) -> bytes:
        begin(router, sock)
        usage = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":123}}}\n\n'
        return EVENT + chunk(usage) + EVENT + END

    def counted() -> float:
        return sum(group.placement.ledger.actual_cached_tokens_total for group in router.fleet.groups.values())

    before = counted()
    answers(stream)
    assert exchange(router.port, post()).endswith(EVENT + END)
    assert counted() == before + 123


def test_a_client_that_leaves_takes_the_replicas_connection_with_it(
    router: RunningRouter, backend: Stub, answers: Callable[..., None]
) -> None:
    has_ended = []

    def stream(seen: Seen, sock: socket.socket) -> None:
        try:
            begin(router, sock)  # the lane may be over before this thread has seen it
            while True:
                sock.sendall(EVENT)
                time.sleep(0.002)
        except OSError:
            has_ended.append(True)

    answers(stream)
    with connect(router.port) as sock:
        sock.sendall(post())
        until(lambda: bool(router.app.relay.lanes))
    until(lambda: bool(has_ended) and not router.app.exchanges)
    assert not router.app.relay.lanes


@pytest.mark.parametrize("cut", [b"", b"15\r\ndata: {"])
def test_a_replica_that_breaks_off_is_told_of_where_the_framing_allows(
    router: RunningRouter, answers: Callable[..., None], cut: bytes
) -> None:
    def stream(seen: Seen, sock: socket.socket) -> None:
        begin(router, sock)
        sock.sendall(cut)

    answers(stream)
    with connect(router.port) as sock:
        sock.sendall(post())
        answer = read_all(sock)
    is_said = answer.endswith(b"data: [DONE]\n\n\r\n" + END) and b"event: error" in answer
    assert is_said == (not cut) and answer.endswith(END) == (not cut)


def test_the_connection_serves_the_next_request(
    router: RunningRouter, backend: Stub, answers: Callable[..., None]
) -> None:
    def stream(seen: Seen, sock: socket.socket) -> bytes:
        begin(router, sock)
        return EVENT + END

    with connect(router.port) as sock:
        for _ in range(3):
            answers(stream)
            sock.sendall(post(close=False))
            answer = b""
            while not answer.endswith(END):
                answer += sock.recv(65536)
            assert answer.endswith(EVENT + END)
            answers(lambda seen, sock: whole(b"plain"))
            sock.sendall(post(close=False))
            answer = b""
            while not answer.endswith(b"plain"):
                answer += sock.recv(65536)
    (replica,) = router.fleet.replicas.values()
    assert not replica.pool.busy and 1 <= replica.pool.num_idle <= 2  # the probes have one too


def test_a_stream_that_a_client_does_not_read_comes_back_and_waits(
    router: RunningRouter, answers: Callable[..., None]
) -> None:
    large = chunk(b"data: " + b"x" * 50_000 + b"\n\n")

    def stream(seen: Seen, sock: socket.socket) -> bytes:
        begin(router, sock)
        for _ in range(100):
            sock.sendall(large)
        return END

    answers(stream)
    with connect(router.port, receive_buffer=4096) as sock:
        sock.sendall(post())
        until(lambda: bool(router.app.exchanges) and next(iter(router.app.exchanges)).connection.is_paused)
        assert not router.app.relay.lanes
        answer = read_all(sock)
    assert answer.endswith(large * 100 + END)


class Read:
    """What the parser makes of an answer: whether it stands between two chunks."""

    def __init__(self) -> None:
        self.is_between = self.is_complete = False

    def on_chunk_header(self) -> None:
        self.is_between = False

    def on_chunk_complete(self) -> None:
        self.is_between = True

    def on_message_complete(self) -> None:
        self.is_complete = True


def mangled(rng: random.Random) -> bytes:
    body = bytearray(b"".join(chunk(rng.randbytes(rng.choice((1, 9, 30)))) for _ in range(rng.randrange(1, 4))))
    body += rng.choice((b"", END, END + EVENT, EVENT[:-1], EVENT[:5]))
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(body))
        body[at : at + rng.randrange(2)] = rng.choice(
            (b"\r", b"\n", b"0", b"f", b" ", b"+", b"x", b"-", b";", b"\0", b"")
        )
    return bytes(body)


def test_what_passes_are_chunks_for_the_parser_too() -> None:
    rng, num_passed = random.Random(3), 0
    with select.epoll() as epoll:
        data = ffi.new("uint8_t[]", 4096)
        relay = ffi.new("struct penstock_relay *", {"epoll": epoll.fileno(), "data": data, "room": 4096})
        for _ in range(20_000):
            body = mangled(rng)
            passed = passes(relay, body)
            num_passed += passed > 0
            read = Read()
            parser = httptools.HttpResponseParser(read)
            parser.feed_data(HEAD + body[:passed])
            assert passed == 0 or (read.is_between and not read.is_complete), body
    assert num_passed > 10_000


def passes(relay: Any, body: bytes) -> int:
    """How many of these bytes go on at once."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lane = ffi.new("struct penstock_lane *")
        assert lib.penstock_relay_open(relay, lane, ours.fileno(), ours.fileno())
        theirs.sendall(body)
        assert lib.penstock_relay_run(relay) == (lane if relay.passed < len(body) else ffi.NULL)
        lib.penstock_relay_close(relay, lane)
        assert relay.sent == relay.passed
        assert not relay.passed or theirs.recv(4096) == body[: relay.passed]
    return int(relay.passed)


def test_the_pace_of_streams_says_what_an_answer_delays(router: RunningRouter, answers: Callable[..., None]) -> None:
    def delay() -> float:
        (row,) = router.http.get("/replicas").json()["replicas"]
        return float(row["brain"]["delay_per_answer_s"])

    def stream(pace_s: float, seen: Seen, sock: socket.socket) -> bytes:
        sock.sendall(HEAD)
        for _ in range(8):  # a lane takes the later ones
            sock.sendall(EVENT)
            time.sleep(pace_s)
        return END

    for pace_s, is_more in ((0.02, True), (0.0, False)):
        answers(partial(stream, pace_s))
        before = delay()
        for _ in range(10):
            exchange(router.port, post())
        assert (delay() > 2 * before) if is_more else (delay() < before)

    before = delay()
    answers(lambda seen, sock: whole(b"a\n\nb\n\nc\n\nd\n\ne\n\nf\n\n"))
    exchange(router.port, post())
    assert delay() == before  # what comes whole has no pace
