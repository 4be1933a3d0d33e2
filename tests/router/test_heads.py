"""Requests and answers at the edges of the router. The quick reader of plain messages may only accept what the parsers accept
that read all others; some requests are refused, and all others mean the same to every parser behind the router."""

import asyncio
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import h11
import pytest

from penstock.engine.http.limits import Limits
from penstock.router.http.edge import ClientConnection, Edge
from penstock.router.http.heads import AnswerHead, ClientRequest, Heads
from penstock.router.http.upstream import Pool, Upstream
from tests.support.raw_http import connect, exchange, mangled, post, status
from tests.support.refusals import cases, table
from tests.support.router_fleet import RunningRouter, running_router, until
from tests.support.router_stub import Seen, Stub, endless, stub

BODY = b'{"prompt":"abc"}'
LIMITS = Limits(max_header_bytes=8192, max_body_bytes=2000, header_timeout_s=1.0, body_timeout_s=1.0)
SMUGGLING: dict[str, bytes] = dict(table(__file__, "smuggling", post=post, BODY=BODY))
REQUEST = (
    b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nUser-Agent: b/1 (c)\r\nAccept: */*\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer sk-1\r\nX-Session-Id: s\r\nConnection: keep-alive\r\nContent-Length: 16\r\n\r\n" + BODY
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\nDate: x\r\nContent-Type: application/json\r\nX-Penstock-Cached-Tokens: 12\r\nX-Request-Id: \xe9y\r\n"
    b"content-length: 16\r\n\r\n" + BODY
)
PIECES = [piece for pieces in cases(__file__, "pieces of heads") for piece in pieces]
NOT_PLAIN = cast(
    Heads, SimpleNamespace(request=lambda data: None, answer=lambda data: None)
)  # leaves all to the parser


class Transport:
    """Takes every call without an effect."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


class AnswerSink:
    def __init__(self) -> None:
        self.is_over = False
        self.body = b""
        self.received: AnswerHead

    def head(self, head: AnswerHead) -> None:
        self.received = head

    def data(self, data: bytes) -> None:
        self.body += data

    def ended(self) -> None:
        self.is_over = True

    def lost(self, reason: str) -> None:
        pass


def by_the_parser(data: bytes) -> list[ClientRequest]:
    requests: list[ClientRequest] = []
    edge = Edge(LIMITS, lambda request: None, lambda request, connection: requests.append(request))
    edge.heads = NOT_PLAIN
    connection = ClientConnection(edge)
    connection.connection_made(cast(asyncio.Transport, Transport()))
    connection.data_received(data)
    return requests


def answer_by_the_parser(data: bytes) -> AnswerSink:
    pool, sink = Pool("x", 1, b"x:1", 1.0), AnswerSink()
    pool.heads = NOT_PLAIN
    upstream = Upstream(pool)
    upstream.connection_made(cast(asyncio.Transport, Transport()))
    upstream.send(b"", b"", sink)
    upstream.data_received(data)
    sink.is_over &= pool.take_idle() is upstream  # it is kept for other requests
    return sink


@pytest.mark.parametrize("count", [20_000, pytest.param(500_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("original", [REQUEST, ANSWER], ids=["request", "answer"])
def test_the_quick_reader_reads_as_the_parser_does(original: bytes, count: int) -> None:
    rng, heads = random.Random(count), Heads(LIMITS.max_header_bytes, LIMITS.max_body_bytes)
    num_plain = 0
    for _ in range(count):
        data = mangled(rng, original, PIECES)
        if original is REQUEST and (request := heads.request(data)) is not None:
            num_plain += 1
            assert [request] == by_the_parser(data), data
        if original is ANSWER and (answer := heads.answer(data)) is not None:
            num_plain += 1
            slow = answer_by_the_parser(data)
            assert slow.is_over and answer == (slow.received, slow.body), data
    assert num_plain > count / 20


def test_plain_messages_are_read_whole() -> None:
    heads = Heads(8192, 1000)
    request = heads.request(REQUEST)
    assert request is not None
    assert (request.path, request.body, request.session) == ("/v1/completions", BODY, b"s")
    assert request.authorization == [b"Bearer sk-1"] and request.content_type == b"application/json"
    assert request.lines == b"user-agent: b/1 (c)\r\naccept: */*\r\nx-session-id: s\r\n"
    head = AnswerHead(
        200, b"date: x\r\ncontent-type: application/json\r\nx-request-id: \xe9y\r\ncontent-length: 16\r\n", 12
    )
    assert heads.answer(ANSWER) == (head, BODY)
    traced = heads.request(REQUEST.replace(b"Accept", b"Traceparent: 00-a\r\ntracestate: b=c\r\nAccept"))
    assert traced is not None and b"traceparent: 00-a\r\ntracestate: b=c\r\n" in traced.lines


def test_a_part_of_a_message_is_not_plain_and_neither_is_one_beyond_the_limits() -> None:
    heads = Heads(8192, 1000)
    assert [size for size in range(len(REQUEST)) if heads.request(REQUEST[:size]) is not None] == []
    assert [size for size in range(len(ANSWER)) if heads.answer(ANSWER[:size]) is not None] == []
    assert Heads(len(REQUEST) - len(BODY), len(BODY)).request(REQUEST) is not None
    assert Heads(len(REQUEST) - len(BODY) - 1, len(BODY)).request(REQUEST) is None
    assert Heads(len(REQUEST) - len(BODY), len(BODY) - 1).request(REQUEST) is None


@pytest.mark.parametrize(("value", "expected"), [(b"12", 12), (b"9" * 5000, None), (b"-1", None), (b"x", None)])
def test_an_invalid_count_of_cached_tokens_is_left_out(value: bytes, expected: int | None) -> None:
    answer = Heads(8192, 1000).answer(ANSWER.replace(b"Tokens: 12", b"Tokens: " + value))
    assert answer is not None and answer[0].cached_tokens == expected
    assert AnswerHead.of(200, [(b"x-penstock-cached-tokens", value)]).cached_tokens == expected


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(backend.url, limits=LIMITS) as started:
        yield started


BY_NIGHT = (pytest.param(seed, 50_000, marks=pytest.mark.nightly) for seed in (6, 7))


@pytest.mark.parametrize(("seed", "count"), [(5, 2500), *BY_NIGHT])
def test_all_parsers_read_a_mangled_request_alike(router: RunningRouter, backend: Stub, seed: int, count: int) -> None:
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


@pytest.mark.parametrize(("request_", "expected", "words"), table(__file__, "fields", BODY=BODY, post=post))
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
        running_router(endless_backend.url, limits=Limits(header_timeout_s=600, write_timeout_s=0.3)) as router,
        connect(router.port),
        connect(router.port, receive_buffer=4096) as sock,
    ):
        sock.sendall(post(close=not asks_again))
        until(lambda: any(each.is_paused for each in router.app.edge.connections))
        if asks_again:
            sock.sendall(post(close=False))
        until(lambda: len(router.app.edge.connections) == 1 and not router.app.exchanges)  # the idle one stays
